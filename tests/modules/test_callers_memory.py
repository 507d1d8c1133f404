"""A batch's memory is the caller's: what they write into it after forward changes nothing in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import shard
from tests.models import apply_optimizer_in_backward, collection
from tests.ranks import ranks

CONFIGS = [EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=[name]) for name in "ab"]


def step(cut: str, world: int, dtype: torch.dtype, *, reuse: bool) -> list[Tensor]:
    """This rank's shards after a step; with ``reuse``, the batch's tensors were overwritten before backward."""
    tables = collection(CONFIGS, optimizers="sgd", weighted=True)
    shape = (20, 8)
    layouts = tuple(
        cuts.row_wise(name, *shape, ranks=range(world)) if cut == "row_wise" else cuts.table_wise(name, *shape, rank=0)
        for name in "ab"
    )
    sharded = shard(tables, ShardingPlan(topology=Topology(ranks_per_host=world), tables=layouts))
    values = torch.tensor([3, 5, 5, 7, 11, 13], dtype=dtype)
    lengths, weights = torch.tensor([2, 1, 1, 2], dtype=torch.int32), torch.arange(1.0, 7.0)
    out = sharded(KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths, weights=weights)).values()
    if reuse:
        values.fill_(1)
        lengths.fill_(0)
        weights.fill_(100.0)
    out.sum().backward()
    return [local.detach().clone() for table in sharded.tables().values() for local in table.locals.values()]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("cut", ["table_wise", "row_wise"])
def test_a_batch_may_be_overwritten_before_backward(cut: str, world: int) -> None:
    def rank_main() -> None:
        for dtype in (torch.int32, torch.int64):
            kept = step(cut, world, dtype, reuse=False)
            reused = step(cut, world, dtype, reuse=True)
            assert len(kept) == len(reused)
            for one, other in zip(kept, reused, strict=True):
                assert torch.equal(one, other)

    ranks(world, rank_main)


def step_at_once(world: int, *, rows: bool, reuse: bool) -> list[Tensor]:
    """This rank's shards after a step; with ``reuse``, what was given was overwritten between backward and the step."""
    cls, config = (EmbeddingCollection, EmbeddingConfig) if rows else (EmbeddingBagCollection, EmbeddingBagConfig)
    torch.manual_seed(0)
    tables = cls(tables=[config(name="a", num_embeddings=20, embedding_dim=8, feature_names=["a"])])
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 1.0})
    plan = ShardingPlan(topology=Topology(ranks_per_host=world), tables=(cuts.table_wise("a", 20, 8, rank=0),))
    sharded = shard(tables, plan, dedup=False, update="step")
    values, lengths = torch.tensor([3, 5, 5, 7]), torch.tensor([2, 1, 1], dtype=torch.int32)
    out = sharded(KeyedJaggedTensor(keys=["a"], values=values, lengths=lengths))
    output = out["a"].values() if rows else out.values()
    gradient = torch.arange(float(output.numel())).view(output.shape)
    output.backward(gradient)
    if reuse:
        for given in (values, lengths, gradient, output.detach()):
            given.fill_(1)
    sharded.fused_optimizer.step()
    return [local.detach().clone() for table in sharded.tables().values() for local in table.locals.values()]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("rows", [False, True])
def test_what_backward_was_given_may_be_overwritten_before_the_step(rows: bool, world: int) -> None:
    def rank_main() -> None:
        kept = step_at_once(world, rows=rows, reuse=False)
        assert all(map(torch.equal, kept, step_at_once(world, rows=rows, reuse=True)))

    ranks(world, rank_main)


class TwoCalls(nn.Module):
    """The first call waits for the second one, and the caller changes its input in between."""

    def __init__(self, *, weighted: bool, rows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_of_rows = rows
        self.first = (
            EmbeddingCollection(
                tables=[EmbeddingConfig(name="a", num_embeddings=20, embedding_dim=8, feature_names=["a"])]
            )
            if rows
            else EmbeddingBagCollection(tables=CONFIGS[:1], is_weighted=weighted)
        )
        self.second = EmbeddingBagCollection(tables=CONFIGS[1:])

    def forward(self, features: KeyedJaggedTensor, others: KeyedJaggedTensor) -> list[Tensor]:
        rows = self.first(features)
        features.values().add_(7)
        if features.weights_or_none() is not None:
            features.weights().mul_(3.0)
        sums = self.second(others).values()
        return [rows["a"].values() if self.is_of_rows else rows.values(), sums]


def cut_calls(cut: str, dtype: torch.dtype, *, weighted: bool, rows: bool, dedup: bool) -> None:
    model = TwoCalls(weighted=weighted, rows=rows)
    shape = ("first.a", 20, 8)
    layouts: dict[str, Callable[[], TableLayout]] = {
        "table_wise": lambda: cuts.table_wise(*shape, rank=0),
        "row_wise": lambda: cuts.row_wise(*shape, ranks=[0, 1]),
        "data_parallel": lambda: cuts.data_parallel(*shape),
    }
    tables = (layouts[cut](), cuts.table_wise("second.b", 20, 8, rank=1))
    reference = copy.deepcopy(model)
    sharded = shard(model, ShardingPlan(topology=Topology(ranks_per_host=2), tables=tables), dedup=dedup)
    for step in range(3):
        outputs = []
        for each in (sharded, reference):
            weights = torch.tensor([1.0, 2.0, 0.5]) if weighted else None
            ids = [torch.tensor([step, 5, 5], dtype=dtype), torch.tensor([3, 4, step], dtype=dtype)]
            features = [
                KeyedJaggedTensor(keys=[key], values=values, lengths=torch.tensor([2, 1]), weights=of_key)
                for key, values, of_key in zip("ab", ids, (weights, None), strict=True)
            ]
            outputs.append(each(*features))
        for output, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("cut", ["table_wise", "row_wise", "data_parallel"])
def test_a_batch_may_be_overwritten_between_two_calls(cut: str) -> None:
    def rank_main() -> None:
        # Each kind of call has both dtypes, under one cut or another.
        first, second = (torch.int32, torch.int64)[:: -1 if cut == "row_wise" else 1]
        cut_calls(cut, first, weighted=False, rows=False, dedup=True)
        cut_calls(cut, second, weighted=True, rows=False, dedup=True)
        cut_calls(cut, first, weighted=False, rows=True, dedup=True)
        cut_calls(cut, second, weighted=False, rows=True, dedup=False)

    ranks(2, rank_main)
