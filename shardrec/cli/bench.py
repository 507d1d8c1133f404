"""``shardrec bench``: a flag for each field of :class:`~shardrec.bench.BenchConfig`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardrec.bench import BenchConfig, bench
from shardrec.cli.ending import ended_by_user
from shardrec.cli.flags import flag_parameters, parameter
from shardrec.errors import ConfigError

if TYPE_CHECKING:
    from shardrec.bench.report import ByteReport

__all__ = ["bench_command"]

_LOG_WIDTH = 120
_HELP = (
    "Count the bytes that a training step sends, and compare them with the closed formula (docs/communication.md).\n\n"
    "Runs a few steps of a workload on ranks of this machine, or on torchrun's. Exits with 1 if a count is not that of "
    "the formula."
)
_BYTES = typer.Option("--bytes", help="What to measure: bytes sent per step, by exchange and rank. Required.")
_JSON = typer.Option("--json", help="Print JSON: bytes for each exchange and pair of ranks.", rich_help_panel="Output")
_DEBUG = typer.Option("--debug", help="Show tracebacks and the launcher's log.", rich_help_panel="Output")


def bench_command() -> Callable[..., None]:
    """The function behind the command; its parameters are made from the config's fields, which hold the help texts."""

    def command(**given: Any) -> None:
        counts_bytes, as_json, debug = given.pop("bytes"), given.pop("json"), given.pop("debug")
        if not counts_bytes:
            raise ConfigError("nothing to measure: give --bytes")
        try:
            flags = {name: value for name, value in given.items() if value not in (None, [])}
            report = bench(BenchConfig(**flags), debug=debug)
        except KeyboardInterrupt:
            ended_by_user()
            raise typer.Exit(130) from None
        if report is not None:
            _show(report, as_json=as_json)
            if report.mismatches:
                raise typer.Exit(1)

    parameters = [parameter("bytes", Annotated[bool, _BYTES], False), *flag_parameters(BenchConfig)]
    parameters += [parameter("json", Annotated[bool, _JSON], False), parameter("debug", Annotated[bool, _DEBUG], False)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take attributes
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = _HELP
    return command


def _show(report: ByteReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    console.print(report.by_exchange())
    console.print(report.by_rank())
