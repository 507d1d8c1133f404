"""Gradients that wait for the step: those of equal rows are added up, whatever the order and sizes of the backwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardrec import native
from shardrec.lookup.bank import RowGradient, WidthClass
from shardrec.lookup.deferred import DeferredGradients

BASES = (0, 5, 12)
"""Two tables of 5 and 7 rows, in one matrix."""
WIDTH = 4


def a_class() -> WidthClass:
    slots = torch.zeros(1, dtype=torch.int64)
    return WidthClass(width=WIDTH, tables=(0, 1), bases=BASES, weight=torch.zeros(BASES[-1], WIDTH), slot_bases=slots)


def gradient(rows: set[int]) -> RowGradient:
    ascending = torch.tensor(sorted(rows), dtype=torch.int64)
    return RowGradient(rows=ascending, values=torch.randint(-8, 8, (len(rows), WIDTH)).float())


def dense(gradients: list[RowGradient]) -> Tensor:
    whole = torch.zeros(BASES[-1], WIDTH)
    for one in gradients:
        whole.index_add_(0, one.rows, one.values)
    return whole


some_rows = st.sets(st.integers(0, BASES[-1] - 1))


@pytest.mark.parametrize("with_native", [True, False])
@given(backwards=st.lists(some_rows, min_size=1, max_size=12), look_after=st.integers(0, 12))
def test_each_row_has_the_sum_of_its_gradients(with_native: bool, backwards: list[set[int]], look_after: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not with_native:
            patch.setattr(native, "is_loaded", lambda: False)
        deferred = DeferredGradients([a_class()])
        given_ones = [gradient(rows) for rows in backwards]
        expected = dense(given_ones)
        for number, one in enumerate(given_ones):
            deferred.add([one])
            if number == look_after:
                deferred.sums(to_change=False)
        (found,) = deferred.take()
        assert found.rows.tolist() == sorted(set().union(*backwards))
        assert torch.equal(dense([found]), expected)
        assert torch.equal(found.square_sums(), found.values.square().sum(dim=1))
    assert deferred.take() == []
    assert deferred.backwards == 0


@given(backwards=st.lists(some_rows, min_size=1, max_size=12))
def test_what_waits_is_bounded(backwards: list[set[int]]) -> None:
    deferred = DeferredGradients([a_class()])
    for rows in backwards * 5:
        deferred.add([gradient(rows)])
        waiting = sum(part.rows.numel() for part in deferred._waiting[0])
        assert waiting <= 4 * len(set().union(*backwards)) + len(rows)


@given(backwards=st.lists(some_rows, min_size=1, max_size=4), gone=st.sets(st.integers(0, 6)), table=st.integers(0, 1))
def test_rows_of_a_table_are_dropped(backwards: list[set[int]], gone: set[int], table: int) -> None:
    gone = {row for row in gone if row < BASES[table + 1] - BASES[table]}
    deferred = DeferredGradients([a_class()])
    given_ones = [gradient(rows) for rows in backwards]
    for one in given_ones:
        deferred.add([one])
    deferred.drop_rows(table, torch.tensor(sorted(gone), dtype=torch.int64))
    expected = dense(given_ones)
    dropped = torch.tensor(sorted(gone), dtype=torch.int64) + BASES[table]
    expected[dropped] = 0
    (found,) = deferred.take()
    assert not set(found.rows.tolist()) & set(dropped.tolist())
    assert torch.equal(dense([found]), expected)


def test_values_that_are_changed_forget_their_squares() -> None:
    deferred = DeferredGradients([a_class()])
    for _ in range(2):
        deferred.add([gradient({1, 2})])
    for one in deferred.sums(to_change=True):
        one.values.mul_(0.5)
    (found,) = deferred.take()
    assert torch.equal(found.square_sums(), found.values.square().sum(dim=1))
