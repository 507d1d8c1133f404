"""``shardrec train``: a flag for each field of :class:`~shardrec.train.TrainConfig`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shardrec.cli.ending import ended_by_user
from shardrec.train import TrainConfig, load_config, train
from shardrec.train.options import flag, rule_of

__all__ = ["train_command"]

# Typer keeps the line breaks inside a paragraph, so each paragraph is one line.
_HELP = (
    "Train a sharded click model and compare it with the best possible one.\n\n"
    "Without a data file the rows are generated, so that the best possible AUC is known. Options come from the YAML "
    "file CONFIG (keys as the flags, with underscores); flags go over it. The results go to a folder: plan.json, "
    "metrics.json, curve.png, config.yaml and checkpoint/."
)


def train_command() -> Callable[..., None]:
    """The function behind the command; its parameters are made from the config's fields, which hold the help texts."""

    def command(**given: Any) -> None:
        path, debug = given.pop("config"), given.pop("debug")
        flags = {name: value for name, value in given.items() if value not in (None, [])}
        try:
            train(load_config(path, flags), debug=debug)
        except KeyboardInterrupt:
            # Caught before Typer, which would say nothing at all.
            ended_by_user()
            raise typer.Exit(130) from None

    parameters = [_parameter("config", Annotated[Path | None, typer.Argument(help="YAML file of options.")], None)]
    parameters += [_flag_parameter(field) for field in dataclasses.fields(TrainConfig)]
    debug = typer.Option("--debug", help="Show tracebacks and the launcher's log.", rich_help_panel="Output")
    parameters.append(_parameter("debug", Annotated[bool, debug], False))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take attributes
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = _HELP
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    """A flag that is None when it is not given, since the YAML file comes before the default."""
    rule, kind = rule_of(field), str(field.type)
    shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    known = f" (default: {shown})" if shown not in (None, "") else ""
    metavar = rule.metavar or ("|".join(rule.choices) if rule.choices else None)
    option = typer.Option(flag(field.name), help=rule.help + known, metavar=metavar, rich_help_panel=rule.panel)
    value: Any = str
    if kind.startswith(("int", "float")):
        value = int if kind.startswith("int") else float
    elif kind == "tuple[str, ...]":
        return _parameter(field.name, Annotated[list[str] | None, option], None)
    return _parameter(field.name, Annotated[value | None, option], None)
