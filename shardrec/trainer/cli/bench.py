"""``shardrec bench``: hands its arguments to the harness, which is in the checkout and not in the package."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

import shardrec
from shardrec import ConfigError

__all__ = ["bench_command"]


def bench_command(context: typer.Context) -> None:
    """Time sharded steps beside TorchRec's, or count the bytes that they send (from a checkout).

    Raises:
        ConfigError: if shardrec is not installed from a checkout.
    """
    root = Path(shardrec.__file__).resolve().parents[1]
    if not (root / "benchmarks" / "harness" / "command.py").is_file():
        raise ConfigError(
            f"shardrec bench runs the harness in benchmarks/harness of a checkout, and {root} is none: clone the "
            "repository and run `make bench`, or `pip install -e .` there"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from benchmarks.harness.command import app

    app(context.args, prog_name=context.command_path)
