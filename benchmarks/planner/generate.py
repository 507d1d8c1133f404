"""Generated planning problems, on which the planner was not tuned: six families of tables, 8 to 128 ranks, by seed.

=============  =====================================================================================
criteo         26 tables, rows log-uniform from 3 to 40 million (a cap that tables share), one width
multi_hot      12 to 60 tables, pooling factors log-uniform up to 120
huge           3 to 12 tables of 10 to 400 million rows, up to as many small ones
alike          150 to 600 tables of 3 to 12 different shapes
tight          20 to 120 tables in 10 to 35% more memory than their weights and optimizer state take
power_law      60 to 250 tables, rows and pooling factors by a power law, widths of their own
=============  =====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from shardrec.planner import TableLoad

__all__ = ["FAMILIES", "Generated", "generated"]

GIB = 2**30
FAMILIES = ("criteo", "multi_hot", "huge", "alike", "tight", "power_law")
RANKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A problem.

    Args:
        name: family and seed.
        tables: by name.
        ranks: eight to a host.
        capacity: bytes of a rank for tables.
    """

    name: str
    tables: dict[str, TableLoad]
    ranks: int
    capacity: float


def generated(count: int, first: int = 0) -> list[Generated]:
    """``count`` problems from number ``first`` on, in turn of each family. A problem depends on its number alone."""
    numbers = range(first, first + count)
    return [_problem(FAMILIES[number % len(FAMILIES)], number // len(FAMILIES)) for number in numbers]


def _problem(family: str, seed: int) -> Generated:
    # Seeded by a string: independent of hash randomization, and each family has a stream of its own.
    rng = Random(f"{family} {seed}")
    ranks = rng.choice(RANKS)
    tables = [*_TABLES[family](rng)]
    needed = sum(
        table.num_embeddings * (table.embedding_dim * table.weight_bytes + table.row_state_bytes) for table in tables
    )
    if family == "tight":
        # Beside the tables, a rank holds its share of the ids and of the pooled outputs, both ways.
        buffers = sum(16 * table.ids_per_sample + 8 * table.embedding_dim * table.features for table in tables)
        capacity = (needed * rng.uniform(1.1, 1.35) + buffers * 65_536) / ranks
    else:
        capacity = max(80.0 * GIB, 1.4 * needed / ranks)
    return Generated(
        name=f"{family}_{seed}",
        tables={f"t{number}": table for number, table in enumerate(tables)},
        ranks=ranks,
        capacity=capacity,
    )


def _table(rows: float, width: int, poolings: tuple[float, ...] = (1.0,)) -> TableLoad:
    """A table with row-wise Adagrad, in float32."""
    return TableLoad(
        num_embeddings=max(1, int(rows)),
        embedding_dim=width,
        poolings=poolings,
        row_state_bytes=4,
        whole_row_state=True,
    )


def _log_uniform(rng: Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def _criteo(rng: Random) -> list[TableLoad]:
    width, cap = rng.choice((16, 32, 64, 128)), rng.choice((1e7, 4e7))
    return [_table(min(cap, _log_uniform(rng, 3, 2e8)), width) for _ in range(26)]


def _multi_hot(rng: Random) -> list[TableLoad]:
    width = rng.choice((64, 128))
    return [
        _table(_log_uniform(rng, 100, 4e7), width, (float(round(_log_uniform(rng, 1, 120))),))
        for _ in range(rng.randint(12, 60))
    ]


def _huge(rng: Random) -> list[TableLoad]:
    large = rng.randint(3, 12)
    return [
        _table(_log_uniform(rng, 1e7, 4e8), rng.choice((64, 128, 256)), (_log_uniform(rng, 1, 30),))
        for _ in range(large)
    ] + [_table(_log_uniform(rng, 100, 1e6), rng.choice((16, 64))) for _ in range(rng.randint(0, large))]


def _alike(rng: Random) -> list[TableLoad]:
    shapes = [
        _table(_log_uniform(rng, 1e3, 2e7), rng.choice((16, 32, 64, 128)), (float(rng.choice((1, 1, 5, 10, 30))),))
        for _ in range(rng.randint(3, 12))
    ]
    return [rng.choice(shapes) for _ in range(rng.randint(150, 600))]


def _tight(rng: Random) -> list[TableLoad]:
    return [
        _table(_log_uniform(rng, 1e4, 1e8), rng.choice((32, 64, 128)), (_log_uniform(rng, 1, 20),))
        for _ in range(rng.randint(20, 120))
    ]


def _power_law(rng: Random) -> list[TableLoad]:
    def features() -> tuple[float, ...]:
        count = 1 if rng.random() < 0.8 else rng.randint(2, 4)
        return tuple(min(200.0, rng.paretovariate(0.9)) for _ in range(count))

    return [
        _table(min(2e8, 300 * rng.paretovariate(0.35)), rng.choice((16, 32, 64, 128, 192, 256)), features())
        for _ in range(rng.randint(60, 250))
    ]


_TABLES = {
    "criteo": _criteo,
    "multi_hot": _multi_hot,
    "huge": _huge,
    "alike": _alike,
    "tight": _tight,
    "power_law": _power_law,
}
