"""How the rows of a served table are kept."""

from __future__ import annotations

import enum

__all__ = ["HEAD_BYTES", "WeightFormat"]

HEAD_BYTES = 4
"""What goes before the codes of a quantized row: scale and bias, float16 each."""


class WeightFormat(enum.Enum):
    """How the rows of a table are kept for inference.

    A quantized row is ``scale | bias | codes``: scale and bias in float16, a code of 8 or 4 bits for each column. It
    stands for ``scale * code + bias``. Whatever the format, rows are summed in float32.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Bits of a column."""
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
        """Bytes of a row with this number of columns, which fill whole bytes."""
        return columns * self.bits // 8 + (HEAD_BYTES if self.is_quantized else 0)
