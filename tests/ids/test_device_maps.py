"""Id maps with a copy on a device map, count and evict as those on the CPU do, on a GPU or in Triton's interpreter.

Skipped without either: Triton comes with torch's builds for CUDA, and TRITON_INTERPRET=1 asks for its interpreter
(CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from torch import Tensor

from shardrec import native
from shardrec.exchange import launching
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.route import Slot
from shardrec.ids import DynamicIds, maps
from shardrec.ids.device_maps import DeviceMaps, launch
from shardrec.ids.id_map import IdMap
from shardrec.ids.maps import IdMaps
from shardrec.ids.options import Evict
from shardrec.layout import Shard, TableLayout, cuts
from tests.compiled_kernels import compile_kernels
from tests.cuda_double import INTERPRETS_TRITON, cuda_double, cuda_is_there
from tests.plans import randoms

pytestmark = [
    pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled"),
    pytest.mark.skipif(
        not (INTERPRETS_TRITON or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
    ),
]

EDGES = (0, -1, 1, 2**63 - 1, -(2**63))
DEVICE = torch.device("cpu" if INTERPRETS_TRITON else "cuda", 0)
"""Whose maps have a copy, also where it is ``cpu:0``; those of ``cpu`` have none."""


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "has_kernels", lambda device: device == DEVICE)
        yield


def options_of(rng: Random, rows: int) -> DynamicIds:
    evict: Evict = rng.choice(get_args(Evict))
    fallback_rows = rng.choice([0, 1, 3])
    return DynamicIds(
        admit_after=rng.choice([1, 1, 2, 3]),
        evict=evict,
        ttl=rng.randint(1, 4) if evict == "ttl" else None,
        fallback_rows=fallback_rows,
        capacity=rng.choice([None, rows - 2 * fallback_rows - 2]),
    )


class Pair:
    """The same maps twice: on the host, and with a copy on a device.

    ``t0`` has two row blocks, ``t1`` two column stripes of one block, ``t2`` plain ids.
    """

    def __init__(self, rng: Random) -> None:
        rows = {"t0": 2 * rng.randint(9, 40), "t1": rng.choice([9, 70, 200]), "t2": 9}
        layouts: dict[str, TableLayout] = {
            "t0": cuts.row_wise("t0", rows["t0"], 8, ranks=[0, 0]),
            "t1": cuts.column_wise("t1", rows["t1"], 8, ranks=[0, 0]),
            "t2": cuts.table_wise("t2", rows["t2"], 8, rank=0),
        }
        self.options = {table: options_of(rng, rows[table]) for table in ("t0", "t1")}
        shards = [shard for layout in layouts.values() for stripe in layout.stripes() for shard in stripe.shards]
        rng.shuffle(shards)
        self.slots = [
            Slot(lookup=lookup, shard=shard, unit=0, block=0, group=0) for shard in shards for lookup in range(2)
        ]
        self.renewed: list[list[tuple[Shard, list[int], int]]] = [[], []]
        self.maps = [
            IdMaps(self.slots, self.options, layouts, self._renew(number), device)
            for number, device in enumerate((torch.device("cpu"), DEVICE))
        ]
        self.layouts = layouts

    def _renew(self, number: int) -> Any:
        return lambda shard, rows, step: self.renewed[number].append((shard, rows.tolist(), step))

    def blocks(self) -> list[tuple[IdMap, IdMap]]:
        return [(id_map, self.maps[1].maps[key]) for key, id_map in self.maps[0].maps.items()]

    def batch(self, rng: Random, pool: list[int]) -> ShardInput:
        """Ids for every slot; those of a column stripe are those of the other."""
        size = rng.choice([0, 1, 3])
        most = rng.choice([0, 2, 2, 12])
        bags: dict[tuple[Any, ...], list[list[int]]] = {}
        for slot in self.slots:
            key = (slot.shard.table, slot.shard.row_start, slot.lookup)
            known = pool if slot.shard.table != "t2" else list(range(9))
            bags.setdefault(key, [rng.choices(known, k=rng.randint(0, most)) for _ in range(size)])
        chosen = [bags[slot.shard.table, slot.shard.row_start, slot.lookup] for slot in self.slots]
        lengths = torch.tensor([[len(bag) for bag in of_slot] for of_slot in chosen], dtype=torch.int32)
        ids = torch.tensor([raw for of_slot in chosen for bag in of_slot for raw in bag], dtype=torch.int64)
        return ShardInput(
            lengths=lengths.view(len(self.slots), size),
            ids=ids,
            weights=ids.to(torch.float32),
            batch_sizes=(size,),
            group_ids=(ids.numel(),),
            counts=((ids.numel(),),),
            slot_sizes=(None,),
        )

    def compare(self) -> None:
        for on_host, on_device in self.blocks():
            assert torch.equal(on_host.records, on_device.records)
            assert torch.equal(on_host.candidates, on_device.candidates)
            assert on_host.counts() == on_device.counts()
            assert on_host.last_of_evicted == on_device.last_of_evicted
        assert self.renewed[0] == self.renewed[1]


def on_device(given: ShardInput) -> ShardInput:
    weights = None if given.weights is None else given.weights.to(DEVICE)
    return replace(given, lengths=given.lengths.to(DEVICE), ids=given.ids.to(DEVICE), weights=weights)


def assert_equal(mapped: maps.Mapped, other: maps.Mapped) -> None:
    for name in ("ids", "lengths", "weights", "group_ids"):
        value, expected = getattr(other.shard_input, name), getattr(mapped.shard_input, name)
        assert torch.equal(value.cpu(), expected) if isinstance(value, Tensor) else value == expected, name
    assert (mapped.kept is None) == (other.kept is None)
    for kept, expected in zip(mapped.kept or (), other.kept or (), strict=True):
        assert torch.equal(kept.cpu(), expected.cpu())


@given(rng=randoms())
def test_as_on_the_cpu(rng: Random) -> None:
    pair = Pair(rng)
    pool = [*EDGES, *(rng.getrandbits(64) - 2**63 for _ in range(rng.choice([5, 40, 400])))]
    saved: list[tuple[Tensor, Tensor]] = []
    open_steps: list[list[maps.OpenStep | None]] = []
    ahead = None
    for _ in range(12):
        batch = pair.batch(rng, pool)
        if rng.random() < 0.3:
            ahead = (
                pair.maps[1].find_rows(on_device(batch)),
                batch,
            )  # for the next step that takes it, which may not be the next
        assign = rng.random() < 0.8
        found_rows = None
        if ahead is not None and rng.random() < 0.7:
            (found_rows, batch), ahead = ahead, None
        mapped = pair.maps[0](batch, assign_new_ids=assign)
        other = pair.maps[1](on_device(batch), assign_new_ids=assign, found_rows=found_rows)
        assert_equal(mapped, other)
        steps = [maps.open_step(mapped_ids) for maps, mapped_ids in zip(pair.maps, (mapped, other), strict=True)]
        open_steps = [*open_steps, steps][rng.choice([1, -1, -2]) :]  # the backwards of some are still to come
        del steps
        event = rng.random()
        if event < 0.3:
            pair.compare()
        elif event < 0.4:  # as a checkpoint that is saved
            saved = [(on_host.records.clone(), on_host.candidates.clone()) for on_host, _ in pair.blocks()]
        elif event < 0.5 and saved:  # and loaded
            for (records, candidates), blocks in zip(saved, pair.blocks(), strict=True):
                for id_map in blocks:
                    id_map.records.copy_(records)
                    id_map.candidates.copy_(candidates)
                    id_map.rebuild()
        elif event < 0.55:
            for id_maps in pair.maps:
                for table in pair.options:
                    options = replace(pair.options[table], capacity=None)
                    id_maps.set_options(pair.layouts[table], options)
    pair.compare()


def test_a_rank_without_dynamic_shards() -> None:
    layout = cuts.table_wise("t2", 9, 8, rank=0)
    slots = [Slot(lookup=0, shard=layout.stripes()[0].shards[0], unit=0, block=0, group=0)]
    id_maps = IdMaps(slots, {}, {}, lambda shard, rows, step: None, DEVICE)
    ids = torch.tensor([3, 8], dtype=torch.int64)
    given = ShardInput(
        lengths=torch.tensor([[2]], dtype=torch.int32),
        ids=ids,
        weights=None,
        batch_sizes=(1,),
        group_ids=(2,),
        counts=((2,),),
        slot_sizes=(None,),
    )
    for assign in (True, False):
        assert id_maps(on_device(given), assign_new_ids=assign).shard_input.ids.tolist() == [3, 8]


@given(rng=randoms())
def test_the_same_ids_are_evicted(rng: Random) -> None:
    """Of a full map, in which many have equal uses and last steps."""
    rows, evict = rng.randint(3, 150), rng.choice(get_args(Evict)[1:])
    options = DynamicIds(evict=evict, ttl=2 if evict == "ttl" else None, fallback_rows=rng.choice([0, 2]))
    id_map = IdMap(rows, options, rows - options.fallback_rows)
    for row in range(options.fallback_rows, rows):
        id_map.records[row] = torch.tensor([1000 + row, rng.randint(1, 3), rng.randint(1, 4)])
    id_map.rebuild()
    device_maps = DeviceMaps([id_map], [0], [True], DEVICE)
    device_maps._upload()
    step, protect, ids = 5, rng.randint(2, 5), torch.arange(rng.randint(1, rows))
    last = id_map.records[:, 2].clone()
    evicted, steps = device_maps._victims(0, step, protect, len(ids))
    looked = id_map.look_up(ids, ids.to(torch.int32), step=step, assign_new_ids=True, protect=protect)
    assert evicted.tolist() == looked.evicted.tolist()
    assert steps.tolist() == last[evicted].tolist()


def test_the_home_of_an_id_is_the_host_s_in_the_largest_table() -> None:
    """Of 2^32 buckets, of which only the one that the id is in is there."""
    key = 3
    mixed = key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
    home, size = mixed % 2**32, 2**30 + 1
    assert home >= 2**31
    bits = size.bit_length()
    bucket = torch.tensor([(mixed >> 32 << bits) % 2**32 | 1]).to(torch.int32)
    tables = torch.tensor([[-home, 2**32 - 1, 0, size, bits, 0]])
    records, rows = torch.tensor([[key, 1, 1]]), torch.empty(1, dtype=torch.int32)
    ids, numbers = torch.tensor([key]), torch.zeros(1, dtype=torch.int32)
    ids, numbers, tables, bucket, records, rows = (
        one.to(DEVICE) for one in (ids, numbers, tables, bucket, records, rows)
    )
    launch("find", 1, ids, numbers, tables, bucket, records, rows, rows, 0, CLAIM=False)
    assert rows.tolist() == [0]


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    pointers = {"ids_N": "*i64", "maps_N": "*i32", "tables_M": "*i64", "records_R": "*i64", "missing": "*i64"}
    types = pointers | {"rows_N": "*i32", "claims": "*i32", "buckets": "*i32"}
    finds = [("find", {"BLOCK": 256, "CLAIM": claim}) for claim in (True, False)]
    compile_kernels(
        "shardrec.ids.map_kernels", types, [*finds, ("emit", {"BLOCK": 256}), ("stamp", {"BLOCK": 256})], tmp_path
    )


def test_lookups_on_several_streams_wait_for_each_other() -> None:
    """A copy that one of them makes, of maps that were written on the host, is read by the next one."""
    layout = cuts.table_wise("t", 8, 4, rank=0)
    slots = [Slot(lookup=0, shard=layout.shards[0], unit=0, block=0, group=0)]
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        id_maps = IdMaps(slots, {"t": DynamicIds()}, {"t": layout}, lambda *_: None, torch.device("cuda", 0))
        shard_input = ShardInput(
            lengths=torch.ones((1, 3), dtype=torch.int32).cuda(),
            ids=torch.tensor([1, 2, 3]).cuda(),
            weights=None,
            batch_sizes=(3,),
            group_ids=(3,),
            counts=((3,),),
            slot_sizes=(None,),
        )
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        id_maps(shard_input, False)
        with torch.cuda.stream(side):
            id_maps.find_rows(shard_input)
        assert side.waits_for[main] > 0  # type: ignore[attr-defined,index]
        id_maps(shard_input, False)
        assert main.waits_for[side] > 0  # type: ignore[attr-defined,index]
