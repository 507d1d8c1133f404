"""Predicted steps of DLRM-DCN v2 on 8 to 1,024 ranks. README.md has the model and its assumptions."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.scaling import Assumptions, ScalingPoint, predict
from benchmarks.harness.workload import parse_tables
from shardrec.layout import Topology
from shardrec.layout.presets import preset
from shardrec.planner import plan_tables
from shardrec.planner.cost import Profile, TableLoad
from shardrec.planner.solve import SolveLimits

FULL = 10**9  # no limit to a preset's rows


def loads(workload: str, max_rows: int) -> dict[str, TableLoad]:
    """The tables as the planner sees them: rowwise Adagrad, ids drawn evenly."""
    return {
        table.name: TableLoad(
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            poolings=(float(table.pooling),),
            row_state_bytes=4,
            whole_row_state=True,
        )
        for table in parse_tables([workload], max_rows=max_rows)
    }


def topology_of(options: argparse.Namespace, ranks: int) -> Topology:
    """A topology of ``ranks`` ranks, on full hosts."""
    local = min(ranks, options.ranks_per_host)
    return Topology(hosts=ranks // local, ranks_per_host=local, machine=preset(options.machine))


def points_of(options: argparse.Namespace) -> list[list[ScalingPoint]]:
    """For each number of ranks, a prediction for each number of copies, one copy first."""
    tables = loads(options.workload, options.max_rows)
    profile = Profile.load(options.profile) if options.profile else None
    limits = SolveLimits(seconds=options.seconds)
    assumptions = Assumptions(dense_flops=options.dense_flops, peer_us=options.peer_us, sync_every=options.sync_every)
    plans = {
        size: plan_tables(
            tables, topology_of(options, size), batch_size=options.batch_size, profile=profile, limits=limits
        )
        for size in options.ranks
    }
    return [
        [
            predict(
                tables,
                plans[size],
                batch_size=options.batch_size,
                machine=preset(options.machine),
                replicas=ranks // size,
                profile=profile,
                assumptions=assumptions,
            )
            for size in sorted(plans, reverse=True)
            if ranks % size == 0
        ]
        for ranks in options.ranks
    ]


def shown(title: str, points: list[ScalingPoint]) -> Table:
    """A line for each number of ranks."""
    table = Table(title=title)
    headings = "ranks copies work links dense all-reduce sync latency step overlapped M_samples/s efficiency gap"
    for heading in headings.split():
        table.add_column(heading.replace("_", " "), justify="right")
    first = points[0]
    for one in points:
        efficiency = one.samples_per_second / one.ranks / (first.samples_per_second / first.ranks)
        times = (one.work, one.links, one.dense, one.reduce, one.sync, one.latency, one.serial, one.overlapped)
        table.add_row(
            f"{one.ranks:,}",
            str(one.replicas),
            *(f"{ms:.2f}" for ms in times),
            f"{one.samples_per_second / 1e6:.1f}",
            f"{efficiency:.0%}",
            f"{one.gap:.1%}",
        )
    return table


def main() -> None:
    """Predict, show, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--workload", default="multi_hot", help="as in shardrec bench")
    parser.add_argument("--max-rows", type=int, default=FULL)
    parser.add_argument("--batch-size", type=int, default=8192, help="samples of each rank")
    parser.add_argument("--machine", default="h100", help="a preset")
    parser.add_argument("--profile", help="JSON file of shardrec calibrate; default: the machine's data sheet")
    parser.add_argument("--dense-flops", type=float, default=Assumptions().dense_flops)
    parser.add_argument("--peer-us", type=float, default=Assumptions().peer_us)
    parser.add_argument("--sync-every", type=int, default=Assumptions().sync_every, help="steps between averagings")
    parser.add_argument("--seconds", type=float, default=20.0, help="of search for a plan, at most")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling.json"))
    options = parser.parse_args()
    points = points_of(options)
    best = [min(of_ranks, key=lambda one: one.serial) for of_ranks in points]
    title = f"Predicted ms of a step: {options.workload}, {options.batch_size} samples a rank, {options.machine}"
    console = Console(width=140)
    console.print(shown(f"{title}, one copy of the tables", [of_ranks[0] for of_ranks in points]))
    console.print(shown(f"{title}, as many copies as is fastest", best))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = [asdict(one) for of_ranks in points for one in of_ranks]
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
