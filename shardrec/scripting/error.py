"""The error of this package. A part of the hierarchy in ``shardrec.errors``."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch

from shardrec.errors import ShardrecError

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LAZY_METHODS = re.compile(r"attribute or method '(wait|then|done|callbacks|add_callback)'")
_AWAIT = re.compile(r"\bAwait\[")
_LAZY_TYPES = re.compile(
    r"[Uu]nknown type name '[\w.]*(LazyAwaitable|Awaitable|LazyNoWait)'|\b(LazyAwaitable|LazyNoWait)\b"
)


class ScriptError(ShardrecError, RuntimeError):
    """A model that cannot be scripted. The message has the user's file, line and a remedy."""


def explain(what: str, error: Exception) -> ScriptError:
    """TorchScript's error with the place in the user's code and the remedy before it.

    Args:
        what: the model's class.
        error: what ``torch.jit.script`` raised.
    """
    text = str(error)
    place = _users_place(text)
    where = f" at {place}" if place else ""
    return ScriptError(
        f"{what} cannot be scripted{where}: {_first_line(text)}. {_remedy(text)}. TorchScript says:\n{text}"
    )


def _first_line(text: str) -> str:
    return next((line.strip().rstrip(":.") for line in text.splitlines() if line.strip()), "no reason given")


def _users_place(text: str) -> str | None:
    """The innermost ``file:line`` that is in no installed package. TorchScript lists the innermost first."""
    installed = {Path(torch.__file__).parents[1], Path(__file__).parents[1]}
    installed |= {Path(folder) for name, folder in sysconfig.get_paths().items() if name.endswith("lib")}
    places = [(Path(match["file"]), f"{match['file']}:{match['line']}") for match in _FRAME.finditer(text)]
    users = [place for path, place in places if not installed & set(path.parents) and not path.name.startswith("<")]
    return next(iter([*users, *(place for _, place in places)]), None)


def _remedy(text: str) -> str:
    method = _LAZY_METHODS.search(text)
    if method:
        return (
            f"Scripted code sees the value itself, which lacks .{method[1]}(): write shardrec.wait(value), which "
            "means the same in eager mode"
        )
    if _AWAIT.search(text):
        return (
            "A module gives an Await to code that takes its value: if it is a scripted twin, annotate its forward with "
            "-> Await[T]; if it is your own, write shardrec.wait(value)"
        )
    if _LAZY_TYPES.search(text):
        return (
            "Scripted code sees the value itself, not the LazyAwaitable: annotate with the type of the value, such as "
            "KeyedTensor, and write shardrec.wait(value) where it has to be there"
        )
    return (
        "Write the line in the Python that TorchScript knows, or keep it out of forward. Where it takes a pending "
        "value apart, give it shardrec.wait(value)"
    )
