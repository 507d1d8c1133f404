"""The floor's bytes, by hand, and what makes them grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.batches import BatchMaker
from benchmarks.harness.timing.case import Case
from benchmarks.harness.timing.floor import RankBytes, floor_of, step_bytes
from benchmarks.harness.timing.plans import case_plan

# Two tables of 1 row (so that what is looked up is known) and 8 columns, bags of 3 ids, 10 samples a rank.
ONE_ROW: dict[str, Any] = {"workload": "2x1x8x3", "batch_size": 10}


def bytes_of(case: Case) -> list[RankBytes]:
    return step_bytes(case, case_plan(case))


def test_table_wise_by_hand() -> None:
    header = 8 * (2 + 4 * (2 + 1))
    for rank in bytes_of(Case(layout="table_wise", **ONE_ROW)):
        assert rank.ids == 8 * 2 * 30 + 4 * 2 * 10  # int64 ids, int32 lengths
        assert rank.rows == 8 * 4  # one table's row
        assert rank.sums == 0
        assert rank.output == rank.gradient == 4 * 10 * 16
        assert rank.update == 2 * (8 * 4 + 4)  # read and written, with a float of state
        # Lengths and ids of the other's table; its columns for the other's samples; and their gradient.
        assert rank.sent == header + 4 * (10 + 30) + 4 * 10 * 8 + 4 * 10 * 8
        assert rank.memory == rank.ids + rank.rows + rank.output + rank.gradient + rank.update


def test_row_wise_adds_partial_sums() -> None:
    case = Case(workload="1x1000x8x3", layout="row_wise", batch_size=10, ranks=4)
    for rank in bytes_of(case):
        assert rank.sums == 4 * 10 * 8 * 3  # of three other blocks
        assert rank.rows == pytest.approx(1000 * (1 - (1 - 1 / 1000) ** 120) / 4 * 8 * 4)
        assert rank.sent == pytest.approx(3 * (8 * 14 + 4 * (10 + 30 / 4) + 2 * 4 * 10 * 8))


def test_the_slowest_rank_counts() -> None:
    first = RankBytes(ids=1, rows=2, sums=3, output=4, gradient=5, update=6, sent=100)
    second = replace(first, rows=50, sent=10)
    floor = floor_of([first, second], {"memory": 1000.0, "link": 100.0}, other_ms=7.0)
    assert floor.through_memory == pytest.approx(7 + max((21 + 200) / 1000, (69 + 20) / 1000) * 1e3)
    assert floor.over_links == pytest.approx(7 + max(21 / 1000 + 1, 69 / 1000 + 0.1) * 1e3)


def test_random_rows_have_rates_of_their_own() -> None:
    rank = RankBytes(ids=1, rows=2, sums=3, output=4, gradient=5, update=6, sent=0)
    rates = {"memory": 1000.0, "link": 0.0, "gather": 500.0, "scatter": 100.0}
    assert floor_of([rank], rates).through_memory == pytest.approx(21)
    floor = floor_of([rank], rates, other_ms=7.0, gather=True)
    assert floor.over_links == floor.through_memory == pytest.approx(7 + 13 + 2 / 0.5 + 6 / 0.1)


@settings(max_examples=20)
@given(
    rows=st.integers(1, 400),
    pooling=st.integers(1, 5),
    batch=st.integers(1, 100),
    ids=st.sampled_from(["uniform", "zipf"]),
)
def test_distinct_rows_are_those_of_drawn_ids(rows: int, pooling: int, batch: int, ids: str) -> None:
    case = Case(workload=f"1x{rows}x4x{pooling}", layout="table_wise", batch_size=batch, ids=ids, ranks=1)
    counts = []
    for seed in range(20):
        maker = BatchMaker(case.tables, batch_size=batch, ids=ids, seed=seed)
        counts.append(maker.draw(0, 0).values().unique().numel())
    found = torch.tensor(counts, dtype=torch.float64)
    expected = bytes_of(case)[0].rows / 16
    assert expected <= min(rows, batch * pooling) + 1e-6
    assert float(found.mean()) == pytest.approx(expected, abs=4 * float(found.std()) / 20**0.5 + 0.05 * expected + 0.5)
