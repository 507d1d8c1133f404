"""Functions of upper layers that a lower one calls: the package says where they are, and they load at the first call.

A layer imports those below it. What it needs of a layer above, such as :func:`shardrec.shard` the embedding servers, it
asks for by name, and ``shardrec/__init__.py``, which is above all layers and runs before any of them, provides it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["from_above", "provide"]

_MODULES: dict[str, str] = {}


def provide(name: str, module: str) -> None:
    """Make a function of a module available to the layers below it. The module is not imported before it is used."""
    _MODULES[name] = module


def from_above(name: str) -> Callable[..., Any]:
    """The function that is provided under this name."""
    function: Callable[..., Any] = getattr(import_module(_MODULES[name]), name)
    return function
