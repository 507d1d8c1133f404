"""Convert rows to the bytes of a weight format.

Shapes: n rows, w columns, b bytes of a row (see :class:`shardrec.serve.format.WeightFormat`).

[Note: half a scale]
The error of a column of a quantized row is at most half the row's scale. Scale and bias are stored in float16; for the
bound to hold they are chosen first: the bias is the row's minimum rounded down, the scale is the remaining range
divided by the number of steps, rounded up. fbgemm's own conversion to INT8 rounds both to nearest afterwards, so in a
row of values near 1 that differ by thousandths the error is many scales. fbgemm's operator computes the codes from the
row minus its bias and the range that the scale spans; its float32 arithmetic adds less than a thousandth of a scale.

[Note: columns on several ranks]
Scale and bias are those of the whole row. A shard of some columns is given the whole row's minimum and maximum, so it
holds the same codes as an uncut table: the sharding does not change the served values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardrec.serve.format import HEAD_BYTES, WeightFormat

__all__ = ["GREATEST", "encode", "fault_of", "row_ranges"]

GREATEST = 65504.0
"""The greatest float16."""


def row_ranges(weight: Tensor) -> Tensor:
    """(n, 2) float32: the negated minimum and the maximum of each row.

    The elementwise maximum of the ranges of a row's parts is the range of the row.
    """
    weight = weight.to(torch.float32)
    return torch.stack([-weight.amin(dim=1), weight.amax(dim=1)], dim=1)


def encode(weight: Tensor, form: WeightFormat, ranges: Tensor | None = None) -> Tensor:
    """Encode rows as bytes.

    Args:
        weight: (n, w) of any floating dtype, on any device; its values are finite, and within float16's range unless
            ``form`` is FP32. The columns of a quantized row fill pairs of bytes.
        form: the format.
        ranges: (n, 2) ranges of the whole rows, from :func:`row_ranges`; default: those of ``weight``.

    Returns:
        (n, b) uint8, on the device of ``weight``.
    """
    if form is WeightFormat.FP32:
        return weight.to(torch.float32).contiguous().view(torch.uint8)
    if form is WeightFormat.FP16:
        return weight.to(torch.float16).contiguous().view(torch.uint8)
    device = weight.device
    # fbgemm has this operator for the CPU only; a table is converted once.
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
    # fbgemm's operator puts scale and bias last; its kernel expects them first.
    return torch.cat([head, codes[:, :-HEAD_BYTES]], dim=1).to(device)


def fault_of(table: str, parts: Iterable[Tensor], form: WeightFormat) -> str:
    """A message about a value of a table that its format cannot represent; "" if there is none."""
    limit = torch.finfo(torch.float32).max if form is WeightFormat.FP32 else GREATEST
    # amax() of no elements raises; a comparison with NaN is false, so NaN is bad.
    if all(not part.numel() or bool(part.abs().amax() <= limit) for part in parts):
        return ""
    return (
        f"table {table!r} has a value that {form.value} cannot keep (not finite, or beyond ±{limit:g}): keep it as "
        "'fp32' with tables={...}, or mend the weights"
    )


def _half_up(values: Tensor) -> Tensor:
    """The least float16 that is not below each float32."""
    half = values.to(torch.float16)
    bits = half.view(torch.int16)
    # The bit pattern grows with the magnitude, so the next value up of a negative number has a smaller pattern.
    above = torch.where(bits >= 0, bits + 1, bits - 1).view(torch.float16)
    return torch.where(half.to(torch.float32) < values, above, half)
