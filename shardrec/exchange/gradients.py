"""Who averages the gradients of ordinary parameters over the ranks, and in which backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from shardrec.exchange.backward_watch import BEGUN, BackwardWatch

__all__ = ["Gradients", "Reducer"]


class Reducer(Protocol):
    """What averages the gradients of ordinary parameters over the ranks (:mod:`shardrec.modules.dense`)."""

    @property
    def agreement(self) -> str:
        """What the ranks must have in common, in words."""

    def broadcast_buffers(self) -> None:
        """Called when a forward begins; sends the first rank's buffers to all ranks that make it."""

    def arm(self) -> None:
        """Called when a forward with gradients begins."""

    def begin(self) -> None:
        """Called when a backward begins."""


class Gradients:
    """The gradients of a model's ordinary parameters, replicated tables among them.

    Args:
        report_failure: called with the error of a backward that raises here, for the other ranks.
        are_reduced: true if there is nothing to average, or it is done elsewhere.

    Attributes:
        reducer: averages them over the ranks, unless that is left to the user, or there is one rank.
        across: called with the reducer's parameters, frozen ones too, when it has averaged and before they are used.
        updates: called at the end of each backward in which the reducer has averaged gradients.
        forwards: called when a forward with gradients begins.
        accumulates: forwards are in ``no_sync``.
        reduce_this_backward: the last forward with gradients ran outside ``no_sync``; its backward all-reduces.
        returning: what the operators of a program that goes back have sent, and what they receive at its end.
        backward: tells the reducer of backwards, and the other ranks of one that raises here.
    """

    def __init__(self, report_failure: Callable[[str], None], *, are_reduced: bool) -> None:
        self.reducer: Reducer | None = None
        self.are_reduced = are_reduced
        self.across: Callable[[Sequence[nn.Parameter]], None] | None = None
        self.updates: list[Callable[[], None]] = []
        self.forwards: list[Callable[[], None]] = []
        self.accumulates = False
        self.reduce_this_backward = True
        self.returning: list[tuple[Tensor, Tensor]] = []
        self.backward = BackwardWatch(report_failure, self._backward_begins)

    def begin_forward(self) -> None:
        """A forward begins: if it has gradients, it decides whether its backward averages them."""
        if torch.is_grad_enabled():
            self.reduce_this_backward = not self.accumulates
            for begin in self.forwards:
                begin()
            if self.reducer is not None:
                BEGUN.begin(self.reducer)
                self.reducer.arm()

    def agreement(self) -> str:
        """What the ranks must have in common in a forward."""
        if not torch.is_grad_enabled():
            return "gradients off"
        trained = "" if self.reducer is None else self.reducer.agreement
        return f"gradients on{' in no_sync' if self.accumulates else ''}{trained}"

    def _backward_begins(self) -> None:
        if self.reducer is not None:
            self.reducer.begin()
