"""The lookups of a compiled model: an operator each way, which calls the eager model's kernels.

A table with a fused optimizer is written in backward by whatever kernel looks it up. To a compiler a lookup is a
function of the ids that takes a gradient; that the tables change is hidden from it, as what it does not know it cannot
copy, move or do twice (see the note in :mod:`shardrec.compile.fakes`).

[Note: the ticket]
The operator runs the eager lookup, whose autograd graph knows how to update the tables, and keeps its result. A number
goes to backward as a tensor, among what a graph saves, and finds the result again. When the graph is gone, so is the
tensor, and with it what was kept, whether or not there was a backward.

[Note: inputs are copied]
A compiler may write another value into the memory of one that it has no use for any more, and does not know that the
kept graph has.

Shapes: S slots of a group on this rank, B_all samples of all ranks, N ids, D columns of the group, w columns of a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from shardrec.compile.live import Live

__all__ = ["TablesLookup"]

LookUp = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_LIBRARY = torch.library.Library("shardrec", "FRAGMENT")
_LIBRARY.define(
    "look_up_tables(Tensor anchor, Tensor ids, Tensor lengths, Tensor? weights, int number, int width, bool pooled, "
    "bool gradients) -> (Tensor, Tensor)",
    tags=torch.Tag.cudagraph_unsafe,
)
_LIBRARY.define(
    "update_tables(Tensor gradient, Tensor ticket, int number) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)

_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.ADInplaceOrView,
)


@contextmanager
def _with_autograd(gradients: bool) -> Iterator[None]:
    """Operators called inside see autograd again, which is out of the way below an operator with a gradient.

    fbgemm's training lookups need that also without ``gradients``: on the CPU they are kernels of autograd alone.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.set_grad_enabled(gradients):
        yield


class _Tables:
    """One group's lookup, and the results that wait for their backward.

    Args:
        look_up: takes ids (N,), lengths (S, B_all), weights (N,) or None; its backward updates the tables.
    """

    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        self._tickets = count()
        self._kept: dict[int, Tensor] = {}

    def rows(self, ids: Tensor, lengths: Tensor, weights: Tensor | None, gradients: bool) -> tuple[Tensor, Tensor]:
        """The rows, and their ticket."""
        ticket = torch.tensor(next(self._tickets))
        if not gradients:
            with _with_autograd(False):
                return self._look_up(ids, lengths, weights), ticket
        with _with_autograd(True):
            rows = self._look_up(ids.clone(), lengths.clone(), None if weights is None else weights.clone())
        number = int(ticket)
        self._kept[number] = rows
        weakref.finalize(ticket, self._kept.pop, number, None)
        return rows.detach(), ticket

    def update(self, gradient: Tensor, ticket: Tensor) -> None:
        """Backward of the rows with this ticket."""
        rows = self._kept[int(ticket)]
        if not rows.requires_grad:
            return
        with _with_autograd(True):
            torch.autograd.backward(rows, gradient, retain_graph=True)


_TABLES: Live[_Tables] = Live("the tables")


@torch.library.impl(_LIBRARY, "look_up_tables", "CompositeExplicitAutograd")
def _look_up(
    anchor: Tensor,
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    number: int,
    width: int,
    pooled: bool,
    gradients: bool,
) -> tuple[Tensor, Tensor]:
    return _TABLES[number].rows(ids, lengths, weights, gradients)


def _look_up_fake(
    anchor: Tensor,
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    number: int,
    width: int,
    pooled: bool,
    gradients: bool,
) -> tuple[Tensor, Tensor]:
    count = lengths.size(1) if pooled else ids.size(0)
    return anchor.new_empty((count, width)), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.impl(_LIBRARY, "update_tables", "CompositeExplicitAutograd")
def _update(gradient: Tensor, ticket: Tensor, number: int) -> Tensor:
    _TABLES[number].update(gradient, ticket)
    return gradient.new_zeros(0)


def _update_fake(gradient: Tensor, ticket: Tensor, number: int) -> Tensor:
    return gradient.new_empty(0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.number = inputs[4]


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (ticket,) = ctx.saved_tensors
    # The anchor's gradient is what makes a compiler keep the update.
    of_anchor = torch.ops.shardrec.update_tables(gradient, ticket, ctx.number)
    return of_anchor, None, None, None, None, None, None, None


torch.library.register_fake("shardrec::look_up_tables", _look_up_fake, lib=_LIBRARY)
torch.library.register_fake("shardrec::update_tables", _update_fake, lib=_LIBRARY)
torch.library.register_autograd("shardrec::look_up_tables", _backward, setup_context=_keep, lib=_LIBRARY)


class TablesLookup(nn.Module):
    """The lookup of one group, for a tracer.

    Args:
        look_up: takes ids (N,), lengths (S, B_all), weights (N,) or None; gives pooled columns or rows, float32.
        width: columns D of the group's slots on this rank, or w.
        pooled: sums of bags; else rows.
        device: of the tables.
    """

    def __init__(self, look_up: LookUp, width: int, *, pooled: bool, device: torch.device) -> None:
        super().__init__()
        self._tables = _Tables(look_up)
        self.number = _TABLES.add(self._tables)
        self.width = width
        self.pooled = pooled
        self.anchor = torch.zeros(0, device=device, requires_grad=True)

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """(B_all, D) or (N, w) float32."""
        rows: Tensor = torch.ops.shardrec.look_up_tables(
            self.anchor, ids, lengths, weights, self.number, self.width, self.pooled, torch.is_grad_enabled()
        )[0]
        return rows
