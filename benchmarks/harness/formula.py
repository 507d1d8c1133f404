"""The closed formula of :mod:`benchmarks.harness.volume` for a workload: with the ids drawn, and in expectation."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.batches import BatchMaker
from benchmarks.harness.config import BenchConfig
from benchmarks.harness.traffic import counted_traffic
from benchmarks.harness.volume import (
    CollectionTraffic,
    TableTraffic,
    Volume,
    header_columns,
    step_volume,
    uniform_traffic,
)
from benchmarks.harness.workload import WorkloadTable
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.layout import ShardingPlan, TableLayout

__all__ = ["WorkloadFormula", "batches_of", "comms_of"]


def comms_of(config: BenchConfig) -> QuantizedComms:
    """The formats that the options ask for."""
    return QuantizedComms(output=config.output_comms, gradient=config.gradient_comms)


def batches_of(config: BenchConfig, tables: Sequence[WorkloadTable]) -> BatchMaker:
    """The batches that the options ask for."""
    return BatchMaker(
        tables, batch_size=config.batch_size, ids=config.ids, seed=config.seed, weighted=config.weights != "none"
    )


class WorkloadFormula:
    """The formula for a workload.

    Args:
        config: the run.
        tables: of the workload.
        plan: where they are.
    """

    def __init__(self, config: BenchConfig, tables: Sequence[WorkloadTable], plan: ShardingPlan) -> None:
        self._config = config
        self._tables = tables
        self._plan = plan
        self._batches = batches_of(config, tables)
        self._distinct = not config.is_pooled and config.dedup == "on"

    def of_step(self, step: int) -> Volume:
        """With the ids that the ranks drew."""
        ranks = range(self._plan.world_size)
        drawn = [self._batches.draw(rank, step) for rank in ranks]
        return self._volume(
            [
                counted_traffic(
                    layout,
                    [[batch[table.feature].values()] for batch in drawn],
                    distinct=self._distinct,
                    whole_rows=self._takes_whole_rows(layout),
                )
                for table, layout in self._layouts()
            ]
        )

    def of_uniform_ids(self) -> Volume:
        """What is expected if each row is as likely as any other."""
        return self._volume(
            [
                uniform_traffic(
                    layout,
                    [table.pooling * self._config.batch_size] * self._plan.world_size,
                    distinct=self._distinct,
                    whole_rows=self._takes_whole_rows(layout),
                )
                for table, layout in self._layouts()
            ]
        )

    def _layouts(self) -> list[tuple[WorkloadTable, TableLayout]]:
        return [(table, self._plan.by_name[table.name]) for table in self._tables]

    def _takes_whole_rows(self, layout: TableLayout) -> bool:
        return self._config.optimizer == "rowwise_adagrad" and len(layout.stripes()) > 1

    def _volume(self, traffic: Sequence[TableTraffic]) -> Volume:
        config = self._config
        # Tables whose optimizers differ are looked up by kernels of their own, as are sequences of other widths.
        groups = {
            (self._takes_whole_rows(layout), None if config.is_pooled else shard.cols)
            for layout in self._plan.tables
            for shard in layout.shards
        }
        collection = CollectionTraffic(
            tables=traffic,
            batch_sizes=[config.batch_size] * self._plan.world_size,
            pooled=config.is_pooled,
            weighted=config.weights != "none",
            learned=config.weights == "learned",
        )
        return step_volume(
            [collection],
            self._plan.topology,
            columns=header_columns([len(groups)]),
            comms=comms_of(config),
            train=config.trains,
        )
