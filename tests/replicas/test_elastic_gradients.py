"""Elastic replicas average tables alone, sparse gradients, and gradients that optimizers in backward take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.checkpoint import Checkpoints
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from shardrec.replicas import Replicas
from shardrec.replicas.elastic_model import ElasticModel
from tests.models import apply_optimizer_in_backward, click_model
from tests.modules.clicks import CONFIGS, assert_tables_equal, dense_parameters, mixed_plan
from tests.ranks import ranks
from tests.replicas.replica import PATIENCE_S, Replica, batch_of, groups_of, loss_of


class Factors(nn.Module):
    """A model of tables alone: the scores of pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=6, embedding_dim=4, feature_names=[name])
            for name in ("user", "item")
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": 0.1})

    def forward(self, pairs: Tensor) -> Tensor:
        pooled = self.bags(KeyedJaggedTensor(["user", "item"], pairs.flatten(), lengths=torch.ones(6).int()))
        return (pooled["user"] * pooled["item"]).sum(dim=1)


def pairs_of(step: int, rank: int) -> Tensor:
    return torch.randint(6, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("size", [1, 2])
def test_tables_alone_count_steps(size: int, store: Any) -> None:
    """Also on a rank without a table, and in no_sync, which ends no step."""

    def rank_main(address: str) -> list[int]:
        layouts = (cuts.table_wise("bags.user", 6, 4, rank=0), cuts.table_wise("bags.item", 6, 4, rank=0))
        plan = ShardingPlan(topology=Topology(ranks_per_host=size), tables=layouts)
        group = groups_of(size)[dist.get_rank() // size]
        model = shard(Factors(), plan, replicas=Replicas(2, elastic=address, patience_s=PATIENCE_S), group=group)
        assert isinstance(model, ElasticModel)
        model.join()
        counts = []
        for step in range(3):
            model(pairs_of(step, dist.get_rank())).square().mean().backward()
            counts.append(model.steps)
        with model.no_sync():
            model(pairs_of(0, 0)).mean().mul(0).backward()
        counts.append(model.steps)
        model.sync_replicas()
        reference = Factors()
        for step in range(3):
            losses = [reference(pairs_of(step, rank)).square().mean() for rank in range(2 * size)]
            torch.stack(losses).mean().backward()
        assert_tables_equal(model.module, reference, "tables")
        return counts

    assert ranks(2 * size, rank_main, f"127.0.0.1:{store.port}") == [[1, 2, 3, 3]] * (2 * size)


def test_a_step_in_which_only_tables_train(store: Any) -> None:
    """A dense part that is frozen has no gradient to average."""

    def rank_main(address: str) -> int:
        replica = Replica(address, count=1)
        for parameter in dense_parameters(replica.model):
            parameter.requires_grad_(False)
        replica.model.join(replica.dense)
        replica.step()
        return replica.model.steps

    assert ranks(1, rank_main, f"127.0.0.1:{store.port}") == [1]


class Both(nn.Module):
    """The bags, and an ordinary embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = click_model(CONFIGS, optimizer="sgd")
        self.bias = nn.Embedding(9, 1, sparse=True)

    def forward(self, dense: Tensor, bags: Any) -> Tensor:
        logits: Tensor = self.clicks(dense, bags) + self.bias(torch.arange(len(dense)) * 2).squeeze(1)
        return logits


def test_sparse_gradients_and_optimizers_of_the_dense_part(store: Any, tmp_path: Path) -> None:
    """SparseAdam gets the means as sparse gradients, also where a replica adds none. The optimizers in backward may be
    given. A model that has loaded a checkpoint is at its step."""

    def rank_main(address: str) -> None:
        rank = dist.get_rank()
        alone = [dist.new_group([one]) for one in range(2)][rank]
        torch.manual_seed(0)
        reference, module = Both(), Both()
        module.load_state_dict(reference.state_dict())
        in_backward = module.clicks.top.bias
        apply_optimizer_in_backward(torch.optim.SGD, [in_backward], {"lr": 0.1})
        replicas = Replicas(2, elastic=address, patience_s=PATIENCE_S)
        model: Any = shard(module, mixed_plan(1, "clicks.sparse"), replicas=replicas, group=alone)
        model.bias.weight.requires_grad_(rank == 0)
        sparse = torch.optim.SparseAdam([model.bias.weight], lr=0.1)
        checkpoints = Checkpoints(tmp_path / str(rank))
        checkpoints.save(7, model, sparse)
        checkpoints.load_last(model, sparse)
        model.join(sparse, *in_backward._in_backward_optimizers)
        assert model.steps == 7
        loss_of(model, [batch_of(0, rank)]).backward()
        assert model.bias.weight.grad.is_sparse
        sparse.step()
        (loss_of(reference, [batch_of(0, 0)]) / 2).backward()
        torch.optim.SparseAdam([reference.bias.weight], lr=0.1).step()
        assert torch.allclose(model.bias.weight, reference.bias.weight)
        assert (model.steps, sparse.state[model.bias.weight]["step"]) == (8, 1)

    ranks(2, rank_main, f"127.0.0.1:{store.port}")
