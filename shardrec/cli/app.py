"""The ``shardrec`` command: its subcommands, and how it ends."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import shardrec
from shardrec.cli.bench import BENCH_HELP, bench_command
from shardrec.cli.calibrate import CALIBRATE_HELP, calibrate_command
from shardrec.cli.doctor import doctor
from shardrec.cli.ending import ended_by_error
from shardrec.cli.plan import PLAN_HELP, plan_command
from shardrec.cli.runs import compare_command, eval_command, export_command, inspect_command, serve_command
from shardrec.cli.serve_embeddings import SERVE_HELP, serve_embeddings_command
from shardrec.cli.train import train_command
from shardrec.launch.quiet import environment_for_torch, quiet_libraries

__all__ = ["app", "main"]

app = typer.Typer(
    help="Plan, shard and train TorchRec models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardrec {shardrec.__version__}")
        raise typer.Exit


@app.callback()
def _shardrec(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plan, shard and train TorchRec models."""


app.command("train")(train_command())
app.command("eval")(eval_command)
app.command("export")(export_command)
app.command("serve")(serve_command)
app.command("inspect")(inspect_command)
app.command("compare")(compare_command)
# The harness reads the arguments, --help among them.
_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command("bench", help=BENCH_HELP, context_settings=_FORWARDED)(bench_command)
app.command("plan", help=PLAN_HELP)(plan_command)
app.command("calibrate", help=CALIBRATE_HELP)(calibrate_command)
app.command("serve-embeddings", help=SERVE_HELP)(serve_embeddings_command)
app.command("doctor")(doctor)


def main() -> None:
    """Run the command line and exit: 0 done, 1 an error (one message, no traceback), 2 a wrong flag, 75 stopped
    after saving, 130 stopped.

    With ``--debug`` among the arguments an error keeps its traceback, and the libraries below say what they like.
    """
    quiet = "--debug" not in sys.argv[1:]
    try:
        with environment_for_torch(quiet=quiet), quiet_libraries(quiet=quiet):
            app(prog_name="shardrec")
    except Exception as error:
        if not quiet:
            raise
        ended_by_error(error)
        raise SystemExit(1) from None
