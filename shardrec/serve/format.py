"""Storage formats of the rows of a served table."""

from __future__ import annotations

import enum

__all__ = ["HEAD_BYTES", "WeightFormat"]

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
        """Bytes of a row of ``columns`` columns, whose bits fill whole bytes."""
        return columns * self.bits // 8 + (HEAD_BYTES if self.is_quantized else 0)
