"""Marks for Python functions that torch.compile is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["left_alone", "passed_over"]

F = TypeVar("F", bound=Callable[..., Any])


def left_alone(function: F) -> F:
    """Run ``function``, and all that it calls, eagerly."""
    marked: F = torch.compiler.disable(function)
    return marked


def passed_over(function: F) -> F:
    """Run ``function`` eagerly; what it calls may be compiled."""
    marked: F = torch.compiler.disable(function, recursive=False)
    return marked
