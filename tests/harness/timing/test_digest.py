"""Digests tell outputs apart, and what fills tables and gradients is the same under every cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.timing.case import Case
from benchmarks.harness.timing.digest import differing, digest
from benchmarks.harness.timing.inputs import draw_batches, draw_inputs, fill_weight, read_batches

KEYS, WIDTHS = ["a", "b"], [4, 8]


def values(rows: int) -> torch.Tensor:
    return torch.randn(rows, sum(WIDTHS), generator=torch.Generator().manual_seed(rows))


class TestDigest:
    @pytest.mark.parametrize("rows", [1, 7, 3000])
    def test_rounding_is_no_difference(self, rows: int) -> None:
        one = digest(values(rows), KEYS, WIDTHS)
        assert differing(one, digest(values(rows) * (1 + 1e-7), KEYS, WIDTHS)) == []

    @pytest.mark.parametrize("change", ["row", "element", "order", "columns"])
    def test_a_change_is_found_where_it_is(self, change: str) -> None:
        value = values(100)
        other = value.clone()
        match change:
            case "row":
                other[50, 4:] = 0
            case "element":
                other[3, 7] += 0.5
            case "order":
                other[[1, 2], 4:] = value[[2, 1], 4:]
            case "columns":
                other[:, [5, 6]] = value[:, [6, 5]]
        assert differing(digest(value, KEYS, WIDTHS), digest(other, KEYS, WIDTHS)) == ["b"]

    def test_a_feature_that_is_not_there(self) -> None:
        one = digest(values(3), KEYS, WIDTHS)
        assert differing(one, {"a": one["a"]}) == ["b"]


@settings(max_examples=25)
@given(rows=st.integers(1, 20_000), cols=st.integers(1, 12), data=st.data())
def test_a_part_of_a_table_is_filled_as_the_whole(rows: int, cols: int, data: st.DataObject) -> None:
    row, col = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    whole, part = torch.empty(rows, cols), torch.empty(rows - row, cols - col)
    fill_weight(whole, 3)
    fill_weight(part, 3, row, col)
    assert torch.equal(part, whole[row:, col:])
    assert 0 < float(whole.abs().max()) <= 0.11


def test_batches_come_back_from_their_files(tmp_path: object) -> None:
    from pathlib import Path

    case = Case(workload="2x50x4x3", layout="table_wise", batch_size=5, ids="zipf")
    folder = draw_inputs(case, Path(str(tmp_path)), seed=1)
    assert draw_inputs(case, Path(str(tmp_path)), seed=1) == folder
    for rank in range(2):
        read = read_batches(case, folder, rank, torch.device("cpu"))
        drawn = draw_batches(case, rank, torch.device("cpu"), seed=1)
        assert len(read) == len(drawn) == 4
        for one, other in zip(read, drawn, strict=True):
            assert torch.equal(one.values, other.values)
            assert torch.equal(one.lengths, other.lengths)
            assert one.features().to_dict()["f_t1"].values().numel() == 15
            assert one.features() is not one.features(), "a step gets an object of its own"
