"""Blocks of memory that are measured in no time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from benchmarks.harness.timing import probe as module

__all__ = ["small_blocks"]


def small_blocks() -> AbstractContextManager[Any]:
    """Inside, the machine is measured by few bytes: the figures mean nothing."""
    return mock.patch.multiple(module, _COPY_BYTES={"cpu": 2**20}, _LINK_BYTES=(2**16, 2**18), _REPEATS=3)
