"""Exchanges through shared memory: the same values as through the process group, and nothing in use written over."""

from __future__ import annotations

import gc
import os
from random import Random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import ConfigError, PeerError
from shardrec.exchange import peers
from shardrec.exchange.row_exchange import OutgoingRows, RowAllToAll, RowsInFlight
from shardrec.exchange.shared.shared_memory import SharedCollectives
from shardrec.exchange.transport import transport_of
from shardrec.exchange.wire_format import QuantizedComms
from tests.exchange.shared.ranks_on_hosts import shared
from tests.ranks import RankErrors, ranks


def exchange_at_random(collectives: SharedCollectives, rng: Random, exchanges: int) -> None:
    """Parts whose values say where they come from and go to; several exchanges are under way, and results are kept."""
    rank, world_size = collectives.rank, collectives.world_size
    kept = []
    under_way = []
    for number in range(exchanges):
        dtype = rng.choice([torch.int32, torch.int64, torch.float32, torch.uint8, torch.bfloat16])
        # sizes[p][q]: what p sends to q, in two parts; every rank draws the same.
        sizes = [[[rng.choice([0, 1, 7, 3000]) for _ in "ab"] for _ in range(world_size)] for _ in range(world_size)]

        def value(p: int, q: int, number: int = number) -> int:
            return (number * 16 + p * 4 + q) % 120

        parts = [
            [torch.full((size,), value(rank, q), dtype=dtype) for size in sizes[rank][q]] for q in range(world_size)
        ]
        pending = collectives.send(parts, [sum(sizes[p][rank]) for p in range(world_size)], f"test {number}")
        for part in parts:
            for one in part if part is not parts[rank] else []:
                one.fill_(99)  # what was sent is the receiver's
        under_way.append((pending, [(sum(sizes[p][rank]), value(p, rank)) for p in range(world_size)], dtype))
        if rng.random() < 0.6:
            pending, expected, dtype = under_way.pop(rng.randrange(len(under_way)))
            kept.append((pending.wait(), expected, dtype))
        if len(kept) > 5:
            kept.pop(rng.randrange(len(kept)))
        for received, expected, dtype in kept:
            for one, (size, number_in) in zip(received, expected, strict=True):
                assert one.dtype is dtype
                assert one.shape == (size,)
                assert (one == number_in).all()
    for pending, _, _ in under_way:
        pending.wait()


@pytest.mark.some(2)
@pytest.mark.parametrize(("world_size", "per_host"), [(2, None), (4, None), (4, 2), (3, 2)])
def test_every_part_arrives_and_stays(world_size: int, per_host: int | None) -> None:
    def rank_main() -> None:
        collectives = shared(per_host)
        assert len(collectives.far) == (0 if per_host is None else world_size - 1 - len(collectives.peers))
        exchange_at_random(collectives, Random(5), 60)

    ranks(world_size, rank_main)


def test_blocks_come_back_when_they_are_not_used_any_more() -> None:
    def rank_main() -> tuple[int, int, int]:
        collectives = shared()
        sizes = []
        for _ in range(30):
            parts = [[torch.zeros(300_000)] for _ in range(2)]
            received = collectives.send(parts, [300_000] * 2, "test").wait()
            sizes.append(collectives.arena.lent_bytes)
        del received
        gc.collect()
        for _ in range(2):  # the last blocks are released with the next messages
            collectives.send([[torch.zeros(1)] for _ in range(2)], [1, 1], "test").wait()
            collectives.lend(1, 1)
        return max(sizes), collectives.arena.total_bytes, len(collectives._lent)

    for most, total, lent in ranks(2, rank_main):
        assert most <= 3 * 1_204_224, "a step's blocks are lent again"
        assert total == 32 << 20
        assert lent == 2, "but for those that this test lent to nobody"


@pytest.mark.parametrize(("world_size", "per_host"), [(2, None), (4, 2)])
def test_gradients_find_their_way_twice(world_size: int, per_host: int | None) -> None:
    """Two backwards through one forward, and outputs of several steps kept."""

    def rank_main() -> None:
        collectives = shared(per_host)
        rank = collectives.rank
        exchange = RowAllToAll(collectives, QuantizedComms())
        kept = []
        for step in range(4):
            calls = [
                OutgoingRows(
                    flat=torch.full((world_size * size,), float(rank + 10 * step + call)),
                    out=[[(size, 1)]] * world_size,
                    into=[[(size, 1)]] * world_size,
                )
                for call, size in enumerate((5000, 3))
            ]
            rows = RowsInFlight(exchange, calls, with_gradients=True)
            kept.append(rows.receive())
            for backward in range(2):
                for call, of_call in enumerate(rows.gradient_blocks()):
                    for source, block in enumerate(of_call):
                        block.fill_(source + 1.0 + 10 * call + 100 * backward)
                rows.send_gradients()
                for call, gradient in enumerate(rows.receive_gradients()):
                    assert (gradient == rank + 1.0 + 10 * call + 100 * backward).all()
            for before, one in enumerate(kept):
                for stream, of_ranks in enumerate(one):
                    for source, block in enumerate(of_ranks):
                        assert (block == source + 10 * before + stream).all()

    ranks(world_size, rank_main)


def test_a_forward_without_a_backward_leaves_nothing_behind() -> None:
    def rank_main() -> int:
        collectives = shared()
        exchange = RowAllToAll(collectives, QuantizedComms())
        for _ in range(20):
            shapes = [[(10_000, 1)]] * 2
            calls = [OutgoingRows(flat=torch.zeros(20_000), out=shapes, into=shapes)]
            RowsInFlight(exchange, calls, with_gradients=True).receive()
        gc.collect()
        return collectives.arena.lent_bytes

    assert max(ranks(2, rank_main)) <= 6 * 81_920


def test_what_nobody_waits_for_is_given_back() -> None:
    def rank_main() -> int:
        collectives = shared()
        exchange = RowAllToAll(collectives, QuantizedComms())
        for _ in range(20):
            shapes = [[(10_000, 1)]] * 2
            RowsInFlight(
                exchange, [OutgoingRows(flat=torch.zeros(20_000), out=shapes, into=shapes)], with_gradients=True
            )
            collectives.send([[torch.zeros(1)]] * 2, [1, 1], "test").wait()
        gc.collect()
        return collectives.arena.lent_bytes

    assert max(ranks(2, rank_main)) <= 6 * 81_920


def test_a_rank_that_dies_is_named_at_once() -> None:
    def rank_main() -> str:
        collectives = shared(timeout_s=600.0)
        parts = [[torch.zeros(5000)] for _ in range(3)]
        collectives.send(parts, [5000] * 3, "first").wait()
        if collectives.rank == 1:
            collectives.channel.close()  # as the end of the process does
            return ""
        # Its process runs, so that they look for a while whether it ends.
        with mock.patch.object(peers, "_LOOK_S", 0.3):
            with pytest.raises(PeerError) as failure:
                collectives.send(parts, [5000] * 3, "output").wait()
            with pytest.raises(PeerError):
                collectives.send(parts, [5000] * 3, "output").wait()
        return str(failure.value)

    first, _, third = ranks(3, rank_main)
    for text in (first, third):
        assert "output exchange" in text
        assert "waited for rank 1" in text


def test_ranks_at_different_exchanges_are_told() -> None:
    def rank_main() -> None:
        collectives = shared(timeout_s=30.0)
        collectives.send([[torch.zeros(1)]] * 2, [1, 1], f"exchange {collectives.rank}").wait()

    with pytest.raises(RankErrors, match="The ranks issued different collectives"):
        ranks(2, rank_main)


def test_one_rank_that_wants_the_group_decides_for_all() -> None:
    def rank_main() -> list[str]:
        device = torch.device("cpu")
        names = [type(transport_of(None, device)).__name__]
        if dist.get_rank() == 1:
            os.environ["SHARDREC_TRANSPORT"] = "group"
        names.append(type(transport_of(None, device)).__name__)
        return names

    assert ranks(2, rank_main) == [["SharedCollectives", "FunctionalCollectives"]] * 2


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="Give 'auto'"):
        transport_of(None, torch.device("cpu"), "pigeon")  # type: ignore[arg-type]


def test_what_was_written_into_a_region_is_sent_as_it_lies() -> None:
    def rank_main() -> tuple[list[int], int]:
        collectives = shared()
        rank, size = collectives.rank, 50_000
        lent = []
        for step in range(6):
            allocate = collectives.allocate(3 * size, torch.device("cpu"))
            parts = allocate.split(size)
            for peer, part in enumerate(parts):
                part.fill_(100 * step + 10 * rank + peer)
            before = collectives.arena.lent_bytes
            pending = collectives.send([[part] for part in parts], [size] * 3, "test")
            assert collectives.arena.lent_bytes == before, "no block was lent for a copy"
            del allocate, parts, part
            received = pending.wait()
            for peer, values in enumerate(received):
                assert (values == 100 * step + 10 * peer + rank).all()
            lent.append(before)
            del pending, received, values
        gc.collect()
        return lent, sum(region.may_be_sent for region in collectives.arena.lent.values())

    for lent, left in ranks(3, rank_main):
        assert max(lent) <= 3 * 602_112, "rooms come back when nobody uses them"
        assert left <= 2
