"""Storage formats of the rows of a served table, and the bytes of rows in them.

Shapes: n rows, w columns, b bytes of a row (see :class:`WeightFormat`).

[Note: half a scale]
The error of a column of a quantized row is at most half the row's scale. Scale and bias are stored in float16; for the
bound to hold they are chosen first: the bias is the row's minimum rounded down, the scale is the remaining range
divided by the number of steps, rounded up. fbgemm's own conversion to INT8 rounds both to nearest afterwards, so in a
row of values near 1 that differ by thousandths the error is many scales. fbgemm's operator computes the codes from the
row minus its bias and the range that the scale spans. Its float32 arithmetic adds less than a thousandth of a scale.

[Note: columns on several ranks]
Scale and bias belong to the whole row. A shard of some columns is given the whole row's minimum and maximum, so it
holds the same codes as an uncut table: the sharding does not change the served values.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import Tensor

GREATEST = 65504.0
"""The greatest float16."""

HEAD_BYTES = 4
"""Bytes before the codes of a quantized row: scale and bias, float16 each."""


class WeightFormat(enum.Enum):
    """Storage format of a table's rows for inference.

    A quantized row is ``scale | bias | codes``: scale and bias in float16, a code of 8 or 4 bits per column. A
    column's value is ``scale * code + bias``. In every format rows are summed in float32.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Bits per column."""
        return {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}[self.value]

    @property
    def is_quantized(self) -> bool:
        """Whether a row has a scale and a bias."""
        return self in (WeightFormat.INT8, WeightFormat.INT4)

    @property
    def levels(self) -> int:
        """The largest code of a quantized row."""
        return (1 << self.bits) - 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` columns. Its bits fill whole bytes."""
        return columns * self.bits // 8 + (HEAD_BYTES if self.is_quantized else 0)


def dtype_of(form: WeightFormat) -> torch.dtype:
    """The dtype of a tensor of rows: of values, or of the bytes of quantized rows."""
    return {WeightFormat.FP32: torch.float32, WeightFormat.FP16: torch.float16}.get(form, torch.uint8)


def row_ranges(weight: Tensor) -> Tensor:
    """(n, 2) float32: the negated minimum and the maximum per row.

    The elementwise maximum of the ranges of a row's parts is the range of the row.
    """
    weight = weight.to(torch.float32)
    return torch.stack([-weight.amin(dim=1), weight.amax(dim=1)], dim=1)


def encode(weight: Tensor, form: WeightFormat, ranges: Tensor | None = None) -> Tensor:
    """Encode rows as bytes.

    Args:
        weight: (n, w) of any floating dtype, on any device. Its values are finite, and within float16's range unless
            ``form`` is FP32. The columns of a quantized row fill pairs of bytes.
        form: the format.
        ranges: (n, 2) ranges of the whole rows, from :func:`row_ranges`. Default: the ranges of ``weight``.

    Returns:
        (n, b) uint8, on the device of ``weight``.
    """
    if not form.is_quantized:
        return weight.to(dtype_of(form)).contiguous().view(torch.uint8)
    device = weight.device
    # fbgemm has this operator for the CPU only. A table is converted once.
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
    # fbgemm's operator puts scale and bias last. Its kernel expects them first.
    return torch.cat([head, codes[:, :-HEAD_BYTES]], dim=1).to(device)


def fault_of(table: str, parts: Iterable[Tensor], form: WeightFormat) -> str:
    """A message about a value of a table that its format cannot represent. "" for none."""
    limit = torch.finfo(torch.float32).max if form is WeightFormat.FP32 else GREATEST
    # amax() of no elements raises. A comparison with NaN is false, so NaN is bad.
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
