"""Faults outside the batch of ids: dense inputs, the model's own code, and the second of two lookups."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError
from shardrec.exchange.headers import quoted
from shardrec.layout import ShardingPlan
from shardrec.modules import shard
from tests.batches import joined, random_bags
from tests.models import ClickModel, click_model, collection
from tests.modules.faults import (
    CONFIGS,
    ROWS,
    STRUCTURE_FAULTS,
    guilty_ranks,
    id_faults,
    plan_of,
)
from tests.modules.tables import assert_weights_equal
from tests.ranks import ranks


def dense_trial(
    dense_first: bool, guilty: Sequence[int], spoil: Callable[[Tensor], Tensor], words: str, world_size: int
) -> None:
    """A step in which some ranks' dense columns are bad, between good ones."""
    rank = dist.get_rank()
    model = shard(click_model(CONFIGS, dense_first=dense_first), plan_of(world_size, "sparse."))
    reference = click_model(CONFIGS)
    rng, generator = Random(0), torch.Generator().manual_seed(2)

    def good(where: str) -> None:
        bags = [random_bags(rng, ROWS, 2, shuffled=False) for _ in range(world_size)]
        dense = torch.randn(2 * world_size, 3, generator=generator)
        mine = slice(2 * rank, 2 * rank + 2)
        logits, expected = model(dense[mine], bags[rank].kjt()), reference(dense, joined(bags).kjt())
        assert torch.allclose(logits, expected[mine], atol=1e-5), where
        logits.square().mean().backward()
        expected.square().mean().backward()
        assert_weights_equal(model.sparse, reference.sparse, where)

    good("before")
    dense, features = torch.randn(2, 3), random_bags(rng, ROWS, 2).kjt()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    own = rank in guilty and "forward failed" in words
    with pytest.raises(RuntimeError if own else InputError) as caught:
        model(spoil(dense) if rank in guilty else dense, features)
    told = str(caught.value) if not own else f"rank {rank}: the model's forward failed: {quoted(caught.value)}"
    assert re.search(words, told, re.DOTALL), told
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))
    good("after")
    good("after, again")


@pytest.mark.parametrize("dense_first", [True, False], ids=["dense first", "sparse first"])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_wrong_dense_dtype_everywhere(world_size: int, dense_first: bool) -> None:
    words = r"rank \d: the model's forward failed: RuntimeError.*among the other inputs are float64 tensors and the "
    words += r"model's parameters are float32: convert the inputs with \.to\(torch\.float32\)"

    def rank_main() -> None:
        dense_trial(dense_first, range(world_size), Tensor.double, words, world_size)

    ranks(world_size, rank_main)


@pytest.mark.some(2)
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("dense_first", [True, False], ids=["dense first", "sparse first"])
def test_wrong_dense_dtype_on_one_rank(dense_first: bool, guilty: int) -> None:
    if dense_first:
        words = rf"rank {guilty}: the model's forward failed: RuntimeError.*float64.*convert the inputs with"
    else:
        words = rf"the ranks disagree.*rank {guilty}: other inputs float64(\n|$)"

    def rank_main() -> None:
        dense_trial(dense_first, [guilty], Tensor.double, words, 2)

    ranks(2, rank_main)


@pytest.mark.some(1)
@pytest.mark.parametrize("guilty", [0, 3])
def test_wrong_dense_shape_before_the_lookup(guilty: int) -> None:
    words = rf"^rank {guilty}: the model's forward failed: RuntimeError: mat1 and mat2 shapes"

    def rank_main() -> None:
        dense_trial(True, [guilty], lambda dense: dense[:, :2], words, 4)

    ranks(4, rank_main)


def test_a_missing_argument_on_one_rank() -> None:
    def rank_main() -> None:
        model = shard(click_model(CONFIGS), plan_of(2, "sparse."))
        features, dense = random_bags(Random(0), ROWS, 2).kjt(), torch.randn(2, 3)
        arguments = (dense, features) if dist.get_rank() else (dense,)
        own = pytest.raises(TypeError, match="'features'")
        told = pytest.raises(InputError, match=r"rank 0: the model's forward failed: TypeError.*'features'")
        with told if dist.get_rank() else own:
            model(*arguments)
        assert model(dense, features).shape == (2,)

    ranks(2, rank_main)


class TwoLookups(nn.Module):
    """Two collections with inputs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = collection(CONFIGS, optimizers="sgd", seed=1)
        self.right = collection(CONFIGS, optimizers="sgd", seed=2)

    def forward(self, left: Any, right: Any) -> Tensor:
        values: Tensor = self.left(left).values() + self.right(right).values()
        return values


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_fault_of_the_second_lookup(world_size: int) -> None:
    """The first one's exchange is over by then, and its output is dropped."""

    def rank_main() -> None:
        rank = dist.get_rank()
        left, right = plan_of(world_size, "left."), plan_of(world_size, "right.")
        plan = ShardingPlan(topology=left.topology, tables=left.tables + right.tables)
        model, reference = shard(TwoLookups(), plan), TwoLookups()
        rng = Random(0)
        for number, fault in enumerate([*id_faults()[:5], *STRUCTURE_FAULTS]):
            good = random_bags(rng, ROWS, 2, shuffled=False).kjt()
            guilty = guilty_ranks(world_size, number)
            bad = fault.change(good) if rank in guilty else good
            pair = (good, bad) if number % 4 else (bad, good)
            # A tensor in place of the batch is a dense input, too, of which the first header tells.
            words = fault.words if fault.name != "tensor" else rf"{fault.words}|the ranks disagree.*other inputs int64"
            with pytest.raises(InputError, match=re.compile(words, re.DOTALL)):
                model(*pair)
            values, expected = model(good, good), reference(good, good)
            assert torch.allclose(values, expected, atol=1e-5), fault.name
            values.mean().backward()
            expected.mean().backward()
        assert_weights_equal(model.left, reference.left, "left")
        assert_weights_equal(model.right, reference.right, "right")

    ranks(world_size, rank_main)


class Picky(ClickModel):
    """Refuses some dense input by itself, between its two lookups."""

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        first = self.sparse(features).values()
        if bool((dense > 99).any()):
            raise ValueError("dense values above 99")
        second = self.sparse(features).values()
        total: Tensor = first + second
        return total


def test_an_error_of_the_models_own_between_two_lookups() -> None:
    def rank_main() -> None:
        model = shard(Picky(collection(CONFIGS, seed=1), pooled=32), plan_of(2, "sparse."))
        features, dense = random_bags(Random(0), ROWS, 2).kjt(), torch.zeros(2, 3)
        expected = 2 * collection(CONFIGS, seed=1)(features).values()
        with torch.no_grad():
            assert torch.allclose(model(dense, features), expected)
            for guilty in (0, 1):
                own = pytest.raises(ValueError, match=r"^dense values above 99$")
                told = pytest.raises(InputError, match=rf"^rank {guilty}: .*ValueError: dense values above 99")
                with own if dist.get_rank() == guilty else told:
                    model(dense + 100 * (dist.get_rank() == guilty), features)
                assert torch.allclose(model(dense, features), expected)

    ranks(2, rank_main)


class AtTheEnd(TwoLookups):
    """Refuses some values after its lookups, of which evaluation makes the first only."""

    def forward(self, left: Any, right: Any, limit: float = 1e9) -> Tensor:
        values: Tensor = self.left(left).values()
        if self.training:
            values = values + self.right(right).values()
        elif right is not None:
            thrice = self.left(left), self.left(right), self.left(left)
            values = thrice[0].values() + thrice[1].values() + thrice[2].values()
        if values.abs().max() > limit:
            raise ValueError("values above the limit")
        return values


@pytest.mark.parametrize("calls", [1, 4])
def test_an_error_of_one_rank_after_the_last_lookup_of_an_evaluation(calls: int) -> None:
    """That rank raises it, the others have their values, and all go on, with evaluations and with training."""

    def rank_main() -> None:
        rank = dist.get_rank()
        left, right = plan_of(2, "left."), plan_of(2, "right.")
        model = shard(AtTheEnd(), ShardingPlan(topology=left.topology, tables=left.tables + right.tables))
        reference, headers = AtTheEnd(), model.context.headers
        features = random_bags(Random(0), ROWS, 2, shuffled=False).kjt()
        other = features if calls > 1 else None

        def train() -> int:
            before = headers.exchanged
            values = model(features, features)
            assert torch.allclose(values, reference(features, features), atol=1e-5)
            values.mean().backward()
            reference(features, features).mean().backward()
            return headers.exchanged - before

        train()
        exchanges = train()
        for guilty in (0, 1, 0):
            model.eval()
            reference.eval()
            with torch.no_grad():
                if calls > 1:  # from the second one on, three of them share an exchange
                    model(features, other)
                if rank == guilty:
                    with pytest.raises(ValueError, match="values above the limit"):
                        model(features, other, limit=0.0)
                else:
                    model(features, other)
                dist.barrier()
                for _ in range(2):
                    assert torch.allclose(model(features, other), reference(features, other), atol=1e-5)
            model.train()
            reference.train()
            assert train() == exchanges, "an evaluation does not change when training exchanges"
        assert_weights_equal(model.left, reference.left, "left")

    ranks(2, rank_main)
