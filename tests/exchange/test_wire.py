"""Formats on the wire: the error is bounded as documented, and the bytes that travel are fewer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.exchange.wire import QuantizedComms, Wire, WireType
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from tests.ranks import ranks

QUANTIZED: list[WireType] = ["fp16", "bf16", "int8"]


class Loopback:
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
    arrived = codec.receive(codec.send(flat, layout, layout, "test"), layout, "test")
    assert arrived.dtype is torch.float32
    for part, got in zip(parts, arrived.split([part.numel() for part in parts]), strict=True):
        if part.numel():
            assert ((got.view_as(part) - part).abs() <= bound(wire, part)).all()
    rows = sum(r for r, c in shapes if c)
    assert loop.bytes == (flat.numel() + 8 * rows if wire == "int8" else flat.numel() * 2)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="formats are fp32, fp16, bf16 and int8"):
        QuantizedComms(output="fp8")  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = {"num_embeddings": 20, "embedding_dim": 16}
        self.bags = EmbeddingBagCollection([EmbeddingBagConfig(name="t", feature_names=["f"], **tables)])
        self.rows = EmbeddingCollection([EmbeddingConfig(name="s", feature_names=["f"], **tables)])

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled, rows = self.bags(features), self.rows(features)
        return pooled.values(), rows["f"].values()


def outputs_and_weights(wire: WireType) -> list[Tensor]:
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    topology = Topology(ranks_per_host=world)
    plan = ShardingPlan(
        topology=topology,
        tables=(
            cuts.column_wise("bags.t", 20, 16, ranks=range(world)),
            cuts.row_wise("rows.s", 20, 16, ranks=range(world)),
        ),
    )
    sharded = shard(model, plan, comms=QuantizedComms(output=wire, gradient=wire))
    features = KeyedJaggedTensor(["f"], torch.arange(12) + dist.get_rank(), lengths=torch.full((6,), 2))
    pooled, rows = sharded(features)
    (pooled.square().sum() + rows.square().sum()).backward()
    after = sharded(features)
    return [value.detach() for value in (pooled, rows, *after)]


@pytest.mark.parametrize("wire", QUANTIZED)
@pytest.mark.parametrize("world", [2, 4])
def test_a_quantized_model_stays_near_the_exact_one(world: int, wire: WireType) -> None:
    exact = ranks(world, outputs_and_weights, "fp32")
    near = ranks(world, outputs_and_weights, wire)
    for expected, got in zip(exact, near, strict=True):
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            limit = bound(wire, a)
            if index >= 2:
                # Weights after a step with rounded gradients, each the sum of several: a bound by the largest value.
                limit = 4 * limit.max().expand_as(a)
            assert ((a - b).abs() <= limit + 1e-6).all(), (index, (a - b).abs().max())
            assert not torch.equal(a, b)
