"""FP16 and BF16 tables: trained as float32 tables whose looked-up rows are rounded after each step.

TorchRec's unsharded module cannot be the reference of a training step: its gradient and its update are computed in
float16, and a BF16 table is an FP16 parameter there. So the reference is the unsharded module with float32 tables that
hold the same 16-bit numbers, trained in float32, every table rounded to its dtype after every step.

Tolerances. ``UNIT`` is the distance of neighbouring numbers near 1. Both sides add the same float32 numbers, in another
order; where a sum is next to the middle between two 16-bit numbers they may round apart, by one unit of the number
itself, and rarely (some 1 in 20,000 weights; 2 in a case are let pass). After each step the sharded tables take the
reference's weights, so that steps are compared one by one. A replicated table's gradient is rounded to 16 bits, on each
rank and in the all-reduce: each of these roundings errs by up to half a unit of the largest addend.
"""

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

from shardrec.errors import ConfigError
from shardrec.exchange.wire import QuantizedComms
from shardrec.modules import ShardedModel, shard
from shardrec.modules.collection import TABLE_DTYPES, ShardedCollection
from tests.batches import Bags, random_bags
from tests.collective_counts import CountCollectives
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.modules.parity import local_part
from tests.plans import CUTS, cut_plan, topologies_of
from tests.ranks import ranks

UNIT = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
ATOL = 1e-5

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

    def build(self, *, reference: bool = False, device: str = "cpu") -> nn.Module:
        """The unsharded collection; the reference with float32 tables."""
        torch.manual_seed(0)
        common = [
            {
                "name": name,
                "num_embeddings": rows,
                "embedding_dim": dim,
                "feature_names": list(features),
                "data_type": DataType.FP32 if reference else self.type_of(name),
            }
            for name, (rows, dim, features, _) in TABLES.items()
        ]
        where = torch.device(device)
        module: nn.Module
        if self.pooled:
            mean = PoolingType.SUM if self.weighted else PoolingType.MEAN
            poolings = [PoolingType.SUM, mean, mean, PoolingType.SUM]
            bags = [EmbeddingBagConfig(**one, pooling=how) for one, how in zip(common, poolings, strict=True)]
            module = EmbeddingBagCollection(tables=bags, is_weighted=self.weighted, device=where)
        else:
            module = EmbeddingCollection(tables=[EmbeddingConfig(**one) for one in common], device=where)
        choice = OPTIMIZERS[self.optimizer]
        if choice.optimizer is not None:
            cls = choice.reference if reference and choice.reference else choice.optimizer
            apply_optimizer_in_backward(cls, module.parameters(), dict(choice.settings))
        return module

    def sharded(self, cut: str, rng: Random, world_size: int, **options: Any) -> ShardedModel:
        """Every table by one cut."""
        sizes = {name: (rows, dim) for name, (rows, dim, _, _) in TABLES.items()}
        return shard(self.build(), cut_plan(cut, rng, sizes, rng.choice(topologies_of(world_size))), **options)


def tables_of(module: nn.Module) -> dict[str, Tensor]:
    """The unsharded weights by table."""
    return {name.split(".")[-2]: weight for name, weight in module.named_parameters()}


def values_of(output: Any) -> list[Tensor]:
    """(B, D) of a pooled output; one (N_f, D) per key of a sequence output."""
    return [one.values() for one in output.values()] if isinstance(output, dict) else [output.values()]


def outputs(module: nn.Module, features: KeyedJaggedTensor, pooled: bool) -> list[Tensor]:
    output = module(features)
    return values_of(output if pooled else dict(output.items()))


def gradients_like(values: Sequence[Tensor], *seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return [torch.randn(value.shape, generator=generator) for value in values]


def collection_of(model: ShardedModel) -> ShardedCollection:
    assert isinstance(model.module, ShardedCollection)
    return model.module


# ------------------------------------------------------------------------------------------------------- training


def check(setting: Setting, cut: str, steps: int = 2) -> None:
    """Train sharded and unsharded, step by step; see the module's text for the tolerances."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = Random(f"{cut} {setting}")
    where = f"{cut}, {setting}"
    model, reference = setting.sharded(cut, rng, world_size), setting.build(reference=True)
    first = tables_of(setting.build())
    with torch.no_grad():
        for name, weight in first.items():
            tables_of(reference)[name].copy_(weight.to(TABLE_DTYPES[setting.type_of(name)]))
    largest = 0.0
    differing = total = 0
    for step in range(steps):
        sizes = [rng.choice([0, 3, 4]) if one else 4 for one in range(world_size)]
        batches = [random_bags(rng, ROWS, size, weighted=setting.weighted) for size in sizes]
        largest = max(largest, train_step(setting, model, reference, batches, (step, rank), where))
        found = compare_step(setting, model, reference, largest, where)
        differing, total = differing + found[0], total + found[1]
        model.load_state_dict(reference.state_dict())
    assert differing <= 2, f"{where}: {differing} of {total} weights differ"


def train_step(
    setting: Setting,
    model: ShardedModel,
    reference: nn.Module,
    batches: Sequence[Bags],
    place: tuple[int, int],
    where: str,
) -> float:
    """One forward and backward of both, the reference's weights rounded; returns the largest gradient of an output."""
    step, rank = place
    mine = outputs(model, batches[rank].kjt(), setting.pooled)
    assert {value.dtype for value in mine} == {torch.float32}
    loss = torch.zeros(())
    expected_loss = torch.zeros(())
    largest = 0.0
    for other, batch in enumerate(batches):
        if batch.size:
            expected = outputs(reference, batch.kjt(), setting.pooled)
            gradients = gradients_like(expected, step, other)
            largest = max(largest, *(float(one.abs().max()) for one in gradients if one.numel()))
            expected_loss = expected_loss + sum((e * g).sum() for e, g in zip(expected, gradients, strict=True))
        if other == rank:
            if batch.size:
                for value, one in zip(mine, expected, strict=True):
                    assert torch.allclose(value, one, atol=ATOL), f"{where}, step {step}: outputs differ"
            gradients = gradients if batch.size else [torch.zeros_like(value) for value in mine]
            loss = loss + sum((value * g).sum() for value, g in zip(mine, gradients, strict=True))
    loss.backward()
    (expected_loss / len(batches)).backward()
    with torch.no_grad():
        for name, weight in tables_of(reference).items():
            dtype = TABLE_DTYPES[setting.type_of(name)]
            weight.copy_(weight.to(dtype))
            if weight.grad is not None:
                weight.grad.copy_(weight.grad.to(dtype))
    return largest


def compare_step(
    setting: Setting, model: ShardedModel, reference: nn.Module, largest: float, where: str
) -> tuple[int, int]:
    """Weights, gradients and fused states after a step; returns how many 16-bit numbers of cuts differ, of all."""
    differing = total = 0
    for name, table in collection_of(model).tables().items():
        whole = tables_of(reference)[name]
        dtype = TABLE_DTYPES[setting.type_of(name)]
        for shard_, parameter in table.locals.items():
            assert parameter.dtype is dtype, f"{where}: {name} became {parameter.dtype}"
            pairs = [(parameter.detach(), local_part(whole.detach(), shard_))]
            if OPTIMIZERS[setting.optimizer].optimizer is None and whole.grad is not None:
                assert parameter.grad is not None and parameter.grad.dtype is dtype
                pairs.append((parameter.grad, local_part(whole.grad, shard_)))
                parameter.grad = None
            for found, expected in pairs:
                difference = (found.float() - expected).abs()
                bound = tolerance(expected, dtype, largest if shard_ is None else 0.0)
                excess = float((difference - bound).max())
                assert excess <= 0, f"{where}: {name} is off by {float(difference.max())}, {excess} too much"
                if dtype in UNIT and shard_ is not None:
                    differing, total = differing + int((difference > 0).sum()), total + difference.numel()
        if OPTIMIZERS[setting.optimizer].optimizer is None:
            whole.grad = None
        compare_states(setting, model, name, whole, where)
    return differing, total


def tolerance(expected: Tensor, dtype: torch.dtype, gradient: float) -> Tensor:
    """Of each number; ``gradient`` is the largest addend of a gradient that was rounded to 16 bits on its way, or 0."""
    if dtype not in UNIT:
        return torch.full_like(expected, ATOL)
    return UNIT[dtype] * (expected.abs() + gradient) + ATOL


def compare_states(setting: Setting, model: ShardedModel, name: str, whole: Tensor, where: str) -> None:
    collection = collection_of(model)
    optimizer = collection.fused_optimizers().get(name)
    if optimizer is None or optimizer.kind.value not in ("Adagrad", "RowWiseAdagrad"):
        return
    (unsharded,) = whole._in_backward_optimizers  # type: ignore[attr-defined]
    (expected,) = (state["sum"] for state in unsharded.state.values())
    for place, state in collection.fused_state(name, "sum").items():
        assert state.dtype is torch.float32
        part = expected.reshape(-1)[place.row_start : place.row_end] if optimizer.rowwise and place else expected
        part = part.reshape(state.shape) if optimizer.rowwise else local_part(expected, place)
        # A square errs twice as much as the number, and a replica's gradient has been rounded.
        unit = UNIT.get(TABLE_DTYPES[setting.type_of(name)], 0.0) if place is None else 0.0
        assert torch.allclose(state, part, rtol=1e-4 + 8 * unit, atol=ATOL + 8 * unit), f"{where}: {name} sum"


@pytest.mark.slow  # tests/parity trains these tables, and all others, beside the unsharded ones
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_trained_as_float32_tables_that_are_rounded(world_size: int, pooled: bool) -> None:
    def rank_main() -> None:
        for cut in sorted(CUTS):
            for number, optimizer in enumerate(OPTIMIZERS):
                check(Setting(pooled=pooled, optimizer=optimizer, weighted=pooled and number % 2 == 1), cut)

    ranks(world_size, rank_main)


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


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_first_values_are_the_unsharded_ones_rounded_to_the_table(device: str, pooled: bool) -> None:
    def rank_main() -> None:
        setting = Setting(pooled=pooled)
        reference = setting.build()
        sizes = {name: (rows, dim) for name, (rows, dim, _, _) in TABLES.items()}
        for cut in sorted(CUTS):
            rng = Random(cut)
            plan = cut_plan(cut, rng, sizes, rng.choice(topologies_of(2)))
            unsharded = setting.build(device=device)
            torch.manual_seed(0)
            for name, table in collection_of(shard(unsharded, plan)).tables().items():
                dtype = TABLE_DTYPES[setting.type_of(name)]
                assert table.dtype is dtype
                for place, parameter in table.locals.items():
                    assert torch.equal(parameter, local_part(tables_of(reference)[name], place).to(dtype)), (cut, name)

    ranks(2, rank_main)


@pytest.mark.parametrize("types", [["FP16"] * 4, ["BF16"] * 4, ["FP32", "FP16", "BF16", "FP32"]], ids=str)
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
def test_outputs_are_float32_as_the_unsharded_ones(pooled: bool, types: Sequence[str]) -> None:
    """A sequence's numbers are the unsharded ones; of a bag's, the unsharded module rounds the sum to float16."""

    def rank_main() -> None:
        setting = Setting(pooled=pooled, types=dict(zip(TABLES, map(DataType, types), strict=True)))
        reference = setting.build()
        for cut in sorted(CUTS):
            rng = Random(cut)
            model = setting.sharded(cut, rng, 2)
            model.load_state_dict(reference.state_dict())
            with torch.no_grad():
                for name, weight in tables_of(reference).items():
                    weight.copy_(weight.to(TABLE_DTYPES[setting.type_of(name)]))
            features = random_bags(Random(dist.get_rank()), ROWS, 4).kjt()
            expected = outputs(reference, features, pooled)
            found = outputs(model, features, pooled)
            assert [one.dtype for one in expected] == [one.dtype for one in found] == [torch.float32] * len(found)
            assert collection_of(model).output_dtype is torch.float32
            for one, two in zip(found, expected, strict=True):
                assert (
                    torch.allclose(one, two, rtol=UNIT[torch.float16], atol=1e-6) if pooled else torch.equal(one, two)
                )

    ranks(2, rank_main)


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
    with pytest.raises(ConfigError, match=r"table 'fp32' is INT8; tables that train are FP32, FP16, BF16"):
        setting.sharded("table_wise", Random(0), 1)


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

    assert ranks(2, rank_main) == [[4] * 3] * 2


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
