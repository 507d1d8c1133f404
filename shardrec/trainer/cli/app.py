"""The ``shardrec`` command: its subcommands, and how it ends."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import shardrec
from shardrec import ConfigError
from shardrec.launch import environment_for_torch, quiet_libraries
from shardrec.trainer.cli.calibrate import calibrate_command
from shardrec.trainer.cli.doctor import doctor
from shardrec.trainer.cli.ending import ended_by_error, writable_output
from shardrec.trainer.cli.flags import Command
from shardrec.trainer.cli.ingest_command import ingest_command
from shardrec.trainer.cli.plan import plan_command
from shardrec.trainer.cli.run_commands import (
    compare_command,
    eval_command,
    export_command,
    inspect_command,
    predict_command,
    recommend_command,
    serve_command,
)
from shardrec.trainer.cli.sequences_command import sequences_command
from shardrec.trainer.cli.serve_embeddings import serve_embeddings_command
from shardrec.trainer.cli.train import convert_command, sweep_command, train_command

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


def _add(name: str, command: Callable[..., None], context_settings: dict[str, object] | None = None) -> None:
    """A command with its docstring as help: each paragraph as one line, because Typer keeps line breaks."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.command(name, cls=Command, help=text, context_settings=context_settings)(command)


def _bench(context: typer.Context) -> None:
    """Time sharded steps beside TorchRec's, or count the bytes that they send (from a checkout).

    Raises:
        ConfigError: if shardrec is not installed from a checkout.
    """
    root = Path(shardrec.__file__).resolve().parents[1]
    if not (root / "benchmarks" / "harness" / "command.py").is_file():
        raise ConfigError(
            f"shardrec bench runs the harness in benchmarks/harness of a checkout, and {root} is not one: clone the "
            "repository and run `make bench`, or `pip install -e .` there"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from benchmarks.harness.command import app

    app(context.args, prog_name=context.command_path)


_add("train", train_command())
_add("sweep", sweep_command)
_add("eval", eval_command)
_add("predict", predict_command)
_add("recommend", recommend_command)
_add("export", export_command)
_add("serve", serve_command)
_add("inspect", inspect_command)
_add("compare", compare_command)
_add("convert", convert_command)
_add("sequences", sequences_command)
_add("ingest", ingest_command)
# The harness reads the arguments, --help among them.
_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_add("bench", _bench, context_settings=_FORWARDED)
_add("plan", plan_command)
_add("calibrate", calibrate_command)
_add("serve-embeddings", serve_embeddings_command)
_add("doctor", doctor)


def main() -> None:
    """Run the command line and exit: 0 done, 1 an error (one message, no traceback), 2 a wrong flag, 75 stopped
    after saving, 130 stopped.

    With ``--debug`` among the arguments an error keeps its traceback, and messages of the libraries below are shown.
    """
    quiet = "--debug" not in sys.argv[1:]
    try:
        with environment_for_torch(quiet=quiet), quiet_libraries(quiet=quiet), writable_output():
            app(prog_name="shardrec")
    except Exception as error:
        if not quiet:
            raise
        ended_by_error(error)
        raise SystemExit(1) from None
