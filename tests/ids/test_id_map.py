"""An id map gives the rows, evicts the ids and counts as a dict does."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest
import torch
from hypothesis import given
from torch import Tensor

from shardrec import native
from shardrec.errors import ConfigError
from shardrec.exchange.hashing import home_rows, mixed
from shardrec.ids import DynamicIds
from shardrec.ids.id_map import FALLBACK, IdMap
from shardrec.ids.options import Evict
from tests.ids import reference
from tests.ids.reference import DictMap
from tests.plans import randoms

pytestmark = pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")

EDGES = (0, -1, 1, 2**63 - 1, -(2**63))


def options_of(rng: Random, evict: Evict | None = None) -> DynamicIds:
    evict = evict or rng.choice(get_args(Evict))
    return DynamicIds(
        admit_after=rng.choice([1, 1, 2, 3]),
        evict=evict,
        ttl=rng.randint(1, 6) if evict == "ttl" else None,
        fallback_rows=rng.choice([0, 1, 3]),
    )


def look_up(
    one: IdMap, ids: list[int], step: int, *, assign_new_ids: bool, protect: int | None = None
) -> tuple[Tensor, Tensor]:
    rows = torch.full((len(ids),), 99, dtype=torch.int32)
    found = one.look_up(
        torch.tensor(ids, dtype=torch.int64), rows, step=step, assign_new_ids=assign_new_ids, protect=protect
    )
    assert found.lacking == int((rows < 0).sum())
    return rows, found.evicted


@given(rng=randoms())
def test_as_a_dict(rng: Random) -> None:
    options = options_of(rng)
    rows = options.fallback_rows + rng.randint(1, rng.choice([4, 30, 200]))
    capacity = rng.randint(1, rows - options.fallback_rows)
    one, other = IdMap(rows, options, capacity), DictMap(rows, options, capacity)
    ids_of = Random(rng.getrandbits(32))  # they have no order to shrink to
    pool = [*EDGES, *(ids_of.getrandbits(64) - 2**63 for _ in range(rng.choice([5, 40, 400])))]
    for step in range(1, 30):
        ids = rng.choices(pool, k=rng.choice([0, 1, 7, 60]))
        if rng.random() < 0.2:
            found, evicted = look_up(one, ids, step, assign_new_ids=False)
            assert found.tolist() == other.frozen(ids)
            assert not evicted.numel()
            continue
        protect = max(1, step - rng.randint(0, 2))
        found, evicted = look_up(one, ids, step, assign_new_ids=True, protect=protect)
        assert (found.tolist(), evicted.tolist()) == other.learn(ids, step, protect)
        counts = one.counts()
        assert {name: counts[name] for name in other.counts} == other.counts
        assert (counts["rows"], counts["used"]) == (capacity, len(other.rows.entries))
        if rng.random() < 0.1:
            one.rebuild()  # what a checkpoint has lost is made again


@pytest.mark.slow
@pytest.mark.parametrize("evict", get_args(Evict))
def test_a_million_ids(evict: Evict) -> None:
    rng = torch.Generator().manual_seed(0)
    options = DynamicIds(evict=evict, ttl=8 if evict == "ttl" else None, admit_after=2)
    one, other = IdMap(3_000, options, 3_000), DictMap(3_000, options, 3_000)
    for step in range(1, 51):
        uniform = torch.rand(20_000, generator=rng)
        ids = mixed((uniform**-1.2).clamp(max=1e15).to(torch.int64) + 1_000 * (step // 5))
        rows = torch.empty(ids.numel(), dtype=torch.int32)
        found = one.look_up(ids, rows, step=step, assign_new_ids=True)
        assert (rows.tolist(), found.evicted.tolist()) == other.learn(ids.tolist(), step)
    counts = one.counts()
    assert {name: counts[name] for name in other.counts} == other.counts
    assert counts["evictions"] or evict in ("never", "ttl")


def test_ids_in_use_keep_their_rows() -> None:
    one = IdMap(4, DynamicIds(evict="lru"), 4)
    look_up(one, [1, 2, 3, 4], 1, assign_new_ids=True)
    rows, evicted = look_up(one, [1, 5, 6], 2, assign_new_ids=True)
    assert rows.tolist() == [0, 1, 2]
    assert evicted.tolist() == [1, 2]
    rows, evicted = look_up(one, [7, 8], 3, assign_new_ids=True, protect=2)
    assert rows.tolist() == [3, -1]
    assert evicted.tolist() == [3]
    assert one.counts()["no_room"] == 1


def test_the_reserve_is_opened() -> None:
    one = IdMap(6, DynamicIds(capacity=2, evict="never", fallback_rows=1), 2)
    assert look_up(one, [1, 2, 3], 1, assign_new_ids=True)[0].tolist() == [1, 2, 0]
    one.open_reserve(4)
    assert look_up(one, [3, 4, 5], 2, assign_new_ids=True)[0].tolist() == [3, 4, 0]
    assert one.counts()["rows"] == 4


def test_a_copy_goes_on_alike() -> None:
    one = IdMap(8, DynamicIds(), 8)
    look_up(one, list(range(8)), 1, assign_new_ids=True)
    other = IdMap(8, DynamicIds(), 8)
    other.copy_(one)
    again = look_up(one, [3, 90, 91], 2, assign_new_ids=True)
    for mine, copied in zip(again, look_up(other, [3, 90, 91], 2, assign_new_ids=True), strict=True):
        assert torch.equal(mine, copied)


def test_two_rows_of_one_id_are_refused() -> None:
    one = IdMap(4, DynamicIds(), 4)
    one.records[:2] = torch.tensor([7, 1, 1])
    with pytest.raises(RuntimeError, match="id 7 has several rows"):
        one.rebuild()


@given(rng=randoms())
def test_hashes(rng: Random) -> None:
    """In C++ (of which the fallback's row is made), in torch, and in Python."""
    ids = [*EDGES, *(rng.getrandbits(64) - 2**63 for _ in range(20))]
    given = torch.tensor(ids, dtype=torch.int64)
    assert [one % 2**64 for one in mixed(given).tolist()] == [reference.mixed(one) for one in ids]
    rows = rng.choice([1, 7, 2**31])
    homes = home_rows(given, torch.tensor(rows)).tolist()
    assert homes == [(reference.mixed(one) >> 32) * rows >> 32 for one in ids]
    one = IdMap(5, DynamicIds(fallback_rows=4), 1)
    assert look_up(one, ids, 1, assign_new_ids=False)[0].tolist() == [
        (reference.mixed(i) & 0xFFFFFFFF) % 4 for i in ids
    ]
    assert one.records[:, 1].tolist() == [FALLBACK] * 4 + [0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evict": "fifo"}, "'lfu', 'lru', 'ttl', 'score'"),
        ({"evict": "ttl"}, "Give ttl"),
        ({"ttl": 5}, "with 'ttl' alone"),
        ({"admit_after": 0}, "admit_after=0"),
        ({"fallback_rows": -1}, "fallback_rows=-1"),
        ({"capacity": 0}, "capacity=0"),
    ],
)
def test_settings_that_are_none(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DynamicIds(**settings)  # type: ignore[arg-type]
