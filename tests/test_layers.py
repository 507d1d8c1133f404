"""The package's layers point one way: no file imports itself by way of others, and no folder one above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "shardrec"

LAYERS = [
    {"errors", "memory", "_dynamo"},
    {"_built", "_torchscript", "_versions", "console"},
    {"native", "pending"},
    {"layout"},
    {"exchange"},
    {"lookup"},
    {"planner"},
    {"modules"},
    {"portable"},
    {"scripting"},
    {"checkpoint", "pipeline", "serve"},
    {"data", "rpc"},
    {"train"},
    {"cli"},
]
"""A folder, or a file of the package itself, imports from its own layer's folders only itself, and from those above."""

HOOKS = {"__prepare_scriptable__"}
"""What TorchScript calls on a module, which answers with the help of a layer above."""


@cache
def files() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imported(nodes: list[ast.stmt]) -> Iterator[str]:
    """Files of the package that these statements import, in functions too; not those for type checkers alone."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardrec"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in files() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files())
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse)
        elif not (isinstance(node, ast.FunctionDef) and node.name in HOOKS):
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from imported(getattr(node, field, []))


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imported(ast.parse(path.read_text()).body)) - {name} for name, path in files().items()}


def test_no_file_imports_itself_by_way_of_others() -> None:
    left = {name: set(targets) for name, targets in graph().items()}
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    assert not left, f"these import each other in a circle, or import who does: {sorted(left)}"


def test_layers_point_one_way() -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for name, targets in graph().items():
        for target in targets:
            one, other = (part.split(".")[1] if "." in part else "" for part in (name, target))
            if one and other and one != other and level[other] >= level[one]:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(sorted(wrong))
