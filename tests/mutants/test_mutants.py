"""Mutants of a small package; ``make mutants`` makes those of this one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.mutants.main import ROOT, Tree, campaign, draw, nearest_tests
from tests.mutants.mutations import mutations
from tests.mutants.patch import is_in_functions, patch
from tests.mutants.recording import Recording

SOURCE = """
def clamp(value: int, most: int = 7) -> int:
    \'\'\'The docstring, 1 + 1.\'\'\'
    while value > most:
        value -= 1
    return value
"""
TESTS = """
from package.numbers import clamp

def test_clamp() -> None:
    assert clamp(8, 5) == 5
"""


def test_every_change_is_another_program_with_the_same_lines() -> None:
    source = (ROOT / "shardrec" / "pipeline" / "schedule.py").read_text(encoding="utf-8")
    original = ast.dump(ast.parse(source))
    for mutation in mutations(source):
        changed = mutation.apply(source)
        assert ast.dump(ast.parse(changed)) != original, mutation
        assert changed.count("\n") == source.count("\n"), mutation


def test_the_nearest_tests_come_first() -> None:
    expected = ["tests/lookup/test_row_optimizers.py", "tests/lookup", "tests"]
    assert nearest_tests(ROOT, Path("shardrec/lookup/row_optimizers.py")) == expected


FUNCTIONS = """
LIMIT = 7

def outer(value, most=7):
    def inner(one):
        return one + 1
    return inner(value)

class Counter:
    @property
    def first(self):
        return min(each + 2 for each in [LIMIT])
"""


def test_imported_functions_are_changed(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    names: dict[str, Any] = {}
    exec(compile(FUNCTIONS, str(path), "exec"), names)
    outer, counter = names["outer"], names["Counter"]()
    assert (outer(1), counter.first) == (2, 9)
    for before, after in {"one + 1": "one - 1", "each + 2": "each + 5"}.items():
        changed = FUNCTIONS.replace(before, after)
        assert is_in_functions(FUNCTIONS, changed, str(path))
        patch(str(path), changed)
        assert (outer(1), counter.first) == ((0, 9) if "one" in before else (2, 12))
    for other in ("LIMIT = 8", "most=8"):
        assert not is_in_functions(FUNCTIONS, FUNCTIONS.replace(f"{other[:-1]}7", other), str(path))


def test_the_tests_that_run_a_function(tmp_path: Path) -> None:
    """The nearest come first, then the fastest; those that failed do not count."""
    tests = {1: (9.0, "b/test_c.py::slow"), 2: (1.0, "b/test_c.py::fast"), 3: (0.5, "d/test_e.py::far")}
    lines = [f"{number} {seconds} passed tests/{name}" for number, (seconds, name) in tests.items()]
    (tmp_path / "tests").write_text("\n".join([*lines, "4 0.1 failed tests/b/test_c.py::fails"]), encoding="utf-8")
    hits = ["0 b/c.py:outer", *(f"{number} b/c.py:outer" for number in range(1, 5)), "2 b/c.py:outer.<locals>.inner"]
    (tmp_path / "hits").write_text("\n".join([*hits, "3 b/c.py:Counter.first"]), encoding="utf-8")
    recording, path = Recording(tmp_path), Path("shardrec/b/c.py")

    def chosen(line: int, seconds: float = 60.0) -> tuple[list[str], int]:
        names, count = recording.tests(path, FUNCTIONS, line, seconds)
        return [name.partition("::")[2] for name in names], count

    assert chosen(7) == (["fast", "slow", "far"], 3)
    assert chosen(7, seconds=2.0) == (["fast", "far"], 3)
    assert chosen(6) == (["fast"], 1)
    assert chosen(2) == (["fast", "slow", "far"], 3)


def test_what_a_process_runs_is_recorded_by_the_names_that_are_looked_up(tmp_path: Path) -> None:
    package, folder = tmp_path / "package", tmp_path / "recording"
    package.mkdir()
    folder.mkdir()
    (package / "c.py").write_text(FUNCTIONS, encoding="utf-8")
    (folder / "test").write_bytes((5).to_bytes(8, "little"))
    (folder / "tests").write_text("5 1.0 passed tests/test_c.py::test", encoding="utf-8")
    variables = {"SHARDREC_RECORD": str(folder), "SHARDREC_RECORD_PACKAGE": str(package)}
    paths = os.pathsep.join([str(ROOT / "tests" / "mutants" / "recorder"), str(package)])
    command = [sys.executable, "-c", "import c; c.outer(1)"]
    subprocess.run(command, env={**os.environ, **variables, "PYTHONPATH": paths}, check=True)
    recording = Recording(folder)
    chosen = {line: recording.tests(Path("shardrec/c.py"), FUNCTIONS, line, 60.0)[1] for line in (5, 6, 12)}
    assert chosen == {5: 1, 6: 1, 12: 0}


def test_a_mutant_survives_if_all_its_tests_fail_in_a_fork(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    tree, orders = Tree(tmp_path / "root", tmp_path / "tree", 60.0), []

    def ask(order: Mapping[str, Any]) -> tuple[int, str]:
        orders.append(order["tests"])
        assert len(orders) < 9, "without an end"
        return (1, order["tests"][0]) if order["tests"] else (1, "")

    with mock.patch.object(tree, "_ask", ask):
        assert tree._ask_sound(tmp_path / "c.py", "a", "b", ["x", "y"]) == (0, "")
        assert orders == [["x", "y"], ["x"], ["y"], ["y"]]
        with mock.patch.object(tree, "_ask", lambda order: (1, "")):
            assert tree._ask_sound(tmp_path / "c.py", "a", "b", ["z"]) == (1, ""), "it ends before a test begins"


@pytest.mark.slow
def test_mutants_are_killed_hang_or_survive(tmp_path: Path) -> None:
    for name, text in {"package/numbers.py": SOURCE, "tests/test_numbers.py": TESTS, "package/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    fates = campaign(tmp_path, draw(tmp_path, ["package"], 100, 0), workers=1, timeout=20.0)
    assert {mutant.mutation.text: fate for mutant, fate in fates.items()} == {
        "8": "survives",  # the default
        "(value >= most)": "killed by tests/test_numbers.py",
        "pass": "hangs in tests/test_numbers.py",
        "2": "killed by tests/test_numbers.py",
        "return None": "killed by tests/test_numbers.py",
    }
    assert (tmp_path / "package/numbers.py").read_text(encoding="utf-8") == SOURCE
