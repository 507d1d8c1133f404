"""The type of the fixture ``run``."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Run"]

Run = Callable[..., tuple[int, str, str]]
"""Runs the command line with the arguments: (exit code, stdout, stderr)."""
