"""What TorchRec's tests of dynamic sharding ask of a model whose plan changes, and the plans that they leave out.

Theirs (``torchrec/distributed/tests/test_dynamic_sharding.py``): a collection that was sharded under a plan and
resharded is the one that was sharded under the new plan at once, in parameters and in predictions, for tables that go
from ranks to ranks or between numbers of column shards, in FP32 and FP16, with each fused optimizer and quantized
communication. Equal up to the order of sums, as there; bit by bit: ``tests/checkpoint/test_reshard.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType

from shardrec import QuantizedComms, shard
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import ShardedModel
from tests.batches import random_bags
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.plans import CUTS
from tests.ranks import ranks

ROWS, DIM = 4, 16
KINDS = ("table_wise", "column_wise", "both")


def plans_of(kind: str, tables: int, world_size: int, rng: Random) -> list[ShardingPlan]:
    """Two plans that differ, of tables on one rank each, cut by columns, or either."""

    def layout(number: int) -> TableLayout:
        name = f"t{number}"
        if kind == "any":
            return CUTS[rng.choice(sorted(CUTS))](rng, name, ROWS, DIM, Topology(ranks_per_host=world_size))
        if kind == "table_wise" or (kind == "both" and rng.random() < 0.5):
            return cuts.table_wise(name, ROWS, DIM, rank=rng.randrange(world_size))
        count = rng.choice([count for count in (1, 2, 4) if count <= world_size])
        return cuts.column_wise(name, ROWS, DIM, ranks=rng.sample(range(world_size), count))

    plans: list[ShardingPlan] = []
    while len(plans) < 2 or not plans[0].diff(plans[1]):
        layouts = tuple(layout(number) for number in range(tables))
        plans = [*plans[:1], ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=layouts)]
    return plans


def sharded(plan: ShardingPlan, data_type: DataType, optimizer: str, comms: QuantizedComms | None) -> ShardedModel:
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=ROWS,
            embedding_dim=DIM,
            feature_names=[f"f_{table.name}"],
            data_type=data_type,
        )
        for table in plan.tables
    ]
    collection = EmbeddingBagCollection(tables=configs)
    choice = OPTIMIZERS[optimizer]
    if choice.optimizer is not None:
        apply_optimizer_in_backward(choice.optimizer, collection.parameters(), dict(choice.settings))
    return shard(collection, plan, comms=comms)


def compare(cases: Sequence[tuple[Any, ...]]) -> None:
    """On a rank: a model that changes its plan after two steps, and one of the new plan from the first on."""
    for (old, new), data_type, optimizer, comms in cases:
        models = [sharded(plan, data_type, optimizer, comms) for plan in (old, new)]
        given = [
            torch.optim.SGD(model.parameters(), lr=0.1)
            for model in models
            if optimizer == "none" and [*model.parameters()]
        ]
        rng = Random(dist.get_rank())
        close: Any = dict.fromkeys(("rtol", "atol"), 1e-4 if data_type is DataType.FP32 else 1e-2)
        for step in range(4):
            if step == 2:
                models[0].reshard(new, given[0] if given else None)
            features = random_bags(rng, {f"f_{table.name}": ROWS for table in new.tables}, 2).kjt()
            outputs: list[Tensor] = []
            for model in models:
                for one in given:
                    one.zero_grad()
                outputs.append(model(features).values())
                outputs[-1].sum().backward()
                for one in given:
                    one.step()
            torch.testing.assert_close(*outputs, **close)
        mine, theirs = (list(model.named_parameters()) for model in models)
        assert [name for name, _ in mine] == [name for name, _ in theirs]
        for (_, one), (_, other) in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, **close)


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_resharded_model_is_the_one_of_the_new_plan(world_size: int) -> None:
    rng = Random(world_size)
    fp16 = QuantizedComms(output="fp16", gradient="bf16")
    options = list(product(KINDS, (DataType.FP32, DataType.FP16), ("sgd", "adagrad", "rowwise_adagrad"), (None, fp16)))
    chosen = rng.sample(options, 6)
    cases = [(plans_of(kind, rng.randint(2, 4), world_size, rng), *rest) for kind, *rest in chosen]
    ranks(world_size, compare, cases)


def test_plans_that_theirs_have_not() -> None:
    """By rows, grids and replicated tables, too."""
    rng = Random(1)
    cases = [
        (plans_of("any", 3, 2, rng), DataType.FP32, optimizer, None)
        for optimizer in ("sgd", "adagrad")
        for _ in range(3)
    ]
    ranks(2, compare, cases)
