"""Float rows of several calls in one all-to-all each way."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from torch import Tensor

from shardrec.exchange.collectives import joined
from shardrec.exchange.row_exchange import OutgoingRows, RowAllToAll, RowsInFlight
from shardrec.exchange.wire_format import QuantizedComms
from tests.plans import randoms
from tests.thread_ranks import ThreadCollectives, thread_ranks


@given(rng=randoms())
def test_each_part_and_its_gradient_find_their_way(rng: Random) -> None:
    world_size, calls = rng.randint(1, 4), rng.randint(1, 3)
    # parts[call][source][target]: whole numbers, which the wire keeps.
    parts = [
        [
            [torch.tensor([float(rng.randint(-9, 9)) for _ in range(rng.randrange(4))]) for _ in range(world_size)]
            for _ in range(world_size)
        ]
        for _ in range(calls)
    ]

    def rank_main(collectives: ThreadCollectives) -> tuple[list[list[Tensor]], list[Tensor]]:
        rank = collectives.rank
        outgoing = [
            OutgoingRows(
                flat=torch.cat(parts[call][rank]),
                out=[[(len(part), 1)] for part in parts[call][rank]],
                into=[[(len(parts[call][source][rank]), 1)] for source in range(world_size)],
            )
            for call in range(calls)
        ]
        rows = RowsInFlight(RowAllToAll(collectives, QuantizedComms()), outgoing, with_gradients=True)
        assert collectives.issued == ["output"]
        blocks = [list(of_call) for of_call in rows.receive()]
        for number, of_call in enumerate(rows.gradient_blocks()):
            for block in of_call:
                block.fill_(3.0 + number)
        rows.send_gradients()
        assert collectives.issued == ["output", "gradient"]
        gradients = rows.receive_gradients()
        assert collectives.unwaited == []
        return blocks, gradients

    for rank, (blocks, gradients) in enumerate(thread_ranks(world_size, rank_main)):
        for call in range(calls):
            for source in range(world_size):
                assert torch.equal(blocks[call][source], parts[call][source][rank])
            assert gradients[call].numel() == sum(map(len, parts[call][rank]))
            assert bool((gradients[call] == 3.0 + call).all())


def test_neighbours_are_joined_without_a_copy() -> None:
    whole = torch.arange(10.0)
    left, middle, right = whole.split([3, 0, 7])
    assert joined([left, middle, right]).data_ptr() == whole.data_ptr()
    assert torch.equal(joined([left, middle, right]), whole)
    assert torch.equal(joined([right, left]), torch.cat([right, left]))
    assert torch.equal(joined([left, right.clone()]), whole)
