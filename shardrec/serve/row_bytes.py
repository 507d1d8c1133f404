"""Conversion of rows to the bytes of a weight format.

Shapes: n rows, w columns, b bytes of a row (see :class:`shardrec.serve.format.WeightFormat`).

[Note: half a scale]
A column of a quantized row is off by half the row's scale at most. For that to hold of the scale and bias that are
stored, and these are float16, they are chosen first: the bias is the least value rounded down, the scale the rest of
the range divided by the number of steps, rounded up. fbgemm's own conversion to INT8 rounds both to nearest afterwards,
so that a row of values near 1 that differ by thousandths is off by many scales. The codes are made by fbgemm's
operator, from the row less its bias and the range given by the scale; what it computes in float32 adds less than a
thousandth of a scale.

[Note: columns on several ranks]
Scale and bias are those of the whole row. A shard of some of its columns is given the whole row's least and greatest
value, and so holds the very codes that an uncut table would: how a table is cut does not show in what it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardrec.serve.format import HEAD_BYTES, WeightFormat

__all__ = ["GREATEST", "encode", "row_ranges"]

GREATEST = 65504.0
"""The greatest float16."""


def row_ranges(weight: Tensor) -> Tensor:
    """(n, 2) float32: the least value of each row, negated, and the greatest.

    So that ranges of parts of a row become the row's by one elementwise maximum.
    """
    weight = weight.to(torch.float32)
    return torch.stack([-weight.amin(dim=1), weight.amax(dim=1)], dim=1)


def encode(weight: Tensor, form: WeightFormat, ranges: Tensor | None = None) -> Tensor:
    """The bytes of rows.

    Args:
        weight: (n, w) of any floating dtype, on any device; its values are finite, and within float16's range unless
            ``form`` is FP32. The columns of a quantized row fill pairs of bytes.
        form: how they are kept.
        ranges: (n, 2) of the whole rows, as :func:`row_ranges` gives them; default: those of ``weight``.

    Returns:
        (n, b) uint8, on the device of ``weight``.
    """
    if form is WeightFormat.FP32:
        return weight.to(torch.float32).contiguous().view(torch.uint8)
    if form is WeightFormat.FP16:
        return weight.to(torch.float16).contiguous().view(torch.uint8)
    device = weight.device
    # fbgemm has the operator for the CPU only; tables are converted once.
    weight = weight.to("cpu", torch.float32)
    low, high = (row_ranges(weight) if ranges is None else ranges.cpu()).unbind(1)
    bias = -_half_up(low)
    height = high - bias.to(torch.float32)
    scale = _half_up(torch.where(height > 0, height / form.levels, torch.ones_like(height)))
    top = scale.to(torch.float32) * form.levels
    operator = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalfWithRowwiseMinMax
    ends = torch.stack([torch.zeros_like(top), top], dim=1)
    codes = operator((weight - bias.to(torch.float32).unsqueeze(1)).contiguous(), form.bits, ends)
    head = torch.stack([scale, bias], dim=1).view(torch.uint8)
    # fbgemm's operator puts scale and bias last, its kernel looks for them first.
    return torch.cat([head, codes[:, :-HEAD_BYTES]], dim=1).to(device)


def _half_up(values: Tensor) -> Tensor:
    """The least float16 that is not below each float32."""
    half = values.to(torch.float16)
    bits = half.view(torch.int16)
    # Bits grow with the magnitude, so towards zero below it.
    above = torch.where(bits >= 0, bits + 1, bits - 1).view(torch.float16)
    return torch.where(half.to(torch.float32) < values, above, half)
