"""Formats on the wire: the error is bounded as documented, and the bytes that travel are fewer.

Whole collections in each format are in tests/parity.
"""

from __future__ import annotations

from collections.abc import Sequence

import fbgemm_gpu  # noqa: F401  # defines the operators
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives, Later, StreamSizes
from shardrec.exchange.wire_format import QuantizedComms, Wire, WireType

QUANTIZED: list[WireType] = ["fp16", "bf16", "int8"]


class Loopback(Collectives):
    """Two ranks, of which each sends itself what it receives; remembers the bytes."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.bytes = 0

    def send(
        self, parts: Sequence[Sequence[Tensor]], receive: Sequence[int], what: str, streams: StreamSizes | None = None
    ) -> Later:
        came = [torch.cat(list(of_rank)) for of_rank in parts]
        assert [part.numel() for part in came] == receive
        self.bytes += sum(part.nbytes for part in came)
        return Later(lambda: came)


def bound(wire: str, rows: Tensor) -> Tensor:
    """The largest error that the documentation allows, per element, in float64 as `rows` are."""
    size = rows.abs()
    if wire == "fp16":
        return size * 2.0**-11 + 2.0**-25  # below 2⁻¹⁴ steps are 2⁻²⁴
    if wire == "bf16":
        return size * 2.0**-8
    spread = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    return spread * (1 / 510 + 2.0**-21) + size * 2.0**-24 + 2.0**-66


def sent(wire: WireType, parts: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """What arrives, and how many bytes travelled; each part is all that a rank sends."""
    loop = Loopback()
    layout = [[(part.shape[0], part.shape[1])] for part in parts]
    arrived = Wire(wire, loop).send(torch.cat([part.reshape(-1) for part in parts]), layout, layout, "test").wait()
    assert all(one.dtype is torch.float32 for one in arrived)
    return [one.view_as(part) for one, part in zip(arrived, parts, strict=True)], loop.bytes


@given(
    wire=st.sampled_from(QUANTIZED),
    shapes=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 4, 8, 64])), min_size=2, max_size=2),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-18, 1e-9, 1e-6, 1e-3, 1.0, 100.0]),
    centre=st.sampled_from([0.0, 1.0, -30.0]),
)
@example(wire="int8", shapes=[(0, 0), (5, 4)], seed=161, scale=1e-3, centre=0.0)  # fbgemm's epsilon is felt
@example(wire="int8", shapes=[(5, 64), (5, 64)], seed=0, scale=1e24, centre=1.0)
def test_what_arrives_is_within_the_bound(
    wire: WireType, shapes: list[tuple[int, int]], seed: int, scale: float, centre: float
) -> None:
    torch.manual_seed(seed)
    parts = [(torch.randn(rows, cols) + centre) * scale for rows, cols in shapes]
    arrived, bytes_sent = sent(wire, parts)
    for part, got in zip(parts, arrived, strict=True):
        if part.numel():
            assert ((got.double() - part.double()).abs() <= bound(wire, part.double())).all()
    rows = sum(r for r, c in shapes if c)
    numbers = sum(part.numel() for part in parts)
    assert bytes_sent == (numbers + 8 * rows if wire == "int8" else numbers * 2)


@pytest.mark.parametrize("wire", QUANTIZED)
def test_the_bound_is_not_too_wide(wire: WireType) -> None:
    """Numbers between two that the format has are as far off as the documentation says, or hardly less."""
    between = {"fp16": 1 + 2.0**-11, "bf16": 1 + 2.0**-8, "int8": 127.5}[wire]
    rows = torch.tensor([[0.0, between, 1.0, 255.0]])
    (got, _), _ = sent(wire, [rows, rows])
    assert abs(got[0, 1].double() - between) > 0.99 * bound(wire, rows.double())[0, 1]


def test_int8_does_not_lean_to_the_smallest_of_a_row_of_small_gradients() -> None:
    """As it would with fbgemm's epsilon of 10⁻⁸: nearly all of a row that spans 10⁻⁹ would be lost."""
    rows = torch.linspace(0, 1e-9, 256).view(1, 256)
    (got, _), _ = sent("int8", [rows, rows])
    torch.testing.assert_close(got, rows, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3.4e38])
@pytest.mark.parametrize("wire", QUANTIZED)
def test_a_value_beyond_the_format_arrives_as_no_finite_number(wire: WireType, value: float) -> None:
    rows = torch.arange(12.0).view(3, 4)
    rows[1, 2] = value
    (got, _), _ = sent(wire, [rows, rows])
    assert not got[1, 2].isfinite()
    assert got[::2].isfinite().all(), "the other rows are as they were"


def test_float16_overflows_to_infinity() -> None:
    rows = torch.tensor([[70_000.0, -70_000.0, 1.0, 65_504.0]])
    assert sent("fp16", [rows, rows])[0][0].tolist() == [[torch.inf, -torch.inf, 1.0, 65_504.0]]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="formats are fp32, fp16, bf16, int8"):
        QuantizedComms(output="fp8")  # type: ignore[arg-type]
