"""Changes functions that a process has imported to those of a changed source."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import CodeType, FunctionType

__all__ = ["is_in_functions", "patch", "serve_changed"]

Name = tuple[str, int]
"""Qualified name and first line."""


def _codes(code: CodeType) -> Iterator[tuple[Name, CodeType]]:
    """Functions that a module's code defines, without those inside of other functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 2:  # a function's variables are no dict, as a class body's are
                yield (constant.co_qualname, constant.co_firstlineno), constant
            yield from _codes(constant)


def is_in_functions(before: str, after: str, path: str) -> bool:
    """Whether a change of a source is in what functions do, and not in what happens when the module is imported."""
    old, new = (dict(_codes(compile(source, path, "exec"))) for source in (before, after))
    return any(old[name] != new.get(name) for name in old)


def patch(path: str, source: str) -> None:
    """Have all functions of an imported module do what ``source`` says; ``path`` is that of its file."""
    codes = dict(_codes(compile(source, path, "exec")))
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == path:
            old = function.__code__
            new = codes.get((old.co_qualname, old.co_firstlineno))
            if new is not None and new.co_freevars == old.co_freevars and new != old:
                function.__code__ = new


def serve_changed(path: str, source: str, port: int, channel: Connection, log: str, stack: str) -> None:
    """A rank of the tests' pool, changed."""
    from tests.worker import serve

    gc.unfreeze()
    patch(path, source)
    serve(port, channel, log, stack)
