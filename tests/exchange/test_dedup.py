"""Distinct ids of a batch, with their number known and without."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given

from shardrec.exchange.batch import Batch
from shardrec.exchange.dedup import DistinctIds, distinct, distinct_padded
from tests.batches import random_bags
from tests.plans import randoms

CPU = torch.device("cpu")
TABLES = [("t0", 13), ("t1", 7), ("t2", 29)]
LOOKUPS = [("a", "t0"), ("b", "t1"), ("c", "t1"), ("a", "t2")]
ROWS = {"a": 13, "b": 7, "c": 7}


def random_batch(rng: Random) -> Batch:
    bags = random_bags(rng, ROWS, rng.randint(0, 3), extra=["unused"])
    features = bags.kjt(id_dtype=rng.choice([torch.int32, torch.int64]))
    lengths = features.lengths().view(len(bags.keys), bags.size)
    return Batch(keys=bags.keys, lengths=lengths, values=features.values(), weights=None)


@given(rng=randoms())
def test_each_id_finds_itself(rng: Random) -> None:
    batch = random_batch(rng)
    found, inverse = DistinctIds(LOOKUPS, TABLES, CPU)(batch)
    per_key = dict(zip(batch.keys, batch.values.split(batch.lengths.sum(dim=1).tolist()), strict=True))
    assert found.keys == ("t0", "t1", "t2")
    assert found.values.dtype == batch.values.dtype
    expected = {"t0": per_key["a"], "t1": torch.cat([per_key["b"], per_key["c"]]), "t2": per_key["a"]}
    parts = found.values.split(found.lengths.flatten().tolist())
    for (name, ids), part in zip(expected.items(), parts, strict=True):
        assert torch.equal(part, ids.unique()), name
    in_order = torch.cat([per_key[feature] for feature, _ in LOOKUPS])
    assert torch.equal(found.values[inverse], in_order)


@given(rng=randoms())
def test_the_number_need_not_be_known(rng: Random) -> None:
    """As on CUDA, where more may follow the ids, which are none."""
    batch = random_batch(rng)
    finder = DistinctIds(LOOKUPS, TABLES, CPU)
    order, most = finder._order(batch.keys)
    assert most == 2, "feature a is looked up in two tables"
    constants = (order, batch.lengths, batch.values, finder._firsts, finder._edges)
    counts, values, inverse = distinct(*constants, None)
    found_counts, found, places = distinct_padded(*constants, inverse.numel() + rng.randint(0, 5))
    assert torch.equal(found_counts, counts)
    assert torch.equal(found[: values.numel()], values)
    assert torch.equal(places[: inverse.numel()], inverse)
