"""Pooled columns of given values, sent between ranks and back by the step's functions."""

from __future__ import annotations

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.row_exchange import OutgoingRows, RowAllToAll, RowsInFlight
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.step.pooled_columns import PooledOutput
from shardrec.step.records import Arrival
from tests.exchange.lookups import Case

__all__ = ["exchange_columns", "pooled_output", "served"]


def served(sizes: list[int]) -> ShardInput:
    """What is known of the ids whose columns are given."""
    none = torch.zeros(0)
    return ShardInput(
        lengths=none,
        ids=none,
        weights=None,
        batch_sizes=tuple(sizes),
        group_ids=(),
        counts=(),
        slot_sizes=(None,) * len(sizes),
    )


def pooled_output(case: Case, rank: int, per_host: int | None = None) -> PooledOutput:
    features = list(dict.fromkeys(lookup.feature for lookup in case.lookups))
    return PooledOutput(case.route, case.lookups, features, rank, torch.device("cpu"), ranks_per_host=per_host)


def exchange_columns(
    output: PooledOutput,
    collectives: Collectives,
    pooled: Tensor,
    sizes: list[int],
    replicated: Tensor | None,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output; and with a gradient, those of ``pooled`` and ``replicated``.

    Args:
        output: of this rank.
        collectives: of this rank.
        pooled: (sum of sizes, D_mine).
        sizes: batch size of each rank.
        replicated: (B, D_r) or None.
        gradient: of the output, or None.
    """
    arrival = Arrival(size=sizes[collectives.rank], slot_sizes=None, counts=())
    received, goes_back, hosts, sums = served(sizes), gradient is not None, output.hosts, list[Tensor]()
    if hosts is not None:
        pooled, partial_sums = hosts.divide(pooled, sizes)
        exchange = RowAllToAll(collectives, QuantizedComms(), "partial sums")
        inside = RowsInFlight(exchange, [partial_sums], with_gradients=goes_back)
        sums = hosts.add_up(inside.receive()[0], sizes)
    flat, out = output.outgoing([pooled], received, sums)
    outgoing = OutgoingRows(flat=flat, out=out, into=output.into(arrival))
    rows = RowsInFlight(RowAllToAll(collectives, QuantizedComms()), [outgoing], with_gradients=goes_back)
    value = output.assemble(arrival, rows.receive()[0], replicated)
    if gradient is None:
        return value, None, None
    of_replicated = output.distribute(arrival, gradient, rows.gradient_blocks()[0])
    rows.send_gradients()
    (of_pooled,), of_sums = output.returned(rows.receive_gradients()[0], received)
    if hosts is not None:
        hosts.distribute(of_sums, inside.gradient_blocks()[0], sizes)
        inside.send_gradients()
        of_pooled = hosts.undivide(of_pooled, inside.receive_gradients()[0], sizes)
    return value, of_pooled, of_replicated
