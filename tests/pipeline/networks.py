"""Sequentials for the tests of pipelines."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardrec.pipeline.message import Key, Mailbox, Message
from shardrec.pipeline.skip import Namespace, pop, skippable, stash
from tests.pipeline.skip.layers import Pop, Stash

__all__ = ["BrokenBackward", "Counts", "Fails", "Join", "Split", "failures_told", "nested", "network", "two_skips"]


class Split(nn.Module):
    """A nest of its input."""

    def forward(self, input: Tensor) -> Any:
        return input, [input * 2, {"count": torch.arange(len(input)), "none": None}]


class Join(nn.Module):
    """A tensor of the nest."""

    def forward(self, input: Any) -> Tensor:
        assert input[1][1]["none"] is None
        joined: Tensor = input[0] + input[1][0] * input[1][1]["count"].unsqueeze(1)
        return joined


class Fails(nn.Module):
    """Raises while ``error`` is set."""

    error: BaseException | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return input


class Counts(nn.Module):
    """Counts its forwards; each from ``waiting``'s on waits until a message has told of a failure."""

    count = 0
    waiting = 2

    def __init__(self, told: threading.Event) -> None:
        super().__init__()
        self.told = told

    def forward(self, input: Tensor) -> Tensor:
        self.count += 1
        if self.count >= self.waiting:
            assert self.told.wait(60)
        return input


@contextmanager
def failures_told() -> Iterator[threading.Event]:
    """Set once a mailbox of this process has a message that tells of a failure."""
    told, send = threading.Event(), Mailbox.send

    def noting(self: Mailbox, key: Key, message: Message) -> None:
        send(self, key, message)
        if self.failure is not None:
            told.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "send", noting)
        yield told


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: BrokenBackward) -> Tensor:
        ctx.layer = layer
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.layer.broken:
            raise ValueError("backward fails on purpose")
        return gradient, None


class BrokenBackward(nn.Module):
    """Raises in backward while ``broken``."""

    broken = False

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Broken.apply(input, self)  # type: ignore[no-untyped-call]
        return output


def network(seed: int = 0) -> nn.Sequential:
    """Eight layers, a skip over five of them."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 8), Stash(), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), Pop(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def two_skips() -> nn.Sequential:
    """Two skips of one name, which cross."""
    one, other = Namespace(), Namespace()
    layers = [
        nn.Linear(4, 4),
        Stash().isolate(one),
        nn.Tanh(),
        Stash().isolate(other),
        nn.Linear(4, 4),
        Pop().isolate(one),
        nn.Tanh(),
        Pop().isolate(other),
    ]
    return nn.Sequential(*layers).double()


@skippable(stash=["pair", "nothing"])
class _StashPair(nn.Module):
    def forward(self, input: Tensor) -> Generator[stash, Any, Tensor]:
        yield stash("pair", (input * 2, [input.long()]))
        yield stash("nothing", None)
        return input


@skippable(pop=["pair", "nothing"])
class _PopPair(nn.Module):
    def forward(self, input: Tensor) -> Generator[pop, Any, Tensor]:
        pair = yield pop("pair")
        assert (yield pop("nothing")) is None
        output: Tensor = input + pair[0] * pair[1][0]
        return output


def nested() -> nn.Sequential:
    """Nests and None between layers and in skips."""
    return nn.Sequential(nn.Linear(4, 4), _StashPair(), Split(), Join(), _PopPair(), nn.Linear(4, 2)).double()
