"""Random tables, layouts and plans, for property tests and for loops over many plans.

Everything is drawn from a ``random.Random``, so that hypothesis (:func:`randoms`) and a loop over seeds share what
draws, and the ranks of a test can draw the same plan each for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from random import Random

from hypothesis import strategies as st

from shardrec.layout import COLUMN_UNIT, Shard, ShardingPlan, TableLayout, Topology, cuts

__all__ = [
    "CUTS",
    "coverage",
    "cut_plan",
    "random_layout",
    "random_plan",
    "random_tables",
    "random_topology",
    "randoms",
    "rectangles",
    "sums_inside_hosts",
    "topologies_of",
]

CUTS: Mapping[str, Callable[[Random, str, int, int, Topology], TableLayout]] = {
    "table_wise": lambda rng, name, rows, dim, topology: cuts.table_wise(
        name, rows, dim, rank=rng.randrange(topology.world_size)
    ),
    "row_wise": lambda rng, name, rows, dim, topology: cuts.row_wise(name, rows, dim, ranks=_ranks(rng, topology)),
    "row_wise_uneven": lambda rng, name, rows, dim, topology: _row_wise_uneven(rng, name, rows, dim, topology),
    "column_wise": lambda rng, name, rows, dim, topology: cuts.column_wise(
        name, rows, dim, ranks=_ranks(rng, topology)
    ),
    "table_row_wise": lambda rng, name, rows, dim, topology: cuts.table_row_wise(
        name, rows, dim, host=rng.randrange(topology.hosts), topology=topology
    ),
    "table_column_wise": lambda rng, name, rows, dim, topology: cuts.table_column_wise(
        name, rows, dim, host=rng.randrange(topology.hosts), topology=topology
    ),
    "grid": lambda rng, name, rows, dim, topology: cuts.grid(
        name, rows, dim, hosts=rng.sample(range(topology.hosts), topology.hosts), topology=topology
    ),
    "data_parallel": lambda rng, name, rows, dim, topology: cuts.data_parallel(name, rows, dim),
}
"""Every cut, with its free choices drawn: ``cut(rng, name, rows, dim, topology)``."""


def _ranks(rng: Random, topology: Topology) -> list[int]:
    return rng.sample(range(topology.world_size), topology.world_size)


def _row_wise_uneven(rng: Random, name: str, rows: int, dim: int, topology: Topology) -> TableLayout:
    ranks = _ranks(rng, topology)
    inner = sorted(rng.randrange(rows + 1) for _ in ranks[1:])
    return cuts.row_wise(name, rows, dim, ranks=ranks, boundaries=[0, *inner, rows])


def randoms() -> st.SearchStrategy[Random]:
    """Generators whose draws are hypothesis's own, so that what fails shrinks: their least draws are the simplest."""
    return st.randoms(use_true_random=False)


def random_topology(rng: Random, most_ranks: int = 8) -> Topology:
    """Up to ``most_ranks`` ranks, on one host or several."""
    hosts = rng.choice([hosts for hosts in (1, 1, 2, 4) if hosts <= most_ranks])
    return Topology(hosts=hosts, ranks_per_host=rng.randint(1, most_ranks // hosts))


def topologies_of(world_size: int) -> list[Topology]:
    """Every way to spread so many ranks evenly over hosts."""
    return [
        Topology(hosts=hosts, ranks_per_host=world_size // hosts)
        for hosts in range(1, world_size + 1)
        if world_size % hosts == 0
    ]


def random_tables(rng: Random, most: int = 4) -> dict[str, tuple[int, int]]:
    """1 to ``most`` tables: (rows, columns) by name, from a single row up."""
    return {
        f"t{number}": (rng.randint(1, 20), COLUMN_UNIT * rng.randint(1, 5) - rng.choice([0, 0, 0, 1, 2, 3]))
        for number in range(rng.randint(1, most))
    }


def random_layout(
    rng: Random, name: str, rows: int, dim: int, world_size: int, *, replicas: bool = True
) -> TableLayout:
    """A layout that no cut makes: stripes of random widths, each with row blocks of its own; or replicated."""
    if replicas and rng.random() > 0.85:
        return cuts.data_parallel(name, rows, dim)
    columns = _edges(rng, -(-dim // COLUMN_UNIT), most=3)
    shards = []
    for left, right in pairwise(min(column * COLUMN_UNIT, dim) for column in columns):
        for top, bottom in pairwise(_edges(rng, rows, most=3)):
            shards.append(
                Shard(
                    table=name,
                    row_start=top,
                    row_end=bottom,
                    col_start=left,
                    col_end=right,
                    rank=rng.randrange(world_size),
                )
            )
    rng.shuffle(shards)
    return TableLayout(name=name, num_embeddings=rows, embedding_dim=dim, shards=tuple(shards))


def _edges(rng: Random, length: int, most: int) -> list[int]:
    parts = rng.randint(1, min(most, length))
    return [0, *sorted(rng.sample(range(1, length), parts - 1)), length]


def random_plan(rng: Random, tables: Mapping[str, tuple[int, int]], topology: Topology) -> ShardingPlan:
    """Each table by a cut drawn at random, or as :func:`random_layout` lays it out."""
    layouts = []
    for name, (rows, dim) in tables.items():
        if rng.random() > 0.7:
            layouts.append(CUTS[rng.choice(sorted(CUTS))](rng, name, rows, dim, topology))
        else:
            layouts.append(random_layout(rng, name, rows, dim, topology.world_size))
    return ShardingPlan(topology=topology, tables=tuple(layouts))


def cut_plan(cut: str, rng: Random, tables: Mapping[str, tuple[int, int]], topology: Topology) -> ShardingPlan:
    """All tables by one cut of :data:`CUTS`."""
    layouts = [CUTS[cut](rng, name, rows, dim, topology) for name, (rows, dim) in tables.items()]
    return ShardingPlan(topology=topology, tables=tuple(layouts))


def sums_inside_hosts(plan: ShardingPlan) -> bool:
    """Whether several ranks of one host, of several, hold row blocks of the same columns."""
    per_host = plan.topology.ranks_per_host
    if plan.topology.hosts == 1:
        return False
    return any(
        len(ranks) > 1
        for layout in plan.tables
        for stripe in layout.stripes()
        for host in range(plan.topology.hosts)
        if (ranks := {shard.rank for shard in stripe.shards if shard.rank // per_host == host})
    )


def rectangles(layout: TableLayout) -> list[tuple[int, int, int, int, int]]:
    """(row_start, row_end, col_start, col_end, rank) of each shard, in order."""
    return [(s.row_start, s.row_end, s.col_start, s.col_end, s.rank) for s in layout.shards]


def coverage(rows: int, dim: int, shards: Sequence[Shard]) -> list[list[int]]:
    """How many shards hold each cell, counted cell by cell."""
    counts = [[0] * dim for _ in range(rows)]
    for shard in shards:
        for row in range(shard.row_start, shard.row_end):
            for column in range(shard.col_start, shard.col_end):
                counts[row][column] += 1
    return counts
