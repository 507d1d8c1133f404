"""Functions of upper layers that a lower one calls: the package says where they are, and they load at the first call.

A layer imports those below it. A function of a layer above, such as sharding over servers for ``shardrec.shard``, it
asks for by name. ``shardrec/__init__.py``, which runs before any layer, says in which modules these functions are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

PROVIDED: dict[str, str] = {}
"""The module per function, by the function's name."""


def late_import(name: str) -> Callable[..., Any]:
    """The function that is provided under this name."""
    function: Callable[..., Any] = getattr(import_module(PROVIDED[name]), name)
    return function


def names_from(package: str, modules: Mapping[str, str]) -> tuple[dict[str, str], Callable[[str], Any]]:
    """For a package whose public names are imported at their first use (PEP 562).

    Args:
        package: its name.
        modules: by a module, the names that the package has of it, separated by spaces.

    Returns:
        The module per name, and a function for the package's ``__getattr__``.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(import_module(package), name, value)
        return value

    return homes, load
