"""The output exchange: blocks of pooled columns back in place, and their gradients the same way back."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings
from torch import Tensor

from shardrec.exchange.payload import ShardInput
from shardrec.exchange.pooled_output import PooledOutputLayout
from shardrec.exchange.route import output_pieces
from shardrec.exchange.row_exchange import BlocksInFlight, RowAllToAll
from shardrec.exchange.wire_format import QuantizedComms
from tests.exchange.lookups import Case, draw, random_case
from tests.plans import randoms
from tests.thread_ranks import ThreadCollectives, thread_ranks


class Exchange:
    """The output exchange of one module by itself."""

    def __init__(self, case: Case, collectives: ThreadCollectives) -> None:
        self.output = PooledOutputLayout(case.route, case.lookups, collectives.rank)
        self.blocks = RowAllToAll(collectives, QuantizedComms())
        self.rank = collectives.rank

    def start(self, pooled: Tensor, sizes: list[int]) -> tuple[BlocksInFlight, int]:
        none = torch.zeros(0)
        served = ShardInput(
            lengths=none,
            ids=none,
            weights=None,
            batch_sizes=tuple(sizes),
            group_ids=(),
            counts=(),
            slot_sizes=(None,) * len(sizes),
        )
        return self.blocks.start([self.output.stream(pooled, served, None)]), sizes[self.rank]

    def finish(self, flight: BlocksInFlight, size: int, replicated: Tensor | None) -> Tensor:
        return self.output.finish(flight, 0, size, None, replicated)


def by_hand(case: Case, blocks: list[Tensor]) -> Tensor:
    """(B, D): each piece of the output as a sum of columns of the blocks, one per rank and the replicated tables'."""
    columns = []
    for piece in output_pieces(case.lookups, case.route):
        parts = [blocks[source.block][:, source.start : source.start + piece.width] for source in piece.sources]
        columns.append(torch.stack(parts).sum(dim=0))
    return torch.cat(columns, dim=1)


@given(rng=randoms())
def test_columns_and_gradients_find_their_way(rng: Random) -> None:
    case = random_case(rng)
    world_size = case.plan.world_size
    sizes = [rng.randrange(4) for _ in range(world_size)]
    widths = [case.route.width(rank) for rank in range(world_size)]
    own_width = sum(one.layout.embedding_dim for one in case.lookups if one.layout.replicated)
    dim = sum(one.layout.embedding_dim for one in case.lookups)
    pooled = [draw(rng, sum(sizes), width) for width in widths]
    own = [draw(rng, size, own_width) for size in sizes]
    gradients = [draw(rng, size, dim) for size in sizes]

    def rank_main(collectives: ThreadCollectives) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rank = collectives.rank
        exchange = Exchange(case, collectives)
        mine = pooled[rank].clone().requires_grad_()
        replica = own[rank].clone().requires_grad_() if own_width else None
        token, pending = exchange.start(mine, sizes)
        assert collectives.issued == ["output"][: world_size - 1]
        output = exchange.finish(token, pending, replica)
        output.backward(gradients[rank])
        assert collectives.issued == (["output", "gradient"] if world_size > 1 else [])
        assert collectives.unwaited == []
        return output.detach(), mine.grad, None if replica is None else replica.grad

    results = thread_ranks(world_size, rank_main)

    starts = [sum(sizes[:rank]) for rank in range(world_size)]
    expected_gradients = [[torch.zeros(size, width) for width in widths] for size in sizes]
    for rank, (output, _, own_gradient) in enumerate(results):
        samples = slice(starts[rank], starts[rank] + sizes[rank])
        blocks = [part[samples] for part in pooled] + [own[rank]]
        assert torch.equal(output, by_hand(case, blocks))
        leaves = [block.clone().requires_grad_() for block in blocks]
        by_hand(case, leaves).backward(gradients[rank])
        for source, leaf in enumerate(leaves[:-1]):
            if leaf.grad is not None:
                expected_gradients[rank][source] = leaf.grad
        if own_width:
            assert own_gradient is not None and leaves[-1].grad is not None
            assert torch.equal(own_gradient, leaves[-1].grad), "replicated columns are not divided by the ranks"
    for rank, (_, gradient, _) in enumerate(results):
        assert gradient is not None, "each rank takes part in backward"
        expected = torch.cat([expected_gradients[source][rank] for source in range(world_size)])
        assert torch.allclose(gradient, expected / world_size, rtol=1e-6, atol=0)


def test_a_rank_without_gradient_of_its_own_takes_part_in_backward() -> None:
    """As one that holds frozen tables, or none."""
    cases = map(random_case, map(Random, range(100)))
    case = next(one for one in cases if one.plan.world_size > 1 and not any(of.layout.replicated for of in one.lookups))
    world_size = case.plan.world_size
    widths = [case.route.width(rank) for rank in range(world_size)]

    def rank_main(collectives: ThreadCollectives) -> None:
        exchange = Exchange(case, collectives)
        pooled = torch.ones(2 * world_size, widths[collectives.rank], requires_grad=collectives.rank != 1)
        output = exchange.finish(*exchange.start(pooled, [2] * world_size), None)
        output.sum().backward()
        assert collectives.issued == ["output", "gradient"]
        assert collectives.unwaited == []

    thread_ranks(world_size, rank_main)


@settings(max_examples=20)
@given(rng=randoms())
def test_without_gradients_nothing_is_kept(rng: Random) -> None:
    case = random_case(rng, most_ranks=3)
    world_size = case.plan.world_size
    sizes = [rng.randrange(3) for _ in range(world_size)]
    widths = [case.route.width(rank) for rank in range(world_size)]
    own_width = sum(one.layout.embedding_dim for one in case.lookups if one.layout.replicated)

    def rank_main(collectives: ThreadCollectives) -> Tensor:
        exchange = Exchange(case, collectives)
        pooled = torch.ones(sum(sizes), widths[collectives.rank], requires_grad=True)
        replica = torch.ones(sizes[collectives.rank], own_width) if own_width else None
        with torch.no_grad():
            return exchange.finish(*exchange.start(pooled, sizes), replica)

    for size, output in zip(sizes, thread_ranks(world_size, rank_main), strict=True):
        assert not output.requires_grad
        assert output.size(0) == size
