"""Features with a batch size each: inverse indices that are read, and faulty ones. Values are in tests/parity."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from tests.executors import TRAINING, executed
from tests.models import collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan
from tests.ranks import ranks


def features_with(strides: list[int], inverse: list[list[int]] | None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.zeros(sum(strides), dtype=torch.int64),
        lengths=torch.ones(sum(strides), dtype=torch.int32),
        stride_per_key_per_rank=[[size] for size in strides],
        inverse_indices=None if inverse is None else (["a", "b"], torch.tensor(inverse)),
    )


def test_bad_inverse_indices_are_named_on_every_rank() -> None:
    def rank_main() -> None:
        rng = Random(0)
        configs = random_configs(rng)
        while set(feature_rows(configs)) != {"a", "b"}:
            configs = random_configs(rng)
        model = shard(collection(configs), random_plan(rng, table_sizes(configs), Topology(ranks_per_host=2)))
        good = features_with([2, 1], [[0, 1, 1], [0, 0, 0]])
        for bad, words in [
            (
                features_with([2, 1], None),
                r"batch size each \(\[2, 1\]\) and no inverse indices.*Give .* inverse_indices",
            ),
            (features_with([2, 1], [[0, 2, 1], [0, 0, 0]]), r"'a': the inverse index of sample 1 is 2 and .* 2 bags"),
            (features_with([2, 1], [[0, 1, 1], [0, 0, -1]]), r"'b': the inverse index of sample 2 is -1"),
            (features_with([2, 2], [[0, 1, 1], [0, 0, 9]]), r"'b': the inverse index of sample 2 is 9"),
        ]:
            with pytest.raises(InputError, match=words):
                model(bad if dist.get_rank() == 1 else good)
            assert model(good).values().size(0) == 3

    ranks(2, rank_main)


def test_of_sequences_bad_inverse_indices_are_named_and_no_others_are_read() -> None:
    def rank_main() -> None:
        module = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["a", "b"])]
        )
        plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=(cuts.row_wise("t", 4, 8, ranks=(0, 1)),))
        model = shard(module, plan)
        good = features_with([2, 1], [[0, 1, 1], [0, 0, 0]])
        for bad, words in [
            (features_with([2, 1], [[0, 2, 1], [0, 0, 0]]), r"'a': the inverse index of sample 1 is 2 and .* 2 bags"),
            (features_with([2, 2], [[0, 1, 1], [0, 0, -1]]), r"'b': the inverse index of sample 2 is -1"),
            (features_with([0, 0], [[0, 0, 0], [0, 0, 0]]), r"'a': the inverse index of sample 0 is 0 and .* 0 bags"),
        ]:
            with pytest.raises(InputError, match=words):
                model(bad if dist.get_rank() == 1 else good)
            assert [one.lengths().tolist() for one in model(good).values()] == [[1, 1, 1], [1, 1, 1]]
        bags = model(features_with([2, 1], None))
        assert [one.lengths().tolist() for one in bags.values()] == [[1, 1], [1]]
        # As TorchRec's sharded module, which reads them where features have a batch size each.
        plain = KeyedJaggedTensor(
            keys=["a", "b"],
            values=torch.zeros(4, dtype=torch.int64),
            lengths=torch.ones(4, dtype=torch.int32),
            inverse_indices=(["a", "b"], torch.tensor([[0, 9, 1], [0, 0, 0]])),
        )
        assert [one.lengths().tolist() for one in model(plain).values()] == [[1, 1], [1, 1]]

    ranks(2, rank_main)


@pytest.mark.some(4)
@pytest.mark.parametrize("executor", TRAINING)
@pytest.mark.parametrize("unused", [0, 1, 7])
def test_what_no_table_looks_up_may_have_any_form(executor: str, unused: int) -> None:
    """A key's batch size, and weights of any shape, in each executor; also of a batch without samples."""

    def rank_main() -> None:
        rank = dist.get_rank()
        configs = [
            EmbeddingBagConfig(name=f"t_{name}", num_embeddings=9, embedding_dim=8, feature_names=[name])
            for name in ("a", "b")
        ]
        plan = ShardingPlan(
            topology=Topology(ranks_per_host=2),
            tables=(cuts.row_wise("t_a", 9, 8, ranks=range(2)), cuts.table_wise("t_b", 9, 8, rank=1)),
        )
        model, reference = shard(collection(configs, seed=1), plan), collection(configs, seed=1)
        run = executed(model, executor)
        for size in (2, 1) if rank else (3, 1):
            sizes = {"a": size, "unused": unused, "b": size}
            lengths = torch.arange(sum(sizes.values())) % 3
            batch = KeyedJaggedTensor(
                keys=list(sizes),
                values=torch.arange(int(lengths.sum())) % 9,
                lengths=lengths,
                weights=torch.ones(int(lengths.sum()), 2),
                stride_per_key_per_rank=[[each] for each in sizes.values()],
            )
            torch.testing.assert_close(run(batch).values(), reference(batch).values())

    ranks(2, rank_main)
