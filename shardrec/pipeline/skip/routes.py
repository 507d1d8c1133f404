"""The skips of a sequential: whether they fit together, and which go from which stage to which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from shardrec.pipeline.skip.skippable import Skippable
from shardrec.pipeline.skip.tracker import SkipKey


def _skippables(module: nn.Sequential) -> Iterator[tuple[int, str, Skippable]]:
    """The skippables of a sequential, in order.

    Those inside of a layer are taken in order of registration, which for a nested sequential is the order of execution.

    Yields:
        Number of the layer, path of the skippable in the sequential, the skippable.
    """
    for number, (name, layer) in enumerate(module._modules.items()):
        for path, child in layer.named_modules(prefix=name, remove_duplicate=False):
            if isinstance(child, Skippable):
                yield number, path, child


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip is stashed once and popped once later on, in each namespace.

    Args:
        module: the sequential with all its layers.

    Raises:
        TypeError: lists all the faults, each with the layer and the name.
    """
    faults: list[str] = []
    stashed: dict[SkipKey, str] = {}
    popped: dict[SkipKey, str] = {}
    isolate = "isolate one of the pairs: .isolate(Namespace())"
    for _, path, layer in _skippables(module):
        overlap = layer.stashable_names & layer.poppable_names
        faults += [
            f"layer {path!r} declares {name!r} both as stash and as pop: give the two skips different names"
            for name in sorted(overlap)
        ]
        for key in layer.poppable():
            name = key[1]
            if name in overlap:
                continue
            if key in popped:
                faults.append(f"layer {path!r} pops {name!r}, which layer {popped[key]!r} has popped: {isolate}")
            elif key not in stashed:
                faults.append(
                    f"layer {path!r} pops {name!r}, which no layer before it stashes"
                    + (" in its namespace" if key[0] else "")
                    + ": put the layer that stashes it first, in the same namespace"
                )
            popped.setdefault(key, path)
        for key in layer.stashable():
            name = key[1]
            if name in overlap:
                continue
            if key in stashed:
                faults.append(f"layer {path!r} stashes {name!r}, which layer {stashed[key]!r} has stashed: {isolate}")
            stashed.setdefault(key, path)
    faults += [
        f"layer {path!r} stashes {key[1]!r}, which no layer pops: pop it in a later layer, or do not stash it"
        for key, path in stashed.items()
        if key not in popped
    ]
    if faults:
        raise TypeError("the skips do not fit together:\n" + "\n".join(f"  - {fault}" for fault in faults))


@dataclass(frozen=True, slots=True)
class Route:
    """A skip between two stages.

    Args:
        number: of the skip. The same on every rank, on which namespaces made there are not.
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

    Raises:
        TypeError: as :func:`verify_skippables` does.
    """
    verify_skippables(module)
    ends = list(accumulate(balance))
    stashed: dict[SkipKey, int] = {}
    popped: dict[SkipKey, int] = {}
    for layer, _, child in _skippables(module):
        stage = next(number for number, end in enumerate(ends) if layer < end)
        stashed.update((key, stage) for key in child.stashable())
        popped.update((key, stage) for key in child.poppable())
    return [
        Route(number, key, stage, popped[key])
        for number, (key, stage) in enumerate(stashed.items())
        if popped[key] != stage
    ]
