"""What is measured: steps of sharded tables over rows, columns, pooling, batch, dtype and cut, and bare collectives."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from shardrec import ShardingPlan, Topology
from shardrec.layout import TableLayout, cuts
from shardrec.planner import TableLoad

CUTS = ("table_wise", "row_wise", "column_wise", "data_parallel")
_MAX_BYTES = 400 * 2**20
_MAX_ROWS_READ = 400_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Equal tables with equal cuts, so that all ranks have the same load.

    Args:
        cut: per table. Table-wise tables go round the ranks.
        tables: number of them, a multiple of the ranks where they are table-wise.
        rows: per table.
        dim: columns per table.
        pooling: ids of a bag.
        batch: samples per rank.
        half: the weights are FP16.
    """

    cut: str
    tables: int
    rows: int
    dim: int
    pooling: int
    batch: int
    half: bool = False


def workloads(count: int, world: int, seed: int) -> list[Workload]:
    """``count`` different workloads that fit a small machine, drawn with a seed.

    Args:
        count: how many.
        world: ranks.
        seed: other seeds draw others.
    """
    rng = Random(seed)
    drawn: list[Workload] = []
    while len(drawn) < count:
        cut = CUTS[len(drawn) % len(CUTS)] if world > 1 else "table_wise"
        # Copies are for small tables: the gradient of a large one is dense.
        rows = rng.choice([1000, 5000, 20_000] if cut == "data_parallel" else [1000, 20_000, 200_000, 1_000_000])
        each = Workload(
            cut=cut,
            tables=rng.choice([1, 2, 4]) * world,
            rows=rows,
            dim=rng.choice([16, 32, 64, 128]),
            pooling=rng.choice([1, 1, 4, 20]),
            batch=rng.choice([256, 1024, 4096]),
            half=cut == "table_wise" and rng.random() < 0.15,
        )
        size = each.tables * each.rows * each.dim * 4
        if size <= _MAX_BYTES and each.tables * each.batch * each.pooling <= _MAX_ROWS_READ and each not in drawn:
            drawn.append(each)
    return drawn


def table_loads(workload: Workload) -> dict[str, TableLoad]:
    """The tables as the cost model sees them: rowwise Adagrad, ids drawn evenly."""
    load = TableLoad(
        num_embeddings=workload.rows,
        embedding_dim=workload.dim,
        poolings=(float(workload.pooling),),
        weight_bytes=2 if workload.half else 4,
        row_state_bytes=4,
        whole_row_state=True,
    )
    return {f"t{index}": load for index in range(workload.tables)}


def step_plan(workload: Workload, world: int) -> ShardingPlan:
    """Where the tables are."""
    shape = (workload.rows, workload.dim)
    ranks = range(world)
    layouts: list[TableLayout] = []
    for index in range(workload.tables):
        name = f"t{index}"
        match workload.cut:
            case "table_wise":
                layouts.append(cuts.table_wise(name, *shape, rank=index % world))
            case "row_wise":
                layouts.append(cuts.row_wise(name, *shape, ranks=ranks))
            case "column_wise":
                layouts.append(cuts.column_wise(name, *shape, ranks=ranks))
            case _:
                layouts.append(cuts.data_parallel(name, *shape))
    return ShardingPlan(topology=Topology(ranks_per_host=world), tables=tuple(layouts))
