"""Calibrates this machine and checks it: steps that were not fitted, and the order of ten plans of one model.

    python benchmarks/planner/accuracy.py

Nothing else may run meanwhile. See README.md for results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

from plans_in_turn import measure_plans
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.layout.presets import detect_machine
from shardrec.planner import Profile, TableLoad, plan_tables
from shardrec.planner.cost import COMPONENTS, CostModel
from shardrec.planner.price import overhead_ms, predicted_ms, priced_plan
from shardrec.trainer import calibrate
from shardrec.trainer.calibrate import Measured, Workload

BATCH = 2048


def model_tables() -> dict[str, TableLoad]:
    """Sixteen tables: few of them do most of the work."""
    rng = Random(3)
    return {
        f"t{number}": TableLoad(
            num_embeddings=rows,
            embedding_dim=dim,
            poolings=(pooling,),
            row_state_bytes=4,
            whole_row_state=True,
        )
        for number, (rows, dim, pooling) in enumerate(
            [
                (400_000, 64, 20.0),
                (200_000, 128, 4.0),
                (100_000, 32, 10.0),
                *(
                    (rng.choice([1000, 10_000, 50_000]), rng.choice([16, 32, 64]), rng.choice([1.0, 1.0, 4.0]))
                    for _ in range(13)
                ),
            ]
        )
    }


def plans_of(tables: Mapping[str, TableLoad], world: int, profile: Profile, count: int = 10) -> dict[str, ShardingPlan]:
    """The planner's, some by rule, and others drawn with a seed."""
    topology, rng = Topology(ranks_per_host=world), Random(11)
    ranks = range(world)

    def made(kinds: Mapping[str, str], spread: bool = True) -> ShardingPlan:
        layouts: list[TableLayout] = []
        for index, (name, load) in enumerate(tables.items()):
            shape = (load.num_embeddings, load.embedding_dim)
            match kinds[name]:
                case "row_wise":
                    layouts.append(cuts.row_wise(name, *shape, ranks=ranks))
                case "column_wise":
                    layouts.append(cuts.column_wise(name, *shape, ranks=ranks))
                case "data_parallel" if load.num_embeddings <= 10_000:
                    layouts.append(cuts.data_parallel(name, *shape))
                case _:
                    rank = index % world if spread else rng.randrange(world)
                    layouts.append(cuts.table_wise(name, *shape, rank=rank))
        return ShardingPlan(topology=topology, tables=tuple(layouts))

    found = {"planned": plan_tables(tables, topology, batch_size=BATCH, profile=profile)}
    for cut in ("table_wise", "row_wise", "column_wise"):
        found[f"all {cut}"] = made(dict.fromkeys(tables, cut))
    found["all on rank 0"] = ShardingPlan(
        topology=topology,
        tables=tuple(
            cuts.table_wise(name, load.num_embeddings, load.embedding_dim, rank=0) for name, load in tables.items()
        ),
    )
    while len(found) < count:
        kinds = {name: rng.choice(["table_wise", "row_wise", "column_wise", "data_parallel"]) for name in tables}
        found[f"drawn {len(found)}"] = made(kinds, spread=False)
    return found


def split(measured: Measured, count: int) -> tuple[Measured, Measured]:
    """The first ``count`` workloads, with the bare collectives, and the others."""
    return (
        replace(measured, steps=measured.steps[:count], forward=measured.forward[:count]),
        replace(measured, steps=measured.steps[count:], forward=measured.forward[count:], all_to_all=(), all_reduce=()),
    )


def parts(profile: Profile, workload: Workload, world: int) -> str:
    """What a predicted step consists of: where an error must come from."""
    model = CostModel(profile=profile, topology=Topology(ranks_per_host=world), batch_size=workload.batch)
    tables, plan = calibrate.table_loads(workload), calibrate.step_plan(workload, world)
    ranks, _ = priced_plan(model, tables, plan)
    slowest = max(ranks, key=lambda cost: cost.ms)
    shares = {**dict(zip(COMPONENTS, slowest.times, strict=True)), "fixed": overhead_ms(model, tables, plan)}
    return ", ".join(f"{name} {ms:.2f}" for name, ms in shares.items() if ms >= 0.01)


def main() -> None:
    """Calibrate, check, compare. Write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workloads", type=int, default=60, help="fitted, on one rank and on all")
    parser.add_argument("--checks", type=int, default=20, help="not fitted")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=8, help="in which the ten plans take turns")
    parser.add_argument("--out", type=Path, default=Path("runs/planner_accuracy.json"))
    options = parser.parse_args()
    begin = time.perf_counter()
    base = Profile.of_machine(detect_machine(options.ranks, device=options.device))
    fitted = calibrate.workloads(options.workloads, options.ranks, 0)
    others = [each for each in calibrate.workloads(4 * options.checks, options.ranks, 1) if each not in fitted]
    others = others[: options.checks]
    # In the same processes and passes: what the machine does differently minutes later is no error of the model.
    both = calibrate.measure([*fitted, *others], options.ranks, device=options.device, repeats=options.repeats)
    known, measured = split(both, len(fitted))
    runs = [(fitted, known)]
    if options.ranks > 1:
        alone = calibrate.workloads(options.workloads, 1, 0)
        runs.insert(0, (alone, calibrate.measure(alone, 1, device=options.device, repeats=options.repeats)))
    profile = calibrate.fit(base, runs, name="calibrated", source="benchmarks/planner/accuracy.py")
    errors = calibrate.relative_errors(profile, others, measured)

    tables = model_tables()
    plans = plans_of(tables, options.ranks, profile)
    model = CostModel(profile=profile, topology=Topology(ranks_per_host=options.ranks), batch_size=BATCH)
    predicted = {name: predicted_ms(model, tables, plan) for name, plan in plans.items()}
    rounds = measure_plans(tables, list(plans.values()), batch_size=BATCH, device=options.device, rounds=options.rounds)
    times = {name: median(each) for name, each in zip(plans, rounds, strict=True)}
    tau = float(kendalltau([predicted[name] for name in plans], [times[name] for name in plans]).statistic)

    console, table = Console(width=120), Table("plan", "predicted, ms", "measured, ms")
    for name in sorted(plans, key=times.__getitem__):
        table.add_row(name, f"{predicted[name]:.2f}", f"{times[name]:.2f}")
    console.print(table)
    for each, error, took in sorted(zip(others, errors, measured.steps, strict=True), key=lambda one: -abs(one[1])):
        console.print(f"{error:+7.1%} of {took:8.2f} ms  {each}", highlight=False)
        console.print(" " * 21 + parts(profile, each, options.ranks), highlight=False)
    for cut in calibrate.CUTS:
        of_cut = [error for each, error in zip(others, errors, strict=True) if each.cut == cut]
        if of_cut:
            console.print(f"{cut}: {min(of_cut):+.1%} to {max(of_cut):+.1%}, median {median(of_cut):+.1%}")
    sizes = [abs(error) for error in errors]
    fit = profile.errors
    console.print(f"fit: median {fit['median_percent']}%, worst {fit['worst_percent']}%, {fit['times']:.0f} times")
    console.print(f"not fitted: median {median(sizes):.1%}, worst {max(sizes):.1%}, {len(sizes)} steps")
    console.print(f"order of {len(plans)} plans: Kendall tau {tau:.2f}; {time.perf_counter() - begin:.0f} s in all")
    found = {
        "profile": profile.to_json(),
        "errors": errors,
        "median_error": median(sizes),
        "worst_error": max(sizes),
        "predicted_ms": predicted,
        "measured_ms": times,
        "kendall_tau": tau,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
