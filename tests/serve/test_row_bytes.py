"""Rows to bytes: off by half a scale at most, however large or alike the values are, and however rows are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardrec.serve.row_bytes import GREATEST, HEAD_BYTES, WeightFormat, encode, row_ranges
from tests.serve.served import decode

QUANTIZED = [WeightFormat.INT8, WeightFormat.INT4]


def scales(rows: Tensor) -> Tensor:
    return rows[:, :2].contiguous().view(torch.float16).to(torch.float32)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """(n, w) rows of any height at any distance from zero."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    rows, columns = draw(st.integers(1, 5)), 4 * draw(st.integers(1, 6))
    centre = draw(st.sampled_from([0.0, 1e-7, -0.1, 1.0, -1000.0001, 40000.0]))
    height = draw(st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 1.0, 300.0, 25000.0]))
    return (centre + height * (2 * torch.rand(rows, columns) - 1)).clamp(-GREATEST, GREATEST)


@given(weights(), st.sampled_from(QUANTIZED))
def test_a_quantized_column_is_off_by_half_the_rows_scale(weight: Tensor, form: WeightFormat) -> None:
    rows = encode(weight, form)
    assert rows.dtype is torch.uint8
    assert rows.shape == (len(weight), form.row_bytes(weight.size(1)))
    error = (decode(rows, form) - weight).abs()
    # What float32 itself cannot tell apart at this distance from zero comes on top.
    rounding = weight.abs() * 2**-22
    assert (error <= scales(rows) / 2 * 1.001 + rounding).all()


@given(weights(), st.sampled_from(QUANTIZED))
def test_the_scale_is_no_larger_than_the_range_asks_for(weight: Tensor, form: WeightFormat) -> None:
    """Or a huge one would make the bound above easy."""
    found = scales(encode(weight, form)).squeeze(1)
    height = weight.amax(dim=1) - weight.amin(dim=1)
    # The bias is below the least value by one float16, the scale above its share by another.
    slack = weight.abs().amax(dim=1) * 2**-9 + 2**-24
    constant = weight.amin(dim=1) == weight.amax(dim=1)
    assert (constant | (found <= (height + slack) / form.levels * (1 + 2**-9) + 2**-23)).all()


@given(weights(), st.sampled_from(list(WeightFormat)), st.data())
def test_parts_of_columns_hold_the_whole_rows_codes(weight: Tensor, form: WeightFormat, data: st.DataObject) -> None:
    cut = 4 * data.draw(st.integers(0, weight.size(1) // 4))
    ranges = row_ranges(weight)
    parts = [part for part in weight.split([cut, weight.size(1) - cut], dim=1) if part.size(1)]
    found = torch.cat([decode(encode(part, form, ranges), form) for part in parts], dim=1)
    assert torch.equal(found, decode(encode(weight, form), form))


def test_ranges_of_parts_become_the_rows_by_a_maximum() -> None:
    weight = torch.randn(4, 6)
    both = torch.maximum(row_ranges(weight[:, :2]), row_ranges(weight[:, 2:]))
    assert torch.equal(both, row_ranges(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_stay_what_they_are(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 4).to(dtype)
    wide = weight.to(torch.float32)
    assert torch.equal(decode(encode(weight, WeightFormat.FP32), WeightFormat.FP32), wide)
    assert torch.equal(decode(encode(weight, WeightFormat.FP16), WeightFormat.FP16), wide.half().float())


def test_values_on_the_grid_are_exact() -> None:
    codes = torch.tensor([[0.0, 15.0, 7.0, 1.0]])
    for form in QUANTIZED:
        row = torch.cat([codes, torch.full((1, 4), float(form.levels))], dim=1) * 0.25 - 2
        assert torch.equal(decode(encode(row, form), form), row)


def test_row_bytes() -> None:
    sizes = {form: form.row_bytes(12) for form in WeightFormat}
    assert sizes == {
        WeightFormat.FP32: 48,
        WeightFormat.FP16: 24,
        WeightFormat.INT8: 12 + HEAD_BYTES,
        WeightFormat.INT4: 6 + HEAD_BYTES,
    }
