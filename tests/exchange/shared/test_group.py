"""Shared memory behind the functional operators: their values, gradients and errors, whoever calls them."""

from __future__ import annotations

import gc
import os
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from shardrec.errors import PeerError
from shardrec.exchange.shared.collectives import SharedCollectives
from tests.collective_counts import CountCollectives
from tests.exchange.shared.test_collectives import shared
from tests.ranks import RankDied, RankErrors, ranks
from tests.scripting import exchanges

functional = torch.ops._c10d_functional
with_gradient = torch.ops._c10d_functional_autograd


def swap_at_random(collectives: SharedCollectives, rng: Random, exchanges: int) -> None:
    """Rows that say where they come from and go to; several exchanges are under way, in any order of waits."""
    rank, world_size, name = collectives.rank, collectives.world_size, collectives.operator_group
    under_way: list[tuple[Tensor, Tensor]] = []
    for number in range(exchanges):
        dtype = rng.choice([torch.int32, torch.int64, torch.float32, torch.uint8, torch.bfloat16])
        row = rng.choice([(), (3,), (2, 2)])
        sizes = [[rng.choice([0, 1, 7, 3000]) for _ in range(world_size)] for _ in range(world_size)]

        def part(
            p: int, q: int, number: int = number, row: tuple[int, ...] = row, dtype: torch.dtype = dtype
        ) -> Tensor:
            return torch.full((sizes[p][q], *row), (number * 16 + p * 4 + q) % 120, dtype=dtype)  # noqa: B023

        values = torch.cat([part(rank, q) for q in range(world_size)])
        expected = torch.cat([part(p, rank) for p in range(world_size)])
        into = [sizes[p][rank] for p in range(world_size)]
        pending = functional.all_to_all_single(values, into, sizes[rank], name)
        values.fill_(99)  # what was sent is not looked at any more
        under_way.append((pending, expected))
        if rng.random() < 0.6:
            pending, expected = under_way.pop(rng.randrange(len(under_way)))
            assert torch.equal(functional.wait_tensor(pending), expected)
    for pending, expected in under_way:
        assert torch.equal(functional.wait_tensor(pending.view(pending.shape)), expected)


@pytest.mark.parametrize(("world_size", "per_host"), [(2, None), (4, None), (4, 2), (3, 2)])
def test_every_part_arrives(world_size: int, per_host: int | None) -> None:
    def rank_main() -> None:
        swap_at_random(shared(per_host), Random(7), 40)

    ranks(world_size, rank_main)


def test_what_lies_in_a_room_may_be_written_to() -> None:
    def rank_main() -> None:
        collectives = shared()
        for step in range(3):
            values = collectives.room(40_000, torch.device("cpu")).fill_(10 * step + collectives.rank)
            pending = functional.all_to_all_single(values, [20_000] * 2, [20_000] * 2, collectives.operator_group)
            values.fill_(99)
            dist.barrier()
            arrived = functional.wait_tensor(pending)
            assert arrived.view(2, -1).unique(dim=1).flatten().tolist() == [10 * step, 10 * step + 1]

    ranks(2, rank_main)


def test_the_gradient_goes_back() -> None:
    def rank_main() -> None:
        collectives = shared()
        rank = collectives.rank
        values = torch.full((5,), float(rank), requires_grad=True)
        out, into = ([2, 3], [2, 1]) if rank == 0 else ([1, 4], [3, 4])
        with CountCollectives() as counts:
            arrived = functional.wait_tensor(
                with_gradient.all_to_all_single(values, into, out, collectives.operator_group)
            )
            (arrived * (rank + 1)).sum().backward()
        assert counts == {"all_to_all": 2}
        assert arrived.tolist() == ([0, 0, 1] if rank == 0 else [0, 0, 0, 1, 1, 1, 1])
        assert values.grad is not None
        assert values.grad.tolist() == ([1, 1, 2, 2, 2] if rank == 0 else [1, 2, 2, 2, 2])

    ranks(2, rank_main)


def test_its_other_collectives_are_the_process_groups() -> None:
    def rank_main() -> None:
        collectives = shared()
        name = collectives.operator_group
        assert name != collectives.group_name
        ones = torch.ones(3)
        with CountCollectives() as counts:
            assert functional.wait_tensor(functional.all_reduce(ones, "sum", name)).tolist() == [2, 2, 2]
            gathered = functional.all_gather_into_tensor(ones * collectives.rank, 2, name)
            assert functional.wait_tensor(gathered).tolist() == [0, 0, 0, 1, 1, 1]
            group = _resolve_process_group(name)
            group.barrier().wait()
        assert counts == {"all_reduce": 1, "all_gather": 1, "barrier": 1}
        assert (group.rank(), group.size()) == (collectives.rank, 2)
        halves = torch.empty(4, dtype=torch.int64)
        group.alltoall_base(halves, torch.arange(4) + 10 * collectives.rank, [], []).wait()
        assert halves.tolist() == ([0, 1, 10, 11] if collectives.rank == 0 else [2, 3, 12, 13])

    ranks(2, rank_main)


def test_other_collectives_do_not_wait_for_the_interpreters_lock() -> None:
    """torch calls those that have no method in Python with the lock held, which gloo's worker may be waiting for."""

    def rank_main() -> None:
        collectives = shared()
        group = _resolve_process_group(collectives.operator_group)
        ones = torch.ones(3)
        for _ in range(300):
            reduced = functional.wait_tensor(functional.all_reduce(ones, "sum", collectives.operator_group))
        assert reduced.tolist() == [2, 2, 2]
        parts = [torch.zeros(1), torch.zeros(1)]
        own = torch.tensor([float(collectives.rank)])
        group.allgather([parts], [own]).wait()
        assert [part.item() for part in parts] == [0, 1]
        group.broadcast(own, 1).wait()
        assert own.item() == 1
        peer = 1 - collectives.rank
        sent = group.send([torch.tensor([5.0 + peer])], peer, 0)
        group.recv([own], peer, 0).wait()
        sent.wait()
        assert own.item() == 5 + collectives.rank
        group.reduce_scatter([own], [[torch.ones(1), torch.full((1,), 2.0)]]).wait()
        assert own.item() == 2 + 2 * collectives.rank

    ranks(2, rank_main)


def test_sizes_that_do_not_add_up_are_refused_by_the_rank_that_gives_them() -> None:
    def rank_main() -> None:
        name = shared_name()
        with pytest.raises(ValueError, match="does not add up; give sizes along dim 0 that do"):
            functional.all_to_all_single(torch.zeros(4), [2, 2], [1, 2], name)

    def shared_name() -> str:
        kept.append(shared())
        return kept[0].operator_group

    kept: list[SharedCollectives] = []
    ranks(2, rank_main)


def test_what_nobody_waits_for_is_given_back() -> None:
    def rank_main() -> tuple[int, int]:
        collectives = shared()
        for _ in range(20):
            functional.all_to_all_single(torch.zeros(40_000), [20_000] * 2, [20_000] * 2, collectives.operator_group)
            collectives.send([[torch.zeros(1)]] * 2, [1, 1], "test").wait()
        gc.collect()
        collectives.send([[torch.zeros(1)]] * 2, [1, 1], "test").wait()
        collectives.send([[torch.zeros(1)]] * 2, [1, 1], "test").wait()
        collectives.lend(1, 0)
        return collectives.arena.lent_bytes, len(collectives._lent)

    for lent_bytes, lent in ranks(2, rank_main):
        assert lent_bytes <= 3 * 81_920
        assert lent <= 4


def test_eager_exchanges_and_operators_take_turns() -> None:
    def rank_main() -> None:
        collectives = shared()
        rank, name = collectives.rank, collectives.operator_group
        for step in range(5):
            first = functional.all_to_all_single(torch.full((2,), step), [1, 1], [1, 1], name)
            second = collectives.send([[torch.full((3,), 10 * step + rank)]] * 2, [3, 3], "eager")
            third = exchanges.swap_and_wait(torch.full((4,), 100 * step + rank), [2, 2], name)
            assert torch.cat(second.wait()).tolist() == [10 * step] * 3 + [10 * step + 1] * 3
            assert third.tolist() == [100 * step] * 2 + [100 * step + 1] * 2
            assert functional.wait_tensor(first).tolist() == [step] * 2

    ranks(2, rank_main)


def test_waits_on_torchscripts_own_threads() -> None:
    def rank_main() -> None:
        collectives = shared()
        values = torch.arange(6_000, dtype=torch.float32)
        for _ in range(5):
            found = exchanges.swap_in_forks(values, [3_000] * 2, collectives.operator_group, 8)
            half = values.view(2, -1)[collectives.rank]
            assert all(torch.equal(one, torch.cat([half, half]) * number) for number, one in enumerate(found))

    ranks(2, rank_main)


def test_ranks_that_have_come_apart_are_told() -> None:
    def rank_main() -> None:
        collectives = shared(timeout_s=30.0)
        if collectives.rank:
            collectives.send([[torch.zeros(1)]] * 2, [1, 1], "header").wait()
        else:
            exchanges.swap_and_wait(torch.zeros(2), [1, 1], collectives.operator_group)

    with pytest.raises(RankErrors) as caught:
        ranks(2, rank_main)
    assert any(
        "made the header exchange; the ranks have come apart" in str(one) for one in caught.value.errors.values()
    )


def test_a_rank_that_dies_is_named_at_once() -> None:
    def rank_main() -> str:
        collectives = shared(timeout_s=600.0)
        name = collectives.operator_group
        values = torch.zeros(6_000, requires_grad=True)
        arrived = functional.wait_tensor(with_gradient.all_to_all_single(values, [2_000] * 3, [2_000] * 3, name))
        dist.barrier()
        if collectives.rank == 1:
            os._exit(3)
        words = (
            r"the all-to-all exchange (failed, because rank 1's process \d+ has ended|cannot be made after a failure)"
        )
        with pytest.raises(PeerError, match=words):
            arrived.sum().backward()
        with pytest.raises(RuntimeError, match=words):
            exchanges.swap_and_wait(values.detach(), [2_000] * 3, name)
        return "told"

    first, second, third = ranks(3, rank_main, expect_death={1})
    assert (first, third) == ("told", "told")
    assert isinstance(second, RankDied)


def test_a_rank_that_does_not_come_in_time() -> None:
    def rank_main() -> None:
        collectives = shared(timeout_s=0.2)
        pending = None
        if collectives.rank == 0:
            pending = functional.all_to_all_single(torch.zeros(4), [2, 2], [2, 2], collectives.operator_group)
            with pytest.raises(PeerError, match=r"waited for rank 1 \(.*timeout of 0\.2 s is over"):
                functional.wait_tensor(pending)
        dist.barrier()

    ranks(2, rank_main)


def test_a_name_ends_with_its_collectives() -> None:
    def rank_main() -> None:
        names = []
        for _ in range(2):
            collectives = shared()
            assert collectives.operator_group == collectives.operator_group
            names.append(collectives.operator_group)
            assert _resolve_process_group(names[-1]).size() == 2
            del collectives
            gc.collect()
            with pytest.raises((RuntimeError, ValueError), match=names[-1]):
                functional.all_to_all_single(torch.zeros(2), [1, 1], [1, 1], names[-1])
        assert names[0] != names[1]

    ranks(2, rank_main)
