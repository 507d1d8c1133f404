"""Routes, by following ids one by one in plain Python."""

from __future__ import annotations

from itertools import groupby, pairwise
from random import Random

from hypothesis import given

from shardrec.exchange.route import Lookup, Slot, Source, build_route, output_pieces
from shardrec.layout import Shard, cuts
from tests.batches import Bags, random_bags
from tests.exchange.lookups import Case, random_case
from tests.plans import randoms


def received(case: Case, slot: Slot, bag: list[int] | tuple[int, ...]) -> list[int]:
    """The local rows that a slot receives of one bag of its unit's feature."""
    top, bottom = case.route.unit_boundaries[slot.unit][slot.block : slot.block + 2]
    return [one - top for one in bag if top <= one < bottom]


@given(rng=randoms())
def test_each_id_reaches_just_the_shards_that_hold_its_row(rng: Random) -> None:
    case = random_case(rng, huge=True)
    for index, lookup in enumerate(case.lookups):
        for one in {0, rng.randrange(case.rows[lookup.feature]), case.rows[lookup.feature] - 1}:
            arrivals: list[tuple[Shard, int]] = []
            for rank, slots in enumerate(case.route.slots):
                for slot in slots:
                    if slot.lookup == index:
                        assert slot.shard.rank == rank
                        assert case.route.unit_keys[slot.unit] == lookup.feature
                        arrivals += [(slot.shard, row) for row in received(case, slot, [one])]
            holders = [shard for shard in lookup.layout.shards if shard.row_start <= one < shard.row_end]
            assert sorted(arrivals) == sorted((shard, one - shard.row_start) for shard in holders)


@given(rng=randoms())
def test_slots_are_where_the_kernels_need_them(rng: Random) -> None:
    case = random_case(rng)
    for rank, slots in enumerate(case.route.slots):
        groups = [slot.group for slot in slots]
        assert groups == sorted(groups)
        assert all(slot.group == case.lookups[slot.lookup].group for slot in slots)
        runs = [shard for shard, _ in groupby(slots, key=lambda slot: slot.shard)]
        assert len(runs) == len(set(runs)), "the lookups of one shard are neighbours"
        assert case.route.width(rank) == sum(slot.shard.cols for slot in slots)
    everything = [(slot.lookup, slot.shard) for slots in case.route.slots for slot in slots]
    wanted = [(index, shard) for index, lookup in enumerate(case.lookups) for shard in lookup.layout.shards]
    assert sorted(everything) == sorted(wanted)


@given(rng=randoms())
def test_units_are_distinct_and_used(rng: Random) -> None:
    case = random_case(rng)
    units = list(zip(case.route.unit_keys, case.route.unit_boundaries, strict=True))
    assert len(units) == len(set(units))
    assert {slot.unit for slots in case.route.slots for slot in slots} == set(range(len(units)))
    assert case.route.blocks == max((len(edges) - 1 for _, edges in units), default=1)
    assert all(0 <= row < case.route.blocks * len(units) for row in case.route.slot_rows)
    assert case.route.slot_counts() == tuple(len(slots) for slots in case.route.slots)


@given(rng=randoms())
def test_wide_ids_just_where_a_shard_needs_them(rng: Random) -> None:
    case = random_case(rng, huge=True)
    largest = max((shard.rows for lookup in case.lookups for shard in lookup.layout.shards), default=0)
    assert case.route.wide_ids == (largest >= 2**31)


def weight(table: str, row: int, column: int) -> int:
    """A table's content: no two cells of a test are likely to be equal."""
    return hash((int(table[1:]), row, column)) % 100_003 - 50_000


def pooled_rows(case: Case, batch: Bags, rank: int) -> list[list[int]]:
    """(B, D_rank): what a rank pools for one rank's batch, slot by slot."""
    rows = []
    for sample in range(batch.size):
        row: list[int] = []
        for slot in case.route.slots[rank]:
            ids = received(case, slot, list(batch.ids[case.lookups[slot.lookup].feature][sample]))
            shard = slot.shard
            row += [
                sum(weight(shard.table, one + shard.row_start, column) for one in ids)
                for column in range(shard.col_start, shard.col_end)
            ]
        rows.append(row)
    return rows


@given(rng=randoms())
def test_pieces_put_the_sums_of_rows_together(rng: Random) -> None:
    case = random_case(rng)
    batch = random_bags(rng, case.rows, rng.randrange(3))
    blocks = [pooled_rows(case, batch, rank) for rank in range(case.plan.world_size)]
    expected, own = [], []
    for sample in range(batch.size):
        whole: list[int] = []
        replicated: list[int] = []
        for lookup in case.lookups:
            table = lookup.layout
            bag = batch.ids[lookup.feature][sample]
            sums = [sum(weight(table.name, one, c) for one in bag) for c in range(table.embedding_dim)]
            whole += sums
            replicated += sums if table.replicated else []
        expected.append(whole)
        own.append(replicated)
    blocks.append(own)
    pieces = output_pieces(case.lookups, case.route)
    for sample in range(batch.size):
        output = [
            sum(blocks[source.block][sample][source.start + column] for source in piece.sources)
            for piece in pieces
            for column in range(piece.width)
        ]
        assert output == expected[sample]


@given(rng=randoms())
def test_pieces_are_as_long_as_they_can_be(rng: Random) -> None:
    """Column by column, a new piece begins only where the sources do not go on."""
    case = random_case(rng)
    pieces = output_pieces(case.lookups, case.route)
    columns = [
        [(source.block, source.start + column) for source in piece.sources]
        for piece in pieces
        for column in range(piece.width)
    ]
    breaks = sum(after != [(block, start + 1) for block, start in before] for before, after in pairwise(columns))
    assert len(pieces) == breaks + 1
    assert len(columns) == sum(lookup.layout.embedding_dim for lookup in case.lookups)
    read = [place for column in columns for place in column]
    assert len(read) == len(set(read)), "each pooled column is used once"


def lookups_of(layouts: list[tuple[str, int]], cut: str, world_size: int) -> list[Lookup]:
    ranks = range(world_size)
    found = []
    for number, (name, dim) in enumerate(layouts):
        if cut == "row_wise":
            layout = cuts.row_wise(name, 8, dim, ranks=ranks)
        elif cut == "table_wise":
            layout = cuts.table_wise(name, 8, dim, rank=number * world_size // len(layouts))
        else:
            layout = cuts.data_parallel(name, 8, dim)
        found.append(Lookup(feature=f"f{number}", layout=layout, group=0, output=f"f{number}"))
    return found


TABLES = [(f"t{number:02d}", 4 + 4 * (number % 3)) for number in range(20)]
WIDTH = sum(dim for _, dim in TABLES)


def test_row_wise_tables_are_one_sum_of_blocks() -> None:
    lookups = lookups_of(TABLES, "row_wise", 4)
    (piece,) = output_pieces(lookups, build_route(lookups, 4, 1))
    assert piece.width == WIDTH
    assert piece.sources == tuple(Source(block=rank, start=0) for rank in range(4))


def test_table_wise_tables_in_order_are_one_copy_per_rank() -> None:
    lookups = lookups_of(TABLES, "table_wise", 4)
    pieces = output_pieces(lookups, build_route(lookups, 4, 1))
    assert [piece.sources for piece in pieces] == [(Source(block=rank, start=0),) for rank in range(4)]


def test_replicated_tables_send_nothing() -> None:
    lookups = lookups_of(TABLES, "data_parallel", 4)
    route = build_route(lookups, 4, 0)
    assert route.slots == ((), (), (), ())
    assert route.unit_keys == ()
    (piece,) = output_pieces(lookups, route)
    assert (piece.width, piece.sources) == (WIDTH, (Source(block=4, start=0),))
