"""The rows of one rank, which need no exchange: look up → assemble, and distribute → update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from shardrec.exchange.backward_watch import accumulates_in
from shardrec.lookup.backward import once_differentiable
from shardrec.step.exchange import RowExchange
from shardrec.step.look_up import look_up, node_inputs, update
from shardrec.step.records import Arrival, InFlight


def look_up_here(exchange: RowExchange, call: InFlight) -> None:
    """:func:`shardrec.step.exchange.launch` on one rank, where the ids already are.

    Args:
        exchange: of the model.
        call: is given its value.
    """
    plan, with_gradients = call.plan, torch.is_grad_enabled()
    assert plan is not None, "a call that looks up rows has a plan"
    call.arrival = Arrival(size=call.lengths.size(1), slot_sizes=None, counts=call.counts)
    call.to_update = with_gradients and call.requires_grad
    plan.output.meanwhile(call)
    replicated = call.replicated
    if call.to_update or (replicated is not None and with_gradients):
        value: Tensor = _LookUp.apply(  # type: ignore[no-untyped-call]
            exchange, call, replicated, *node_inputs(exchange.placeholder, [call])
        )
        if call.to_update:
            plan.lookup.begin_lookup(value.grad_fn)
        call.assembled = value
    else:
        call.assembled = _look_up(None, exchange, call, replicated)
    call.is_launched = True
    call.received = call.found_rows = None


def _look_up(ctx: Any, exchange: RowExchange, call: InFlight, replicated: Tensor | None) -> Tensor:
    """What is looked up, in order. ``ctx`` is given what the backward takes."""
    plan, received = call.plan, call.received
    assert plan is not None and received is not None, "the ids of one rank are here"
    looked_up = look_up(plan, received, call=call, to_update=call.to_update)
    for watch in exchange.life_cycle.rows_looked_up:
        watch(plan, looked_up)
    rows, looked_up.rows = looked_up.rows, []
    if ctx is not None:
        ctx.exchange, ctx.output, ctx.looked_up = exchange, exchange.output, looked_up
        ctx.arrival, ctx.to_update, ctx.flag = call.arrival, call.to_update, call.flag
        ctx.save_for_backward(*looked_up.release_ids())
    if plan.output.is_identity:
        return rows[0]
    flat, _ = plan.output.outgoing(rows, received, ())
    return plan.output.assemble(call.arrival, [flat], replicated)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, exchange: RowExchange, call: InFlight, replicated: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        return _look_up(ctx, exchange, call, replicated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.output.ended:
            ctx.output.refuse_ended()
        if ctx.flag is not None:
            ctx.exchange.flags.check()
            ctx.flag.check()  # read before, and the backward is made again
        looked_up, arrival, of_replicated = ctx.looked_up, ctx.arrival, None
        output = looked_up.plan.output
        if output.pools and output.is_identity:
            gradients = [gradient]
        else:
            flat = gradient.reshape(-1)
            if not output.is_identity:
                flat = gradient.new_empty(sum([rows * cols for rows, cols in output.into(arrival)[0]]))
                of_replicated = output.distribute(arrival, gradient, [flat])
            gradients = output.returned(flat, looked_up.received)[0]
        if not ctx.to_update:
            return None, None, of_replicated, *[None] * (len(ctx.needs_input_grad) - 3)
        exchange = ctx.exchange
        # A node without other inputs than the placeholder runs for the placeholder's gradient.
        updates = len(ctx.needs_input_grad) == 4 or accumulates_in(exchange.placeholder)
        of_inputs = update([looked_up], ctx.saved_tensors, [gradients], exchange.collectives, updates=updates)
        return None, None, of_replicated, None, *of_inputs
