"""``shardrec calibrate``: time steps and collectives on this machine and fit the planner's cost model to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from shardrec import ConfigError
from shardrec.trainer.cli.flags import Debug, Device
from shardrec.trainer.console import console, working

if TYPE_CHECKING:
    from shardrec.planner import Profile, TableLoad

__all__ = ["calibrate_command"]


def calibrate_command(
    out: Annotated[Path, typer.Argument(help="JSON file to write the profile to.")] = Path("profile.json"),
    ranks: Annotated[int, typer.Option(help="Ranks to start here.", min=1)] = 2,
    device: Annotated[Device, typer.Option(help="Device of the ranks.")] = "cpu",
    workloads: Annotated[int, typer.Option(help="Different steps to time, on one rank and on all.", min=1)] = 60,
    repeats: Annotated[int, typer.Option(help="Least repetitions of a workload, in four passes.", min=1)] = 7,
    checks: Annotated[int, typer.Option(help="Workloads left out of the fit, to compare with.", min=0)] = 8,
    seed: Annotated[int, typer.Option(help="Seed that draws the workloads.")] = 0,
    plans: Annotated[
        Path | None, typer.Option(help="File of tables: time the best few plans for them.", metavar="TABLES")
    ] = None,
    count: Annotated[int, typer.Option(help="Most plans to time.", min=1)] = 4,
    batch_size: Annotated[int, typer.Option(help="Samples per rank in a step of the plans.", min=1)] = 2048,
    save: Annotated[Path | None, typer.Option(help="Write the fastest plan to this JSON file.")] = None,
    debug: Debug = False,
) -> None:
    """Measure this machine for the planner.

    Times lookup, update and exchange over rows, columns, pooling, batch, dtype and cut on ranks of this machine, fits
    the cost model's coefficients, and writes them with their fit errors to a JSON file for shardrec plan --profile and
    shardrec.plan(profile=).

    With --plans TABLES, a file as for shardrec plan, it then makes a few different plans for these tables, times them
    in turn, and keeps the fastest with --save. An existing OUT is used unchanged.

    Example: shardrec calibrate profile.json --ranks 2 --plans tables.csv --save plan.json

    """
    from shardrec.planner import Profile
    from shardrec.trainer import calibrate
    from shardrec.trainer.cli.plan import check_outputs, read_tables

    fewest = calibrate.fewest_workloads(len({1, ranks}))
    if workloads < fewest:
        raise ConfigError(f"--workloads is {workloads}: give at least {fewest}, which determine the coefficients")
    check_outputs({"OUT": out, "--save": save})
    if save is not None and plans is None:
        raise ConfigError("--save is for the fastest plan. Give the tables to plan with --plans")
    loads = None if plans is None else read_tables(plans)
    if loads is not None and out.exists():
        profile = Profile.load(out)
        typer.echo(f"using {out}, {profile.source}")
    else:
        profile = _calibrated(out, ranks, device, workloads, repeats, checks, seed)
    if loads is not None:
        _keep_fastest(loads, profile, ranks, device, batch_size, count, save)


def _calibrated(out: Path, ranks: int, device: str, workloads: int, repeats: int, checks: int, seed: int) -> Profile:
    from shardrec.layout import detect_machine
    from shardrec.planner import Profile
    from shardrec.trainer import calibrate

    worlds = sorted({1, ranks})
    base = Profile.of_machine(detect_machine(ranks, device=device))
    runs = []
    for world in worlds:
        drawn = calibrate.workloads(workloads, world, seed)
        typer.echo(f"timing {len(drawn)} workloads on {world} rank{'s' * (world > 1)}")
        with working("timing"):
            runs.append((drawn, calibrate.measure(drawn, world, device=device, repeats=repeats)))
    source = f"measured on {ranks} {device} rank{'s' * (ranks > 1)}, {sum(len(w) for w, _ in runs)} workloads"
    fitted = calibrate.fit(base, runs, name=f"calibrated {device}", source=source)
    fitted.save(out)
    for name, value in fitted.to_json().items():
        if isinstance(value, float):
            typer.echo(f"  {name:>22} {value:.4g}")
    typer.echo(f"fit: median error {fitted.errors['median_percent']}%, worst {fitted.errors['worst_percent']}%")
    if checks:
        others = [each for each in calibrate.workloads(3 * checks, ranks, seed + 1) if each not in runs[-1][0]]
        with working(f"timing {checks} workloads that were left out"):
            measured = calibrate.measure(others[:checks], ranks, device=device, repeats=repeats)
        errors = [abs(error) for error in calibrate.relative_errors(fitted, others[:checks], measured)]
        typer.echo(
            f"check: {len(errors)} workloads that were left out: median error {median(errors):.1%}, worst "
            f"{max(errors):.1%}"
        )
    typer.echo(f"wrote {out}")
    return fitted


def _keep_fastest(
    tables: Mapping[str, TableLoad],
    profile: Profile,
    ranks: int,
    device: str,
    batch_size: int,
    count: int,
    save: Path | None,
) -> None:
    from rich.table import Table

    from shardrec import Topology
    from shardrec.layout import detect_machine
    from shardrec.trainer import calibrate

    topology = Topology(ranks_per_host=ranks, machine=detect_machine(ranks, device=device))
    with working(f"planning {len(tables)} tables"):
        plans = calibrate.different_plans(tables, topology, batch_size=batch_size, profile=profile, count=count)
    typer.echo(f"timing {len(plans)} plan{'s' * (len(plans) > 1)} of {len(tables)} tables")
    with working("timing"):
        timed = calibrate.time_plans(tables, plans, batch_size=batch_size, profile=profile, device=device)
    shown = Table("cuts", "predicted, ms", "measured, ms", "to the planner's own")
    for each in timed:
        cuts = Counter(layout.cut.replace("_", "-") for layout in each.plan.tables)
        shown.add_row(
            ", ".join(f"{number} {cut}" for cut, number in cuts.items()),
            f"{each.predicted_ms:,.3f}",
            f"{median(each.measured_ms):,.3f}",
            f"{each.ratio:.3f}",
        )
    console().print(shown)
    if save is not None:
        timed[0].plan.save(save)
        typer.echo(f"wrote the fastest to {save}")
