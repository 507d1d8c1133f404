"""Ratios, spreads and geometric means."""

from __future__ import annotations

import pytest

from benchmarks.harness.timing.case import Case
from benchmarks.harness.timing.floor import Floor
from benchmarks.harness.timing.record import CaseResult, Spread, geometric_mean, groups_of, turn_of
from benchmarks.harness.timing.report import TimingReport
from benchmarks.harness.timing.tables import report_tables


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


def test_over_the_floor_of_the_way_that_was_taken() -> None:
    found = result([10], [40])
    assert found.over_floor() is None
    found.floor = Floor(through_memory=2.0, over_links=5.0)
    assert (found.over_floor(), found.over_floor("torchrec")) == (5.0, 20.0)
    assert (found.gather_ms, found.over_gather_floor()) == (0.0, None)
    found.gather_floor = Floor(through_memory=4.0, over_links=10.0)
    found.shares_memory = False
    assert found.over_floor() == 2.0


def test_a_step_below_the_floor_is_marked_and_explained() -> None:
    """The floor is no more than a measurement, and a busy machine's is too high."""
    found = result([8], [40])
    found.floor = Floor(through_memory=10.0, over_links=10.0)
    environment = dict.fromkeys(("cpu", "cores", "threads_per_rank", "libc"), 1)
    loads = {"load_at_start": [0], "load_at_end": [0]}
    table = next(report_tables(TimingReport(options={}, environment=environment | loads, results=[found], machine={})))
    assert "0.8 ?" in [cell for column in table.columns for cell in column.cells]
    assert "? a step below the floor: bandwidths were lower when they were measured" in str(table.caption)


def test_a_turn_keeps_median_mean_and_extremes() -> None:
    turn = turn_of({"step_ms": [1.0, 2.0, 9.0], "faults": 3.0, "peak_bytes": 7, "digests": []})
    assert turn == {
        "ms": 2.0,
        "mean_ms": 4.0,
        "low_ms": 1.0,
        "high_ms": 9.0,
        "steps": 3,
        "faults": 3.0,
        "peak_bytes": 7,
    }


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
