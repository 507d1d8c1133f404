"""Marks for Python functions that torch.compile is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

import torch
import torch._dynamo

from shardrec.errors import ConfigError

F = TypeVar("F", bound=Callable[..., object])


def left_alone(function: F) -> F:
    """Run ``function``, and all that it calls, eagerly."""
    marked: F = torch.compiler.disable(function)
    return marked


def passed_over(function: F) -> F:
    """Run ``function``, a sharded model's forward, eagerly. What it calls may be compiled."""
    return cast(F, torch._dynamo.decorators.skip(function))


def refuse_export(model: object) -> NoReturn:
    """Called by a forward in ``torch.export.export``. Torch's own error would not say what to do.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"torch.export.export cannot trace a {type(model).__name__}: use shardrec.export(model.eval(), args), which "
        "makes an ExportedProgram, also on several ranks"
    )
