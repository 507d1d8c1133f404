"""Functions of upper layers that a lower one calls: the package says where they are, and they load at the first call.

A layer imports those below it. A function of a layer above, such as sharding over servers for ``shardrec.shard``, it
asks for by name; ``shardrec/__init__.py``, which runs before any layer, says in which modules these functions are.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["PROVIDED", "late_import"]

PROVIDED: dict[str, str] = {}
"""The module of each function, by the function's name."""


def late_import(name: str) -> Callable[..., Any]:
    """The function that is provided under this name."""
    function: Callable[..., Any] = getattr(import_module(PROVIDED[name]), name)
    return function
