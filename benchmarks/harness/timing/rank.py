"""One measurement on a rank: the side is made, shown to compute what it should, warmed up and timed."""

from __future__ import annotations

import gc
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.timing.case import Job
from benchmarks.harness.timing.clock import WARM_UP_S, time_steps
from benchmarks.harness.timing.digest import digest
from benchmarks.harness.timing.inputs import draw_batches, read_batches
from benchmarks.harness.timing.sides import Side, make_side
from shardrec.launch.ranks import RankInfo

__all__ = ["measure"]

_FEWEST = 3


def measure(options: Mapping[str, Any], rank_info: RankInfo) -> dict[str, Any]:
    """Measure one side of a case as one of its ranks.

    The steps before the clock runs are on batches 0, 1 and 0: the outputs on batch 0 show that the sides
    agree at first, and after two updates.

    Args:
        options: a :class:`~benchmarks.harness.timing.case.Job` as JSON.
        rank_info: this rank, which is in a process group.

    Returns:
        As JSON, the same on every rank: ``step_ms``, of the slowest rank in each step. ``faults``, page faults of a
        step, of the rank that has most. ``peak_bytes``, the most memory of any rank's process (on CUDA, allocated on
        any device). ``digests`` by rank, of the outputs.
    """
    job = Job.from_json(options)
    gc.collect()  # what the side before has left
    if rank_info.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    batches = (
        read_batches(job.case, Path(job.inputs), rank_info.rank, rank_info.device)
        if job.inputs
        else draw_batches(job.case, rank_info.rank, rank_info.device, job.seed)
    )
    side = make_side(job, rank_info)
    digests = _warm_up(side, [side.prepare(batches[number]) for number in (0, 1, 0)], trains=job.case.trains)
    warming = 1e3 * WARM_UP_S if rank_info.device.type == "cuda" else 0.0
    steps = _number_of_steps(job, side, side.prepare(batches[1]), rank_info, warming)
    inputs = [side.prepare(batches[number % len(batches)]) for number in range(steps)]
    # Collections of garbage walk over what the imports left behind, and fall into any one side's steps.
    gc.collect()
    gc.freeze()
    dist.barrier()
    before = _page_faults()
    own = time_steps(side.step, inputs, rank_info.device)
    faults = (_page_faults() - before) / steps
    found: list[Any] = [None] * rank_info.world_size
    dist.all_gather_object(found, (own, faults, _peak_bytes(rank_info), digests))
    gc.unfreeze()
    return {
        "step_ms": [max(times) for times in zip(*(one[0] for one in found), strict=True)],
        "faults": max(one[1] for one in found),
        "peak_bytes": max(one[2] for one in found),
        "digests": [one[3] for one in found],
    }


def _warm_up(side: Side, inputs: list[Any], *, trains: bool) -> dict[str, Any]:
    found = {}
    for name, one in zip(("first", "", "trained"), inputs, strict=True):
        output = side.step(one)
        if name == "first" or (name and trains):
            found[name] = digest(output, side.keys, side.widths)
        del output
    return found


def _number_of_steps(job: Job, side: Side, inputs: Any, rank_info: RankInfo, warming: float) -> int:
    """As many as were asked for, or as fit into the time, and the same on every rank. After steps of ``warming`` ms."""
    slowest = _slowest_ms(side, inputs, rank_info)
    steps_to_warm = int(warming / slowest)
    if steps_to_warm:
        for _ in range(steps_to_warm):
            side.step(inputs)
        slowest = _slowest_ms(side, inputs, rank_info)
    return max(_FEWEST, min(job.steps, int(job.seconds * 1e3 / slowest)))


def _slowest_ms(side: Side, inputs: Any, rank_info: RankInfo) -> float:
    """Of one step, on the slowest rank."""
    dist.barrier()
    (took,) = time_steps(side.step, [inputs], rank_info.device)
    slowest = torch.tensor(took, device=rank_info.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(float(slowest), 1e-3)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _peak_bytes(rank_info: RankInfo) -> int:
    if rank_info.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
