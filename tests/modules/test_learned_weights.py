"""Weights of ids that take a gradient: position weights and attention reach their own rank, under any plan."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError
from shardrec.layout import Topology
from shardrec.modules import shard
from tests.batches import random_bags
from tests.collective_counts import CountCollectives
from tests.models import collection, feature_rows, random_configs, table_sizes
from tests.modules.tables import local_part
from tests.plans import random_plan
from tests.ranks import ranks


def with_leaf(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
    """The batch with its weights as a leaf."""
    leaf = features.weights().clone().requires_grad_()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        weights=leaf,
        stride=features.stride(),
    ), leaf


def test_position_weights() -> None:
    """TorchRec's FeatureProcessedEmbeddingBagCollection, its position weights averaged with the dense part."""
    configs = [
        EmbeddingBagConfig(name="t0", num_embeddings=13, embedding_dim=8, feature_names=["a"]),
        EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=12, feature_names=["b"]),
    ]

    def processed() -> FeatureProcessedEmbeddingBagCollection:
        weights = PositionWeightedModuleCollection(max_feature_lengths={"a": 4, "b": 4})
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter.copy_(torch.linspace(0.5, 2.0, 4))
        return FeatureProcessedEmbeddingBagCollection(collection(configs, weighted=True, optimizers="sgd"), weights)

    def rank_main() -> None:
        rank = dist.get_rank()
        rng = Random(0)
        path = "_embedding_bag_collection"
        plan = random_plan(rng, table_sizes(configs, path), Topology(ranks_per_host=2))
        model, reference = shard(processed(), plan), processed()
        optimizers = [
            torch.optim.SGD([one for name, one in module.named_parameters() if "position" in name], lr=0.1)
            for module in (model, reference)
        ]
        for _ in range(3):
            batches = [random_bags(rng, feature_rows(configs), 3, shuffled=False).kjt() for _ in range(2)]
            with CountCollectives() as counts:
                loss = model(batches[rank]).values().square().sum()
            assert counts["all_to_all"] == 2
            expected = [reference(batch).values().square().sum() for batch in batches]
            assert torch.allclose(loss, expected[rank], rtol=1e-4)
            with CountCollectives() as counts:
                loss.backward()
            assert counts["all_to_all"] == 2, "the output's gradient, and that of the weights"
            (sum(expected) / 2).backward()  # type: ignore[union-attr]
            for one in optimizers:
                one.step()
                one.zero_grad()
        ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
        checked = [name for name in theirs if "position" in name]
        assert checked
        for name in checked:
            assert torch.allclose(ours[name], theirs[name], atol=1e-4)
            assert not torch.equal(ours[name], torch.linspace(0.5, 2.0, 4)), "they learned"
        for name, table in model.module._embedding_bag_collection.tables().items():  # type: ignore[operator,union-attr]
            whole: nn.Parameter = reference._embedding_bag_collection.embedding_bags[name].weight  # type: ignore[assignment]
            for place, part in table.locals.items():
                assert torch.allclose(part, local_part(whole, place), atol=1e-4)

    ranks(2, rank_main)


def test_ranks_that_disagree_about_the_gradient_are_told_so() -> None:
    def rank_main() -> None:
        rng = Random(1)
        configs = random_configs(rng, weighted=True)
        plan = random_plan(rng, table_sizes(configs), Topology(ranks_per_host=2))
        model = shard(collection(configs, weighted=True), plan)
        features = random_bags(rng, feature_rows(configs), 2, weighted=True).kjt()
        with pytest.raises(InputError, match=r"rank 1: weights with gradient"):
            model(with_leaf(features)[0] if dist.get_rank() else features)

    ranks(2, rank_main)
