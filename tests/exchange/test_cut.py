"""Batches are cut by the C++ operator as by fbgemm's, id by id."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from shardrec import native
from shardrec.exchange.batch import Batch
from shardrec.exchange.cut import Cutter
from tests.batches import random_bags
from tests.cuda_double import cuda_double, cuda_is_there
from tests.exchange.lookups import random_case
from tests.plans import randoms

needs_native = pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")


@needs_native
@given(rng=randoms())
def test_at_once_as_in_steps(rng: Random) -> None:
    dynamic = rng.random() < 0.5
    case = random_case(rng, huge=not dynamic and rng.random() < 0.2, most_ranks=rng.choice([2, 5, 20]), dynamic=dynamic)
    cutter = Cutter(case.route, torch.device("cpu"))
    weighted, keep = rng.random() < 0.4, rng.random() < 0.5
    # A replicated table, of which the cutter knows nothing, may have larger ids.
    assume(cutter.id_dtype is torch.int64 or max(case.rows.values()) < 2**31)
    bags = random_bags(rng, case.rows, rng.choice([0, 1, 3, 40]), weighted=weighted)
    given = bags.kjt(cutter.id_dtype, torch.int32)
    batch = Batch(
        keys=tuple(given.keys()),
        lengths=given.lengths().view(len(given.keys()), -1),
        values=given.values(),
        weights=given.weights() if weighted else None,
    )

    def cut() -> list[Tensor | None]:
        found = cutter.cut(batch, keep_positions=keep, given=batch)
        return [found.lengths, *cutter.in_slots(found, int(found.lengths.sum()))]

    at_once = cut()
    with patch.object(native, "has_operators", lambda: False):
        in_steps = cut()
    for name, one, other in zip(("lengths", "values", "weights", "positions"), at_once, in_steps, strict=True):
        assert (one is None) == (other is None), name
        if one is not None and other is not None:
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name


@needs_native
@given(rng=randoms())
def test_on_cuda_as_at_once(rng: Random) -> None:
    """Where the host does not know the number of ids: keys that are unused or in several units, and no samples."""
    dynamic = rng.random() < 0.3
    case = random_case(rng, most_ranks=rng.choice([2, 5]), dynamic=dynamic)
    weighted, keep = rng.random() < 0.4, rng.random() < 0.5
    cutter = Cutter(case.route, torch.device("cpu"))
    # As above, and a replicated table is said to have dynamic ids, of any value.
    assume(cutter.id_dtype is torch.int64 or max(case.rows.values()) < 2**31)
    bags = random_bags(rng, case.rows, rng.choice([0, 1, 3, 40]), weighted=weighted, extra=["unused"])
    given = bags.kjt(cutter.id_dtype, torch.int32)

    def cut(device: str, cutter: Cutter) -> list[Tensor | None]:
        batch = Batch(
            keys=tuple(given.keys()),
            lengths=given.lengths().view(len(given.keys()), -1).to(device),
            values=given.values().to(device),
            weights=given.weights().to(device) if weighted else None,
        )
        found = cutter.cut(batch, keep_positions=keep, given=batch)
        return [found.lengths, *cutter.in_slots(found, int(found.lengths.sum()))]

    at_once = cut("cpu", cutter)
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        there = cut("cuda", Cutter(case.route, torch.device("cuda")))
        assert double.longest_loop <= 64
        for name, one, other in zip(("lengths", "values", "weights", "positions"), at_once, there, strict=True):
            assert (one is None) == (other is None), name
            if one is not None and other is not None:
                assert torch.equal(one, other.cpu()), name


@needs_native
def test_what_does_not_fit_is_refused() -> None:
    ids, lengths = torch.tensor([0, 5, 9]), torch.tensor([[1, 2]], dtype=torch.int32)
    halves = [0, 0, 2, 0, 5, 10, 1, 0, 1, 1]  # key 0, not hashed, in two blocks, a slot each

    def cut(
        ids: Tensor = ids, lengths: Tensor = lengths, units: list[int] = halves, slots: int = 2
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.shardrec.cut_ids(ids, lengths, None, units, slots, False)
        return found

    assert [one.tolist() for one in cut()[:2]] == [[[1, 0], [0, 2]], [0, 0, 4]]
    for words, wrong in (
        ("not a row", {"ids": torch.tensor([0, 5, 10])}),
        ("not a row", {"ids": torch.tensor([0, -1, 9])}),
        ("not a row", {"ids": torch.tensor([0, 10, 9]), "units": [0, 0, 1, 0, 10, 2, 0, 1]}),
        ("not a row", {"ids": torch.tensor([0, 10, 9]), "units": [0, 0, 3, 0, 2, 5, 10, 1, 0, 0, 1, 1]}),
        ("do not fit", {"ids": torch.tensor([0, 5])}),
        ("negative length", {"lengths": torch.tensor([[4, -1]], dtype=torch.int32)}),
        ("malformed", {"units": [1, *halves[1:]]}),
        ("end inside", {"units": halves[:-1]}),
        ("there twice", {"units": [*halves[:-1], 0]}),
        ("in no unit", {"slots": 3}),
        ("int32", {"lengths": lengths.long()}),
        ("hashed ids are int64", {"ids": ids.int(), "units": [0, 1, *halves[2:]]}),
    ):
        with pytest.raises(RuntimeError, match=words):
            cut(**wrong)  # type: ignore[arg-type]
