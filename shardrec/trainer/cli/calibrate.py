"""``shardrec calibrate``: time steps and collectives on this machine and fit the planner's cost model to them."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from shardrec import ConfigError
from shardrec.trainer.cli.flags import Debug, Device
from shardrec.trainer.console import working


def calibrate_command(
    out: Annotated[Path, typer.Argument(help="JSON file to write the profile to.")] = Path("profile.json"),
    ranks: Annotated[int, typer.Option(help="Ranks to start here.", min=1)] = 2,
    device: Annotated[Device, typer.Option(help="Device of the ranks.")] = "cpu",
    workloads: Annotated[int, typer.Option(help="Different steps to time, on one rank and on all.", min=1)] = 60,
    repeats: Annotated[int, typer.Option(help="Least repetitions of a workload, in four passes.", min=1)] = 7,
    checks: Annotated[int, typer.Option(help="Workloads left out of the fit, to compare with.", min=0)] = 8,
    seed: Annotated[int, typer.Option(help="Seed that draws the workloads.")] = 0,
    debug: Debug = False,
) -> None:
    """Measure this machine for the planner.

    Times lookup, update and exchange over rows, columns, pooling, batch, dtype and cut on ranks of this machine, fits
    the cost model's coefficients, and writes them with their fit errors to a JSON file for shardrec plan --profile and
    shardrec.plan(profile=).

    Example: shardrec calibrate profile.json --ranks 2
    """
    from shardrec.layout import detect_machine
    from shardrec.planner import Profile
    from shardrec.trainer import calibrate
    from shardrec.trainer.cli.plan import check_outputs

    worlds = sorted({1, ranks})
    fewest = calibrate.fewest_workloads(len(worlds))
    if workloads < fewest:
        raise ConfigError(f"--workloads is {workloads}: give at least {fewest}, which determine the coefficients")
    check_outputs({"OUT": out})
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
