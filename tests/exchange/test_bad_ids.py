"""Ids outside their table, taken out of a batch or wrapped: against loops over lists."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given

from shardrec.errors import ConfigError
from shardrec.exchange.bad_ids import DROPPED, POLICIES, mend, mended, places_of_rows, policies_of
from shardrec.exchange.batch import NO_LIMIT, Batch
from tests.plans import randoms

SCRIPTED = torch.jit.script(mend)


@pytest.mark.parametrize("run", [mend, SCRIPTED], ids=["eager", "scripted"])
@given(rng=randoms())
def test_mend(run: Callable[..., tuple[torch.Tensor, ...]], rng: Random) -> None:
    features, size = rng.randint(1, 4), rng.randint(0, 4)
    limits = [rng.choice([1, 5, 9, NO_LIMIT]) for _ in range(features)]
    policies = [0 if limit == NO_LIMIT else rng.randrange(3) for limit in limits]
    anything = [-(2**31), -1, 0, 4, 5, 8, 2**31 - 1]
    bags = [[[rng.choice(anything) for _ in range(rng.randrange(4))] for _ in range(size)] for _ in limits]
    drops = 1 in policies or rng.random() < 0.3
    lengths, looked_up, order, kept, bad = run(
        torch.tensor([[len(bag) for bag in row] for row in bags], dtype=torch.int32).view(features, size),
        torch.tensor([one for row in bags for bag in row for one in bag], dtype=torch.int64),
        torch.tensor(limits),
        torch.tensor(policies),
        drops,
    )
    wanted_lengths: list[list[int]] = []
    wanted, gone, flags, counts = [], 0, [], []
    for row, limit, policy in zip(bags, limits, policies, strict=True):
        wanted_lengths.append([])
        counts.append(0)
        for bag in row:
            left = 0
            for one in bag:
                bad_one = policy != 0 and not 0 <= one < limit
                counts[-1] += bad_one
                dropped = bad_one and policy == 1
                flags.append(not dropped)
                wanted.append(0 if dropped else one % limit if bad_one else one)
                left += not dropped
                gone += dropped
            wanted_lengths[-1].append(left)
    assert bad.tolist() == counts
    assert looked_up.tolist() == wanted
    if not drops:
        assert lengths.tolist() == wanted_lengths
        assert order.numel() == kept.numel() == 0
        return
    assert lengths.tolist() == [*wanted_lengths, [gone, *[0] * (size - 1)] if size else []]
    assert kept.tolist() == flags
    places = [place for place, flag in enumerate(flags) if flag]
    assert order.tolist() == [*places, *(place for place, flag in enumerate(flags) if not flag)]
    rows = torch.arange(1, len(places) + 1)
    found = torch.cat([torch.zeros(1, dtype=torch.int64), rows])[places_of_rows(kept, None)]
    assert found.tolist() == [flags[:place].count(True) + 1 if flag else 0 for place, flag in enumerate(flags)]


def test_a_batch_keeps_its_weights_in_order() -> None:
    batch = Batch(
        keys=("a",),
        lengths=torch.tensor([[2, 1]]),
        values=torch.tensor([9, 1, 2]),
        weights=torch.tensor([0.5, 0.25, 0.125]),
        sizes=(2,),
    )
    found, bad = mended(batch, torch.tensor([3]), torch.tensor([POLICIES.index("zero")]), drops=True)
    assert found.keys == ("a", DROPPED)
    assert found.lengths.tolist() == [[1, 1], [1, 0]]
    assert found.values.tolist() == [1, 2, 0]
    assert found.weights is not None
    assert found.weights.tolist() == [0.25, 0.125, 0.5]
    assert found.sizes == (2, 2)
    assert bad.tolist() == [1]


def test_policies() -> None:
    assert policies_of("error", ["a", "b"]) == {}
    assert policies_of("wrap", ["b", "a", "a"]) == {"a": "wrap", "b": "wrap"}
    assert policies_of({"a": "zero", "b": "error"}, ["a", "b", "c"]) == {"a": "zero"}
    with pytest.raises(ConfigError, match=r"on_bad_id is 'skip' for feature 'a'\. Give one of 'error', 'zero', 'wrap'"):
        policies_of("skip", ["a"])  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"names feature 'x', which no table of the model looks up\. Its features are 'a'"
    ):
        policies_of({"x": "zero"}, ["a"])
