"""The output exchange of compiled and live scripted models: the eager model's, an operator for each of its four ends.

::

    forward    pooled ── send_columns ──► under way ── arrived_columns ──► output, columns in the unsharded order
    backward   gradient of pooled ◄── arrived_column_gradients ── under way ◄── send_column_gradients ── its gradient

With operators of torch alone the same takes several passes over the rows on each side: parts are packed, columns cut
and joined one by one, gradients divided. Here a part is read from where its sender wrote it, and each side makes one
pass (:mod:`shardrec.exchange.output`, whose layout and kernels these are). What a program has between two of the
operators overlaps with the exchange.

[Note: the ticket]
What is under way is kept under a number, which goes from operator to operator, and to backward, as a tensor; it ends
with that tensor, whether or not anybody has waited. A second tensor, of nothing, carries the gradients' order: who
waits for them comes after who sends them. (See also the notes in :mod:`shardrec.compile.lookups`.)

[Note: pooled rows are given twice]
What a rank sends to itself stays where it is until the output is put together. So the rows are an input there, too, and
no compiler writes something else into their memory before.

Shapes: B local batch, B_all the batches of all ranks, D_mine pooled columns of this rank, D_r of replicated tables, D
of the output.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardrec.compile.live import Live
from shardrec.exchange.assemble import Columns
from shardrec.exchange.collectives import Collectives, Pending, Streams, joined

__all__ = ["ColumnsExchange"]

_LIBRARY = torch.library.Library("shardrec", "FRAGMENT")
_LIBRARY.define(
    "send_columns(Tensor pooled, Tensor anchor, SymInt[] sizes, int number, bool gradients) -> (Tensor, Tensor)",
    tags=torch.Tag.cudagraph_unsafe,
)
_LIBRARY.define(
    "arrived_columns(Tensor pooled, Tensor order, Tensor ticket, Tensor replicated, SymInt batch, int width, "
    "int number) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)
_LIBRARY.define(
    "send_column_gradients(Tensor gradient, Tensor ticket, int replicated, int number) -> (Tensor, Tensor)",
    tags=torch.Tag.cudagraph_unsafe,
)
_LIBRARY.define(
    "arrived_column_gradients(Tensor order, Tensor ticket, SymInt rows, int width, int number) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)


class _UnderWay:
    """One exchange, from its forward to the last of its backwards."""

    def __init__(self, pending: Pending) -> None:
        self.pending: Pending | None = pending
        self.way_back = pending.way_back


class _Exchange:
    """What the operators call back to.

    Args:
        collectives: of the group.
        columns: how the output is put together: blocks of the ranks, then that of replicated tables.
        widths: pooled columns of each rank.
        what: a word for error messages. It is part of what ranks compare, so that two modules are not mixed up.
    """

    def __init__(self, collectives: Collectives, columns: Columns, widths: Sequence[int], what: str) -> None:
        self._collectives = collectives
        self._columns = columns
        self._widths = list(widths)
        self._what = what
        self._tickets = count()
        self._kept: dict[int, _UnderWay] = {}

    def send(self, pooled: Tensor, sizes: list[int], gradients: bool) -> Tensor:
        """See :class:`ColumnsExchange`."""
        rank, batch = self._collectives.rank, sizes[self._collectives.rank]
        out = [size * self._widths[rank] for size in sizes]
        into = [batch * width for width in self._widths]
        streams = Streams(out=[[one] for one in out], into=[[one] for one in into]) if gradients else None
        parts = pooled.detach().reshape(-1).split(out)
        # In two pieces each, which are copied: what lies in a room already would be read there, while a compiler may
        # write to memory that it has no use for any more.
        pieces = [[part[:0], part] for part in parts]
        made = _UnderWay(self._collectives.send(pieces, into, self._what, streams))
        if gradients and made.way_back is None:
            made.way_back = _Buffered(self._collectives, out, into, pooled)
        ticket = torch.tensor(next(self._tickets))
        number = int(ticket)
        self._kept[number] = made
        weakref.finalize(ticket, self._kept.pop, number, None).atexit = False
        return ticket

    def arrived(self, ticket: Tensor, replicated: Tensor, batch: int) -> Tensor:
        """See :class:`ColumnsExchange`."""
        kept = self._kept[int(ticket)]
        assert kept.pending is not None, "columns arrive once"
        parts, kept.pending = kept.pending.wait(), None
        blocks = [part.view(batch, width) for part, width in zip(parts, self._widths, strict=True)]
        return self._columns.assemble([*blocks, replicated.detach()])

    def send_gradient(self, gradient: Tensor, ticket: Tensor, replicated: int) -> Tensor:
        """Write the gradient of what came to where its senders want it; gives that of the replicated columns."""
        way_back = self._kept[int(ticket)].way_back
        assert way_back is not None, "an exchange in training mode has a way back"
        batch = gradient.size(0)
        blocks = [view.view(batch, width) for view, width in zip(way_back.views(), self._widths, strict=True)]
        own = gradient.new_empty((batch, replicated))
        self._columns.distribute(gradient, [*blocks, own])
        way_back.send()
        return own

    def arrived_gradient(self, ticket: Tensor, rows: int, width: int) -> Tensor:
        """(B_all, D_mine) gradient of what was sent."""
        way_back = self._kept[int(ticket)].way_back
        assert way_back is not None, "an exchange in training mode has a way back"
        (flat,) = way_back.wait()
        return flat.view(rows, width)


class _Buffered:
    """The way back through collectives that have none of their own."""

    def __init__(self, collectives: Collectives, out: list[int], into: list[int], like: Tensor) -> None:
        self._collectives = collectives
        self._out, self._into = out, into
        self._like = like.new_empty(0)
        self._views: list[Tensor] = []
        self._pending: Pending | None = None

    def views(self) -> list[Tensor]:
        self._views = list(self._like.new_empty(sum(self._into)).split(self._into))
        return self._views

    def send(self) -> None:
        views, self._views = self._views, []
        self._pending = self._collectives.send([[view] for view in views], self._out, "gradient")

    def wait(self) -> list[Tensor]:
        assert self._pending is not None, "a gradient is sent before it is received"
        pending, self._pending = self._pending, None
        return [joined(pending.wait())]


_EXCHANGES: Live[_Exchange] = Live("the output exchange")


@torch.library.impl(_LIBRARY, "send_columns", "CompositeExplicitAutograd")
def _send(pooled: Tensor, anchor: Tensor, sizes: Sequence[int], number: int, gradients: bool) -> tuple[Tensor, Tensor]:
    return pooled.new_zeros(0), _EXCHANGES[number].send(pooled, list(sizes), gradients)


@torch.library.impl(_LIBRARY, "arrived_columns", "CompositeExplicitAutograd")
def _arrived(
    pooled: Tensor, order: Tensor, ticket: Tensor, replicated: Tensor, batch: int, width: int, number: int
) -> Tensor:
    return _EXCHANGES[number].arrived(ticket, replicated, batch)


@torch.library.impl(_LIBRARY, "send_column_gradients", "CompositeExplicitAutograd")
def _send_gradient(gradient: Tensor, ticket: Tensor, replicated: int, number: int) -> tuple[Tensor, Tensor]:
    return gradient.new_zeros(0), _EXCHANGES[number].send_gradient(gradient, ticket, replicated)


@torch.library.impl(_LIBRARY, "arrived_column_gradients", "CompositeExplicitAutograd")
def _arrived_gradient(order: Tensor, ticket: Tensor, rows: int, width: int, number: int) -> Tensor:
    return _EXCHANGES[number].arrived_gradient(ticket, rows, width)


def _send_fake(pooled: Tensor, anchor: Tensor, sizes: Any, number: int, gradients: bool) -> tuple[Tensor, Tensor]:
    return pooled.new_empty(0), torch.empty((), dtype=torch.int64, device="cpu")


def _arrived_fake(
    pooled: Tensor, order: Tensor, ticket: Tensor, replicated: Tensor, batch: int, width: int, number: int
) -> Tensor:
    return pooled.new_empty((batch, width))


def _send_gradient_fake(gradient: Tensor, ticket: Tensor, replicated: int, number: int) -> tuple[Tensor, Tensor]:
    return gradient.new_empty(0), gradient.new_empty((gradient.size(0), replicated))


def _arrived_gradient_fake(order: Tensor, ticket: Tensor, rows: int, width: int, number: int) -> Tensor:
    return order.new_empty((rows, width))


def _keep_sent(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    pooled, _, _, ctx.number, _ = inputs
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.rows, ctx.width = pooled.shape


def _sent_backward(ctx: Any, order: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (ticket,) = ctx.saved_tensors
    gradient = torch.ops.shardrec.arrived_column_gradients(order, ticket, ctx.rows, ctx.width, ctx.number)
    # The anchor's gradient makes a compiler keep the exchange where no row of this rank's takes one.
    return gradient, gradient.new_zeros(0), None, None, None


def _keep_arrived(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ticket, replicated, _, _, ctx.number = inputs
    ctx.save_for_backward(ticket)
    ctx.replicated = replicated.size(1)


def _arrived_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (ticket,) = ctx.saved_tensors
    order, own = torch.ops.shardrec.send_column_gradients(gradient, ticket, ctx.replicated, ctx.number)
    return None, order, None, own, None, None, None


torch.library.register_fake("shardrec::send_columns", _send_fake, lib=_LIBRARY)
torch.library.register_fake("shardrec::arrived_columns", _arrived_fake, lib=_LIBRARY)
torch.library.register_fake("shardrec::send_column_gradients", _send_gradient_fake, lib=_LIBRARY)
torch.library.register_fake("shardrec::arrived_column_gradients", _arrived_gradient_fake, lib=_LIBRARY)
torch.library.register_autograd("shardrec::send_columns", _sent_backward, setup_context=_keep_sent, lib=_LIBRARY)
torch.library.register_autograd(
    "shardrec::arrived_columns", _arrived_backward, setup_context=_keep_arrived, lib=_LIBRARY
)


class ColumnsExchange(nn.Module):
    """The output exchange of one pooled module, for a tracer or for TorchScript; not for a file.

    Args:
        collectives: of a group of several ranks.
        columns: how the output is put together.
        widths: pooled columns of each rank.
        what: a word for error messages.
        device: of the tables.
    """

    # What is for Python only, by the name under which torch.jit looks for it; it lives as long as the scripted module.
    __jit_ignored_attributes__: ClassVar = ["_exchange"]

    def __init__(
        self, collectives: Collectives, columns: Columns, widths: Sequence[int], what: str, device: torch.device
    ) -> None:
        super().__init__()
        self._exchange = _Exchange(collectives, columns, widths, what)
        self.number = _EXCHANGES.add(self._exchange)
        self.width = columns.width
        self.anchor = torch.zeros(0, device=device, requires_grad=True)

    @torch.jit.export
    def __getstate__(self) -> int:
        raise RuntimeError(
            "a model scripted with portable=False exchanges through its own process, and can be neither saved, copied "
            "nor frozen: script it again with portable=True"
        )
        return self.number  # TorchScript wants what it is told

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        self.number = state

    def forward(self, pooled: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Issue the exchange; gives two tensors for ``shardrec::arrived_columns``.

        Args:
            pooled: (B_all, D_mine) float32, rank after rank.
            sizes: batch size of each rank.
        """
        order, ticket = torch.ops.shardrec.send_columns(
            pooled, self.anchor, sizes, self.number, torch.is_grad_enabled()
        )
        return order, ticket
