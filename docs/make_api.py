"""Write docs/api.md from the docstrings of the public names: ``python docs/make_api.py``."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
INTRODUCTION = """# API

The public names of `shardrec` and of its packages, from their docstrings. `make docs` writes this page.
"""
FIRST = (
    "shard",
    "plan",
    "script",
    "export",
    "save_checkpoint",
    "load_checkpoint",
    "clip_grad_norm_",
    "ShardingPlan",
    "Topology",
    "Constraint",
    "QuantizedComms",
    "ShardrecError",
)
"""The names of shardrec that most programs need, with which the page begins."""
MODULES = (
    "shardrec",
    "shardrec.planner",
    "shardrec.layout",
    "shardrec.layout.cuts",
    "shardrec.modules",
    "shardrec.replicas",
    "shardrec.pending",
    "shardrec.scripting",
    "shardrec.errors",
    "shardrec.serve",
    "shardrec.checkpoint",
    "shardrec.launch",
    "shardrec.files",
    "shardrec.pipeline",
    "shardrec.rpc",
    "shardrec.trainer.data",
    "shardrec.trainer.run",
)


def page() -> str:
    """The text of docs/api.md."""
    parts = [INTRODUCTION]
    written: dict[int, str] = {}
    for path in MODULES:
        module = importlib.import_module(path)
        first = (inspect.getdoc(module) or "").splitlines()[0].replace("``", "`")
        parts.append(f"## {path}\n\n{first}\n")
        names = sorted(module.__all__, key=str.lower)
        if path == "shardrec":
            names = [*FIRST, *(name for name in names if name not in FIRST)]
            parts.append("Most programs need the first twelve names; the others follow in the order of the alphabet.\n")
        for name in names:
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            before = written.setdefault(id(value), f"{path}.{name}") if callable(value) else f"{path}.{name}"
            if before != f"{path}.{name}":
                parts.append(f"### `{name}`\n\nThe same as `{before}`.\n")
                continue
            parts.append(f"### `{name}`\n\n{_described(name, value)}")
            if inspect.isclass(value) and not issubclass(value, BaseException):
                parts.extend(
                    f"#### `{name}.{member}`\n\n{_described(member, method)}"
                    for member, method in sorted(vars(value).items())
                    if not member.startswith("_") and _is_method(method)
                )
    return "\n".join(parts)


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, property))


def _described(name: str, value: Any) -> str:
    home = str(getattr(value, "__module__", ""))
    if home.split(".")[0] == "torch":
        return f"Torch's own `{home}.{value.__qualname__}`, under a public name: see [scripting.md](scripting.md).\n"
    if not (callable(value) or isinstance(value, (classmethod, staticmethod, property))):
        return f"```python\n{name} = {_short(value)}\n```\n"
    text = inspect.getdoc(value) or ""
    signature = _signature(name, value)
    block = f"```python\n{signature}\n```\n\n" if signature else ""
    return f"{block}```text\n{text}\n```\n"


def _short(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else repr(value)  # as the formatter has it
    return text if len(text) <= 100 else text[:97] + "..."


def _signature(name: str, value: Any) -> str:
    # What an Enum shows as its own differs by Python.
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, (BaseException, Enum))):
        return ""
    target = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return ""
    parameters = [p.replace(annotation=_bare(p.annotation)) for p in signature.parameters.values()]
    bare = signature.replace(parameters=parameters, return_annotation=_bare(signature.return_annotation))
    return name + re.sub(r"<(?:function|class) '?([\w.]+)[^>]*>", r"\1", str(bare))  # defaults by their names


class _Bare(str):
    """An annotation that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _bare(annotation: Any) -> Any:
    if annotation is inspect.Signature.empty:
        return annotation
    # Which of typing's names come with their module differs by Python.
    return _Bare(
        annotation if isinstance(annotation, str) else inspect.formatannotation(annotation).replace("typing.", "")
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
