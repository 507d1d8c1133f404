"""House rules that a reader could otherwise only hope for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.syntax import tree

ROOT = Path(__file__).parents[1]
MOST_LINES = 600
"""A hint: a file is split along a seam that a reader would look for, not for its length alone."""

# Spelled apart, so that this file does not find itself.
LEFTOVERS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME"]) + r")\b")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PRONOUNS = frozenset(["one", "found", "own", "it", "this", "that", "thing", "things", "stuff", "both", "every"])

PACKAGE = python_files("shardrec", "benchmarks/harness")
EVERYTHING = [*python_files("shardrec", "tests", "examples", "benchmarks"), *sorted((ROOT / "docs").rglob("*.md"))]


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The classes and functions of a module for others: those in its ``__all__``, or else without an underscore."""
    exported: set[str] | None = None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            exported = set(ast.literal_eval(node.value))
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_") if exported is None else node.name not in exported:
            continue
        # An overload says only which types go together.
        if not any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list):
            yield node


def test_module_sizes() -> None:
    files = [*PACKAGE, *python_files("tests")]
    sizes = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: lines for path, lines in sizes.items() if lines > MOST_LINES} == {}


def test_no_leftovers() -> None:
    found = {name(path): LEFTOVERS.findall(path.read_text(encoding="utf-8")) for path in EVERYTHING}
    assert {path: words for path, words in found.items() if words} == {}


def test_modules_and_public_definitions_are_documented() -> None:
    bare = []
    for path in PACKAGE:
        module = tree(path)
        if module.body and not ast.get_docstring(module):
            bare.append(name(path))
        bare += [f"{name(path)}: {node.name}" for node in public_definitions(module) if not ast.get_docstring(node)]
    assert bare == [], "these have no docstring"


def pronouns(node: ast.AST, allowed: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Line and identifier of each use of a pronoun, but of a comprehension's variables if it fits on one line."""
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)) and node.lineno == node.end_lineno:
        targets = (name for generator in node.generators for name in ast.walk(generator.target))
        allowed |= {name.id for name in targets if isinstance(name, ast.Name)}
    if isinstance(node, ast.Name) and node.id in allowed:
        return
    for field in ("id", "arg", "attr", "name", "asname"):
        if getattr(node, field, None) in PRONOUNS:
            yield node.lineno, getattr(node, field)
    for child in ast.iter_child_nodes(node):
        yield from pronouns(child, allowed)


def test_pronouns_are_found() -> None:
    source = """
try:
    a = [one for one in it.both]
    b = f(found=[
        one for one in a
    ], own=[(g(one), that) for one in a])
except E as this:
    pass
"""
    uses = [(3, "it"), (3, "both"), (4, "found"), (5, "one"), (5, "one"), (6, "own"), (6, "that"), (7, "this")]
    assert sorted(pronouns(ast.parse(source))) == sorted(uses)


def test_variables_are_named_for_what_they_hold() -> None:
    uses = []
    for path in python_files("shardrec"):
        uses += [f"{name(path)}:{line}: {identifier}" for line, identifier in pronouns(tree(path))]
    assert uses == [], "name the table, shard, lookup, ... that each of these holds"


def test_every_package_has_an_init() -> None:
    """A folder without one is a namespace package, which the install leaves out."""
    folders = {path.parent for path in PACKAGE}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_test_modules_do_not_import_each_other() -> None:
    importing = re.compile(
        r"^(?:from tests\.\S*\btest_\w+ import|from tests\S* import .*\btest_|import tests\S*\btest_)", re.M
    )
    assert [name(path) for path in python_files("tests") if importing.search(path.read_text(encoding="utf-8"))] == [], (
        "move what they share to a module without test_"
    )
