"""Ratios, spreads and geometric means."""

from __future__ import annotations

import pytest

from benchmarks.harness.timing.case import Case
from benchmarks.harness.timing.record import CaseResult, Spread, geometric_mean, groups_of


def result(shardrec: list[float], torchrec: list[float], **options: object) -> CaseResult:
    case = Case(**{"workload": "criteo", "layout": "table_wise", "batch_size": 8, **options})  # type: ignore[arg-type]
    rounds = [{"shardrec": {"ms": a}, "torchrec": {"ms": b}} for a, b in zip(shardrec, torchrec, strict=True)]
    return CaseResult(case=case, rounds=rounds)


def test_ratios_are_taken_round_by_round() -> None:
    found = result([10, 20, 40], [40, 40, 40])
    assert found.step("shardrec") == Spread(median=20, low=10, high=40)
    assert found.ratio("torchrec") == Spread(median=2, low=1, high=4)
    assert found.ratio("torch") is None


def test_a_case_that_went_wrong_has_no_figures() -> None:
    found = result([10], [40])
    found.error = "the outputs differ"
    assert (found.step("shardrec"), found.ratio("torchrec"), found.over_floor()) == (None, None, None)
    assert found.to_json()["step_ms"] == {}
    assert groups_of([found]) == []


def test_geometric_means_by_group() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    groups = groups_of(
        [
            result([1], [2]),
            result([1], [8], batch_size=16),
            result([1], [4], layout="row_wise"),
            result([1], [0.5], malloc="keep"),
        ]
    )
    found = {group.name: group for group in groups}
    everything = found["train"]
    assert (everything.mean, everything.least, everything.cases) == (pytest.approx(4.0), 2.0, 3)
    assert everything.where == result([1], [2]).case.key
    assert found["train: table_wise"].mean == pytest.approx(4.0)
    assert "train: row_wise" not in found, "one case is no group"
    assert "train: criteo" not in found, "all of them are one group already"
    assert found["train, malloc keep"].mean == 0.5
