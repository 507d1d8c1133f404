"""Float rows of several streams in one all-to-all each way."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from torch import Tensor

from shardrec.exchange.collectives import joined
from shardrec.exchange.row_exchange import RowAllToAll, Stream
from shardrec.exchange.wire_format import QuantizedComms
from tests.plans import randoms
from tests.thread_ranks import ThreadCollectives, thread_ranks


@given(rng=randoms())
def test_each_part_and_its_gradient_find_their_way(rng: Random) -> None:
    world_size, streams = rng.randint(1, 4), rng.randint(1, 3)
    # parts[stream][source][target]: whole numbers, which the wire keeps.
    parts = [
        [
            [torch.tensor([float(rng.randint(-9, 9)) for _ in range(rng.randrange(4))]) for _ in range(world_size)]
            for _ in range(world_size)
        ]
        for _ in range(streams)
    ]
    used = [rng.random() < 0.8 for _ in range(streams)]
    elsewhere = rng.random() < 0.5

    def rank_main(collectives: ThreadCollectives) -> tuple[list[list[Tensor]], list[Tensor | None]]:
        rank = collectives.rank
        flats = [torch.cat(parts[stream][rank]).requires_grad_() for stream in range(streams)]
        exchange = RowAllToAll(collectives, QuantizedComms())
        flight = exchange.start(
            [
                Stream(
                    flat=flats[stream],
                    out=[[(len(part), 1)] for part in parts[stream][rank]],
                    into=[[(len(parts[stream][source][rank]), 1)] for source in range(world_size)],
                )
                for stream in range(streams)
            ]
        )
        assert collectives.issued == ["output"][: world_size - 1]
        blocks = [list(flight.blocks(stream)) for stream in range(streams)]
        loss = torch.zeros((), requires_grad=True)
        for stream, mine in enumerate(blocks):
            if used[stream]:
                # Two uses of a block: autograd adds their gradients up in memory of its own.
                loss = loss + sum((one * 3).sum() + (one.sum() if elsewhere else 0.0) for one in mine)
        if any(used):
            loss.backward()
            assert collectives.issued == (["output", "gradient"] if world_size > 1 else [])
        assert collectives.unwaited == []
        return [[one.detach() for one in mine] for mine in blocks], [flat.grad for flat in flats]

    for rank, (blocks, gradients) in enumerate(thread_ranks(world_size, rank_main)):
        for stream in range(streams):
            for source in range(world_size):
                assert torch.equal(blocks[stream][source], parts[stream][source][rank])
            if any(used):
                gradient = gradients[stream]
                if world_size == 1 and not used[stream]:
                    assert gradient is None, "a rank by itself has nobody to take part with"
                    continue
                assert gradient is not None, "each rank and each stream takes part"
                assert (gradient == (3.0 + elsewhere if used[stream] else 0.0)).all()


def test_neighbours_are_joined_without_a_copy() -> None:
    whole = torch.arange(10.0)
    left, middle, right = whole.split([3, 0, 7])
    assert joined([left, middle, right]).data_ptr() == whole.data_ptr()
    assert torch.equal(joined([left, middle, right]), whole)
    assert torch.equal(joined([right, left]), torch.cat([right, left]))
    assert torch.equal(joined([left, right.clone()]), whole)
