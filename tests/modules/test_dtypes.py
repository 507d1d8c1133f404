"""FP16 and BF16 tables: rounding, exchange and state_dict. tests/parity trains them. And the default dtype of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.modules import ShardedModel, shard
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.given_tables import TABLE_DTYPES
from tests.batches import random_bags
from tests.collective_counts import CountCollectives
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.plans import CUTS, cut_plan, topologies_of
from tests.ranks import ranks

UNIT = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

TABLES: Mapping[str, tuple[int, int, Sequence[str], DataType]] = {
    "fp16": (13, 8, ("a", "b"), DataType.FP16),
    "bf16": (7, 8, ("b",), DataType.BF16),
    "fp32": (9, 8, ("c",), DataType.FP32),
    "fp16_more": (29, 8, ("d",), DataType.FP16),
}
"""Rows, columns, features and type of each table: every type next to another, one of them twice."""
ROWS = {"a": 13, "b": 7, "c": 9, "d": 29}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A collection to shard.

    Args:
        pooled: an EmbeddingBagCollection; else an EmbeddingCollection.
        optimizer: a key of ``tests.models.OPTIMIZERS``.
        weighted: ids come with weights.
        types: per table; default: those of ``TABLES``.
    """

    pooled: bool = True
    optimizer: str = "sgd"
    weighted: bool = False
    types: Mapping[str, DataType] | None = None

    def type_of(self, name: str) -> DataType:
        return (self.types or {key: table[3] for key, table in TABLES.items()})[name]

    def build(self) -> nn.Module:
        """The unsharded collection."""
        torch.manual_seed(0)
        common = [
            {
                "name": name,
                "num_embeddings": rows,
                "embedding_dim": dim,
                "feature_names": list(features),
                "data_type": self.type_of(name),
            }
            for name, (rows, dim, features, _) in TABLES.items()
        ]
        module: nn.Module
        if self.pooled:
            mean = PoolingType.SUM if self.weighted else PoolingType.MEAN
            poolings = [PoolingType.SUM, mean, mean, PoolingType.SUM]
            bags = [EmbeddingBagConfig(**one, pooling=how) for one, how in zip(common, poolings, strict=True)]
            module = EmbeddingBagCollection(tables=bags, is_weighted=self.weighted)
        else:
            module = EmbeddingCollection(tables=[EmbeddingConfig(**one) for one in common])
        choice = OPTIMIZERS[self.optimizer]
        if choice.optimizer is not None:
            apply_optimizer_in_backward(choice.optimizer, module.parameters(), dict(choice.settings))
        return module

    def sharded(self, cut: str, rng: Random, world_size: int, **options: Any) -> ShardedModel:
        """Every table by one cut."""
        sizes = {name: (rows, dim) for name, (rows, dim, _, _) in TABLES.items()}
        return shard(self.build(), cut_plan(cut, rng, sizes, rng.choice(topologies_of(world_size))), **options)


def values_of(output: Any) -> list[Tensor]:
    """(B, D) of a pooled output; one (N_f, D) per key of a sequence output."""
    return [one.values() for one in output.values()] if isinstance(output, dict) else [output.values()]


def outputs(module: nn.Module, features: KeyedJaggedTensor, pooled: bool) -> list[Tensor]:
    output = module(features)
    return values_of(output if pooled else dict(output.items()))


def collection_of(model: ShardedModel) -> ShardedCollection:
    assert isinstance(model.module, ShardedCollection)
    return model.module


def test_steps_smaller_than_half_a_unit_leave_a_weight_alone() -> None:
    """To the nearest, not at random: so says the documentation, and so two runs give equal weights."""
    setting = Setting(optimizer="sgd")
    model = setting.sharded("table_wise", Random(0), 1)
    table = collection_of(model).tables()["fp16"].locals
    (weight,) = table.values()
    with torch.no_grad():
        weight.fill_(1.0)
    features = KeyedJaggedTensor(
        keys=list("abcd"), values=torch.zeros(4, dtype=torch.int64), lengths=torch.ones(4, dtype=torch.int32)
    )
    for _ in range(3):
        (model(features)["a"].sum() * UNIT[torch.float16] * 0.49).backward()  # times 0.5, the learning rate
    assert bool((weight == 1.0).all())
    (model(features)["a"].sum() * UNIT[torch.float16] * 1.02).backward()
    assert weight[0].tolist() == [1.0 - UNIT[torch.float16] / 2] * 8
    assert bool((weight[1:] == 1.0).all())


# --------------------------------------------------------------------------------------------- as the unsharded module


def test_weights_of_the_ids_may_be_float16() -> None:
    """As the unsharded module wants them for FP16 tables; it takes no others, and none for mixed tables."""

    def rank_main() -> None:
        setting = Setting(weighted=True, types=dict.fromkeys(TABLES, DataType.FP16))
        features = random_bags(Random(dist.get_rank()), ROWS, 4, weighted=True).kjt()
        half = KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            lengths=features.lengths(),
            weights=features.weights().to(torch.float16),
        )
        expected = setting.build()(half).values()
        for cut in sorted(CUTS):
            model = setting.sharded(cut, Random(cut), 2)
            for one in (features, half):
                assert torch.allclose(model(one).values(), expected, rtol=UNIT[torch.float16], atol=2e-4)

    ranks(2, rank_main)


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
def test_other_types_are_refused(pooled: bool) -> None:
    setting = Setting(pooled=pooled, types={**dict.fromkeys(TABLES, DataType.FP16), "fp32": DataType.INT8})
    with pytest.raises(ConfigError, match=r"table 'fp32' is INT8. Tables that train are FP32, FP16, BF16"):
        setting.sharded("table_wise", Random(0), 1)


# ------------------------------------------------------------------------------------------------------ default dtype


def trained_under(default: torch.dtype, cut: str, setting: Setting, update: str) -> list[Tensor]:
    """Outputs and weights of two steps in a program that has called ``torch.set_default_dtype``."""
    torch.set_default_dtype(default)
    model, values = setting.sharded(cut, Random(cut), 2, update=update), []
    for step in range(2):
        features = random_bags(Random(10 * step + dist.get_rank()), ROWS, 4).kjt()
        looked_up = outputs(model, features, setting.pooled)
        torch.stack([value.square().sum() for value in looked_up]).sum().backward()
        values += looked_up
        if update == "step":
            shardrec.clip_grad_norm_(model, 1.0)
            model.fused_optimizer.step()
            model.fused_optimizer.zero_grad()
    return [value.detach().clone() for value in (*values, *model.parameters())]


def any_default_dtype(default: torch.dtype, pooled: bool) -> None:
    for cut, optimizer, update in (
        ("row_wise", "adagrad", "step"),
        ("grid", "rowwise_adagrad", "backward"),
        ("data_parallel", "adam", "backward"),
        ("table_wise", "adam", "step"),
    ):
        setting = Setting(pooled=pooled, optimizer=optimizer)
        runs = [trained_under(dtype, cut, setting, update) for dtype in (torch.float32, default)]
        for expected, value in zip(*runs, strict=True):
            assert value.dtype is expected.dtype
            assert torch.equal(value, expected), f"{cut}, {optimizer}, {update}"


@pytest.mark.some(1)
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_default_dtype_of_the_program_changes_nothing(default: torch.dtype, pooled: bool) -> None:
    ranks(2, any_default_dtype, default, pooled)


# ---------------------------------------------------------------------------------------------------------- exchange


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
def test_tables_of_three_types_make_no_more_collectives(pooled: bool) -> None:
    def rank_main() -> list[int]:
        found = []
        for cut in ("row_wise", "table_wise", "grid"):
            model = Setting(pooled=pooled, optimizer="adagrad").sharded(cut, Random(cut), 2)
            with CountCollectives() as counted:
                values = outputs(model, random_bags(Random(dist.get_rank()), ROWS, 4).kjt(), pooled)
                sum((value.sum() for value in values), torch.zeros(())).backward()
            found.append(sum(dict(counted).values()))
        return found

    assert ranks(2, rank_main) == [[3] * 3] * 2


def test_rows_of_float16_tables_travel_as_float16_without_loss() -> None:
    def rank_main() -> None:
        setting = Setting(pooled=False, types=dict.fromkeys(TABLES, DataType.FP16))
        features = random_bags(Random(dist.get_rank()), ROWS, 4).kjt()
        expected = outputs(setting.build(), features, pooled=False)
        model = setting.sharded("row_wise", Random(1), 2, comms=QuantizedComms(output="fp16"))
        found = outputs(model, features, pooled=False)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))

    ranks(2, rank_main)


# ------------------------------------------------------------------------------------------------------- state_dict


def test_a_state_dict_tells_the_dtype_on_every_rank() -> None:
    """Also on a rank that holds no part of the table."""

    def rank_main() -> None:
        for cut in sorted(CUTS):
            setting = Setting(optimizer="adagrad")
            state = setting.sharded(cut, Random(cut), 4).state_dict()
            assert state.keys() == setting.build().state_dict().keys()
            for name in TABLES:
                assert state[f"embedding_bags.{name}.weight"].dtype is TABLE_DTYPES[setting.type_of(name)], (cut, name)

    ranks(4, rank_main)


@pytest.mark.parametrize("cut", ["row_wise", "grid", "data_parallel"])
def test_a_state_dict_goes_from_one_model_to_another(cut: str) -> None:
    def rank_main() -> None:
        setting = Setting(optimizer="rowwise_adagrad")
        first, second = (setting.sharded(cut, Random(cut), 2) for _ in range(2))
        for step in range(2):
            features = random_bags(Random(step), ROWS, 4).kjt()
            first(features).values().square().sum().backward()
        second.load_state_dict(first.state_dict())
        for one, two in zip(first.parameters(), second.parameters(), strict=True):
            assert one.dtype is two.dtype
            assert torch.equal(one, two)

    ranks(2, rank_main)
