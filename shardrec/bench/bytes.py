"""The bytes that a workload's steps send, counted, and by the closed formula of :mod:`shardrec.exchange.volume`.

::

    each rank    its batches ──► sharded module ──► CountingCollectives ──► bytes sent to each rank, per exchange
    rank 0       the batches of all ranks ──► ids per row block ──► formula          both ──► ByteReport
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.bench.batches import BatchMaker
from shardrec.bench.config import PLANNER, BenchConfig
from shardrec.bench.layouts import cut_plan
from shardrec.bench.module import sharded_module, total_of, unsharded_module
from shardrec.bench.report import ByteReport
from shardrec.bench.traffic import counted_traffic
from shardrec.bench.workload import WorkloadTable
from shardrec.errors import ConfigError
from shardrec.exchange.collectives import collectives_of
from shardrec.exchange.counting import CountingCollectives, Sent
from shardrec.exchange.step import StepContext
from shardrec.exchange.volume import (
    EXCHANGES,
    CollectionTraffic,
    TableTraffic,
    Volume,
    header_columns,
    step_volume,
    uniform_traffic,
)
from shardrec.exchange.wire import QuantizedComms
from shardrec.layout import ShardingPlan, TableLayout, Topology
from shardrec.planner import plan as make_plan
from shardrec.train.ranks import Place, joined, same_everywhere
from shardrec.train.report import environment

__all__ = ["count_bytes"]


def count_bytes(config: BenchConfig) -> ByteReport | None:
    """Run the workload's steps as this process's rank; the report, on rank 0.

    Raises:
        ShardrecError: for options, a plan or peers that the run cannot go on with.
    """
    with joined(config) as place:
        tables = config.workload_tables()
        plan = _plan(config, tables, place)
        sent = _gathered(_run_steps(config, tables, plan, place), place)
        if sent is None:
            return None
        formula = _Formula(config, tables, plan)
        measured = [_volume([rank[step] for rank in sent], plan) for step in range(config.steps)]
        expected = [formula.of_step(step) for step in range(config.steps)]
        mismatches = [
            f"step {step}: {exchange} from rank {p} to {q}: {here} bytes, by the formula {there}"
            for step, (one, other) in enumerate(zip(measured, expected, strict=True))
            for exchange, p, q, here, there in one.differences(other)
        ]
        replicas = [table for table in plan.tables if table.replicated]
        return ByteReport(
            config=config.to_mapping(),
            environment=environment(world_size=place.world_size, threads=place.threads),
            plan=plan,
            steps=config.steps,
            calls={name: sum(one.calls[name] for one in sent[0]) / config.steps for name in EXCHANGES},
            measured=_total(measured),
            formula=_total(expected),
            uniform=formula.of_uniform_ids(),
            mismatches=tuple(mismatches),
            all_reduced=sum(4 * table.num_embeddings * table.embedding_dim for table in replicas) * config.trains,
        )


def _plan(config: BenchConfig, tables: Sequence[WorkloadTable], place: Place) -> ShardingPlan:
    if config.plan is not None:
        try:
            plan = ShardingPlan.load(config.plan)
        except OSError as error:
            raise ConfigError(f"plan (--plan) is {config.plan!r}: {error.strerror}; give a plan.json") from error
        plan.check_tables({table.name: (table.rows, table.dim) for table in tables})
        if plan.world_size != place.world_size:
            raise ConfigError(
                f"plan (--plan) {config.plan!r} is for {plan.world_size} ranks and there are {place.world_size}: start "
                f"{plan.world_size} (--nproc)"
            )
        return plan
    topology = Topology(hosts=config.hosts, ranks_per_host=place.world_size // config.hosts)
    if config.cut != PLANNER:
        return cut_plan(tables, config.cut, topology)
    made = ""
    if place.is_lead:
        module = _unsharded(config, tables)
        poolings = {table.feature: float(table.pooling) for table in tables}
        made = json.dumps(make_plan(module, topology, batch_size=config.batch_size, poolings=poolings).to_json())
    return ShardingPlan.from_json(json.loads(same_everywhere(made, place)))


def _unsharded(config: BenchConfig, tables: Sequence[WorkloadTable]) -> Any:
    weighted = config.weights != "none"
    return unsharded_module(tables, pooled=config.is_pooled, weighted=weighted, optimizer=config.optimizer)


def _comms(config: BenchConfig) -> QuantizedComms:
    return QuantizedComms(output=config.output_comms, gradient=config.gradient_comms)  # type: ignore[arg-type]


def _batches(config: BenchConfig, tables: Sequence[WorkloadTable]) -> BatchMaker:
    return BatchMaker(
        tables, batch_size=config.batch_size, ids=config.ids, seed=config.seed, weighted=config.weights != "none"
    )


def _run_steps(config: BenchConfig, tables: Sequence[WorkloadTable], plan: ShardingPlan, place: Place) -> list[Sent]:
    """What this rank sends in each step."""
    collectives = CountingCollectives(collectives_of())
    context = StepContext(collectives, place.device, _comms(config))
    model = sharded_module(_unsharded(config, tables), plan, context, dedup=config.dedup == "on")
    batches = _batches(config, tables)
    collectives.take()
    sent = []
    for step in range(config.steps):
        features = batches.draw(place.rank, step).to(place.device)
        if config.weights == "learned":
            features = _with_learned_weights(features)
        with torch.set_grad_enabled(config.trains):
            total = total_of(model(features))
        if config.trains:
            total.backward()
        sent.append(collectives.take())
    return sent


def _with_learned_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        weights=features.weights().requires_grad_(),
        stride=features.stride(),
    )


def _gathered(own: list[Sent], place: Place) -> list[list[Sent]] | None:
    """Of each rank, on rank 0; straight through torch.distributed, so that it does not count."""
    if place.world_size == 1:
        return [own]
    found: list[Any] = [None] * place.world_size
    dist.all_gather_object(found, own)
    return found if place.is_lead else None


def _volume(sent: Sequence[Sent], plan: ShardingPlan) -> Volume:
    nothing = [0] * len(sent)
    return Volume.of(plan.topology.ranks_per_host, len(sent), lambda name, p, q: sent[p].bytes.get(name, nothing)[q])


def _total(volumes: Sequence[Volume]) -> Volume:
    total = volumes[0]
    for volume in volumes[1:]:
        total = total + volume
    return total


class _Formula:
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
        self._batches = _batches(config, tables)
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
            comms=_comms(config),
            train=config.trains,
        )
