"""Who averages the gradients of ordinary parameters over the ranks, and in which backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardrec.exchange.backward_watch import BEGUN, BackwardWatch
from shardrec.exchange.life_cycle import LifeCycle
from shardrec.exchange.recomputation import recomputes_graph


class Reducer(Protocol):
    """What averages the gradients of ordinary parameters over the ranks (:mod:`shardrec.modules.dense`)."""

    @property
    def agreement(self) -> str:
        """What the ranks must have in common, in words."""

    def broadcast_buffers(self) -> None:
        """Called when a forward begins. Sends the first rank's buffers to all ranks that make it."""

    def arm(self) -> None:
        """Called when a forward with gradients begins."""

    def begin(self) -> None:
        """Called when a backward begins."""


class KeepsGradients(Protocol):
    """A :class:`~shardrec.lookup.shards.ShardLookup`."""

    is_open: bool

    def update_kept(self) -> None: ...


class GoesBack(Protocol):
    """A :class:`~shardrec.step.exchange.SharedExchange`."""

    @property
    def lookups(self) -> Sequence[KeepsGradients]: ...


class Gradients:
    """The gradients of a model's ordinary parameters, replicated tables among them.

    Args:
        report_failure: called with the error of a backward that raises here, for the other ranks.
        life_cycle: of the model.
        are_reduced: true if there is nothing to average, or it is done elsewhere.

    Attributes:
        reducer: averages them over the ranks, unless that is left to the user, or there is one rank.
        accumulates: forwards are in ``no_sync``.
        reduce_this_backward: the last forward with gradients ran outside ``no_sync``. Its backward all-reduces.
        returning: tensors that the operators of a program in backward have sent, and tensors that they receive at its
            end.
        going_back: the exchanges of these.
        open_lookups: that keep the gradients of a program's backward until its end.
        backward: tells the reducer of backwards, and the other ranks of one that raises here.
    """

    def __init__(self, report_failure: Callable[[str], None], life_cycle: LifeCycle, *, are_reduced: bool) -> None:
        self.life_cycle = life_cycle
        self.reducer: Reducer | None = None
        self.are_reduced = are_reduced
        self.accumulates = False
        self.reduce_this_backward = True
        self._had_gradients = False  # the last forward
        self.returning: list[tuple[Tensor, Tensor]] = []
        self.going_back: list[GoesBack] = []
        self.open_lookups: list[KeepsGradients] = []
        self.backward = BackwardWatch(report_failure, self._backward_begins)
        life_cycle.gradients_go_back.append(self.backward.begin)

    def begin_forward(self) -> None:
        """A forward begins: if it has gradients, it decides whether its backward averages them. One that a backward
        computes again has begun before, with gradients. The forward of a reentrant checkpoint has not.
        """
        if torch._C._current_graph_task_id() >= 0 and self.computes_again:
            return
        self._had_gradients = torch.is_grad_enabled()
        if self._had_gradients:
            self.reduce_this_backward = not self.accumulates
            for begin in self.life_cycle.forward_begins:
                begin()
            if self.reducer is not None:
                BEGUN.begin(self.reducer)
                self.reducer.arm()

    @property
    def computes_again(self) -> bool:
        """Whether a backward computes a forward with gradients again (``torch.utils.checkpoint``)."""
        return torch._C._current_graph_task_id() >= 0 and (self._had_gradients or recomputes_graph())

    def agreement(self) -> str:
        """What the ranks must have in common in a forward."""
        if not torch.is_grad_enabled():
            return "gradients off"
        trained = "" if self.reducer is None else self.reducer.agreement
        return f"gradients on{' in no_sync' if self.accumulates else ''}{trained}"

    def _backward_begins(self) -> None:
        for begin in self.life_cycle.backward_begins:
            begin()
        if self.reducer is not None:
            self.reducer.begin()
