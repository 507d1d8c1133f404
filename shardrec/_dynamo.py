"""Marks for Python functions that torch.compile is to leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch._dynamo

from shardrec.errors import ConfigError

__all__ = ["left_alone", "passed_over"]

F = TypeVar("F", bound=Callable[..., object])


def left_alone(function: F) -> F:
    """Run ``function``, and all that it calls, eagerly."""
    marked: F = torch.compiler.disable(function)
    return marked


def passed_over(function: F) -> F:
    """Run ``function``, a sharded model's forward, eagerly; what it calls may be compiled.

    Raises:
        ConfigError: in ``torch.export.export``, whose own error would not say what to do.
    """
    skipped = torch._dynamo.decorators.skip(function)

    @functools.wraps(function)
    def unless_exported(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_exporting():
            raise ConfigError(
                f"torch.export.export cannot trace a {type(args[0]).__name__}: use shardrec.export(model.eval(), "
                "args), which makes an ExportedProgram, also on several ranks"
            )
        return skipped(*args, **kwargs)

    return cast(F, torch._dynamo.decorators.skip(unless_exported))
