"""Bad input ends the step on every rank with the same words, and leaves the model as it was."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError
from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import ShardedModel, shard
from tests.batches import Bags, joined, random_bags
from tests.executors import executed
from tests.models import OPTIMIZERS, collection, table_sizes
from tests.modules.faults import (
    CONFIGS,
    ROWS,
    STRUCTURE_FAULTS,
    WEIGHT_FAULTS,
    Fault,
    guilty_ranks,
    id_faults,
    plan_of,
    rebuilt,
)
from tests.modules.tables import assert_weights_equal
from tests.plans import random_plan
from tests.ranks import ranks


def tensors_of(features: object) -> list[Tensor]:
    if not isinstance(features, KeyedJaggedTensor):
        return []
    parts = [features.values(), features._lengths, features.weights_or_none()]
    return [part for part in parts if part is not None and not part.is_meta]


class Trial:
    """A model in training whose steps are alternately good and bad, beside an unsharded one that sees the good ones."""

    def __init__(
        self, model: ShardedModel, reference: nn.Module, seed: int, weighted: bool = False, executor: str = "eager"
    ) -> None:
        self.model = model
        self.run = executed(model, executor)
        self.reference = reference
        self.rng = Random(seed)
        self.weighted = weighted
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def bags(self) -> list[Bags]:
        return [random_bags(self.rng, ROWS, 2, weighted=self.weighted, shuffled=False) for _ in range(self.world_size)]

    def good_step(self, where: str) -> None:
        bags = self.bags()
        values = self.run(bags[self.rank].kjt()).values()
        expected = self.reference(joined(bags).kjt()).values()
        assert torch.allclose(values, expected[2 * self.rank : 2 * self.rank + 2], atol=1e-5), f"output after {where}"
        (values * values).mean().backward()
        (expected * expected).mean().backward()
        assert_weights_equal(self.model.module, self.reference, f"weights after {where}")

    def bad_step(self, fault: Fault, guilty: Sequence[int]) -> None:
        """A step in which the ranks of ``guilty`` have bad input."""
        where = f"{fault.name} on {guilty}"
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        good = self.bags()[self.rank].kjt()
        features = fault.change(good) if self.rank in guilty else good
        tensors = tensors_of(features)
        copies = [(tensor.clone(), tensor._version) for tensor in tensors]
        with pytest.raises((InputError, RuntimeError)) as caught:  # TorchScript has no classes of its user's
            self.run(features)
        assert isinstance(caught.value, InputError) or "InputError: " in str(caught.value)
        message = str(caught.value).rpartition("InputError: ")[2].partition("\n\nAt:")[0]
        assert re.search(fault.words, message), f"{where}: {message}"
        for rank in range(self.world_size):
            assert (f"rank {rank}: " in message) == (rank in guilty), f"{where}: {message}"
        for tensor, (copy, version) in zip(tensors, copies, strict=True):
            assert torch.equal(tensor, copy) and tensor._version == version, f"{where}: the input was changed"
        for parameter, copy in zip(self.model.parameters(), before, strict=True):
            assert torch.equal(parameter, copy), f"{where}: a weight was changed"
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, message)
        assert len(set(gathered)) == 1, f"{where}: the ranks have different messages: {gathered}"


def run_faults(
    faults: Sequence[Fault],
    plan: ShardingPlan,
    weighted: bool = False,
    optimizers: Sequence[str] | str = "sgd",
    executor: str = "eager",
) -> None:
    model = shard(collection(CONFIGS, weighted=weighted, optimizers=optimizers, seed=1), plan)
    reference = collection(CONFIGS, weighted=weighted, optimizers=optimizers, reference=True, seed=1)
    trial = Trial(model, reference, seed=5, weighted=weighted, executor=executor)
    trial.good_step("the start")
    for number, fault in enumerate(faults):
        guilty = guilty_ranks(trial.world_size, number)
        trial.bad_step(fault, guilty)
        if number % 3 == 0:
            trial.good_step(f"{fault.name} on {guilty}")
    trial.good_step("everything")


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ids_outside_their_table(world_size: int) -> None:
    """Row-wise, table-wise, column-wise and replicated tables alike."""

    def rank_main() -> None:
        run_faults(id_faults(), plan_of(world_size, ""))

    ranks(world_size, rank_main)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_broken_batches(world_size: int) -> None:
    def rank_main() -> None:
        run_faults(STRUCTURE_FAULTS, plan_of(world_size, ""))
        run_faults(list(reversed(STRUCTURE_FAULTS)), plan_of(world_size, ""))

    ranks(world_size, rank_main)


NOT_PASSED_ON = {"None", "tensor", "dict", "meta", "lengths on meta", "inverse indices on meta", "no lengths"}
"""Faults that TorchScript or the compiler finds, or takes for tracing, before an operator does."""


# tests/compile/test_faults.py has a few faults of a traced model.
@pytest.mark.parametrize("executor", ["live script", pytest.param("traced", marks=pytest.mark.slow)])
def test_other_executors(executor: str) -> None:
    faults = [fault for fault in STRUCTURE_FAULTS if fault.name not in NOT_PASSED_ON]

    def rank_main() -> None:
        run_faults([*id_faults()[::5], *faults], plan_of(2, ""), executor=executor)

    ranks(2, rank_main, timeout=300)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_fault_under_any_plan(world_size: int) -> None:
    def rank_main() -> None:
        for seed in range(4):
            rng = Random(seed)
            plan = random_plan(rng, table_sizes(CONFIGS), Topology(ranks_per_host=world_size))
            optimizers = [rng.choice(sorted(set(OPTIMIZERS) - {"none"})) for _ in CONFIGS]
            run_faults(rng.sample([*id_faults(), *STRUCTURE_FAULTS], 6), plan, optimizers=optimizers)

    ranks(world_size, rank_main)


def test_weights() -> None:
    def rank_main() -> None:
        run_faults(WEIGHT_FAULTS, plan_of(2, ""), weighted=True)

    ranks(2, rank_main)


def test_double_weights_are_as_good_as_float() -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, weighted=True, seed=1), plan_of(2, ""))
        features = random_bags(Random(0), ROWS, 2, weighted=True).kjt()
        doubled = rebuilt(features, weights=features.weights().double())
        assert torch.equal(model(doubled).values(), model(features).values())

    ranks(2, rank_main)


# ------------------------------------------------------------------------------------------------------ disagreements


@pytest.mark.some(1)
@pytest.mark.parametrize("odd", [0, 1, 3])
def test_int32_ids_on_one_rank_and_int64_on_the_others(odd: int) -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, seed=1), plan_of(4, ""))
        bags = random_bags(Random(0), ROWS, 2)
        dtype = torch.int32 if dist.get_rank() == odd else torch.int64
        with pytest.raises(InputError) as caught:
            model(bags.kjt(dtype))
        message = str(caught.value)
        assert message.startswith("the ranks disagree about their input. Give every rank the same dtypes and modes")
        for rank in range(4):
            assert f"rank {rank}: ids int{32 if rank == odd else 64}" in message
        expected = collection(CONFIGS, seed=1)(bags.kjt()).values()
        for dtype in (torch.int32, torch.int64):
            assert torch.allclose(model(bags.kjt(dtype)).values(), expected)

    ranks(4, rank_main)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_of_torchrec_is_the_cause_on_its_rank(world_size: int) -> None:
    def rank_main() -> None:
        features, guilty = random_bags(Random(0), ROWS, 2).kjt(), dist.get_rank() == world_size - 1
        model = shard(collection(CONFIGS, seed=1), plan_of(world_size, ""))
        bad = rebuilt(features, stride_per_key_per_rank=[[2]])
        with pytest.raises(InputError, match=r"the KeyedJaggedTensor cannot be read \(\w+: ") as caught:
            model(bad if guilty else features)
        assert (caught.value.__cause__ is not None) == guilty
        model(features).values().sum().backward()

    ranks(world_size, rank_main)


def test_gradients_on_one_rank_only() -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, seed=1), plan_of(2, ""))
        bags = random_bags(Random(0), ROWS, 2)
        with torch.set_grad_enabled(dist.get_rank() == 0), pytest.raises(InputError) as caught:
            model(bags.kjt())
        assert "rank 0: gradients on" in str(caught.value)
        assert "rank 1: gradients off" in str(caught.value)
        model(bags.kjt()).values().sum().backward()

    ranks(2, rank_main)
