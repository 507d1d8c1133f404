"""What a step costs the host: Python calls, operators and processor time, beside TorchRec's in the same processes.

``python -m benchmarks.host.main``

Both sides live in the same processes and take turns, A B B A, on the same batches. A rank has one thread. Processor
time is that of a rank's process, with all of its threads; of several ranks, their mean. Counts are those of
``benchmarks/harness/host_work.py``: of several ranks, the most.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from benchmarks.harness.host_work import HostWork, count_steps, largest
from benchmarks.harness.timing.case import Case, Job
from benchmarks.harness.timing.inputs import Batch, draw_batches
from benchmarks.harness.timing.plans import case_plan
from benchmarks.harness.timing.processes import FreshProcesses
from benchmarks.harness.timing.sides.sharded import ShardrecSide, TorchRecSide
from shardrec.launch.ranks import RankInfo

SIDES: dict[str, type[ShardrecSide | TorchRecSide]] = {"shardrec": ShardrecSide, "torchrec": TorchRecSide}
OWN = {
    "shardrec": [f"{Path(shardrec.__file__).parent}/"],
    "torchrec": ["/site-packages/torchrec/", "/site-packages/fbgemm_gpu/"],
}
"""Whose calls count as a side's own: its package's, and of TorchRec's also those of the kernels' modules."""

TASK = "benchmarks.host.main:measure"
PARTS = ("forward", "step")
WARM_UP, COUNTED = 20, 6

Work = tuple[HostWork, HostWork]
Forward = Callable[[KeyedJaggedTensor], Tensor]


class Measured(NamedTuple):
    """Of a number of ranks and a batch size.

    Args:
        work: by side, of a forward and of its backward.
        times: by side and part, microseconds of processor time of each round.
    """

    work: dict[str, Work]
    times: dict[tuple[str, str], list[float]]


def measure(options: Mapping[str, Any], rank_info: RankInfo) -> Measured:
    """Measure both sides as one of the ranks.

    Args:
        options: ``batch_size``, and the command's ``workload``, ``rounds`` and ``steps``.
        rank_info: this rank, which is in a process group.
    """
    warnings.simplefilter("ignore")
    case = Case(
        workload=options["workload"],
        layout="table_wise",
        batch_size=options["batch_size"],
        ids="zipf",
        ranks=rank_info.world_size,
    )
    plan = case_plan(case).to_json()
    batches = draw_batches(case, rank_info.rank, rank_info.device, seed=0)
    forwards = {
        name: _forward(side(Job(case=case, side=name, plan=plan, inputs=""), rank_info)) for name, side in SIDES.items()
    }
    gradient = torch.ones(case.batch_size, sum(table.dim for table in case.tables))
    work = {}
    for name, forward in forwards.items():
        for features in _fresh(batches, WARM_UP):
            forward(features).backward(gradient)
        work[name] = count_steps(forward, list(_fresh(batches, COUNTED)), gradient, OWN[name])
    times = _times(forwards, batches, gradient, options["rounds"], options["steps"])
    of_ranks: list[Any] = [None] * rank_info.world_size
    dist.all_gather_object(of_ranks, (work, times))
    works, rounds = zip(*of_ranks, strict=True)
    return Measured(
        {name: (largest(work[name][0] for work in works), largest(work[name][1] for work in works)) for name in SIDES},
        {key: [mean(of_round) for of_round in zip(*(one[key] for one in rounds), strict=True)] for key in times},
    )


def _forward(side: ShardrecSide | TorchRecSide) -> Forward:
    model = side.model
    return lambda features: model(features).values()


def _fresh(batches: Sequence[Batch], steps: int) -> Iterator[KeyedJaggedTensor]:
    """A new object for each step, in which nothing is cached."""
    return (batches[number % len(batches)].features() for number in range(steps))


def _times(
    forwards: dict[str, Forward], batches: Sequence[Batch], gradient: Tensor, rounds: int, steps: int
) -> dict[tuple[str, str], list[float]]:
    """By side and part, microseconds of each round."""
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(rounds):
        gc.collect()
        gc.disable()
        for name in sorted(forwards, reverse=bool(turn % 2)):
            forward = forwards[name]
            for part in PARTS:
                inputs = list(_fresh(batches, steps))
                dist.barrier()
                began = time.process_time()
                for features in inputs:
                    values = forward(features)
                    if part == "step":
                        values.backward(gradient)
                times[name, part].append((time.process_time() - began) / steps * 1e6)
        gc.enable()
    return dict(times)


def show_counts(measured: dict[int, Measured]) -> None:
    """A row for each number of ranks, part and side."""
    print("| ranks | | | calls | own | files | moves | operators |")
    print("|---:|---|---|---:|---:|---:|---:|---:|")
    for ranks, found in measured.items():
        for number, part in enumerate(("forward", "backward")):
            for side, work in found.work.items():
                cells = " | ".join(f"{value:,}" for value in work[number].counts.values())
                print(f"| {ranks} | {part} | {side} | {cells} |")


def show_times(measured: dict[tuple[int, int], Measured]) -> None:
    """A row for each number of ranks, batch size and part."""
    print("| ranks | batch | | shardrec, µs | torchrec, µs | torchrec / shardrec |")
    print("|---:|---:|---|---|---|---|")
    for (ranks, batch), found in measured.items():
        for part in PARTS:
            ours, theirs = found.times["shardrec", part], found.times["torchrec", part]
            ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
            cells = [f"{min(times):,.0f} ({_quartiles(times, ',.0f')})" for times in (ours, theirs)]
            cells.append(f"{min(theirs) / min(ours):.1f} ({_quartiles(ratios, '.1f')})")
            print(f"| {ranks} | {batch:,} | {part} | {' | '.join(cells)} |")


def _quartiles(values: Sequence[float], form: str) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{low:{form}} to {high:{form}}"


def main() -> None:
    """Start the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 512], help="samples of a rank")
    parser.add_argument("--workload", default="26x100000x64", help="tables: NUMBERxROWSxDIM, or a preset")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side, 2 at least")
    parser.add_argument("--steps", type=int, default=30, help="of a turn")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    measured: dict[tuple[int, int], Measured] = {}
    with FreshProcesses(threads=1, debug=True) as processes:
        for ranks, batch in itertools.product(options.ranks, options.batch):
            job = {"batch_size": batch, **vars(options)}
            measured[ranks, batch] = processes.run(TASK, job, ranks=ranks, malloc="default")
    print(f"load after: {os.getloadavg()[0]:.1f}\n")
    show_counts({ranks: found for (ranks, batch), found in measured.items() if batch == options.batch[0]})
    print()
    show_times(measured)


if __name__ == "__main__":
    main()
