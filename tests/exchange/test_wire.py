"""Formats on the wire: the error is bounded as documented, and the bytes that travel are fewer.

Whole collections in each format are in tests/parity.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.wire import QuantizedComms, Wire, WireType

QUANTIZED: list[WireType] = ["fp16", "bf16", "int8"]


class Loopback(Collectives):
    """Two ranks, of which each sends itself what it receives; remembers the bytes."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.bytes = 0

    def all_to_all(self, values: Tensor, receive: Sequence[int], send: Sequence[int], what: str) -> Tensor:
        assert sum(send) == sum(receive) == values.numel()
        self.bytes += values.numel() * values.element_size()
        return values

    def wait(self, pending: Tensor, what: str) -> Tensor:
        return pending


def bound(wire: str, rows: Tensor) -> Tensor:
    """The largest error that the documentation allows, per element."""
    size = rows.abs()
    if wire == "fp16":
        return size * 2.0**-11 + 2.0**-25
    if wire == "bf16":
        return size * 2.0**-8 + 1e-30
    spread = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    return (spread / 510 + size.amax(1, keepdim=True) * 2.0**-20).expand_as(rows)


@given(
    wire=st.sampled_from(QUANTIZED),
    shapes=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 4, 8, 64])), min_size=2, max_size=2),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_what_arrives_is_within_the_bound(
    wire: WireType, shapes: list[tuple[int, int]], seed: int, scale: float
) -> None:
    torch.manual_seed(seed)
    parts = [torch.randn(rows, cols) * scale for rows, cols in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    loop = Loopback()
    codec = Wire(wire, loop)
    layout = [[shape] for shape in shapes]
    arrived = torch.cat(codec.send(flat, layout, layout, "test").wait())
    assert arrived.dtype is torch.float32
    for part, got in zip(parts, arrived.split([part.numel() for part in parts]), strict=True):
        if part.numel():
            assert ((got.view_as(part) - part).abs() <= bound(wire, part)).all()
    rows = sum(r for r, c in shapes if c)
    assert loop.bytes == (flat.numel() + 8 * rows if wire == "int8" else flat.numel() * 2)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="formats are fp32, fp16, bf16 and int8"):
        QuantizedComms(output="fp8")  # type: ignore[arg-type]
