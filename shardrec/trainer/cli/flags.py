"""Command-line flags made from the fields of a model of options (:class:`shardrec.trainer.run.options.Options`)."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from shardrec.trainer.run.options import Options, Shown, flag

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
"""Read by the entry point, and not by the commands that declare it for their help."""


Device = Literal["cpu", "cuda"]


class Command(TyperCommand):
    """A command that answers an unknown flag with the nearest one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "possibilities", None):  # the nearest first
                error.possibilities = error.possibilities[:1]  # type: ignore[attr-defined]  # just read
            raise


def parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    """A parameter of the function behind a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag_parameters(config: type[Options]) -> list[inspect.Parameter]:
    """A flag for each field, which is None (or empty, for a list) when it is not given."""
    return [_flag_parameter(name, shown) for name, shown in config.options().items()]


def _flag_parameter(name: str, shown: Shown) -> inspect.Parameter:
    default = shown.default
    text = ",".join(map(str, default)) if isinstance(default, (dict, tuple)) else default
    known = f" (default: {text})" if text not in (None, "") else ""
    option = typer.Option(flag(name), help=f"{shown.help}{known}", metavar=shown.metavar, rich_help_panel=shown.panel)
    origin, kinds = get_origin(shown.annotation), get_args(shown.annotation) or (shown.annotation,)
    if origin is dict or (origin is tuple and (kinds[0] is str or shown.choices)):
        return parameter(name, Annotated[list[str] | None, option], None)
    value = next((kind for kind in (int, float) if kind in kinds), str)
    return parameter(name, Annotated[value | None, option], None)
