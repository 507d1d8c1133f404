"""Which skips go from which stage to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from shardrec.pipeline.skip.tracker import SkipKey
from shardrec.pipeline.skip.verify import skippables, verify_skippables

__all__ = ["Route", "skip_routes"]


@dataclass(frozen=True, slots=True)
class Route:
    """A skip between two stages.

    Args:
        number: of the skip; the same on every rank, on which namespaces made there are not.
        key: its namespace and name.
        source: the stage that stashes it.
        target: the stage that pops it, behind ``source``.
    """

    number: int
    key: SkipKey
    source: int
    target: int


def skip_routes(module: nn.Sequential, balance: Sequence[int]) -> list[Route]:
    """The skips of a sequential that leave their stage, in order of their stash.

    Args:
        module: the sequential.
        balance: number of layers of each stage.

    Raises:
        TypeError: as :func:`verify_skippables` does.
    """
    verify_skippables(module)
    ends = list(accumulate(balance))
    stashed: dict[SkipKey, int] = {}
    popped: dict[SkipKey, int] = {}
    for layer, _, child in skippables(module):
        stage = next(number for number, end in enumerate(ends) if layer < end)
        stashed.update((key, stage) for key in child.stashable())
        popped.update((key, stage) for key in child.poppable())
    return [
        Route(number, key, stage, popped[key])
        for number, (key, stage) in enumerate(stashed.items())
        if popped[key] != stage
    ]
