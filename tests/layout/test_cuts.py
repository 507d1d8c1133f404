"""Each cut covers its table exactly once, on the ranks it was given, whatever the shape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError, PlanError
from shardrec.layout import COLUMN_UNIT, TableLayout, Topology, cuts
from tests.plans import CUTS, coverage, random_topology, randoms, rectangles

rows_of = st.integers(1, 24)
dims = st.integers(1, 8 * COLUMN_UNIT)
ranks_of = st.lists(st.integers(0, 5), min_size=1, max_size=7)


def assert_covers_once(layout: TableLayout) -> None:
    counts = coverage(layout.num_embeddings, layout.embedding_dim, layout.shards)
    assert {count for row in counts for count in row} == {1}
    assert all(shard.rows > 0 and shard.cols > 0 and shard.table == layout.name for shard in layout.shards)
    assert all(shard.col_start % COLUMN_UNIT == 0 for shard in layout.shards)


@pytest.mark.parametrize("cut", sorted(CUTS))
@given(rng=randoms(), rows=rows_of, dim=dims)
def test_covers_once_on_known_ranks(cut: str, rng: Random, rows: int, dim: int) -> None:
    topology = random_topology(rng)
    layout = CUTS[cut](rng, "t", rows, dim, topology)
    assert (layout.name, layout.num_embeddings, layout.embedding_dim) == ("t", rows, dim)
    assert layout.faults(topology.world_size) == []
    assert layout.cut == cut.removesuffix("_uneven")
    if layout.replicated:
        assert layout.shards == ()
        assert all(layout.local_numel(rank) == rows * dim for rank in range(topology.world_size))
    else:
        assert_covers_once(layout)
        assert sum(layout.local_numel(rank) for rank in range(topology.world_size)) == rows * dim
        assert layout.ranks == tuple(sorted({shard.rank for shard in layout.shards}))


@given(rows=rows_of, dim=dims, rank=st.integers(0, 7))
def test_table_wise(rows: int, dim: int, rank: int) -> None:
    assert rectangles(cuts.table_wise("t", rows, dim, rank=rank)) == [(0, rows, 0, dim, rank)]


@given(rows=rows_of, dim=dims, ranks=ranks_of)
def test_row_wise_blocks_are_even_and_in_order(rows: int, dim: int, ranks: list[int]) -> None:
    layout = cuts.row_wise("t", rows, dim, ranks=ranks)
    assert_covers_once(layout)
    assert [shard.rank for shard in layout.shards] == ranks[: len(layout.shards)]
    block = -(-rows // len(ranks))
    sizes = [shard.rows for shard in layout.shards]
    assert all(size == block for size in sizes[:-1])
    assert sizes[-1] <= block


@given(data=st.data(), rows=rows_of, dim=dims, ranks=ranks_of)
def test_row_wise_keeps_given_boundaries(data: st.DataObject, rows: int, dim: int, ranks: list[int]) -> None:
    inner = sorted(data.draw(st.lists(st.integers(0, rows), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
    edges = [0, *inner, rows]
    layout = cuts.row_wise("t", rows, dim, ranks=ranks, boundaries=edges)
    expected = [(a, b, 0, dim, rank) for (a, b), rank in zip(pairwise(edges), ranks, strict=True) if a < b]
    assert rectangles(layout) == expected


@given(rows=rows_of, dim=dims, ranks=ranks_of)
def test_column_wise_stripes_are_even(rows: int, dim: int, ranks: list[int]) -> None:
    layout = cuts.column_wise("t", rows, dim, ranks=ranks)
    assert_covers_once(layout)
    widths = [shard.cols for shard in layout.shards]
    assert max(widths) - min(widths) <= COLUMN_UNIT
    assert [shard.rank for shard in layout.shards] == ranks[: len(layout.shards)]


def test_column_wise_keeps_given_widths() -> None:
    layout = cuts.column_wise("t", 5, 24, ranks=[1, 0, 2], widths=[4, 12, 8])
    assert rectangles(layout) == [(0, 5, 0, 4, 1), (0, 5, 4, 16, 0), (0, 5, 16, 24, 2)]


@given(rng=randoms(), rows=rows_of, dim=dims)
def test_host_cuts_stay_on_their_host(rng: Random, rows: int, dim: int) -> None:
    topology = random_topology(rng)
    host = rng.randrange(topology.hosts)
    for layout in (
        cuts.table_row_wise("t", rows, dim, host=host, topology=topology),
        cuts.table_column_wise("t", rows, dim, host=host, topology=topology),
    ):
        assert set(layout.ranks) <= set(topology.host_ranks(host))


@given(rng=randoms(), rows=rows_of, dim=dims)
def test_grid_stripes_stay_on_their_hosts(rng: Random, rows: int, dim: int) -> None:
    topology = random_topology(rng)
    hosts = [rng.randrange(topology.hosts) for _ in range(rng.randint(1, 4))]
    layout = cuts.grid("t", rows, dim, hosts=hosts, topology=topology)
    assert_covers_once(layout)
    for stripe, host in zip(layout.stripes(), hosts, strict=False):
        assert {shard.rank for shard in stripe.shards} <= set(topology.host_ranks(host))


@given(rng=randoms(), rows=rows_of, dim=dims)
def test_stripes_hold_every_shard_in_row_order(rng: Random, rows: int, dim: int) -> None:
    layout = CUTS[rng.choice(sorted(set(CUTS) - {"data_parallel"}))](rng, "t", rows, dim, random_topology(rng))
    stripes = layout.stripes()
    assert sorted(shard for stripe in stripes for shard in stripe.shards) == sorted(layout.shards)
    assert [stripe.col_start for stripe in stripes[1:]] == [stripe.col_end for stripe in stripes[:-1]]
    for stripe in stripes:
        assert stripe.boundaries == (0, *(shard.row_end for shard in stripe.shards))
        assert stripe.boundaries[-1] == rows


TWO_HOSTS = Topology(hosts=2, ranks_per_host=2)


@pytest.mark.parametrize(
    ("cut", "fault"),
    [
        (lambda: cuts.row_wise("big", 9, 8, ranks=[]), r"table 'big': a cut needs at least one rank, got none"),
        (lambda: cuts.column_wise("big", 9, 8, ranks=[]), r"table 'big': a cut needs at least one rank or host"),
        (lambda: cuts.grid("big", 9, 8, hosts=[], topology=TWO_HOSTS), r"table 'big': a cut needs at least one"),
        (
            lambda: cuts.row_wise("big", 9, 8, ranks=[0, 1], boundaries=[0, 9]),
            r"table 'big': row boundaries \[0, 9\] .* 2 blocks. Give 3 ascending numbers from 0 to 9",
        ),
        (lambda: cuts.row_wise("big", 9, 8, ranks=[0, 1], boundaries=[0, 4, 8]), r"from 0 to 9"),
        (lambda: cuts.row_wise("big", 9, 8, ranks=[0, 1], boundaries=[1, 4, 9]), r"from 0 to 9"),
        (lambda: cuts.row_wise("big", 9, 8, ranks=[0, 1, 2], boundaries=[0, 6, 4, 9]), r"ascending"),
        (
            lambda: cuts.column_wise("big", 9, 8, ranks=[0, 1], widths=[4, 8]),
            r"table 'big': column widths \[4, 8\] do not cut 8 columns .* Give 2 multiples of 4 that add up to 8",
        ),
        (lambda: cuts.column_wise("big", 9, 8, ranks=[0, 1], widths=[12, -4]), r"multiples of 4"),
        (lambda: cuts.column_wise("big", 9, 8, ranks=[0, 1], widths=[8]), r"into 2 stripes"),
        (lambda: cuts.column_wise("big", 9, 8, ranks=[0], widths=[]), r"into 1 stripes"),
        (lambda: cuts.column_wise("big", 9, 8, ranks=[0, 1], widths=[2, 6]), r"0:2\] on rank 0: .* at multiples of 4"),
        (lambda: cuts.table_wise("big", 9, 8, rank=-1), r"there is no rank -1"),
        (lambda: cuts.table_wise("big", 0, 8, rank=0), r"'big' has shape \(0, 8\). Both sizes must be at least 1"),
        (lambda: cuts.row_wise("big", -3, 8, ranks=[0, 1]), r"'big' has shape \(-3, 8\)"),
        (lambda: cuts.column_wise("big", 9, 0, ranks=[0, 1]), r"'big' has shape \(9, 0\)"),
    ],
)
def test_impossible_cuts(cut: Callable[[], TableLayout], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        cut()


def test_unknown_host() -> None:
    with pytest.raises(ConfigError, match="no host 2"):
        cuts.table_row_wise("t", 9, 8, host=2, topology=TWO_HOSTS)
    with pytest.raises(ConfigError, match="no host 5"):
        cuts.grid("t", 9, 8, hosts=[0, 5], topology=TWO_HOSTS)


def test_more_ranks_than_rows_or_columns() -> None:
    assert rectangles(cuts.row_wise("t", 3, 4, ranks=[3, 2, 1, 0])) == [
        (0, 1, 0, 4, 3),
        (1, 2, 0, 4, 2),
        (2, 3, 0, 4, 1),
    ]
    assert rectangles(cuts.column_wise("t", 3, 8, ranks=[3, 2, 1, 0])) == [(0, 3, 0, 4, 3), (0, 3, 4, 8, 2)]
