"""The collectives of a process group, and those of a single rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardrec.exchange.collectives import FunctionalCollectives, LocalCollectives, collectives_of
from tests.ranks import ranks


def test_without_a_process_group_there_is_one_rank() -> None:
    collectives = collectives_of()
    assert isinstance(collectives, LocalCollectives)
    assert (collectives.rank, collectives.world_size) == (0, 1)
    values = torch.arange(3)
    assert torch.equal(collectives.wait(collectives.all_to_all(values, [3], [3], "test"), "test"), values)


def test_a_group_of_one_rank_makes_no_calls() -> None:
    def rank_main() -> str:
        return type(collectives_of()).__name__

    assert ranks(1, rank_main) == ["LocalCollectives"]


@pytest.mark.parametrize("columns", [(), (2,)], ids=["flat", "rows"])
def test_all_to_all_of_any_sizes(columns: tuple[int, ...]) -> None:
    """Rank r sends r + q rows to rank q, and none to itself."""

    def rank_main() -> None:
        collectives = collectives_of()
        assert isinstance(collectives, FunctionalCollectives)
        mine = collectives.rank
        sizes = [0 if other == mine else mine + other for other in range(4)]
        send = torch.full((sum(sizes), *columns), float(mine))
        received = collectives.wait(collectives.all_to_all(send, sizes, sizes, "test"), "test")
        expected = torch.cat([torch.full((size, *columns), float(other)) for other, size in enumerate(sizes)])
        assert torch.equal(received, expected)

    ranks(4, rank_main)


def test_nothing_to_send_at_all() -> None:
    def rank_main() -> None:
        collectives = collectives_of()
        pending = collectives.all_to_all(torch.zeros(0), [0, 0], [0, 0], "test")
        assert collectives.wait(pending, "test").shape == (0,)

    ranks(2, rank_main)


def test_groups_number_their_own_ranks() -> None:
    def rank_main() -> tuple[int, int]:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        collectives = collectives_of(pairs[dist.get_rank() % 2])
        mine = torch.tensor([dist.get_rank()] * 2)
        received = collectives.wait(collectives.all_to_all(mine, [1, 1], [1, 1], "test"), "test")
        assert received.tolist() == ([0, 2] if dist.get_rank() % 2 == 0 else [1, 3])
        return collectives.rank, collectives.world_size

    assert ranks(4, rank_main) == [(0, 2), (0, 2), (1, 2), (1, 2)]
