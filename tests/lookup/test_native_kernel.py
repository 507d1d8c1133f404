"""The lookups in C++ against plain torch and against fbgemm's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from shardrec import native
from shardrec.errors import ConfigError
from shardrec.lookup.group_shards import TableBank
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from tests.lookup.differentiable import looked_up
from tests.plans import randoms

pytestmark = pytest.mark.skipif(
    not native.has_kernels(), reason="the C++ operators were not compiled, or other kernels are asked for"
)

CPU = torch.device("cpu")
WIDTHS = [4, 8, 12, 16, 20, 32, 36, 64, 128, 132]
OPTIMIZERS = [
    FusedOptimizer(kind=OptimizerKind.SGD, lr=1 / 64),
    FusedOptimizer(kind=OptimizerKind.ADAGRAD, lr=0.5, eps=1e-3),
    FusedOptimizer(kind=OptimizerKind.ADAGRAD, lr=0.1, eps=1e-8, initial_accumulator_value=0.25),
    FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.5, eps=1e-3),
    FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.1, eps=1e-8, initial_accumulator_value=0.25),
]


@contextmanager
def fbgemm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDREC_KERNELS", "fbgemm")
        yield


class Drawn:
    """Random tables and slots, and batches of Zipf-like ids for them."""

    def __init__(self, rng: Random, *, pooled: bool = True) -> None:
        count = rng.randint(1, 4)
        widths = rng.choices(WIDTHS, k=count) if pooled else [rng.choice(WIDTHS)] * count
        # Few rows are summed in an array, many are sorted.
        self.shapes = [(rng.choice([1, 3, 50, 500, 5000]), width) for width in widths]
        self.slots = sorted([*range(count), *rng.choices(range(count), k=rng.randrange(3))])
        self.pooled = pooled
        self.most = rng.choice([1, 3, 30])
        self.samples = rng.choice([0, 1, 5, 64, 65, 130])
        self.id_dtype = rng.choice([torch.int32, torch.int64])
        self.weighted = pooled and rng.random() < 0.5
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def bank(self, optimizer: FusedOptimizer | None) -> TableBank:
        made = TableBank(self.shapes, self.slots, optimizer, CPU, pooled=self.pooled)
        generator = torch.Generator().manual_seed(0)
        for weight in made.weights:
            weight.copy_(torch.randn(weight.shape, generator=generator))
        return made

    def batch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, lengths, weights; bags of one id, or of up to ``most``."""
        shape = (len(self.slots), self.samples)
        lengths = torch.randint(self.most + 1, shape, generator=self.generator, dtype=torch.int32)
        if self.most == 1 and float(torch.rand(1, generator=self.generator)) < 0.5:
            lengths.fill_(1)
        ids = []
        for table, count in zip(self.slots, lengths.sum(dim=1).tolist(), strict=True):
            uniform = torch.rand(count, generator=self.generator)
            ids.append((self.shapes[table][0] ** uniform).long().clamp(max=self.shapes[table][0]) - 1)
        found = torch.cat(ids).to(self.id_dtype)
        weights = torch.randint(1, 8, found.shape, generator=self.generator) / 4 if self.weighted else None
        return found, lengths, weights

    def gradient(self, like: Tensor) -> Tensor:
        """Of eighths, whose weighted sums are exact in any order."""
        return torch.randint(-8, 9, like.shape, generator=self.generator) / 8

    def reference(self, tables: list[Tensor], ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """By ``index_select`` and ``index_add``, in float64."""
        columns, counts = [], lengths.sum(dim=1).tolist()
        parts = [None] * len(counts) if weights is None else weights.split(counts)
        for table, of_slot, length, part in zip(self.slots, ids.split(counts), lengths, parts, strict=True):
            rows = tables[table].index_select(0, of_slot.long())
            if part is not None:
                rows = rows * part.unsqueeze(1)
            if self.pooled:
                samples = torch.arange(self.samples).repeat_interleave(length)
                rows = rows.new_zeros(self.samples, rows.size(1)).index_add(0, samples, rows)
            columns.append(rows)
        return torch.cat(columns, dim=1 if self.pooled else 0)


@given(rng=randoms())
def test_gives_what_torch_and_fbgemm_give(rng: Random) -> None:
    drawn = Drawn(rng, pooled=rng.random() < 0.7)
    optimizer = rng.choice([None, *OPTIMIZERS])
    bank = drawn.bank(optimizer)
    with fbgemm():
        other = drawn.bank(optimizer)
    assert (bank.writes_in_place, other.writes_in_place) == (drawn.pooled, False)
    for mine, same in zip(bank.weights, other.weights, strict=True):
        same.copy_(mine)
    ids, lengths, weights = drawn.batch()
    found = bank.look_up(ids, lengths, weights).detach()
    theirs = other.look_up(ids, lengths, weights).detach()
    expected = drawn.reference([one.double() for one in bank.weights], ids, lengths, weights)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        assert torch.equal(bank.look_up(ids, lengths, weights), found)
    if drawn.pooled:
        columns = found.size(1)
        whole = torch.full((found.size(0), columns + 7), 3.0)
        place = whole[:, 5 : 5 + columns]
        with torch.no_grad():
            assert bank.look_up(ids, lengths, weights, place) is place
        assert torch.equal(place, found)
        assert bool((whole[:, :5] == 3.0).all() & (whole[:, 5 + columns :] == 3.0).all()), "and nothing beside it"


@pytest.mark.some(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: f"{one.kind.value}-{one.lr:.2f}")
@settings(max_examples=12)
@given(rng=randoms())
def test_learns_as_fbgemm_does(optimizer: FusedOptimizer, rng: Random) -> None:
    """Over several steps with a changing rate."""
    drawn = Drawn(rng, pooled=rng.random() < 0.7)
    own = drawn.bank(optimizer)
    with fbgemm():
        other = drawn.bank(optimizer)
    for step in range(3):
        ids, lengths, weights = drawn.batch()
        gradient = None
        for bank in (own, other):
            bank.set_learning_rate(optimizer.lr / (step + 1))
            learned = None if weights is None else weights.clone().requires_grad_()
            output = looked_up(bank, ids, lengths, learned)
            gradient = drawn.gradient(output) if gradient is None else gradient
            output.backward(gradient)
            if bank is own:
                of_weights = None if learned is None else learned.grad
            elif learned is not None:
                assert of_weights is not None and learned.grad is not None
                torch.testing.assert_close(of_weights, learned.grad, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(own.weights, other.weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(own.states(), other.states(), strict=True):
            for name, state in ours.items():
                torch.testing.assert_close(state, theirs[name], rtol=1e-5, atol=1e-5)


def small_bank() -> tuple[TableBank, Tensor, Tensor]:
    bank = TableBank([(3, 4), (2, 8)], [0, 1], FusedOptimizer(kind=OptimizerKind.SGD, lr=1.0), CPU)
    for weight in bank.weights:
        weight.copy_(torch.arange(weight.numel()).view(weight.shape))
    return bank, torch.tensor([2, 0, 1]), torch.tensor([[1, 1], [0, 1]], dtype=torch.int32)


def test_a_lookup_without_gradient_updates_nothing() -> None:
    bank, ids, lengths = small_bank()
    with torch.no_grad():
        assert not bank.look_up(ids, lengths, None).requires_grad
    with torch.inference_mode():
        assert bank.look_up(ids, lengths, None).tolist() == [
            [8.0, 9.0, 10.0, 11.0, *[0.0] * 8],
            [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0],
        ]
    forward_only = TableBank([(3, 4)], [0], None, CPU)
    assert not forward_only.look_up(torch.tensor([1]), torch.tensor([[1]], dtype=torch.int32), None).requires_grad


def test_each_backward_updates() -> None:
    """Also the second of two lookups in a step, and the same again if the graph was retained, as with fbgemm."""
    for kernels in ("own", "fbgemm"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDREC_KERNELS", kernels)
            bank, ids, lengths = small_bank()
            seen: list[Tensor] = []
            output = looked_up(bank, ids, lengths, None)
            output.register_hook(seen.append)
            (output.sum() + looked_up(bank, ids, lengths, None).sum()).backward(retain_graph=True)
            assert bank.weights[0].tolist() == [[-2.0, -1.0, 0.0, 1.0], [4.0, 5.0, 6.0, 7.0], [6.0, 7.0, 8.0, 9.0]]
            assert bank.weights[1].tolist() == [list(range(8)), [float(x) for x in range(6, 14)]]
            output.sum().backward()
            assert bank.weights[0][2].tolist() == [5.0, 6.0, 7.0, 8.0]
            assert len(seen) == 2
            with pytest.raises(RuntimeError, match="second time"):
                output.sum().backward()


def test_the_rate_is_that_of_the_lookup() -> None:
    for kernels in ("own", "fbgemm"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDREC_KERNELS", kernels)
            bank, ids, lengths = small_bank()
            output = looked_up(bank, ids, lengths, None)
            bank.set_learning_rate(0.5)
            output.sum().backward()
            assert bank.weights[0][0].tolist() == [-1.0, 0.0, 1.0, 2.0]


def test_gradients_whose_rows_lie_apart() -> None:
    """As views of a larger buffer, transposed, or one number expanded."""
    wide = torch.arange(60.0).view(2, 30)
    for gradient in (wide[:, 3:15], torch.arange(24.0).view(12, 2).t(), torch.ones(()).expand(2, 12)):
        bank, ids, lengths = small_bank()
        other, _, _ = small_bank()
        looked_up(bank, ids, lengths, None).backward(gradient)
        looked_up(other, ids, lengths, None).backward(gradient.contiguous().clone())
        assert all(torch.equal(one, two) for one, two in zip(bank.weights, other.weights, strict=True))


def test_other_kernels_are_an_error() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDREC_KERNELS", "mine")
        with pytest.raises(ConfigError, match="'mine'"):
            small_bank()


def test_calls_that_do_not_fit_are_refused() -> None:
    """Nothing is read or written out of bounds."""
    weights, states = torch.zeros(20), torch.zeros(5)
    slots = torch.tensor([[0, 0, 3, 4, 0, 0], [1, 12, 2, 4, 4, 3]])
    ids, lengths = torch.tensor([2, 0, 1]), torch.tensor([[1, 1], [0, 1]], dtype=torch.int32)
    gradient = torch.zeros(2, 8)

    def refused(words: str, **other: object) -> None:
        given = {"weights": weights, "states": states, "slots": slots, "ids": ids, "lengths": lengths}
        given |= {"id_weights": None, "gradient": gradient, "columns": 8, "pooled": True}
        given |= other
        update = [given[name] for name in ("weights", "states", "slots", "ids", "lengths", "id_weights", "gradient")]
        look_up = [given[name] for name in ("weights", "slots", "ids", "lengths", "id_weights", "columns", "pooled")]
        products = [given[name] for name in ("weights", "slots", "ids", "lengths", "gradient")]
        calls = {
            "update": lambda: torch.ops.shardrec.update(*update, given["pooled"], 2, 0.1, 0.0),
            "look_up": lambda: torch.ops.shardrec.look_up(*look_up),
            "weight_gradient": lambda: torch.ops.shardrec.weight_gradient(*products),
        }
        blind = {"gradient": {"look_up"}, "columns": {"update", "weight_gradient"}, "states": {"look_up"}}
        blind |= {"id_weights": {"weight_gradient"}}
        blind["states"] |= {"weight_gradient"}
        for name, call in calls.items():
            if any(name in blind.get(one, set()) for one in other):
                continue
            with pytest.raises(RuntimeError, match=words):
                call()

    for bad in (-1, 3, 2**40, -(2**40)):
        refused("not a row", ids=torch.tensor([bad, 0, 1]))
    refused("not a row", ids=torch.tensor([2, 0, 2], dtype=torch.int32))
    refused("do not fit", ids=torch.tensor([2, 0]))
    refused("do not fit", ids=torch.tensor([2, 0, 1, 1]))
    refused("negative length", lengths=torch.tensor([[3, -1], [0, 1]], dtype=torch.int32))
    refused("int32", lengths=lengths.long())
    refused("int32", lengths=lengths[:1])
    refused("int32 or int64", ids=ids.float())
    refused("contiguous", ids=torch.arange(6)[::2])
    refused("outside of the weights", weights=torch.zeros(19))
    refused("float32", weights=torch.zeros(20, dtype=torch.float64))
    refused("outside of the states", states=torch.zeros(4))
    refused("float32 states", states=None)
    refused("outside of the output", columns=7)
    refused("outside of the gradient", gradient=torch.zeros(2, 7))
    refused("as the output", gradient=torch.zeros(3, 8))
    refused("as the output", gradient=torch.zeros(8, 2).t())
    refused("one, float32|weights of ids", id_weights=torch.ones(2))
    refused("weights of ids", id_weights=torch.ones(3, dtype=torch.float64))
    refused("slots cover 8 of 9", columns=9)
    for column, other in [(1, 4), (2, 2), (3, 2), (5, 1)]:
        disagree = torch.tensor([[0, 0, 3, 4, 0, 0], [0, 0, 3, 4, 4, 0]])
        disagree[1, column] = other
        with pytest.raises(RuntimeError, match="slots of table 0 disagree"):
            torch.ops.shardrec.update(weights, states, disagree, ids, lengths, None, gradient, True, 2, 0.1, 0.0)
