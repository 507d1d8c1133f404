"""Partial sums added up inside hosts: the same output and gradients, and each sum crosses between hosts once."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from hypothesis import given
from torch import Tensor

from shardrec.exchange.assemble import Columns
from shardrec.exchange.collectives import Collectives, Pending, StreamSizes
from shardrec.exchange.hosts import host_sums
from shardrec.exchange.route import Lookup, build_route, output_pieces
from shardrec.layout import ShardingPlan, Topology, cuts
from tests.exchange.lookups import Case, draw, random_case
from tests.plans import randoms
from tests.step.columns import exchange_columns, pooled_output
from tests.thread_ranks import ThreadCollectives, thread_ranks


class Counting(Collectives):
    """Counts the elements that this rank sends to other hosts.

    Args:
        collectives: what does the work.
        ranks_per_host: ranks are numbered host by host.
    """

    def __init__(self, collectives: ThreadCollectives, ranks_per_host: int) -> None:
        self._collectives = collectives
        self._ranks_per_host = ranks_per_host
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.crossing = 0

    def send(self, parts: Any, receive: Any, what: str, streams: StreamSizes | None = None) -> Pending:
        host = self.rank // self._ranks_per_host
        abroad = [of_rank for rank, of_rank in enumerate(parts) if rank // self._ranks_per_host != host]
        self.crossing += sum(part.numel() for of_rank in abroad for part in of_rank)
        return self._collectives.send(parts, receive, what)


def exchange(
    case: Case, per_host: int | None, sizes: list[int], pooled: list[Tensor], own: list[Tensor], gradients: list[Tensor]
) -> list[tuple[Tensor, Tensor, int, list[str]]]:
    """Per rank: output, gradient of its pooled rows, elements sent to other hosts, and the exchanges."""
    world_size = case.plan.world_size

    def rank_main(threads: ThreadCollectives) -> tuple[Tensor, Tensor, int, list[str]]:
        rank = threads.rank
        collectives = Counting(threads, per_host or world_size)
        replica = own[rank] if own[rank].size(1) else None
        given = pooled[rank], sizes, replica, gradients[rank]
        found, of_pooled, _ = exchange_columns(pooled_output(case, rank, per_host), collectives, *given)
        of_gradients = crossing_back(case, per_host, sizes, rank)
        assert threads.unwaited == []
        assert of_pooled is not None
        return found, of_pooled, collectives.crossing - of_gradients, threads.issued

    return thread_ranks(world_size, rank_main)


def crossing_back(case: Case, per_host: int | None, sizes: list[int], rank: int) -> int:
    """Elements of gradient to other hosts: what came from them."""
    total = 0
    per_host = per_host or case.plan.world_size
    sums = host_sums(case.route, per_host)
    for other in range(case.plan.world_size):
        if other // per_host == rank // per_host:
            continue
        width = case.route.width(other) if sums is None else sum(piece.width for piece in sums.direct_columns[other])
        if sums is not None and (other - rank) % per_host == 0:
            width += sums.width(other // per_host)
        total += sizes[rank] * width
    return total


@given(rng=randoms())
def test_the_same_output_and_gradients_as_without_hosts(rng: Random) -> None:
    case = random_case(rng)
    world_size = case.plan.world_size
    per_host = rng.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
    sizes = [rng.randrange(4) for _ in range(world_size)]
    pooled = [draw(rng, sum(sizes), case.route.width(rank)) for rank in range(world_size)]
    replicated = sum(one.layout.embedding_dim for one in case.lookups if one.layout.replicated)
    own = [draw(rng, size, replicated) for size in sizes]
    dim = sum(one.layout.embedding_dim for one in case.lookups)
    gradients = [draw(rng, size, dim) for size in sizes]
    flat = exchange(case, None, sizes, pooled, own, gradients)
    found = exchange(case, per_host, sizes, pooled, own, gradients)
    for (output, gradient, _, _), (expected, expected_gradient, _, _) in zip(found, flat, strict=True):
        assert torch.equal(output, expected), "whole numbers, of which float32 gives exact sums in any order"
        assert torch.allclose(gradient, expected_gradient, rtol=1e-6)


@given(rng=randoms())
def test_every_pooled_column_is_sent_one_way_or_the_other(rng: Random) -> None:
    case = random_case(rng, most_ranks=6)
    world_size = case.plan.world_size
    per_host = rng.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
    sums = host_sums(case.route, per_host)
    if sums is None:
        return
    for rank, slots in enumerate(case.route.slots):
        columns = [
            column
            for piece in (*sums.direct_columns[rank], *sums.summed_columns[rank])
            for column in range(piece.sources[0].start, piece.sources[0].start + piece.width)
        ]
        assert sorted(columns) == list(range(sum(slot.shard.cols for slot in slots)))
    assert any(sums.columns)


def test_row_cuts_cross_between_hosts_once_per_host_and_sample() -> None:
    """Two hosts of two: table-row-wise sends half as much between hosts as with one exchange, grid too."""
    topology = Topology(hosts=2, ranks_per_host=2)
    layouts = [
        cuts.table_row_wise("t0", 8, 16, host=0, topology=topology),
        cuts.grid("t1", 8, 16, hosts=(0, 1), topology=topology),
    ]
    lookups = [Lookup(feature="f", layout=one, group=0, output=one.name) for one in layouts]
    route = build_route(lookups, 4, 1)
    plan = ShardingPlan(topology=topology, tables=tuple(layouts))
    case = Case(plan=plan, lookups=tuple(lookups), route=route, rows={"f": 8})
    sizes = [3, 3, 3, 3]
    pooled = [torch.ones(12, route.width(rank)) for rank in range(4)]
    own = [torch.zeros(3, 0)] * 4
    gradients = [torch.ones(3, 32)] * 4
    flat = exchange(case, None, sizes, pooled, own, gradients)
    found = exchange(case, 2, sizes, pooled, own, gradients)
    # Host 0 holds t0 and the first 8 columns of t1, host 1 the last 8: 24 and 8 columns for each of 6 samples abroad.
    assert [crossing for _, _, crossing, _ in found] == [3 * 24, 3 * 24, 3 * 8, 3 * 8]
    assert found[0][3] == ["partial sums", "output", "gradient", "gradient"]
    assert flat[0][3] == ["output", "gradient"]
    blocks = [torch.full((3, route.width(rank)), 1.0) for rank in range(4)]
    assert torch.equal(found[0][0], Columns(output_pieces(lookups, route)).assemble(blocks))
