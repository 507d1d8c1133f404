"""The bytes that a workload's steps send, counted, and by the closed formula of :mod:`benchmarks.harness.volume`.

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

from benchmarks.harness.config import PLANNER, BenchConfig
from benchmarks.harness.counting import CountingCollectives, Sent
from benchmarks.harness.formula import WorkloadFormula, batches_of, comms_of
from benchmarks.harness.layouts import cut_plan, given_plan
from benchmarks.harness.module import sharded_module, total_of, unsharded_module
from benchmarks.harness.report import ByteReport
from benchmarks.harness.volume import EXCHANGES, Volume
from benchmarks.harness.workload import WorkloadTable
from shardrec.exchange.collectives import collectives_of
from shardrec.launch import RankInfo, joined_run, same_everywhere
from shardrec.layout import ShardingPlan, Topology
from shardrec.planner import plan as make_plan
from shardrec.step.context import ExchangeOptions, ModelContext
from shardrec.trainer.run.report import environment

__all__ = ["count_bytes"]


def count_bytes(config: BenchConfig) -> ByteReport | None:
    """Run the workload's steps as this process's rank. The report, on rank 0.

    Raises:
        ShardrecError: for options, a plan or peers that the run cannot go on with.
    """
    with joined_run(config.device, config.threads, seed=config.seed) as rank_info:
        tables = config.workload_tables()
        plan = _plan(config, tables, rank_info)
        sent = _gathered(_run_steps(config, tables, plan, rank_info), rank_info)
        if sent is None:
            return None
        formula = WorkloadFormula(config, tables, plan)
        measured = [_volume([rank[step] for rank in sent], plan) for step in range(config.steps)]
        expected = [formula.of_step(step) for step in range(config.steps)]
        mismatches = [
            f"step {step}: {exchange} from rank {p} to {q}: {here} bytes, by the formula {there}"
            for step, (one, other) in enumerate(zip(measured, expected, strict=True))
            for exchange, p, q, here, there in one.differences(other)
        ]
        mismatches += [
            f"step {step}: rank {rank} takes part in a {name} exchange, which the formula does not know"
            for rank, steps in enumerate(sent)
            for step, one in enumerate(steps)
            for name in sorted(one.calls.keys() - set(EXCHANGES))
        ]
        replicas = [table for table in plan.tables if table.replicated]
        return ByteReport(
            config=config.to_mapping(),
            environment=environment(world_size=rank_info.world_size, threads=rank_info.threads),
            plan=plan,
            steps=config.steps,
            calls={name: sum(one.calls[name] for one in sent[0]) / config.steps for name in EXCHANGES},
            measured=_total(measured),
            formula=_total(expected),
            uniform=formula.of_uniform_ids(),
            mismatches=tuple(mismatches),
            all_reduced=sum(4 * table.num_embeddings * table.embedding_dim for table in replicas) * config.trains,
        )


def _plan(config: BenchConfig, tables: Sequence[WorkloadTable], rank_info: RankInfo) -> ShardingPlan:
    if config.plan is not None:
        return given_plan(config.plan, tables, rank_info.world_size)
    topology = Topology(hosts=config.hosts, ranks_per_host=rank_info.world_size // config.hosts)
    if config.cut != PLANNER:
        return cut_plan(tables, config.cut, topology)
    made = ""
    if rank_info.is_lead:
        module = _unsharded(config, tables)
        poolings = {table.feature: float(table.pooling) for table in tables}
        made = json.dumps(make_plan(module, topology, batch_size=config.batch_size, poolings=poolings).to_json())
    return ShardingPlan.from_json(json.loads(same_everywhere(made, rank_info)))


def _unsharded(config: BenchConfig, tables: Sequence[WorkloadTable]) -> Any:
    weighted = config.weights != "none"
    return unsharded_module(tables, pooled=config.is_pooled, weighted=weighted, optimizer=config.optimizer)


def _run_steps(
    config: BenchConfig, tables: Sequence[WorkloadTable], plan: ShardingPlan, rank_info: RankInfo
) -> list[Sent]:
    """What this rank sends in each step."""
    collectives = CountingCollectives(collectives_of())
    context = ModelContext(collectives, rank_info.device, ExchangeOptions(comms=comms_of(config)))
    model = sharded_module(_unsharded(config, tables), plan, context, dedup=config.dedup == "on")
    batches = batches_of(config, tables)
    collectives.take()
    sent = []
    for step in range(config.steps):
        features = batches.draw(rank_info.rank, step).to(rank_info.device)
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


def _gathered(own: list[Sent], rank_info: RankInfo) -> list[list[Sent]] | None:
    """Of each rank, on rank 0. Straight through torch.distributed, so that it does not count."""
    if rank_info.world_size == 1:
        return [own]
    found: list[Any] = [None] * rank_info.world_size
    dist.all_gather_object(found, own)
    return found if rank_info.is_lead else None


def _volume(sent: Sequence[Sent], plan: ShardingPlan) -> Volume:
    nothing = [0] * len(sent)
    return Volume.of(plan.topology.ranks_per_host, len(sent), lambda name, p, q: sent[p].bytes.get(name, nothing)[q])


def _total(volumes: Sequence[Volume]) -> Volume:
    total = volumes[0]
    for volume in volumes[1:]:
        total = total + volume
    return total
