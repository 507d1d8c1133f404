"""The rows of the calls that share an exchange: look up → [rows] → assemble, and distribute → [gradients] → update.

Shapes: W ranks, M calls, B local batch, B_all the batches of all ranks, D columns.

::

    launch      look up the ids that all ranks sent to this one, one kernel call per lookup group; on several hosts add
                up partial sums inside each; one all-to-all of float rows; look up replicated tables meanwhile
    finish      at the first use of a value: wait for the rows, put columns or rows in order
    backward    of finish: write the gradients of the rows into memory that is sent. One all-to-all
                of launch: wait for the gradients, update the tables

[Note: two autograd functions]
The rows are sent in one function and waited for in another, with a token between them, so that forward and backward
both have work to do while they are under way: whatever the dense model computes between the two. One rank has nothing
to wait for: a single function looks up and assembles. The state that a function's backward reads holds no tensor of
the graph that refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from shardrec.exchange.backward_watch import accumulates_in
from shardrec.exchange.fault_flags import FaultFlags
from shardrec.exchange.life_cycle import LifeCycle
from shardrec.exchange.row_exchange import OutgoingRows, RowAllToAll, RowsInFlight
from shardrec.lookup.backward import once_differentiable
from shardrec.lookup.shards import ShardLookup
from shardrec.step.look_up import LookedUp, look_up, node_inputs, update
from shardrec.step.records import Arrival, InFlight

_ARRIVAL, _REPLICATED, _REQUIRES_GRAD = attrgetter("arrival"), attrgetter("replicated"), attrgetter("requires_grad")


class RowExchange:
    """What a model exchanges rows by.

    Args:
        inside: the exchange of partial sums inside hosts.
        output: the exchange of rows.
        life_cycle: of the model.
        flags: of the model's batches.

    Attributes:
        placeholder: stands for tables in the autograd graph.
    """

    def __init__(self, inside: RowAllToAll, output: RowAllToAll, life_cycle: LifeCycle, flags: FaultFlags) -> None:
        self.inside = inside
        self.output = output
        self.life_cycle = life_cycle
        self.flags = flags
        self.collectives = output.collectives
        self.placeholder = torch.zeros(0, dtype=torch.float32, device=output.device, requires_grad=True)


class _Sent:
    """The rows of some calls under way. Forward and backward share it.

    Args:
        exchange: of the model.
        to_update: whether gradients may come back. The same on every rank.
    """

    __slots__ = ("_inside", "_output", "exchange", "looked_up", "rows", "to_update")

    def __init__(self, exchange: RowExchange, *, to_update: bool) -> None:
        self.exchange = exchange
        self.to_update = to_update
        self._inside: RowsInFlight | None = None
        self._output = exchange.output  # of the present plan
        self.looked_up: list[LookedUp] = []
        self.rows: RowsInFlight

    def look_up_and_send(self, calls: Sequence[InFlight]) -> None:
        """Look up the ids of each call, and send the rows, after sums inside hosts."""
        exchange, collectives, device = self.exchange, self.exchange.collectives, self._output.device
        # Memory from which pooled rows can usually be sent without a copy.
        allocate = partial(collectives.allocate, device=device)
        for call in calls:
            plan = call.plan
            assert plan is not None, "a call that looks up rows has a plan"
            looked_up = look_up(plan, call.wait_for_ids(), allocate, call=call, to_update=self.to_update)
            for watch in exchange.life_cycle.rows_looked_up:
                watch(plan, looked_up)
            self.looked_up.append(looked_up)
        sums = self._sums_inside_hosts()
        outgoing: list[OutgoingRows] = []
        for call, looked_up in zip(calls, self.looked_up, strict=True):
            plan = looked_up.plan
            if plan.before_rows is not None:
                plan.before_rows(call)
            flat, out = plan.output.outgoing(looked_up.rows, looked_up.received, sums.get(len(outgoing), ()))
            looked_up.rows = []
            outgoing.append(OutgoingRows(flat=flat, out=out, into=plan.output.into(call.arrival)))
        self.rows = RowsInFlight(self._output, outgoing, with_gradients=self.to_update)

    def _sums_inside_hosts(self) -> dict[int, Sequence[Tensor]]:
        """By number of the call, the sums that this host's ranks have made for it. Leaves ``rows`` without them."""
        numbers, partial_sums = [], []
        for number, looked_up in enumerate(self.looked_up):
            hosts = looked_up.plan.output.hosts
            if hosts is not None:
                direct, sums = hosts.divide(looked_up.rows[0], looked_up.received.batch_sizes)
                looked_up.rows = [direct]
                numbers.append((number, hosts))
                partial_sums.append(sums)
        if not numbers:
            return {}
        self._inside = RowsInFlight(self.exchange.inside, partial_sums, with_gradients=self.to_update)
        return {
            number: hosts.add_up(blocks, self.looked_up[number].received.batch_sizes)
            for (number, hosts), blocks in zip(numbers, self._inside.receive(), strict=True)
        }

    def returned(self) -> list[Sequence[Tensor]]:
        """Wait for the gradients of the calls' looked-up rows."""
        gradients, summed = list[Sequence[Tensor]](), []
        for number, (looked_up, flat) in enumerate(zip(self.looked_up, self.rows.receive_gradients(), strict=True)):
            output, received = looked_up.plan.output, looked_up.received
            of_rows, of_sums = output.returned(flat, received)
            gradients.append(of_rows)
            if output.hosts is not None:
                summed.append((number, output.hosts, received.batch_sizes, of_sums))
        if self._inside is not None:
            for (_, hosts, sizes, of_sums), blocks in zip(summed, self._inside.gradient_blocks(), strict=True):
                hosts.distribute(of_sums, blocks, sizes)
            self._inside.send_gradients()
            for (number, hosts, sizes, _), flat in zip(summed, self._inside.receive_gradients(), strict=True):
                gradients[number] = [hosts.undivide(gradients[number][0], flat, sizes)]
        return gradients

    def assembled(self, arrivals: Sequence[Arrival], replicated: Sequence[Tensor | None]) -> list[Tensor]:
        """Wait for the rows, and put each call's rows in order."""
        calls = zip(self.looked_up, arrivals, self.rows.receive(), replicated, strict=True)
        return [
            looked_up.plan.output.assemble(arrival, blocks, columns) for looked_up, arrival, blocks, columns in calls
        ]

    def send_gradients(self, arrivals: Sequence[Arrival], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Send the gradients of the :meth:`assembled` values. Returns the gradient of ``replicated``."""
        if self.to_update:
            for begin in self.exchange.life_cycle.gradients_go_back:
                begin()
        of_replicated: list[Tensor | None] = []
        calls = zip(self.looked_up, arrivals, gradients, self.rows.gradient_blocks(), strict=True)
        for looked_up, arrival, gradient, blocks in calls:
            if gradient is None:
                torch._foreach_zero_(list(blocks))
                of_replicated.append(None)
            else:
                of_replicated.append(looked_up.plan.output.distribute(arrival, gradient, blocks))
        if self.to_update:
            self.rows.send_gradients()
        return of_replicated


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, sent: _Sent, calls: Sequence[InFlight], *inputs: Tensor) -> Tensor:
        ctx.sent = sent  # type: ignore[attr-defined]
        sent.look_up_and_send(calls)
        tensors: list[Tensor | None] = []
        for looked_up in sent.looked_up:
            tensors += looked_up.release_ids()
        ctx.save_for_backward(*tensors)  # type: ignore[arg-type]
        return inputs[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Waits for the gradients, which :meth:`_Finish.backward` of every rank has sent."""
        sent: _Sent = ctx.sent
        gradients, exchange = sent.returned(), sent.exchange
        # A node without other inputs than the placeholder runs for the placeholder's gradient.
        updates = len(ctx.needs_input_grad) == 3 or accumulates_in(exchange.placeholder)
        of_inputs = update(sent.looked_up, ctx.saved_tensors, gradients, exchange.collectives, updates=updates)
        return None, None, None, *of_inputs


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, sent: _Sent, arrivals: Sequence[Arrival], token: Tensor, *replicated: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.sent, ctx.arrivals = sent, arrivals  # type: ignore[attr-defined]
        ctx.like = token.detach()  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return tuple(sent.assembled(arrivals, replicated))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sent: _Sent = ctx.sent
        return None, None, torch.zeros_like(ctx.like), *sent.send_gradients(ctx.arrivals, gradients)


class SharedExchange:
    """The rows of the calls that share an exchange, from their launch to the last use of a value.

    Args:
        sent: the rows.
        calls: that share the exchange.
        token: of the node that has sent them. None without gradients.
    """

    __slots__ = ("__weakref__", "_arrivals", "_replicated", "_sent", "_token", "_values")

    def __init__(self, sent: _Sent, calls: Sequence[InFlight], token: Tensor | None) -> None:
        self._sent = sent
        self._token = token
        self._arrivals = list(map(_ARRIVAL, calls))
        self._replicated = list(map(_REPLICATED, calls))
        self._values: dict[int, Tensor] | None = None

    @property
    def lookups(self) -> list[ShardLookup]:
        """That its backward updates."""
        return [looked_up.plan.lookup for looked_up in self._sent.looked_up]

    def cut_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        """Cut the autograd graph between what was sent and the values, before these are taken.

        Returns:
            What the graph of the sending half ends in, and the leaf that the values' half begins with in its place.
        """
        token = self._token
        if token is None:
            return [], []
        self._token = token.detach().requires_grad_()
        return [token], [self._token]

    def value(self, number: int) -> Tensor:
        """What was assembled for a call, which can be taken once. The first one waits. Call it in the grad mode that
        the exchange was started in."""
        if self._values is None:
            sent, arrivals, replicated, token = self._sent, self._arrivals, self._replicated, self._token
            self._replicated, self._token = [], None
            if torch.is_grad_enabled() and (token is not None or any(part is not None for part in replicated)):
                token = sent.exchange.placeholder.detach() if token is None else token
                values = _Finish.apply(sent, arrivals, token, *replicated)  # type: ignore[no-untyped-call]
            else:
                values = sent.assembled(arrivals, replicated)
            self._values = dict(enumerate(values))
        return self._values.pop(number)


def launch(exchange: RowExchange, calls: Sequence[InFlight]) -> None:
    """Look up the ids that all ranks sent to this one for some calls, and send their rows.

    Args:
        exchange: of the model.
        calls: the same on every rank, in the same order.

    Raises:
        PeerError: if another rank is gone.
    """
    to_update = torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, calls))
    for call in calls:
        call.arrival = Arrival(size=call.lengths.size(1), slot_sizes=call.slot_sizes, counts=call.counts)
    sent, token = _Sent(exchange, to_update=to_update), None
    if to_update:
        token = _Launch.apply(sent, calls, *node_inputs(exchange.placeholder, calls))  # type: ignore[no-untyped-call]
        for looked_up in sent.looked_up:
            looked_up.plan.lookup.begin_lookup(token.grad_fn)
    else:
        sent.look_up_and_send(calls)
    for call, looked_up in zip(calls, sent.looked_up, strict=True):
        looked_up.plan.output.meanwhile(call)
    shared = SharedExchange(sent, calls, token)
    for number, call in enumerate(calls):
        call.exchange, call.number, call.is_launched = shared, number, True
        call.parts = call.received = call.found_rows = None


def finish(call: InFlight) -> Any:
    """The value of a call that was launched, which can be taken once. Waits for the rows.

    (B, D) pooled values; of sequences, (N, D) rows of the lookups of cut tables and the output's entries.
    """
    if not call.mode.is_current:
        with call.mode.entered():
            return finish(call)
    values, plan = call.assembled, call.plan
    if call.exchange is not None:
        values = call.exchange.value(call.number)
    assert values is not None and plan is not None, "a value is finished once its rows are under way"
    call.assembled = None
    value = plan.output.finish(call, values)
    for watch in call.on_value:
        watch(call, value)
    return value
