"""The collectives of a process group, and those of a single rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardrec.exchange.collectives import FunctionalCollectives, LocalCollectives, collectives_of
from tests.ranks import ranks


def test_without_a_process_group_there_is_one_rank() -> None:
    collectives = collectives_of()
    assert isinstance(collectives, LocalCollectives)
    assert (collectives.rank, collectives.world_size) == (0, 1)
    (received,) = collectives.send([[torch.arange(2), torch.arange(2, 3)]], [3], "test").wait()
    assert torch.equal(received, torch.arange(3))


def test_a_group_of_one_rank_makes_no_calls() -> None:
    def rank_main() -> str:
        return type(collectives_of()).__name__

    assert ranks(1, rank_main) == ["LocalCollectives"]


def test_all_to_all_of_any_sizes() -> None:
    """Rank r sends r + q elements to rank q, and none to itself."""

    def rank_main() -> None:
        collectives = collectives_of()
        assert isinstance(collectives, FunctionalCollectives)
        mine = collectives.rank
        sizes = [0 if other == mine else mine + other for other in range(4)]
        parts = [[torch.full((size,), float(mine))] for size in sizes]
        received = collectives.send(parts, sizes, "test").wait()
        for other, (part, size) in enumerate(zip(received, sizes, strict=True)):
            assert torch.equal(part, torch.full((size,), float(other)))

    ranks(4, rank_main)


def test_nothing_to_send_at_all() -> None:
    def rank_main() -> None:
        collectives = collectives_of()
        received = collectives.send([[torch.zeros(0)]] * 2, [0, 0], "test").wait()
        assert [part.shape for part in received] == [(0,), (0,)]

    ranks(2, rank_main)


def test_groups_number_their_own_ranks() -> None:
    def rank_main() -> tuple[int, int]:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        collectives = collectives_of(pairs[dist.get_rank() % 2])
        received = collectives.send([[torch.tensor([dist.get_rank()])]] * 2, [1, 1], "test").wait()
        assert torch.cat(received).tolist() == ([0, 2] if dist.get_rank() % 2 == 0 else [1, 3])
        return collectives.rank, collectives.world_size

    assert ranks(4, rank_main) == [(0, 2), (0, 2), (1, 2), (1, 2)]
