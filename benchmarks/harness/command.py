"""``shardrec bench``: a flag for each field of :class:`~benchmarks.harness.timing.TimingConfig` and, with ``--bytes``,
of :class:`~benchmarks.harness.BenchConfig`. :mod:`shardrec.trainer.cli.app` finds it in the checkout."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from benchmarks.harness import BenchConfig, bench
from benchmarks.harness.timing import TimingConfig, time_steps
from shardrec.errors import ConfigError
from shardrec.trainer.cli.ending import ended_by_user
from shardrec.trainer.cli.flags import flag_parameters, parameter
from shardrec.trainer.console import console
from shardrec.trainer.run.options import Options, flag, together

if TYPE_CHECKING:
    from benchmarks.harness.report import ByteReport
    from benchmarks.harness.timing.report import TimingReport

__all__ = ["app"]

_TABLE_WIDTH = 200
_HELP = (
    "Time sharded steps beside TorchRec's, or count the bytes that they send.\n\n"
    "Without --bytes, the sides take turns on the same cases, each turn in new processes. Each step's time is shown "
    "beside the least possible time, with geometric means of the ratios, and written to --out. Exits with 1 if a "
    "case could not be timed.\n\n"
    "With --bytes, counts what a step sends and compares it with the closed formula (docs/performance.md). Exits "
    "with 1 if a count differs.\n\n"
    "Example: shardrec bench --layout row_wise --batch 512,4096 --mode train"
)
_OUTPUT = "Output"
_BYTES = typer.Option("--bytes", help="Count bytes sent per step, by exchange and rank, instead of timing.")
_QUICK = typer.Option("--quick", help="The same as --preset quick --rounds 1.", rich_help_panel="What to time")
_RESUME = typer.Option("--resume", help="Continue from the timings in --out.", rich_help_panel="How to time it")
_JSON = typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=_OUTPUT)
_DEBUG = typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT)


def _command() -> Callable[..., None]:
    """The function behind the command. Its parameters are made from the configs' fields, which hold the help texts."""

    def command(**given: Any) -> None:
        switches = {name: given.pop(name) for name in ("bytes", "quick", "resume", "json", "debug")}
        flags = {name: value for name, value in given.items() if value not in (None, [])}
        try:
            failed = _count(flags, switches) if switches["bytes"] else _time(flags, switches)
        except KeyboardInterrupt:
            ended_by_user()
            raise typer.Exit(130) from None
        if failed:
            raise typer.Exit(1)

    parameters = {one.name: one for one in flag_parameters(BenchConfig)}
    parameters = {one.name: one for one in flag_parameters(TimingConfig)} | {
        name: one for name, one in parameters.items() if name not in TimingConfig.model_fields
    }
    switches = [
        parameter("bytes", Annotated[bool, _BYTES], False),
        parameter("quick", Annotated[bool, _QUICK], False),
        *parameters.values(),
        parameter("resume", Annotated[bool, _RESUME], False),
        parameter("json", Annotated[bool, _JSON], False),
        parameter("debug", Annotated[bool, _DEBUG], False),
    ]
    command.__signature__ = inspect.Signature(switches)  # type: ignore[attr-defined]  # functions take attributes
    command.__annotations__ = {one.name: one.annotation for one in switches}
    command.__doc__ = _HELP
    return command


def _refuse_others(flags: Mapping[str, Any], config: type[Options], remedy: str) -> None:
    """Raise for flags that only the other half of the command has."""
    others = [flag(name) for name in flags if name not in config.model_fields]
    if others:
        raise ConfigError(together([f"{name} is given and {remedy}" for name in others]))


def _count(flags: Mapping[str, Any], switches: Mapping[str, bool]) -> bool:
    """Count bytes. Whether any differ."""
    _refuse_others(flags, BenchConfig, "--bytes does not time anything: leave it out, or --bytes")
    # Of a list of the timings' only one value makes sense here. The config says which there are.
    lists = {name for name, field in BenchConfig.model_fields.items() if get_origin(field.annotation) is tuple}
    values: dict[str, Any] = {
        name: ",".join(value) if isinstance(value, list) and name not in lists else value
        for name, value in flags.items()
    }
    report = bench(BenchConfig(**values), debug=switches["debug"])
    if report is None:
        return False
    _show_bytes(report, as_json=switches["json"])
    return bool(report.mismatches)


def _time(flags: Mapping[str, Any], switches: Mapping[str, bool]) -> bool:
    """Time the cases. Whether any could not be."""
    _refuse_others(flags, TimingConfig, "it is about counting bytes: give --bytes, too, or leave it out")
    values = {**({"preset": "quick", "rounds": 1} if switches["quick"] else {}), **flags}
    config = TimingConfig(**values)
    out = console(_TABLE_WIDTH, stderr=True)

    def tell(line: str) -> None:
        out.print(line, highlight=False, soft_wrap=True)

    report = time_steps(config, resume=switches["resume"], debug=switches["debug"], tell=tell)
    if report is None:
        return False
    _show_timings(report, as_json=switches["json"])
    return bool(report.failed)


def _show_bytes(report: ByteReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
        return
    out = console()
    out.print(report.by_exchange())
    out.print(report.by_rank())


def _show_timings(report: TimingReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
        return
    from benchmarks.harness.timing.tables import report_tables

    out = console(_TABLE_WIDTH)
    for table in report_tables(report):
        out.print(table)
    typer.echo(f"wrote {report.options['out']}/timings.json and timings.png")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(_command())
