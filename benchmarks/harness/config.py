"""``BenchConfig``: the workload that ``shardrec bench`` measures, and on what ranks."""

from __future__ import annotations

from typing import Final, Literal

from benchmarks.harness.workload import PRESETS, WorkloadTable, parse_tables
from shardrec.errors import ConfigError
from shardrec.trainer.run.options import Options, option

__all__ = ["PLANNER", "BenchConfig", "Cut"]

PLANNER: Final = "planner"
"""The value of ``cut`` that leaves the plan to the planner."""

Cut = Literal[
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
    "mixed",
    "planner",
]

_Wire = Literal["fp32", "fp16", "bf16", "int8"]


class _Workload(Options):
    panel = "With --bytes: workload"

    tables: tuple[str, ...] = option(
        ("26x20000x64",),
        help=f"Tables of a kind, each with a feature of its own, or a preset: {', '.join(PRESETS)}. Can be repeated.",
        metavar="NUMBERxROWSxDIM[xIDS]",
    )
    max_rows: int = option(100_000, ge=1)
    """Most rows of a preset's table."""
    batch_size: int = option(4096, ge=1)
    """Samples of each rank."""
    pooling: int | None = option(None, ge=1, metavar="IDS")
    """Ids of every bag (default: 1, or as the tables say)"""
    ids: Literal["uniform", "zipf"] = "uniform"
    """Equally likely rows, or the k-th row by k to the power of -1.05."""
    module: Literal["pooled", "sequence"] = "pooled"
    """EmbeddingBagCollection, or EmbeddingCollection."""
    dedup: Literal["on", "off"] = "on"
    """Sequences send each distinct id of a table once, or all ids."""
    weights: Literal["none", "given", "learned"] = "none"
    """Weights of ids: none, data, or learned."""
    seed: int = option(0, ge=0)
    """Seed of ids and weights."""


class _Sharding(Options):
    panel = "With --bytes: sharding"

    cut: Cut = "table_wise"
    """Cut of every table. 'mixed' takes them in turn."""
    plan: str | None = option(None, metavar="PATH")
    """Use this plan.json, with tables t0, t1, ..."""
    output_comms: _Wire = "fp32"
    """Format of the output all-to-all."""
    gradient_comms: _Wire = "fp32"
    """Format of the gradient all-to-all."""


class _Step(Options):
    panel = "With --bytes: step"

    step: Literal["train", "forward"] = "train"
    """Forward and backward, or forward only."""
    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    """Optimizer of the tables, fused into their backward."""
    steps: int = option(3, ge=1)
    """Steps to measure, each with ids of its own."""


class _Ranks(Options):
    panel = "Ranks"

    nproc: int | None = option(None, ge=1)
    """Ranks to start on this machine, unless torchrun has (default: 2)"""
    hosts: int = option(1, ge=1)
    """Treat the ranks as if spread over this number of hosts, wherever they are."""
    threads: int | None = option(None, ge=1)
    """Threads of each rank (default: cores / ranks)"""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the tables live."""


class BenchConfig(_Ranks, _Step, _Sharding, _Workload):
    """One measurement. Each field is, with dashes, a flag; its text is that flag's help.

    Raises:
        ConfigError: naming each option that cannot be honoured, its value and what it may be.
    """

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
