"""Command-line flags made from the fields of a dataclass of options (:func:`shardrec.train.options.option`)."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any

import typer

from shardrec.train.options import flag, rule_of

__all__ = ["Debug", "flag_parameters", "parameter"]

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
"""Read by the entry point, and not by the commands that declare it for their help."""


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter of the function behind a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag_parameters(config: type[Any]) -> list[inspect.Parameter]:
    """A flag for each field, which is None (or empty, for a list) when it is not given."""
    return [_flag_parameter(field) for field in dataclasses.fields(config)]


def _flag_parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    rule, kind = rule_of(field), str(field.type)
    shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    known = f" (default: {shown})" if shown not in (None, "") else ""
    metavar = rule.metavar or ("|".join(rule.choices) if rule.choices else None)
    option = typer.Option(flag(field.name), help=rule.help + known, metavar=metavar, rich_help_panel=rule.panel)
    value: Any = str
    if kind.startswith(("int", "float")):
        value = int if kind.startswith("int") else float
    elif kind == "tuple[str, ...]":
        return parameter(field.name, Annotated[list[str] | None, option], None)
    return parameter(field.name, Annotated[value | None, option], None)
