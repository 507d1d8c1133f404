"""The command line, in this process (the type of the fixture ``run``) and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["Run", "shell"]

Run = Callable[..., tuple[int, str, str]]
"""Runs the command line with the arguments: (exit code, stdout, stderr)."""


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "shardrec.trainer.cli", *arguments],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
