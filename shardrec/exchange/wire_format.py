"""Wire formats of pooled rows and their gradients: float32, 16-bit floats, or bytes with a scale per row.

The loss of precision is bounded, per element x of a row with extremes a and b:

========  ====================  ==========================================================
wire      bytes per element     error at most
========  ====================  ==========================================================
``fp32``  4                     0
``fp16``  2                     2⁻¹¹ · \\|x\\| (for 2⁻¹⁴ ≤ \\|x\\| ≤ 65504)
``bf16``  2                     2⁻⁸ · \\|x\\|
``int8``  1, and 8 per row      (b − a) · (1/510 + 2⁻²¹) + 2⁻²⁴ · \\|x\\| + 2⁻⁶⁶ (for \\|x\\| < 2⁸⁶)
========  ====================  ==========================================================

NaN and Inf never arrive as finite numbers: with ``int8``, all of a row that has one arrives as NaN.

The idea is TorchRec's ``QCommsConfig``. The row format of ``int8`` is fbgemm's fused 8-bit rowwise one.

[Note: the bound of int8]
fbgemm sends the scale (b − a) / 255 and the bias a, but divides by a scale that has an epsilon in it, ε = 10⁻⁸: x
becomes q = round((x − a) · 255 / (b − a + ε)), and q · (b − a) / 255 + a is what arrives. Rounding to a whole number
errs by (b − a) / 510. The epsilon moves x towards a by another (x − a) · ε / (b − a + ε), which is up to ε, and more
than the rest once b − a < 5 · 10⁻⁶. Gradients of a mean loss are that small, and rows that span less than ε would
arrive as a. So rows are multiplied by 2⁴⁰ before, and their scale and bias by 2⁻⁴⁰ after, both without rounding:
ε · 2⁻⁴⁰ < 2⁻⁶⁶ is left. The rest is float32, 2⁻²⁴ per operation: six are on numbers up to b − a (x − a, its product,
b − a + ε, 255 over it, the scale, q times the scale), which 2⁻²¹ covers, and the last is on the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives, Later, Pending
from shardrec.layout import COLUMN_UNIT

WireType = Literal["fp32", "fp16", "bf16", "int8"]
WIRE_TYPES: tuple[str, ...] = get_args(WireType)
Shape = tuple[int, int]
"""Rows and columns of a part of a buffer."""

_FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ROW_EXTRA = 8  # a float32 scale and a float32 bias after each row of bytes
_LIFT = 2.0**40  # see [Note: the bound of int8]


@dataclass(frozen=True, kw_only=True)
class QuantizedComms:
    """Formats of the output all-to-all and of its gradient.

    Args:
        output: format of pooled rows, forward.
        gradient: format of their gradients, backward.
    """

    output: WireType = "fp32"
    gradient: WireType = "fp32"

    def __post_init__(self) -> None:
        for name in ("output", "gradient"):
            value = getattr(self, name)
            if value not in WIRE_TYPES:
                raise ConfigError(f"QuantizedComms({name}={value!r}): the formats are {', '.join(WIRE_TYPES)}")


class Wire:
    """An all-to-all of float32 rows in one of the formats.

    Args:
        wire_type: the format.
        collectives: of the group that the embeddings are sharded over.

    Attributes:
        is_plain: whether rows travel unchanged.
    """

    def __init__(self, wire_type: WireType, collectives: Collectives) -> None:
        self._type = wire_type
        self._collectives = collectives
        self.is_plain = wire_type == "fp32"

    def send(
        self, flat: Tensor, receive: Sequence[Sequence[Shape]], send: Sequence[Sequence[Shape]], what: str
    ) -> Pending:
        """Encode and issue.

        Args:
            flat: float32, the parts for each rank one after the other, each (rows, columns) in row order.
            receive: per rank, the parts that come from it.
            send: per rank, the parts that go to it.
            what: the exchange's name in errors.

        Returns:
            Per rank, float32, the parts received from it, one after the other.
        """
        sizes_in = [sum(map(self._elements, parts)) for parts in receive]
        sizes_out = [sum(map(self._elements, parts)) for parts in send]
        encoded = self._encode(flat, [shape for parts in send for shape in parts])
        pending = self._collectives.send([[part] for part in encoded.split(sizes_out)], sizes_in, what)
        return Later(lambda: [self._decode(part, shapes) for part, shapes in zip(pending.wait(), receive, strict=True)])

    def _elements(self, shape: Shape) -> int:
        rows, cols = shape
        if self._type == "int8":
            return rows * (_padded(cols) + _ROW_EXTRA) if cols else 0
        return rows * cols

    def _encode(self, flat: Tensor, shapes: Sequence[Shape]) -> Tensor:
        if self._type == "fp32":
            return flat
        if self._type != "int8":
            return flat.to(_FLOATS[self._type])
        parts = [
            _to_bytes(_with_padding(part.view(rows, cols))).view(-1)
            for part, (rows, cols) in zip(flat.split([rows * cols for rows, cols in shapes]), shapes, strict=True)
            if rows * cols
        ]
        return torch.cat(parts) if parts else flat.new_zeros(0, dtype=torch.uint8)

    def _decode(self, wire: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """The data of one rank, as float32."""
        if self._type == "fp32":
            return wire
        if self._type != "int8":
            return wire.to(torch.float32)
        sizes = [self._elements(shape) for shape in shapes]
        parts = [
            torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(part.view(rows, _padded(cols) + _ROW_EXTRA))[
                :, :cols
            ].reshape(-1)
            for part, (rows, cols) in zip(wire.split(sizes), shapes, strict=True)
            if rows * cols
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32, device=wire.device)


def _to_bytes(rows: Tensor) -> Tensor:
    """(rows, cols) float32 as (rows, cols + 8) bytes. Cols is a multiple of 4."""
    packed: Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows * _LIFT)
    # fbgemm's minimum and maximum pass over NaN. A sum does not: 0 for finite rows, NaN for others.
    packed.view(torch.float32)[:, -2:].mul_(1 / _LIFT).add_(rows.sum(dim=1, keepdim=True).mul_(0))
    return packed


def _padded(cols: int) -> int:
    """Columns that travel as INT8: a multiple of 4, so that what follows them is aligned."""
    return -(-cols // COLUMN_UNIT) * COLUMN_UNIT


def _with_padding(rows: Tensor) -> Tensor:
    """(rows, cols) with the last column repeated, which does not change a row's range."""
    missing = _padded(rows.size(1)) - rows.size(1)
    return torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1) if missing else rows
