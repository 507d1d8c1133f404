"""Layouts: the faults of a set of rectangles, against a count of every cell."""

from __future__ import annotations

import re
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.layout import COLUMN_UNIT, Shard, TableLayout
from tests.plans import coverage, random_layout, randoms


def shard(top: int, bottom: int, left: int, right: int, rank: int = 0, table: str = "t") -> Shard:
    return Shard(table=table, row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rank)


def layout(rows: int, dim: int, *shards: Shard) -> TableLayout:
    return TableLayout(name="t", num_embeddings=rows, embedding_dim=dim, shards=shards)


def are_stripes(shards: tuple[Shard, ...]) -> bool:
    """Whether any two shards have the same columns or none in common."""
    return all(
        (a.col_start, a.col_end) == (b.col_start, b.col_end) or a.col_end <= b.col_start or b.col_end <= a.col_start
        for a in shards
        for b in shards
    )


CELLS = re.compile(r"table 't': rows (\d+):(\d+), columns (\d+):(\d+) are (on no rank|in two shards)")


def cells(faults: list[str], kind: str) -> list[tuple[int, int]]:
    """The cells named by the faults of one kind."""
    found: list[tuple[int, int]] = []
    for fault in faults:
        match = CELLS.match(fault)
        if match is not None and match[5] == kind:
            top, bottom, left, right = map(int, match.groups()[:4])
            found += product(range(top, bottom), range(left, right))
    return found


@st.composite
def rectangle_sets(draw: st.DrawFn) -> TableLayout:
    """A layout that may be sound, with shards dropped, doubled, grown or drawn at random."""
    rng: Random = draw(randoms())
    rows, units = rng.randint(1, 6), rng.randint(1, 4)
    found = list(random_layout(rng, "t", rows, units * COLUMN_UNIT, 3).shards)
    for _ in range(rng.choice([0, 0, 1, 2])):
        if found and rng.random() < 0.5:
            found.pop(rng.randrange(len(found)))
        else:
            top, left = rng.randrange(rows), rng.randrange(units)
            bottom, right = rng.randint(top + 1, rows), rng.randint(left + 1, units)
            found.append(shard(top, bottom, left * COLUMN_UNIT, right * COLUMN_UNIT, rng.randrange(3)))
    return layout(rows, units * COLUMN_UNIT, *found)


@given(rectangle_sets())
def test_faults_name_every_cell_that_is_not_covered_once(table: TableLayout) -> None:
    counts = coverage(table.num_embeddings, table.embedding_dim, table.shards)
    faults = table.faults(3)
    missing = {(row, column) for row, line in enumerate(counts) for column, count in enumerate(line) if not count}
    doubled = {(row, column) for row, line in enumerate(counts) for column, count in enumerate(line) if count > 1}
    if not table.shards:
        assert faults == ["table 't' has no shard. Give it to a rank with a cut, or replicate it"]
        return
    assert sorted(cells(faults, "on no rank")) == sorted(missing)
    assert set(cells(faults, "in two shards")) == doubled
    crossing = [fault for fault in faults if "column stripes" in fault]
    assert bool(crossing) == (not missing and not doubled and not are_stripes(table.shards))
    assert bool(faults) == bool(missing or doubled or crossing)


def test_a_gap_across_stripes_is_one_fault() -> None:
    table = layout(4, 12, shard(0, 2, 0, 4), shard(0, 2, 4, 12))
    assert table.faults(1) == ["table 't': rows 2:4, columns 0:12 are on no rank. Add a shard for them"]


def test_an_overlap_names_both_shards() -> None:
    table = layout(4, 8, shard(0, 3, 0, 8), shard(2, 4, 0, 8, rank=1))
    (fault,) = table.faults(2)
    assert "rows 2:3, columns 0:8 are in two shards" in fault
    assert "t[0:3, 0:8] on rank 0; t[2:4, 0:8] on rank 1" in fault
    assert fault.endswith("Keep one")


def test_pinwheel_covers_once_but_has_no_stripes() -> None:
    """Five rectangles around a centre: no column boundary runs through, so no stripes."""
    table = layout(
        3,
        12,
        shard(0, 1, 0, 8),
        shard(0, 2, 8, 12),
        shard(2, 3, 4, 12),
        shard(1, 3, 0, 4),
        shard(1, 2, 4, 8),
    )
    assert {count for line in coverage(3, 12, table.shards) for count in line} == {1}
    (fault,) = table.faults(1)
    assert "not column stripes cut into row blocks" in fault
    assert "Split the wider shards at the inner column boundary" in fault


def test_every_fault_of_every_shard_at_once() -> None:
    table = layout(
        10,
        12,
        shard(0, 5, 0, 12, rank=7),
        shard(5, 5, 0, 12),
        shard(5, 12, 0, 12),
        shard(5, 10, 0, 6),
        shard(5, 10, 8, 16),
        shard(5, 10, 8, 12, table="other"),
        shard(-2, 3, 0, 4),
    )
    faults = "\n".join(table.faults(2))
    for expected in (
        "t[0:5, 0:12] on rank 7: there is no rank 7. The plan is for ranks 0 to 1",
        "t[5:5, 0:12] on rank 0: rows must be a non-empty part of [0, 10)",
        "t[5:12, 0:12] on rank 0: rows must be a non-empty part of [0, 10)",
        "t[5:10, 0:6] on rank 0: the kernels take columns that are cut at multiples of 4: move the column boundary",
        "t[5:10, 8:16] on rank 0: columns must be a non-empty part of [0, 12)",
        "table 't' holds a shard of table 'other': other[5:10, 8:12] on rank 0",
        "t[-2:3, 0:4] on rank 0: rows must be a non-empty part of [0, 10)",
    ):
        assert expected in faults
    assert len(table.faults(2)) == 7


def test_an_unknown_rank_does_not_hide_a_gap() -> None:
    faults = layout(10, 8, shard(0, 4, 0, 8, rank=3), shard(6, 10, 0, 8)).faults(2)
    assert len(faults) == 2
    assert "there is no rank 3" in faults[0]
    assert "rows 4:6, columns 0:8 are on no rank" in faults[1]


@pytest.mark.parametrize("dim", [10, 3, 1])
def test_only_the_last_columns_need_be_no_multiple(dim: int) -> None:
    assert layout(5, dim, shard(0, 5, 0, dim)).faults(1) == []
    assert TableLayout(name="t", num_embeddings=5, embedding_dim=dim, replicated=True).faults(1) == []
    assert layout(5, dim + 8, shard(0, 5, 0, 8), shard(0, 5, 8, dim + 8)).faults(1) == []
    (first, second) = layout(5, dim + 8, shard(0, 5, 0, dim), shard(0, 5, dim, dim + 8)).faults(1)
    assert "cut at multiples of 4" in first
    assert "cut at multiples of 4" in second


def test_replicated_with_shards() -> None:
    table = TableLayout(name="t", num_embeddings=5, embedding_dim=4, shards=(shard(0, 5, 0, 4),), replicated=True)
    (fault,) = table.faults(1)
    assert fault == ("table 't' is replicated and has 1 shards as well. Leave shards empty, or set replicated=False")


@pytest.mark.parametrize(("rows", "dim"), [(0, 4), (4, 0), (-1, -1)])
def test_a_table_without_cells(rows: int, dim: int) -> None:
    (fault,) = layout(rows, dim, shard(0, 1, 0, 4)).faults(1)
    assert f"table 't' has shape ({rows}, {dim}). Both sizes must be at least 1" in fault


@given(rng=randoms())
def test_on_rank_shares_out_the_shards(rng: Random) -> None:
    table = random_layout(rng, "t", 9, 16, 4)
    per_rank = [table.on_rank(rank) for rank in range(4)]
    assert sorted(one for mine in per_rank for one in mine) == sorted(table.shards)
    for rank, mine in enumerate(per_rank):
        assert all(one.rank == rank for one in mine)
        assert [(one.col_start, one.row_start) for one in mine] == sorted(
            (one.col_start, one.row_start) for one in mine
        )


def test_str_is_a_slice() -> None:
    assert str(shard(2, 5, 4, 8, rank=3)) == "t[2:5, 4:8] on rank 3"
