"""Outputs of another dtype than float32, eager and scripted, pooled and per id."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

import shardrec
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from tests.batches import random_bags
from tests.models import apply_optimizer_in_backward, collection
from tests.ranks import ranks

ROWS = {"a": 13, "b": 7}
LAYOUTS = (cuts.row_wise("t0", 13, 8, ranks=(0, 1)), cuts.data_parallel("t1", 7, 8))
PLAN = ShardingPlan(topology=Topology(ranks_per_host=2), tables=LAYOUTS)


def bags() -> torch.nn.Module:
    configs = [
        EmbeddingBagConfig(name=f"t{number}", num_embeddings=rows, embedding_dim=8, feature_names=[feature])
        for number, (feature, rows) in enumerate(ROWS.items())
    ]
    return collection(configs, optimizers="sgd", seed=1)


def words() -> torch.nn.Module:
    torch.manual_seed(1)
    made = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=f"t{number}", num_embeddings=rows, embedding_dim=8, feature_names=[feature])
            for number, (feature, rows) in enumerate(ROWS.items())
        ]
    )
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.5})
    return made


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_float32_output_rounded_and_a_rounded_gradient(dtype: torch.dtype) -> None:
    def rank_main() -> None:
        features = random_bags(Random(dist.get_rank()), ROWS, 3).kjt()
        model, reference = shard(bags(), PLAN, output_dtype=dtype), shard(bags(), PLAN)
        values, expected = model(features).values(), reference(features).values()
        assert values.dtype is dtype
        assert torch.equal(values, expected.to(dtype))
        scripted = shardrec.script(model)
        assert torch.equal(scripted(features).values(), values)
        values.float().sum().backward()
        expected.sum().backward()
        for name, table in model.module.tables().items():  # type: ignore[operator]
            theirs = reference.module.tables()[name]  # type: ignore[operator]
            for place, part in table.locals.items():
                assert torch.allclose(part, theirs.locals[place]), "ones are the same gradient in every dtype"

        found = shard(words(), PLAN, output_dtype=dtype)
        rows, exact = found(features), shard(words(), PLAN)(features)
        in_script = shardrec.script(found)(features)
        for key in ROWS:
            assert rows[key].values().dtype is dtype
            assert torch.equal(rows[key].values(), exact[key].values().to(dtype))
            assert torch.equal(in_script[key].values(), rows[key].values())

    ranks(2, rank_main)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(
        shardrec.ConfigError, match=r"output_dtype is torch\.int8. Embeddings come as one of torch\.float32"
    ):
        shard(bags(), PLAN, output_dtype=torch.int8)
