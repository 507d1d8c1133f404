"""House rules that a reader could otherwise only hope for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 400

# path from the root -> why it is longer. An entry that is no longer needed fails, too.
LONGER: dict[str, str] = {}

# Spelled apart, so that this file does not find itself.
LEFTOVERS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME"]) + r")\b")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PACKAGE = python_files("shardrec")
EVERYTHING = [*PACKAGE, *python_files("tests", "examples", "benchmarks"), *sorted((ROOT / "docs").rglob("*.md"))]


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The classes and functions of a module that its ``__all__`` names, as written in the module itself."""
    exported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            exported = set(ast.literal_eval(node.value))
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name not in exported:
            continue
        # An overload says only which types go together.
        if not any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list):
            yield node


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_module_size(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if name(path) in LONGER:
        assert lines > MOST_LINES, f"{name(path)} is short again: take it off the list"
    else:
        assert lines <= MOST_LINES, f"{name(path)} has {lines} lines: split it, or list it with its reason"


def test_longer_modules_exist_and_have_a_reason() -> None:
    for path, reason in LONGER.items():
        assert (ROOT / path).is_file()
        assert len(reason.split()) >= 5


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_no_leftovers(path: Path) -> None:
    found = LEFTOVERS.search(path.read_text(encoding="utf-8"))
    assert found is None, f"{name(path)} still says {found.group() if found else ''}"


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_modules_and_public_definitions_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not tree.body:
        return
    assert ast.get_docstring(tree), f"{name(path)} does not say what it is for"
    bare = [node.name for node in public_definitions(tree) if not ast.get_docstring(node)]
    assert not bare, f"{name(path)}: no docstring on {', '.join(bare)}"


def test_every_package_has_an_init() -> None:
    """A folder without one is a namespace package, which the install leaves out."""
    folders = {path.parent for path in PACKAGE}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
