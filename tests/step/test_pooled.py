"""The output exchange: blocks of pooled columns back in place, and their gradients the same way back."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings
from torch import Tensor

from shardrec.exchange.route import output_pieces
from tests.exchange.lookups import Case, draw, random_case
from tests.plans import randoms
from tests.step.columns import exchange_columns, pooled_output
from tests.thread_ranks import ThreadCollectives, thread_ranks


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
        replica = own[rank] if own_width else None
        given = pooled[rank], sizes, replica, gradients[rank]
        result = exchange_columns(pooled_output(case, rank), collectives, *given)
        assert collectives.issued == ["output", "gradient"]
        assert collectives.unwaited == []
        return result

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


@settings(max_examples=20)
@given(rng=randoms())
def test_without_gradients_nothing_is_kept(rng: Random) -> None:
    case = random_case(rng, most_ranks=3)
    world_size = case.plan.world_size
    sizes = [rng.randrange(3) for _ in range(world_size)]
    widths = [case.route.width(rank) for rank in range(world_size)]
    own_width = sum(one.layout.embedding_dim for one in case.lookups if one.layout.replicated)

    def rank_main(collectives: ThreadCollectives) -> Tensor:
        pooled = torch.ones(sum(sizes), widths[collectives.rank])
        replica = torch.ones(sizes[collectives.rank], own_width) if own_width else None
        output = pooled_output(case, collectives.rank)
        value = exchange_columns(output, collectives, pooled, sizes, replica, None)[0]
        assert collectives.issued == ["output"]
        return value

    for size, output in zip(sizes, thread_ranks(world_size, rank_main), strict=True):
        assert not output.requires_grad
        assert output.size(0) == size
