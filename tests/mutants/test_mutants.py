"""Mutants of a small package; ``make mutants`` makes those of this one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.main import ROOT, campaign, draw, nearest_tests
from tests.mutants.mutations import mutations

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
    source = (ROOT / "shardrec" / "pipeline" / "lookahead.py").read_text(encoding="utf-8")
    original = ast.dump(ast.parse(source))
    for mutation in mutations(source):
        changed = mutation.apply(source)
        assert ast.dump(ast.parse(changed)) != original, mutation
        assert changed.count("\n") == source.count("\n"), mutation


def test_the_nearest_tests_come_first() -> None:
    expected = ["tests/lookup/test_row_optimizers.py", "tests/lookup", "tests"]
    assert nearest_tests(ROOT, Path("shardrec/lookup/row_optimizers.py")) == expected


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
