"""shardrec's planner on published table lists: its gap, and TorchRec's planner on TorchRec's own options.

See README.md for the results and how they came about.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from generate import generated
from rich.console import Console
from rich.table import Table

from shardrec.layout import Topology
from shardrec.layout.presets import preset
from shardrec.planner import Profile, SolveLimits, TableLoad
from shardrec.planner.infeasible import least_capacity
from shardrec.planner.planner import Planner
from shardrec.planner.solve import Gang, Item, Option, Problem, Solution, solve
from shardrec.trainer.cli.plan import read_tables

GIB = 2**30
GLOBAL_BATCH = 65_536


def instances(path: Path) -> list[str]:
    """The names in a file of tables, in order."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return list(dict.fromkeys(line.partition(",")[0] for line in lines))


def topology_of(ranks: int, capacity: float) -> Topology:
    """H100s, eight to a host, with so much memory."""
    machine = replace(preset("h100"), device_memory=capacity)
    return Topology(hosts=max(1, ranks // 8), ranks_per_host=min(8, ranks), machine=machine)


def own(tables: Mapping[str, TableLoad], ranks: int, limits: SolveLimits, gib: float | None = None) -> dict[str, Any]:
    """shardrec's planner, its own options and costs, at so much memory, or 80 GiB or the least it finds a plan for."""
    profile = Profile.of_machine(preset("h100"))

    def planner(limit: float) -> Planner:
        batch = max(1, GLOBAL_BATCH // ranks)
        return Planner(tables, topology_of(ranks, limit), batch_size=batch, profile=profile)

    def timed(limit: float) -> tuple[Solution | None, float, float]:
        begin, of_clock = time.process_time(), time.perf_counter()
        found = solve(planner(limit).problem(), limits)
        return found, time.perf_counter() - of_clock, time.process_time() - begin

    capacity = (80.0 if gib is None else gib) * GIB
    found, seconds, processor = timed(capacity)
    if found is None and gib is None:
        least = least_capacity(planner(capacity))
        assert least is not None, "row-wise cuts fit any table at some size of memory"
        capacity = -(-least // GIB) * float(GIB)
        found, seconds, processor = timed(capacity)
    return {
        "tables": len(tables),
        "ranks": ranks,
        "gib": capacity / GIB,
        "cost_ms": found and found.cost,
        "bound_ms": found and found.bound,
        "gap": found and found.gap,
        "seconds": seconds,
        "processor_seconds": processor,
    }


def torchrec_side(tables: Mapping[str, TableLoad], ranks: int, capacity: float) -> tuple[Any, ...]:
    """TorchRec's module, planner, sharders and priced options, and how long it took to make these."""
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.planner.types import Topology as TheirTopology
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=load.num_embeddings,
                embedding_dim=load.embedding_dim,
                feature_names=[f"{name}_{index}" for index in range(load.features)],
            )
            for name, load in tables.items()
        ],
        device=torch.device("meta"),
    )
    batch = max(1, GLOBAL_BATCH // ranks)
    constraints = {name: ParameterConstraints(pooling_factors=list(load.poolings)) for name, load in tables.items()}
    topology = TheirTopology(
        world_size=ranks,
        compute_device="cuda",
        hbm_cap=int(capacity),
        ddr_cap=2**50,
        local_world_size=min(8, ranks),
    )
    enumerator = EmbeddingEnumerator(topology=topology, batch_size=batch, constraints=constraints)
    sharders = [EmbeddingBagCollectionSharder()]
    begin = time.perf_counter()
    options = enumerator.enumerate(module, sharders)
    seconds = time.perf_counter() - begin
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch,
        enumerator=enumerator,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        stats=[],
        debug=False,
        timeout_seconds=None,
    )
    return module, planner, sharders, options, seconds


def as_problem(options: list[Any], ranks: int, capacity: float) -> Problem:
    """TorchRec's options, with its estimates, as a problem of the solver."""
    per_host = min(8, ranks)
    free = tuple((rank,) for rank in range(ranks))
    hosts = tuple(tuple(range(host * per_host, (host + 1) * per_host)) for host in range(max(1, ranks // 8)))
    fixed = (tuple(range(ranks)),)
    # Fewer items than a host has ranks: on neighbouring ones, counted round.
    turned = {
        size: tuple(tuple((*host, *host)[start : start + size]) for host in hosts for start in range(per_host))
        for size in range(1, per_host)
    }
    nothing = Item(memory=(0.0, 0.0))
    tables: dict[str, list[Option]] = {}
    for option in options:
        items = [
            Item(load=shard.perf.total, memory=(float(shard.storage.hbm), float(shard.storage.ddr)))
            for shard in option.shards
        ]
        everywhere, gangs = nothing, ()
        if option.partition_by == "uniform" and len(set(items)) == 1:
            everywhere = items[0]
        elif option.partition_by == "uniform":
            gangs = (Gang(items=tuple(items), places=fixed),)
        elif option.partition_by == "device":
            counts: dict[Item, int] = {}
            for item in items:
                counts[item] = counts.get(item, 0) + 1
            gangs = tuple(Gang(items=(item,), places=free, count=count) for item, count in counts.items())
        else:
            groups = [tuple(items[start : start + per_host]) for start in range(0, len(items), per_host)]
            gangs = tuple(Gang(items=group, places=turned.get(len(group), hosts)) for group in groups)
        label = f"{option.sharding_type} {option.compute_kernel}"
        tables.setdefault(option.name, []).append(Option(label=label, everywhere=everywhere, gangs=gangs))
    return Problem(
        ranks=ranks,
        capacity=(capacity, float(2**50)),
        tables={name: tuple(found) for name, found in tables.items()},
    )


def limited(timeout: float, planner: Any, module: Any, sharders: list[Any], ranks: int) -> tuple[float | None, float]:
    """TorchRec's plan's cost (None: none within the limit) and its seconds, in a process that is ended at the limit."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        loads, begin = [0.0] * ranks, time.process_time()
        try:
            planner.plan(module, sharders)
            for option in planner._best_plan:
                for shard in option.shards:
                    loads[shard.rank] += shard.perf.total
            send.send((max(loads), time.process_time() - begin))
        except Exception as error:  # TorchRec raises PlannerError, and others when it has nothing to show
            print(f"TorchRec: {type(error).__name__}: {str(error).splitlines()[0]}")
            send.send((None, time.process_time() - begin))

    process = context.Process(target=work)
    process.start()
    begin, spent, found = time.perf_counter(), 0.0, None
    # Processor time of the child, as for ours. The clock ends it should it sleep.
    while spent < timeout and time.perf_counter() - begin < 4 * timeout:
        if receive.poll(0.2):
            found, spent = receive.recv()
            break
        spent = _cpu_seconds(process.pid)
    process.terminate()
    process.join()
    return found, spent


def _cpu_seconds(pid: int | None) -> float:
    """Processor time of another process; 0 where the system does not say."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[11:13]
    except (OSError, IndexError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def against_torchrec(
    tables: Mapping[str, TableLoad], ranks: int, limits: SolveLimits, timeout: float
) -> dict[str, Any]:
    """Both planners on TorchRec's options and estimates."""
    capacity = 80.0 * GIB
    while True:
        module, planner, sharders, options, enumerated = torchrec_side(tables, ranks, capacity)
        begin = time.process_time()
        ours = solve(as_problem(options, ranks, capacity), limits)
        mine = time.process_time() - begin
        if ours is not None:
            break
        capacity *= 1.25
    theirs, spent = limited(timeout, planner, module, sharders, ranks)
    return {
        "tables": len(tables),
        "ranks": ranks,
        "gib": capacity / GIB,
        "enumerate_seconds": enumerated,
        "ours_ms": ours.cost,
        "bound_ms": ours.bound,
        "ours_seconds": mine,
        "theirs_ms": theirs,
        "theirs_seconds": spent,
        "theirs_ended": theirs is None,
    }


def own_generated(count: int, first: int, limits: SolveLimits) -> list[dict[str, Any]]:
    """shardrec's planner on generated problems, for which no list of its own speaks."""
    profile, rows = Profile.of_machine(preset("h100")), []
    for problem in generated(count, first):
        topology, batch = topology_of(problem.ranks, problem.capacity), max(1, GLOBAL_BATCH // problem.ranks)
        planner = Planner(problem.tables, topology, batch_size=batch, profile=profile)
        options = planner.problem()
        begin = time.process_time()
        found = solve(options, limits)
        rows.append(
            {
                "instance": problem.name,
                "tables": len(problem.tables),
                "ranks": problem.ranks,
                "gib": problem.capacity / GIB,
                "cost_ms": found and found.cost,
                "bound_ms": found and found.bound,
                "gap": found and found.gap,
                "processor_seconds": time.process_time() - begin,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def compared(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> str:
    """How the costs of two runs differ, where both have a plan: that of another version at the same limit, say."""
    old = {(row["instance"], row["ranks"]): row["cost_ms"] for row in before}
    both = [(row, old.get((row["instance"], row["ranks"]))) for row in rows]
    changes = sorted(row["cost_ms"] / cost - 1 for row, cost in both if row["cost_ms"] and cost)
    close = sum(change <= 0.01 for change in changes)
    none = sum(row["cost_ms"] is None for row in rows), sum(cost is None for cost in old.values())
    if not changes:
        return "no problem has a plan in both runs"
    return (
        f"{len(changes)} problems with a plan in both runs: cost {median(changes):+.2%} in the median, "
        f"{changes[0]:+.2%} to {changes[-1]:+.2%}, {close} at most 1% above; no plan for {none[0]}, before for "
        f"{none[1]}"
    )


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table of results."""
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "instance" else "right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    Console(width=170).print(table)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "no plan"
    if name == "gap" and isinstance(value, float):
        return f"{value:.3%}"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run what the options ask for, show it, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="?", help="CSV: instance,count,num_embeddings,embedding_dim,pooling")
    parser.add_argument("--generated", type=int, default=0, help="number of generated problems, instead of a file's")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--against", type=Path, help="JSON of an earlier run: same memory, compare costs")
    parser.add_argument("--instances", nargs="+", help="default: all of the file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 128])
    parser.add_argument("--seconds", type=float, default=10.0, help="limit of a search; times six over 1000 tables")
    parser.add_argument("--gap", type=float, default=0.005, help="stop a search at this gap")
    parser.add_argument("--peer", action="store_true", help="compare with TorchRec, on its options and costs")
    parser.add_argument("--peer-seconds", type=float, default=300.0, help="limit of TorchRec's planner")
    parser.add_argument("--out", type=Path, default=Path("runs/planner.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    if (options.tables is None) == (options.generated == 0):
        parser.error("give either a file of tables or --generated")
    rows = []
    before = [] if options.against is None else json.loads(options.against.read_text(encoding="utf-8"))
    memory = {(row["instance"], row["ranks"]): row["gib"] for row in before}
    if options.generated:
        seconds = options.seconds if options.seconds > 0 else inf
        rows = own_generated(
            options.generated, options.first, SolveLimits(gap=options.gap, effort=1000, seconds=seconds)
        )
    for name in [] if options.generated else options.instances or instances(options.tables):
        tables = read_tables(options.tables, instance=name)
        for ranks in options.ranks:
            seconds = options.seconds * (6 if len(tables) > 1000 else 1)
            limits = SolveLimits(gap=options.gap, effort=1000, seconds=seconds if seconds > 0 else inf)
            if options.peer:
                found = against_torchrec(tables, ranks, limits, options.peer_seconds)
            else:
                found = own(tables, ranks, limits, memory.get((name, ranks)))
            rows.append({"instance": name, **found})
            print(json.dumps(rows[-1]), flush=True)
    title = f"{'TorchRec and shardrec, TorchRec costs' if options.peer else 'shardrec'}; {os.cpu_count()} cores"
    show(title, rows)
    if before:
        print(compared(rows, before))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
