"""Distinct ids of a batch, with their number known and without."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given

from shardrec.exchange.batch import Batch
from shardrec.exchange.dedup import DistinctIds
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
    found = DistinctIds(LOOKUPS, TABLES, CPU)(batch)
    per_key = dict(zip(batch.keys, batch.values.split(batch.lengths.sum(dim=1).tolist()), strict=True))
    assert found.batch.keys == ("t0", "t1", "t2")
    assert found.batch.values.dtype == batch.values.dtype
    expected = {"t0": per_key["a"], "t1": torch.cat([per_key["b"], per_key["c"]]), "t2": per_key["a"]}
    parts = found.batch.values.split(found.batch.lengths.flatten().tolist())
    for (name, ids), part in zip(expected.items(), parts, strict=True):
        assert torch.equal(part, ids.unique()), name
    in_order = torch.cat([per_key[feature] for feature, _ in LOOKUPS])
    assert torch.equal(found.batch.values[found.inverse], in_order)


@given(rng=randoms())
def test_the_number_need_not_be_known(rng: Random) -> None:
    """As on CUDA, where more may follow the ids, which are none."""
    batch = random_batch(rng)
    finder = DistinctIds(LOOKUPS, TABLES, CPU)
    order = finder._order(batch.keys)
    lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(order.keys, batch.lengths, batch.values, None, None)
    ids_L = lengths.sum(dim=1, dtype=torch.int64)
    values, inverse, counts = finder._distinct(ids, ids_L)
    nothing = torch.randint(-(2**31), 2**31 - 1, (rng.randint(0, 5),), dtype=ids.dtype)
    found, places, found_counts = finder._distinct_of_any(torch.cat([ids, nothing]), ids_L)
    assert torch.equal(found_counts, counts)
    assert torch.equal(found[: values.numel()], values)
    assert torch.equal(places[: inverse.numel()], inverse)
    assert order.most == 2, "feature a is looked up in two tables"
