"""``shardrec train``, whose flags are the fields of :class:`~shardrec.trainer.run.TrainConfig`; ``sweep``, runs with
other values of some; and ``convert``, which makes Parquet of files of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shardrec import ConfigError
from shardrec.files import os_fault
from shardrec.trainer.cli.ending import SAVED, ended_after_saving, ended_by_user
from shardrec.trainer.cli.flags import Debug, flag_parameters, parameter
from shardrec.trainer.console import console, working
from shardrec.trainer.run import RunStopped, TrainConfig, load_config, train


def train_command() -> Callable[..., None]:
    """The function behind the command. Its parameters are made from the config's fields, which hold the help texts."""

    def command(**arguments: Any) -> None:
        """Train a sharded model on columns of files, or on generated clicks.

        Without --data the rows are generated, and the best possible AUC is known. Flags override the YAML file CONFIG,
        whose keys are the flags with underscores. The results are in --out: plan.json, metrics.json, curve.png,
        config.yaml and checkpoints/.

        Example: shardrec train --nproc 2 --data 'day_*.parquet' --features features.yaml --out runs/clicks

        """
        path, debug, resume = arguments.pop("config"), arguments.pop("debug"), arguments.pop("resume")
        flags = {name: value for name, value in arguments.items() if value not in (None, [])}
        try:
            train(load_config(path, flags, resume=resume), resume=resume, debug=debug)
        except RunStopped as stopped:
            ended_after_saving(stopped)
            raise typer.Exit(SAVED) from None
        except KeyboardInterrupt as stopped:
            # Caught before Typer, which would say nothing at all.
            ended_by_user(str(stopped))
            raise typer.Exit(130) from None

    parameters = [parameter("config", Annotated[Path | None, typer.Argument(help="YAML file of options.")], None)]
    parameters += flag_parameters(TrainConfig)
    resume = typer.Option(
        "--resume",
        help="Continue from the last checkpoint in --out, with the run's options. Without one, begin with them.",
        rich_help_panel="Output",
    )
    parameters.append(parameter("resume", Annotated[bool, resume], False))
    debug = typer.Option("--debug", help="Show tracebacks.", rich_help_panel="Output")
    parameters.append(parameter("debug", Annotated[bool, debug], False))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take attributes
    command.__annotations__ = {command_parameter.name: command_parameter.annotation for command_parameter in parameters}
    return command


def sweep_command(
    config: Annotated[Path, typer.Argument(help="YAML file of options of shardrec train.", metavar="CONFIG")],
    out: Annotated[Path, typer.Option(help="Folder for the runs and their results.", metavar="DIR")],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of an option, or of model_args.NAME; after MODEL:, for that model alone. Can be repeated.",
            metavar="OPTION=VALUE,...",
        ),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option("--range", help="Numbers of an option to draw from. Can be repeated.", metavar="OPTION=LOW:HIGH"),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Settings to draw at random (default: all combinations)", min=1)
    ] = None,
    halving: Annotated[
        bool,
        typer.Option("--halving", help="Train all settings for a ninth of the epochs, and the best third for more."),
    ] = False,
    seeds: Annotated[int, typer.Option(help="Runs of a setting, with consecutive seeds.", min=1)] = 3,
    monitor: Annotated[
        str | None, typer.Option(help="Metric of the held-out rows to compare by (default: the file's)")
    ] = None,
    final: Annotated[bool, typer.Option("--final", help="Read the test files, for the best setting.")] = False,
    debug: Debug = False,
) -> None:
    """Train with combinations of some options' values, all or random ones, and compare them on held-out rows.

    The test files are read with --final alone, for the best setting, when no more settings will be tried. Run the same
    command to continue a stopped sweep. The results are in sweep.json and sweep.png.

    Example: shardrec sweep run.yaml --range lr=1e-4:1e-2 --grid model=dcn,deepfm --trials 20 --halving --out runs/sweep

    """
    from shardrec.trainer.run.sweep import parse_space, run_sweep, sweep_table

    options = load_config(config)
    if monitor is not None and options.feed is None:  # the sweep says more about it
        options = options.changed(monitor=monitor)
    try:
        sweep = run_sweep(
            options,
            parse_space(grid or (), ranges or ()),
            seeds=seeds,
            out=out,
            trials=trials,
            halving=halving,
            final=final,
            debug=debug,
        )
    except KeyboardInterrupt as stopped:
        ended_by_user()
        typer.echo(f"shardrec: continue with the same command. Finished runs in {out} are kept", err=True)
        raise typer.Exit(SAVED if isinstance(stopped, RunStopped) else 130) from None
    console().print(sweep_table(sweep))
    if not sweep.test:
        why = "the file of options names no test files" if options.data.test is None else "not tested without --final"
        typer.echo(f"{why}: the best setting's metric is that which chose it")
    typer.echo(f"results in {out}: sweep.json, sweep.png")


def convert_command(
    data: Annotated[
        list[str], typer.Argument(help="Files of rows, as shardrec train --data takes them.", metavar="FILES")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the Parquet files, one for each file.", metavar="DIR")],
    features: Annotated[
        Path | None, typer.Option(help="YAML file that describes the columns (default: those of Criteo's files)")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Column to keep beside the features' columns. Can be repeated.")
    ] = None,
    group_rows: Annotated[int, typer.Option(help="Rows of a row group.", min=1)] = 65_536,
    debug: Debug = False,
) -> None:
    """Write the columns of files as Parquet, which ranks read by row groups.

    Training does the same with files of other formats, in the run's folder. Memory is bounded, and pages have
    checksums. Values are unchanged, so rows train bit-identically.

    Example: shardrec convert 'day_*.csv.gz' --features spec.yaml --out parquet/

    """
    from shardrec.trainer.data import criteo_spec, load_spec
    from shardrec.trainer.data.convert import convert
    from shardrec.trainer.data.urls import files_of, path_of

    spec = criteo_spec() if features is None else load_spec(features)
    sources = [name for pattern in data for name in files_of(pattern)]
    targets = [out / f"{Path(path_of(source)).name.split('.')[0]}.parquet" for source in sources]
    for target in targets:
        if target.exists() or targets.count(target) > 1:
            raise ConfigError(f"out (--out): {target} would be written over: give another folder, or other names")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            with working(f"converting {source}", unit="bytes") as progress:
                rows = convert(source, spec, target, columns=column or (), group_rows=group_rows, progress=progress)
            typer.echo(f"{target}: {rows:,} rows")
    except OSError as error:
        raise ConfigError(f"out (--out) is {str(out)!r}: {os_fault(error)}. Give a folder to write to") from error
