"""TorchRec's tests of gradient clipping (those of its ``GradientClippingOptimizer``), by name, with tables included.

Upstream writes the gradients into plain parameters and DTensors, and looks at them after the step. Here they come from
a backward through tables that are cut, and are seen by what a step of SGD with learning rate 1 takes off.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.layout import ShardingPlan, Topology, cuts
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

DIM = 4
SHARDED = ("first", "second")


class Model(nn.Module):
    """Two tables of three rows and a dense parameter, from all of which the outputs are columns."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=3, embedding_dim=DIM, feature_names=[name]) for name in SHARDED
        ]
        self.tables = EmbeddingBagCollection(tables=tables)
        self.dense = nn.Parameter(torch.zeros(3))

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        return self.tables(features).values(), self.dense


def model() -> shardrec.ShardedModel:
    unsharded = Model()
    with torch.no_grad():
        for parameter in unsharded.parameters():
            parameter.zero_()
    apply_optimizer_in_backward(torch.optim.SGD, unsharded.tables.parameters(), {"lr": 1.0})
    layouts = (
        cuts.row_wise("tables.first", 3, DIM, ranks=range(2)),
        cuts.column_wise("tables.second", 3, DIM, ranks=range(2)),
    )
    plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=layouts)
    return shardrec.shard(unsharded, plan, update="step")


def backward(model: shardrec.ShardedModel, gradients: dict[str, list[float]]) -> None:
    """Give row after row of the tables, in a column of its own, and the dense parameter these gradients."""
    ids = torch.arange(3).repeat(2)
    features = KeyedJaggedTensor(list(SHARDED), ids, lengths=torch.ones(6, dtype=torch.int32))
    pooled, dense = model(features)
    loss = pooled.sum() * 0
    for number, name in enumerate(SHARDED):
        for row, value in enumerate(gradients.get(name, ())):
            loss = loss + pooled[row, DIM * number + row] * value
    if "dense" in gradients:
        loss = loss + (dense[: len(gradients["dense"])] * torch.tensor(gradients["dense"])).sum()
    loss.backward()


def taken_off(model: shardrec.ShardedModel) -> dict[str, list[float]]:
    """What a step takes off, as :func:`backward` was given it."""
    dense = torch.optim.SGD(model.dense_parameters(), lr=1.0)
    dense.step()
    model.fused_optimizer.step()
    change = {"dense": -model.module.dense.detach()}  # type: ignore[union-attr, operator]
    for name in SHARDED:
        whole = torch.zeros(3, DIM)
        sharded = model.state_dict()[f"tables.embedding_bags.{name}.weight"]
        for shard in sharded.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            whole[row : row + rows, column : column + columns] = shard.tensor
        dist.all_reduce(whole)
        change[name] = -whole.diagonal()
    return {name: values.tolist() for name, values in change.items()}


def clipped(gradients: dict[str, list[float]], how: str, most: float, norm_type: float = 2.0) -> dict[str, list[float]]:
    made = model()
    backward(made, gradients)
    if how == "norm":
        shardrec.clip_grad_norm_(made, most, norm_type)
    else:
        shardrec.clip_grad_value_(made, most)
    return taken_off(made)


ONE = {"first": [1.0, 2.0]}
SMALL = {"first": [0.5, 0.5]}
LARGE = {"first": [2.0, 4.0]}
BOTH = {"first": [2.0, 4.0], "second": [4.0, 8.0]}
MIXED = {"first": [12.0, 15.0, 18.0], "dense": [20.0, 30.0, 15.0]}
TABLES = {"first": [12.0, 15.0, 18.0], "second": [20.0, 30.0, 15.0]}


@pytest.mark.some(8)
@pytest.mark.parametrize(
    ("test", "gradients", "how", "most", "norm_type"),
    [
        ("clip_all_gradients_norm", ONE, "norm", 0.0, 2.0),
        ("clip_no_gradients_norm", SMALL, "norm", 1.0, 2.0),
        ("clip_partial_gradients_norm", LARGE, "norm", 1.0, 2.0),
        ("clip_partial_gradients_norm_multi_params", BOTH, "norm", 2.0, 2.0),
        ("clip_all_gradients_value", ONE, "value", 0.0, 2.0),
        ("clip_no_gradients_value", SMALL, "value", 1.0, 2.0),
        ("clip_gradients_value", LARGE, "value", 1.0, 2.0),
        ("clip_partial_gradients_value_multi_params", BOTH, "value", 2.0, 2.0),
        ("clip_no_gradients_norm_meta_device", {}, "norm", 0.0, 2.0),
        *(("tensor_and_sharded_dtensor_clip_all_gradients_norm", MIXED, "norm", 10.0, p) for p in (torch.inf, 1, 2)),
        *(("multiple_sharded_dtensors_clip_all_gradients_norm", TABLES, "norm", 10.0, p) for p in (torch.inf, 1, 2)),
    ],
)
def test_torchrecs_cases(test: str, gradients: dict[str, list[float]], how: str, most: float, norm_type: float) -> None:
    parameters = {name: nn.Parameter(torch.zeros(len(values))) for name, values in gradients.items()}
    for name, parameter in parameters.items():
        parameter.grad = torch.tensor(gradients[name])
    if how == "norm":
        torch.nn.utils.clip_grad_norm_(parameters.values(), most, norm_type)
    else:
        torch.nn.utils.clip_grad_value_(parameters.values(), most)
    for change in ranks(2, clipped, gradients, how, most, norm_type):
        for name, values in change.items():
            expected = parameters[name].grad if name in parameters else torch.zeros(3)
            assert expected is not None
            padded = torch.cat([expected, torch.zeros(3 - len(expected))])
            assert torch.allclose(torch.tensor(values), padded, rtol=1e-5, atol=1e-7), f"{test}: {name}"
