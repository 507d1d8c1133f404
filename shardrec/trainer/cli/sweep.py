"""``shardrec sweep``: the runs of a grid, their table and the test of the best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardrec.trainer.cli.ending import SAVED, ended_by_user
from shardrec.trainer.cli.flags import Debug
from shardrec.trainer.console import console
from shardrec.trainer.run import RunStopped, load_config

__all__ = ["sweep_command"]


def sweep_command(
    config: Annotated[Path, typer.Argument(help="YAML file of options of shardrec train.", metavar="CONFIG")],
    out: Annotated[Path, typer.Option(help="Folder for the runs and their results.", metavar="DIR")],
    grid: Annotated[
        list[str],
        typer.Option(help="Values of an option, or of model_args.NAME; can be repeated.", metavar="OPTION=VALUE,..."),
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each setting, with as many seeds.", min=1)] = 3,
    monitor: Annotated[
        str | None, typer.Option(help="Metric of the held-out rows to compare by (default: the file's)")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train with each combination of some options' values, compare them on held-out rows, and test the best.

    The test files are read once, for the best setting. The same command goes on with a sweep that was stopped. The
    results go to sweep.json and sweep.png.
    """
    from shardrec.trainer.run.grid_search import parse_grid, run_sweep, sweep_table

    options = load_config(config)
    if monitor is not None and options.feed is None:  # of which the sweep says more
        options = options.changed(monitor=monitor)
    try:
        sweep = run_sweep(options, parse_grid(grid), seeds=seeds, out=out, debug=debug)
    except KeyboardInterrupt as stopped:
        ended_by_user()
        typer.echo(f"shardrec: go on with the same command; finished runs in {out} are kept", err=True)
        raise typer.Exit(SAVED if isinstance(stopped, RunStopped) else 130) from None
    console().print(sweep_table(sweep))
    if not sweep.test:
        typer.echo("the file of options names no test files: the best setting's metric is that which chose it")
    typer.echo(f"results in {out}: sweep.json, sweep.png")
