"""Checkpointed forwards are computed once more, with the same random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import DynamicIds, native, shard
from shardrec.pipeline import Pipeline, is_checkpointing, is_recomputing


class Count(nn.Module):
    """Notes how its forward is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append("recomputed" if is_recomputing() else "checkpointed" if is_checkpointing() else "plain")
        return input * 1


@pytest.mark.parametrize(
    ("checkpoint", "seen"),
    [
        ("always", ["checkpointed"] * 3 + ["recomputed"] * 3),
        ("except_last", ["checkpointed"] * 2 + ["plain"] + ["recomputed"] * 2),
        ("never", ["plain"] * 3),
    ],
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_is_computed_again(checkpoint: Any, seen: list[str], schedule: Any) -> None:
    first, last = Count(), Count()
    layers = nn.Sequential(nn.Linear(1, 1), first, nn.Linear(1, 1), last)
    pipeline = Pipeline(layers, [2, 2], chunks=3, checkpoint=checkpoint, schedule=schedule)
    pipeline.step(torch.ones(3, 1), loss_fn=lambda output, _: output.sum(), reduction="sum")
    assert sorted(first.seen) == sorted(last.seen) == sorted(seen)
    if schedule == "gpipe":
        assert first.seen == seen
    first.seen.clear()
    with torch.no_grad():
        pipeline(torch.ones(3, 1))
    assert first.seen == ["plain"] * 3
    assert not is_checkpointing()
    assert not is_recomputing()


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_dropout_drops_the_same_in_forward_and_backward(checkpoint: Any, in_turn: bool) -> None:
    pipeline = Pipeline(
        nn.Sequential(nn.Dropout(), nn.Dropout(), nn.Dropout()), [1, 1, 1], chunks=4, checkpoint=checkpoint
    )
    if in_turn:
        pipeline.threads = lambda: None  # type: ignore[method-assign]
    x = torch.ones(64, 16, requires_grad=True)
    output = pipeline(x)
    output.sum().backward()
    assert 0 < (output == 0).sum() < output.numel()
    # What was kept is multiplied by 2 in each layer, and so is its gradient.
    torch.testing.assert_close(x.grad, output.detach())


def test_a_seed_decides_on_all_that_is_drawn() -> None:
    pipeline = Pipeline(nn.Sequential(nn.Dropout(), nn.Dropout()), [1, 1], chunks=3)
    outputs = []
    for _ in range(3):
        torch.manual_seed(5)
        outputs.append([pipeline(torch.ones(6, 32)), pipeline(torch.ones(6, 32)), torch.rand(3)])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(outputs[0], outputs[2], rtol=0, atol=0)
    assert not torch.equal(outputs[0][0], outputs[0][1])


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_dropout_equals_the_unpipelined_model_s(checkpoint: Any) -> None:
    """In one stage numbers are drawn as without a pipeline; a recomputation leaves no trace in the generator."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3))
    pipeline = Pipeline(copy.deepcopy(model), [3], chunks=2, checkpoint=checkpoint)
    x = torch.randn(8, 3)
    torch.manual_seed(1)
    loss = sum(model(part).square().sum() for part in x.split(4))
    loss.backward()  # type: ignore[union-attr]
    after = torch.rand(1)
    torch.manual_seed(1)
    pipeline.step(x, loss_fn=lambda output, _: output.square().sum(), reduction="sum")
    assert torch.equal(torch.rand(1), after)
    for mine, theirs in zip(pipeline.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Bags(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        value: Tensor = self.bags(features).values()
        return value


@pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")
def test_ids_are_learned_and_counted_once() -> None:
    """By the forward. The recomputation looks the same rows up."""

    def trained(checkpoint: Any) -> list[Any]:
        torch.manual_seed(0)
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=6, embedding_dim=4, feature_names=[name]) for name in "ab"
        ]
        options = DynamicIds(evict="never", admit_after=2, fallback_rows=1)
        bags = Bags(EmbeddingBagCollection(tables=configs))
        model = shard(bags, dynamic_ids={"bags.a": options}, on_bad_id="wrap")
        pipeline = Pipeline(nn.Sequential(model, nn.Linear(8, 1)), [1, 1], chunks=4, checkpoint=checkpoint)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        losses = []
        for _ in range(3):
            features = KeyedJaggedTensor(
                keys=["a", "b"],
                values=torch.cat([torch.arange(8) + 101, torch.arange(8)]),
                lengths=torch.ones(16, dtype=torch.int64),
            )
            optimizer.zero_grad()
            losses.append(pipeline.step(features, torch.zeros(8, 1), loss_fn=nn.functional.mse_loss).item())
            optimizer.step()
        return [losses, [value.tolist() for value in model.state_dict().values()], model.id_stats(), model.bad_ids()]

    assert trained("always") == trained("never")
