"""TorchRec's tests of gradient accumulation in a train pipeline, by name, with tables included.

Those of its wrapper's own parts (the optimizer that it puts into a pipeline, DDP's warm-up and ``no_sync``) have
nothing to stand for here: :class:`shardrec.pipeline.TrainPipeline` accumulates itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.pipeline import TrainPipeline
from tests.models import apply_optimizer_in_backward


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])]
        )
        self.top = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.top(self.bags(features).values())
        return logits.sum()


def batches(count: int) -> list[KeyedJaggedTensor]:
    return [
        KeyedJaggedTensor(["f"], torch.tensor([number % 6, 5]), lengths=torch.ones(2, dtype=torch.int32))
        for number in range(count)
    ]


def pipeline(accumulate: int, count: int) -> tuple[TrainPipeline, list[int], shardrec.ShardedModel]:
    """With the number of updates of the dense part after each batch, which is filled as they come."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.1})
    sharded = shardrec.shard(model, update="step")
    dense = torch.optim.SGD(sharded.dense_parameters(), lr=0.1)
    made: list[int] = []
    dense.register_step_post_hook(lambda *_: made.append(1))
    steps = TrainPipeline(sharded, [dense, sharded.fused_optimizer], batches(count), accumulate=accumulate, depth=0)
    return steps, made, sharded


def reference(accumulate: int, count: int) -> Model:
    model = Model()
    optimizers = [torch.optim.SGD(model.top.parameters(), lr=0.1), torch.optim.Adagrad(model.bags.parameters(), lr=0.1)]
    for start in range(0, count, accumulate):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in batches(count)[start : start + accumulate]:
            (model(batch) / accumulate).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


def assert_equal(sharded: shardrec.ShardedModel, unsharded: nn.Module) -> None:
    held = sharded.state_dict()
    for name, value in unsharded.state_dict().items():
        whole: Any = held[name]
        if hasattr(whole, "local_shards"):
            whole = whole.local_shards()[0].tensor
        assert torch.allclose(whole, value, atol=1e-6), name


@pytest.mark.parametrize(
    ("test", "accumulate", "count", "updates"),
    [
        ("step_only_calls_optimizer_at_boundary", 4, 8, [0, 0, 0, 1, 1, 1, 1, 2]),
        ("accumulation_schedule_num_steps_4", 4, 8, [0, 0, 0, 1, 1, 1, 1, 2]),
        ("stop_iteration_flushes_remaining_gradients", 4, 5, [0, 0, 0, 1, 1]),
        ("stop_iteration_no_flush_at_boundary", 4, 4, [0, 0, 0, 1]),
        ("stop_iteration_current_step_not_advanced", 4, 3, [0, 0, 0]),
        ("stop_iteration_raises", 4, 0, []),
        ("disabled_ga_passes_through", 1, 3, [1, 2, 3]),
    ],
)
def test_torchrecs_schedules(test: str, accumulate: int, count: int, updates: list[int]) -> None:
    """And zero_grad_respects_needs_flag, gradient_values_accumulated, flush_calls_zero_grad: by the weights."""
    steps, made, sharded = pipeline(accumulate, count)
    seen = []
    for _ in range(count):
        next(steps)
        seen.append(len(made))
    assert seen == updates, test
    for _ in range(2):  # the second one updates nothing more
        with pytest.raises(StopIteration):
            next(steps)
        assert len(made) == -(-count // accumulate), test
    assert_equal(sharded, reference(accumulate, count))


def test_is_last_batch_not_at_boundary_flushes() -> None:
    steps, made, sharded = pipeline(4, 2)
    next(steps), next(steps)
    steps.update()
    assert len(made) == 1
    assert_equal(sharded, reference(4, 2))


def test_is_last_batch_at_boundary_no_double_step() -> None:
    steps, made, _ = pipeline(4, 4)
    for _ in range(4):
        next(steps)
    steps.update()
    assert len(made) == 1


@pytest.mark.parametrize("accumulate", [0, -1])
def test_num_steps_must_be_positive(accumulate: int) -> None:
    with pytest.raises(ConfigError, match=f"accumulate is {accumulate}: give a number of batches, 1 or more"):
        pipeline(accumulate, 1)
