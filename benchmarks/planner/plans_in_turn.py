"""Steps of the same tables under several plans, timed in the same processes and in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardrec import ShardingPlan
from shardrec.launch import on_new_ranks
from shardrec.planner import TableLoad
from shardrec.trainer.calibrate.measure import sharded_forward, time_step

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from shardrec.launch import RankInfo


def measure_plans(
    tables: Mapping[str, TableLoad],
    plans: Sequence[ShardingPlan],
    *,
    batch_size: int,
    batches: Sequence[KeyedJaggedTensor] = (),
    device: str = "cpu",
    rounds: int = 15,
    steps: int = 5,
) -> list[tuple[float, ...]]:
    """Per plan, the milliseconds of a step on the slowest rank, one for each round.

    Other load on the machine affects all plans equally.

    Args:
        tables: pooled, by name. The update is rowwise Adagrad's.
        plans: of these tables, for ranks of this machine.
        batch_size: samples per rank.
        batches: of ``batch_size`` samples, distributed over the ranks, at least one for each. The features of a table
            are called ``"<table>.0"``, ``"<table>.1"`` and so on, tables in order. Default: ids drawn evenly from all
            rows.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL).
        rounds: in each, every plan makes its steps, and begins where another did in the round before.
        steps: of a plan in a round. A quiet one counts.
    """
    work = (dict(tables), tuple(plans), batch_size, tuple(batches), rounds, steps)
    times: list[tuple[float, ...]] = on_new_ranks(_time_plans, *work, nproc=plans[0].world_size, device=device)
    return times


def _time_plans(
    rank_info: RankInfo,
    tables: Mapping[str, TableLoad],
    plans: Sequence[ShardingPlan],
    batch_size: int,
    batches: Sequence[KeyedJaggedTensor],
    rounds: int,
    steps: int,
) -> list[tuple[float, ...]]:
    here = [batch.to(rank_info.device) for batch in batches[rank_info.rank :: rank_info.world_size]]
    running = [sharded_forward(tables, plan, batch_size, rank_info.device, here) for plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    for number in range(rounds):
        for turn in range(len(plans)):
            plan = (number + turn) % len(plans)
            times[plan].append(time_step(running[plan], steps, rank_info.device)[1])
    return [tuple(each) for each in times]
