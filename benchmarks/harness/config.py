"""``BenchConfig``: the workload that ``shardrec bench`` measures, and on what ranks."""

from __future__ import annotations

from benchmarks.harness.workload import PRESETS, WorkloadTable, parse_tables
from shardrec.errors import ConfigError
from shardrec.trainer.run.options import Options, option

__all__ = ["CUTS", "PLANNER", "BenchConfig"]

PLANNER = "planner"
"""The value of ``cut`` that leaves the plan to the planner."""

CUTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
    "mixed",
    PLANNER,
)

_WORKLOAD, _SHARDING, _STEP = (f"With --bytes: {part}" for part in ("workload", "sharding", "step"))
_RANKS = "Ranks"
_WIRES = ("fp32", "fp16", "bf16", "int8")


class BenchConfig(Options):
    """One measurement. Each field is, with dashes, a flag; its text is that flag's help.

    Raises:
        ConfigError: naming each option that cannot be honoured, its value and what it may be.
    """

    tables: tuple[str, ...] = option(
        ("26x20000x64",),
        _WORKLOAD,
        f"Tables of a kind, each with a feature of its own, or a preset: {', '.join(PRESETS)}; can be repeated.",
        metavar="NUMBERxROWSxDIM[xIDS]",
    )
    max_rows: int = option(100_000, _WORKLOAD, "Most rows of a preset's table.", ge=1)
    batch_size: int = option(4096, _WORKLOAD, "Samples of each rank.", ge=1)
    pooling: int | None = option(
        None, _WORKLOAD, "Ids of every bag (default: 1, or as the tables say)", ge=1, metavar="IDS"
    )
    ids: str = option(
        "uniform", _WORKLOAD, "Each row as likely, or as rank to the power of -1.05.", choices=("uniform", "zipf")
    )
    module: str = option(
        "pooled", _WORKLOAD, "EmbeddingBagCollection, or EmbeddingCollection.", choices=("pooled", "sequence")
    )
    dedup: str = option(
        "on", _WORKLOAD, "Sequences send each distinct id of a table once, or all ids.", choices=("on", "off")
    )
    weights: str = option(
        "none", _WORKLOAD, "Weights of ids: none, data, or learned.", choices=("none", "given", "learned")
    )
    seed: int = option(0, _WORKLOAD, "Seed of ids and weights.", ge=0)

    cut: str = option("table_wise", _SHARDING, "How every table is cut; 'mixed' is by turns.", choices=CUTS)
    plan: str | None = option(None, _SHARDING, "Use this plan.json; its tables are t0, t1, ...", metavar="PATH")
    output_comms: str = option("fp32", _SHARDING, "Format of the output all-to-all.", choices=_WIRES)
    gradient_comms: str = option("fp32", _SHARDING, "Format of the gradient all-to-all.", choices=_WIRES)

    step: str = option("train", _STEP, "Forward and backward, or forward only.", choices=("train", "forward"))
    optimizer: str = option(
        "rowwise_adagrad",
        _STEP,
        "Optimizer of the tables, fused into their backward.",
        choices=("sgd", "adagrad", "rowwise_adagrad", "adam"),
    )
    steps: int = option(3, _STEP, "Steps to measure, each with ids of its own.", ge=1)

    nproc: int | None = option(
        None, _RANKS, "Ranks to start on this machine (default: 2; under torchrun, its ranks are joined)", ge=1
    )
    hosts: int = option(1, _RANKS, "Treat the ranks as if spread over this number of hosts, wherever they are.", ge=1)
    threads: int | None = option(None, _RANKS, "Threads of each rank (default: cores / ranks)", ge=1)
    device: str = option("cpu", _RANKS, "Where the tables live.", choices=("cpu", "cuda"))

    def workload_tables(self) -> tuple[WorkloadTable, ...]:
        """The tables that ``tables`` asks for."""
        return parse_tables(self.tables, max_rows=self.max_rows, pooling=self.pooling)

    @property
    def is_pooled(self) -> bool:
        """Whether bags are summed."""
        return self.module == "pooled"

    @property
    def trains(self) -> bool:
        """Whether a step has a backward."""
        return self.step == "train"

    def structural_faults(self) -> list[str]:
        """See :class:`Options`."""
        try:
            tables = self.workload_tables()
        except ConfigError as error:
            return [str(error)]
        faults = []
        dims = sorted({table.dim for table in tables})
        if not self.is_pooled and len(dims) > 1:
            faults.append(
                f"module (--module) is 'sequence' and the tables have {', '.join(map(str, dims))} columns: give tables "
                "(--tables) of one width"
            )
        if not self.is_pooled and self.weights != "none":
            faults.append(f"weights (--weights) is {self.weights!r} and module 'sequence' takes none: leave it out")
        if self.plan is not None and self.hosts != 1:
            faults.append("hosts (--hosts) is given and plan (--plan) says how many hosts there are: leave it out")
        return faults
