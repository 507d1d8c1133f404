"""``shardrec calibrate``: time steps and collectives on this machine and fit the planner's cost model to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardrec.errors import ConfigError

__all__ = ["CALIBRATE_HELP", "calibrate_command"]

# Typer keeps the line breaks inside a paragraph, so each paragraph is one line.
CALIBRATE_HELP = (
    "Measure this machine for the planner.\n\n"
    "Times lookup, update and exchange over rows, columns, pooling, batch, dtype and cut on ranks of this machine, "
    "fits the cost model's coefficients, and writes them with their fit errors to a JSON file for shardrec plan "
    "--profile and shardrec.plan(profile=)."
)


def calibrate_command(
    out: Annotated[Path, typer.Argument(help="JSON file to write the profile to.")] = Path("profile.json"),
    ranks: Annotated[int, typer.Option(help="Ranks to start here.", min=1)] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    workloads: Annotated[int, typer.Option(help="Different steps to time, on one rank and on all.", min=1)] = 48,
    repeats: Annotated[int, typer.Option(help="Times that each is repeated, in two passes.", min=1)] = 7,
    checks: Annotated[int, typer.Option(help="Workloads left out of the fit, to compare with.", min=0)] = 8,
    seed: Annotated[int, typer.Option(help="Draws the workloads.")] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Measure this machine for the planner; see :data:`CALIBRATE_HELP`."""
    del debug  # read by the entry point
    from statistics import median

    from shardrec.layout.presets import detect_machine
    from shardrec.planner import calibrate
    from shardrec.planner.cost import Profile

    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}: give cpu or cuda")
    worlds = sorted({1, ranks})
    fewest = calibrate.fewest_workloads(len(worlds))
    if workloads < fewest:
        raise ConfigError(f"--workloads is {workloads}: give at least {fewest}, which determine the coefficients")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} to write {out.name} to; make it first")
    base = Profile.of_machine(detect_machine(ranks, device=device))
    runs = []
    for world in worlds:
        drawn = calibrate.workloads(workloads, world, seed)
        typer.echo(f"timing {len(drawn)} workloads on {world} rank{'s' * (world > 1)}")
        runs.append((drawn, calibrate.measure(drawn, world, device=device, repeats=repeats)))
    source = f"measured on {ranks} {device} rank{'s' * (ranks > 1)}, {sum(len(w) for w, _ in runs)} workloads"
    found = calibrate.fit(base, runs, name=f"calibrated {device}", source=source)
    found.save(out)
    for name, value in found.to_json().items():
        if isinstance(value, float):
            typer.echo(f"  {name:>22} {value:.4g}")
    typer.echo(f"fit: median error {found.errors['median_percent']}%, worst {found.errors['worst_percent']}%")
    if checks:
        others = [each for each in calibrate.workloads(3 * checks, ranks, seed + 1) if each not in runs[-1][0]]
        measured = calibrate.measure(others[:checks], ranks, device=device, repeats=repeats)
        errors = [abs(error) for error in calibrate.relative_errors(found, others[:checks], measured)]
        typer.echo(
            f"check: {len(errors)} workloads that were left out: median error {median(errors):.1%}, worst "
            f"{max(errors):.1%}"
        )
    typer.echo(f"wrote {out}")
