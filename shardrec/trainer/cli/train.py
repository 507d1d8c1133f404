"""``shardrec train``: a flag for each field of :class:`~shardrec.trainer.run.TrainConfig`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shardrec.trainer.cli.ending import SAVED, ended_after_saving, ended_by_user
from shardrec.trainer.cli.flags import flag_parameters, parameter
from shardrec.trainer.run import RunStopped, TrainConfig, load_config, train

__all__ = ["train_command"]


def train_command() -> Callable[..., None]:
    """The function behind the command; its parameters are made from the config's fields, which hold the help texts."""

    def command(**arguments: Any) -> None:
        """Train a sharded click model and compare it with the best possible one.

        Without a data file the rows are generated, so that the best possible AUC is known. Options come from the YAML
        file CONFIG (keys as the flags, with underscores); flags go over it. The results go to a folder: plan.json,
        metrics.json, curve.png, config.yaml and checkpoints/.
        """
        path, debug, resume = arguments.pop("config"), arguments.pop("debug"), arguments.pop("resume")
        flags = {name: value for name, value in arguments.items() if value not in (None, [])}
        try:
            train(load_config(path, flags, resume=resume), resume=resume, debug=debug)
        except RunStopped as stopped:
            ended_after_saving(stopped)
            raise typer.Exit(SAVED) from None
        except KeyboardInterrupt:
            # Caught before Typer, which would say nothing at all.
            ended_by_user()
            raise typer.Exit(130) from None

    parameters = [parameter("config", Annotated[Path | None, typer.Argument(help="YAML file of options.")], None)]
    parameters += flag_parameters(TrainConfig)
    resume = typer.Option(
        "--resume",
        help="Go on from the last checkpoint in --out, with the options of that run; begin if there is none.",
        rich_help_panel="Output",
    )
    parameters.append(parameter("resume", Annotated[bool, resume], False))
    debug = typer.Option("--debug", help="Show tracebacks.", rich_help_panel="Output")
    parameters.append(parameter("debug", Annotated[bool, debug], False))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take attributes
    command.__annotations__ = {command_parameter.name: command_parameter.annotation for command_parameter in parameters}
    return command
