"""Gradients that wait for the step: those of equal rows are added up, whatever the order and sizes of the backwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardrec import native
from shardrec.lookup.backward import LookupGradient
from shardrec.lookup.deferred import DeferredGradients
from shardrec.lookup.group_shards import RowGradient, TableBank
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.lookup.row_optimizers import RowOptimizer
from tests.plans import randoms

SHAPES = [(5, 4), (7, 8), (3000, 4)]
SLOTS = [0, 1, 1, 2]
"""The tables with 4 columns are one matrix; few rows are summed in an array, many are sorted."""


@contextmanager
def operators(with_native: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not with_native:
            patch.setattr(native, "has_operators", lambda: False)
        yield


def a_bank() -> TableBank:
    bank = TableBank(SHAPES, SLOTS, None, torch.device("cpu"))
    for number, weight in enumerate(bank.weights):
        weight.copy_(torch.arange(weight.numel()).view(weight.shape) % 7 + number)
    return bank


def a_lookup(rng: Random, *, weighted: bool) -> LookupGradient:
    """Of integers and halves, whose sums are exact in any order."""
    samples = rng.choice([0, 1, 3, 70])
    lengths = torch.tensor([[rng.randrange(3) for _ in range(samples)] for _ in SLOTS], dtype=torch.int32)
    ids = [
        rng.randrange(min(SHAPES[table][0], 9))
        for table, counts in zip(SLOTS, lengths.tolist(), strict=True)
        for _ in range(sum(counts))
    ]
    columns = sum(SHAPES[table][1] for table in SLOTS)
    return LookupGradient(
        ids=torch.tensor(ids, dtype=rng.choice([torch.int32, torch.int64])),
        lengths=lengths.view(len(SLOTS), samples),
        id_weights=torch.tensor([rng.choice([0.5, 1.0, 2.0]) for _ in ids]) if weighted else None,
        gradient=torch.tensor([[float(rng.randint(-8, 8)) for _ in range(columns)] for _ in range(samples)]).view(
            samples, columns
        ),
    )


def some_lookups(rng: Random) -> list[LookupGradient]:
    weighted = rng.random() < 0.5
    return [a_lookup(rng, weighted=weighted) for _ in range(rng.randint(1, 11))]


def dense(bank: TableBank, gradients: list[RowGradient]) -> list[Tensor]:
    return [
        torch.zeros(cls.weight.shape).index_add_(0, part.rows, part.scaled().values)
        for cls, part in zip(bank.classes, gradients, strict=True)
    ]


def expected_of(bank: TableBank, lookups: list[LookupGradient]) -> list[Tensor]:
    total = [torch.zeros(cls.weight.shape) for cls in bank.classes]
    for one in lookups:
        parts = bank.dense_gradients(one.ids, one.lengths, one.id_weights, one.gradient)
        for whole, part in zip(total, parts, strict=True):
            whole += part
    return total


@pytest.mark.some(1)
@pytest.mark.parametrize("with_native", [True, False])
@settings(max_examples=8)
@given(rng=randoms(), look_after=st.integers(0, 12), scale=st.sampled_from([1.0, 0.5]))
def test_each_row_has_the_sum_of_its_gradients(with_native: bool, rng: Random, look_after: int, scale: float) -> None:
    bank, lookups = a_bank(), some_lookups(rng)
    early = expected_of(bank, lookups[: look_after + 1])
    with operators(with_native):
        deferred = DeferredGradients(bank)
        for number, lookup in enumerate(lookups):
            deferred.add(lookup)
            if number == look_after:
                assert all(map(torch.equal, dense(bank, deferred.sums()), early))
                deferred.scale(torch.tensor(scale))
        found = deferred.take()
    expected = expected_of(bank, lookups)
    if look_after < len(lookups):
        expected = [whole - (1 - scale) * part for whole, part in zip(expected, early, strict=True)]
    for gradient in found:
        assert torch.equal(gradient.rows, gradient.rows.unique())
        torch.testing.assert_close(gradient.square_sums(), gradient.scaled().values.square().sum(dim=1))
    assert all(map(torch.equal, dense(bank, found), expected))
    assert deferred.take() == []
    assert deferred.backwards == 0


@pytest.mark.some(1)
@pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")
@pytest.mark.parametrize("kind", [OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD])
@settings(max_examples=8)
@given(rng=randoms())
def test_a_step_that_reads_lookups_is_one_of_their_sums(kind: OptimizerKind, rng: Random) -> None:
    lookups = some_lookups(rng)
    results = []
    for reads_lookups in (True, False):
        bank = a_bank()
        optimizer = RowOptimizer(bank.classes, len(SHAPES), FusedOptimizer(kind=kind, lr=0.5, eps=1e-3))
        assert optimizer.reads_lookups
        if reads_lookups:
            optimizer.step_from_lookups(bank, lookups)
        else:
            optimizer.step(bank.row_gradients(lookups))
        results.append([*bank.weights, *(state for states in optimizer.states() for state in states.values())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@settings(max_examples=8)
@given(rng=randoms())
def test_what_waits_is_bounded(rng: Random) -> None:
    bank, deferred = a_bank(), DeferredGradients(a_bank())
    lookups = some_lookups(rng) * 3
    rows = [int((whole != 0).any(dim=1).sum()) for whole in expected_of(bank, lookups)]
    for lookup in lookups:
        deferred.add(lookup)
        assert len(deferred._lookups) <= 4
    assert len(deferred._sums) == (len(bank.classes) if len(lookups) > 4 else 0)
    found = deferred.take()
    assert all(part.rows.numel() >= least for part, least in zip(found, rows, strict=True))
    assert sum(part.rows.numel() for part in found) <= len({(n, i) for n in range(len(SLOTS)) for i in range(9)})


@settings(max_examples=8)
@given(rng=randoms(), gone=st.sets(st.integers(0, 4)), table=st.integers(0, 2), scaled=st.booleans())
def test_rows_of_a_table_are_dropped(rng: Random, gone: set[int], table: int, scaled: bool) -> None:
    bank, lookups = a_bank(), some_lookups(rng)
    deferred = DeferredGradients(bank)
    for lookup in lookups:
        deferred.add(lookup)
    expected = expected_of(bank, lookups)
    if scaled:
        deferred.sums()
        deferred.scale(torch.tensor(0.5))
        expected = [whole * 0.5 for whole in expected]
    deferred.drop_rows(table, torch.tensor(sorted(gone), dtype=torch.int64))
    for cls, whole in zip(bank.classes, expected, strict=True):
        if table in cls.tables:
            whole[torch.tensor(sorted(gone), dtype=torch.int64) + cls.bases[cls.tables.index(table)]] = 0
    assert all(map(torch.equal, dense(bank, deferred.take()), expected))


def test_values_that_are_changed_forget_their_squares() -> None:
    bank = a_bank()
    deferred = DeferredGradients(bank)
    lookups = [a_lookup(Random(number), weighted=False) for number in range(2)]
    for lookup in lookups:
        deferred.add(lookup)
    for gradient in deferred.sums(to_change=True):
        gradient.values.mul_(0.5)
    found = deferred.take()
    for gradient in found:
        torch.testing.assert_close(gradient.square_sums(), gradient.values.square().sum(dim=1))
    assert all(map(torch.equal, dense(bank, found), [0.5 * whole for whole in expected_of(bank, lookups)]))
