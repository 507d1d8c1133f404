"""Skippables for the tests of skips."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor, nn

from shardrec.pipeline.skip import pop, skippable, stash

__all__ = ["Both", "Carry", "Drop", "Pop", "Scale", "Stash", "popping", "stashing"]

Skips = Generator[stash | pop, Any, Tensor]


@skippable(stash=["x"])
class Stash(nn.Module):
    """Hands its input on and stashes it."""

    def forward(self, input: Tensor) -> Skips:
        yield stash("x", input)
        return input


@skippable(pop=["x"])
class Pop(nn.Module):
    """Adds what was stashed, ten times."""

    def forward(self, input: Tensor) -> Skips:
        skip = yield pop("x")
        return input + 10 * skip


@skippable(stash=["nothing"])
class Drop(nn.Module):
    """Stashes None."""

    def forward(self, input: Tensor) -> Skips:
        yield stash("nothing", None)
        return input


@skippable(pop=["nothing"])
class Carry(nn.Module):
    """Takes None."""

    def forward(self, input: Tensor) -> Skips:
        assert (yield pop("nothing")) is None
        return input + 1


@skippable(stash=["late"], pop=["early"])
class Both(nn.Module):
    """One skip ends here and another begins."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Skips:
        early = yield pop("early")
        yield stash("late", early * 2)
        output: Tensor = self.linear(input + early)
        return output


@skippable()
class Scale(nn.Module):
    """A plain forward."""

    def forward(self, input: Tensor) -> Tensor:
        return input * 2


def stashing(*names: str) -> Any:
    """A module that stashes its input under each name."""

    class Stashes(nn.Module):
        def forward(self, input: Tensor) -> Skips:
            for name in names:
                yield stash(name, input)
            return input

    return skippable(stash=names)(Stashes)()


def popping(*names: str) -> Any:
    """A module that adds up what it pops."""

    class Pops(nn.Module):
        def forward(self, input: Tensor) -> Skips:
            for name in names:
                input = input + (yield pop(name))
            return input

    return skippable(pop=names)(Pops)()
