"""TorchRec's models, their collections pending: scripted, they compute, train and wait as in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import shardrec
from shardrec.pending import Await, LazyAwaitable, LazyNoWait
from tests.scripting.lookups import reload, script

DIM = 8


def keep(pooled: KeyedTensor) -> KeyedTensor:
    return pooled


class PendingBags(nn.Module):
    """An unsharded collection that returns what a sharded one does."""

    def __init__(self, features: str) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{one}", embedding_dim=DIM, num_embeddings=10, feature_names=[one])
            for one in features
        ]
        self.bags = EmbeddingBagCollection(tables=tables)

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        return LazyNoWait(self.bags(features))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.bags.embedding_bag_configs()

    def scripted_twin(self) -> nn.Module:
        return PendingBagsTwin(self.bags)


class PendingBagsTwin(nn.Module):
    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> Await[KeyedTensor]:
        return shardrec.pending.awaitable(keep, self.bags(features))


class TwoTowers(nn.Module):
    """A query tower and an item tower, each with a collection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query_bags, self.item_bags = PendingBags("ab"), PendingBags("cd")
        self.query, self.item = MLP(2 * DIM, [DIM, 4]), MLP(2 * DIM, [DIM, 4])

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        query = self.query_bags(features)
        item = self.item_bags(features)
        left = self.query(query.values())
        return (left * self.item(torch.cat([item["c"], item["d"]], dim=1))).sum(dim=1)


def parts() -> dict[str, Any]:
    return {
        "embedding_bag_collection": PendingBags("abcd"),
        "dense_in_features": 3,
        "dense_arch_layer_sizes": [6, DIM],
        "over_arch_layer_sizes": [5, 1],
    }


MODELS = [
    pytest.param(lambda: DLRM(**parts()), 1, id="dlrm"),
    # tests/parity/test_models.py has it on two ranks, test_crossnets.py its layers.
    pytest.param(
        lambda: DLRM_DCN(**parts(), dcn_num_layers=2, dcn_low_rank_dim=4), 1, id="dcn", marks=pytest.mark.slow
    ),
    pytest.param(TwoTowers, 2, id="two_towers"),
]


def batch() -> tuple[Tensor, KeyedJaggedTensor]:
    lengths = torch.randint(0, 3, (4 * 5,))
    ids = torch.randint(0, 10, (int(lengths.sum()),))
    return torch.randn(5, 3), KeyedJaggedTensor.from_lengths_sync(keys=list("abcd"), values=ids, lengths=lengths)


@pytest.mark.parametrize("make, collections", MODELS)
def test_computes_and_trains_the_same(make: Any, collections: int) -> None:
    torch.manual_seed(1)
    eager = make()
    torch.manual_seed(1)
    live = make()
    scripted: Any = script(live)
    graph = scripted.forward.graph
    assert len(graph.findAllNodes("prim::awaitable")) == collections
    assert len(graph.findAllNodes("prim::awaitable_wait")) == collections
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, scripted)]
    for _ in range(4):
        inputs = batch()
        losses = []
        for model, optimizer in zip((eager, scripted), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(*inputs).square().sum())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(live.state_dict(), eager.state_dict())
    inputs = batch()
    torch.testing.assert_close(reload(scripted)(*inputs), live(*inputs))
