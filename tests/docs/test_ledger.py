"""Each test that docs/ledger.md names as a proof exists, and each claim that needs one has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
PARITY, _, REST = PAGE.partition("## Parity with TorchRec")[2].partition("\n## Failures\n")
FAILURES = REST.partition("\n### Campaigns\n")[0]
PAGES = [PAGE, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").glob("*/README.md")))]
NAMED = sorted({named for page in PAGES for named in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)})
VERDICTS = ("**same**", "**more**", "**differs**", "**left out**", "*(to come)*")


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("path", "test"), NAMED, ids="::".join)
def test_the_named_tests_exist(path: str, test: str) -> None:
    assert (ROOT / path).is_file(), f"a page names {path}, which is not there"
    assert test in functions(path), f"a page names {test}, which {path} does not have"


def test_nothing_that_looks_like_a_test_is_spelled_another_way() -> None:
    assert len(re.findall(r"tests/[\w/]+\.py::", PAGE)) == len(re.findall(r"`tests/[\w/]+\.py::\w+`", PAGE))


def test_every_row_says_what_holds_and_claims_have_a_proof() -> None:
    rows = [line for line in PARITY.split("### Cuts", 1)[1].splitlines() if line.startswith("| ")]
    rows = [line for line in rows if not line.startswith("| TorchRec |")]
    assert len(rows) > 50
    for line in rows:
        _, feature, ours, proof, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line))
        assert ours.startswith(VERDICTS), f"{feature}: {ours}"
        if ours.startswith(VERDICTS[:3]):
            assert "::" in proof, f"{feature}: {ours} is claimed without a test"


def test_every_row_of_what_dies_has_a_test() -> None:
    rows = [line for line in FAILURES.splitlines() if line.startswith("| ") and not line.startswith("| what dies |")]
    assert len(rows) > 25
    for line in rows:
        assert len(re.findall(r"`tests/[\w/]+\.py::\w+`", line.split("|")[-2])) >= 1, line
