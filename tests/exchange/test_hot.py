"""Ids of hot rows moved to keys of their own: against loops over lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given

from shardrec import native
from shardrec.exchange.batch import Batch, WithDropped
from shardrec.exchange.hot import HotSplit, hot_key
from shardrec.layout import TableLayout
from tests.batches import random_bags
from tests.plans import randoms

CPU = torch.device("cpu")
ROWS = {"a": 13, "b": 7, "c": 29, "d": 7}


def random_layout(rng: Random, table: str, rows: int) -> TableLayout:
    hot = sorted(rng.sample(range(rows), rng.randint(1, rows)))
    return TableLayout(name=table, num_embeddings=rows, embedding_dim=4, hot_rows=tuple(hot))


def random_batch(rng: Random, *, weighted: bool) -> Batch:
    bags = random_bags(rng, ROWS, rng.randint(0, 3), weighted=weighted, extra=["unused"])
    features = bags.kjt(id_dtype=rng.choice([torch.int32, torch.int64]))
    return Batch(
        keys=bags.keys,
        lengths=features.lengths().view(len(bags.keys), bags.size),
        values=features.values(),
        weights=features.weights_or_none(),
        sizes=tuple(rng.randint(0, bags.size) for _ in bags.keys) if rng.random() < 0.3 else None,
    )


def bags_of(batch: Batch) -> dict[str, list[list[int]]]:
    """Per key and sample, the ids."""
    parts = iter(batch.values.split(batch.lengths.flatten().tolist())) if batch.lengths.numel() else iter(())
    return {key: [next(parts).tolist() for _ in range(batch.size)] for key in batch.keys}


@pytest.fixture(scope="module", params=["C++", "torch"], autouse=True)
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "is_loaded", lambda: False)
        elif not native.is_loaded():
            pytest.skip("the C++ operators were not compiled when shardrec was installed (no C++ compiler?)")
        yield


@given(rng=randoms())
def test_each_id_goes_to_its_key(rng: Random) -> None:
    """With features that several tables look up, tables of several features, and weights."""
    batch = random_batch(rng, weighted=rng.random() < 0.5)
    one, other = random_layout(rng, "t", 7), random_layout(rng, "u", 29)
    third = random_layout(rng, "v", 7)
    split = HotSplit({"b": one, "d": one, "c": other, "b in v": third}, {"b in v": "b"}, keep=True, device=CPU)
    found = split(batch, places=True)
    given, sent = bags_of(batch), bags_of(found)
    assert found.keys == (
        *batch.keys,
        "b in v",
        *(hot_key(key) for key in (*batch.keys, "b in v") if key in "bcd" or " " in key),
    )
    for key, layout in {"b": one, "d": one, "c": other, "b in v": third}.items():
        bags = given["b" if " " in key else key]
        assert sent[key] == [[row for row in bag if row not in layout.hot_rows] for bag in bags]
        hot = [[layout.hot_rows.index(row) for row in bag if row in layout.hot_rows] for bag in bags]
        assert sent[hot_key(key)] == hot
    assert sent["a"] == given["a"] and sent["unused"] == given["unused"]
    assert found.values.dtype == batch.values.dtype and found.order is not None
    if batch.sizes is not None:
        assert found.sizes is not None
        size_of = dict(zip(batch.keys, batch.sizes, strict=True)) | {"b in v": batch.sizes[batch.keys.index("b")]}
        assert found.sizes == tuple(size_of[key.removeprefix(hot_key(""))] for key in found.keys)
    if batch.weights is not None:
        assert found.weights is not None
        places = found.places_as_given(torch.arange(found.values.numel()))
        assert torch.equal(batch.weights[places], found.weights)
        order = torch.randperm(batch.values.numel())
        with_dropped = WithDropped(order=order, kept=order > 0, lengths=batch.lengths, values=batch.values)
        found = split(replace(batch, with_dropped=with_dropped), places=False)
        assert torch.equal(found.places_as_given(torch.arange(places.numel())), order[places])


@given(rng=randoms())
def test_a_key_for_each_lookup(rng: Random) -> None:
    """As sequences have it: the place of each id of the lookups, whatever lies behind the ids."""
    batch = random_batch(rng, weighted=False)
    layout = random_layout(rng, "t", 7)
    copies = {"0": "d", "1": "a", "2": "b", "3": "b"}
    found = HotSplit({"0": layout, "3": layout}, copies, keep=False, device=CPU)(batch, places=True)
    per_key = dict(zip(batch.keys, batch.values.split(batch.lengths.sum(dim=1).tolist()), strict=True))
    assert found.keys == ("0", "1", "2", "3", hot_key("0"), hot_key("3"))
    wanted = torch.cat([per_key[feature] for feature in copies.values()])
    counts = found.lengths.sum(dim=1).tolist()
    hot = torch.tensor(layout.hot_rows)
    rows = [part if number < 4 else hot[part.long()] for number, part in enumerate(found.values.split(counts))]
    assert found.order is not None and torch.equal(torch.cat(rows), wanted.to(torch.cat(rows).dtype)[found.order])


@given(rng=randoms())
def test_the_operator_is_torchs(rng: Random) -> None:
    """Any row, in tables of any number of words, and keys without hot rows."""
    if not native.is_loaded():
        pytest.skip("this compares the C++ operator")
    rows = {key: rng.choice([1, 63, 64, 65, 128, 500]) for key in "abc"}
    bags = random_bags(rng, rows, rng.randint(0, 9), weighted=rng.random() < 0.5)
    features = bags.kjt(id_dtype=rng.choice([torch.int32, torch.int64]))
    layouts = {key: random_layout(rng, key, count) for key, count in rows.items() if rng.random() < 0.7}
    batch = Batch(
        keys=bags.keys,
        lengths=features.lengths().view(len(bags.keys), bags.size).int(),
        values=features.values(),
        weights=features.weights_or_none(),
    )
    if not layouts:
        return
    of_operator = HotSplit(layouts, {}, keep=True, device=CPU)(batch, places=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_loaded", lambda: False)
        of_torch = HotSplit(layouts, {}, keep=True, device=CPU)(batch, places=True)
    assert of_operator.order is not None and of_torch.order is not None
    assert torch.equal(of_operator.order, of_torch.order) and torch.equal(of_operator.lengths, of_torch.lengths)
    assert torch.equal(of_operator.values, of_torch.values) and of_operator.values.dtype is of_torch.values.dtype
    assert (of_operator.weights is None) == (of_torch.weights is None)
    if of_torch.weights is not None and of_operator.weights is not None:
        assert torch.equal(of_operator.weights, of_torch.weights)


@given(rng=randoms())
def test_what_lies_behind_the_ids_stays(rng: Random) -> None:
    """As on CUDA, where nobody knows on the host where they end."""
    batch, layout, spare = random_batch(rng, weighted=False), random_layout(rng, "t", 7), rng.randint(1, 4)
    padded = replace(batch, values=torch.cat([batch.values, torch.full((spare,), 3, dtype=batch.values.dtype)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_loaded", lambda: False)
        split = HotSplit({"b": layout, "d": layout}, {}, keep=True, device=CPU)
    plain, with_spare = split(batch, places=False), split(padded, places=False)
    assert torch.equal(with_spare.values[:-spare], plain.values)
    assert torch.equal(with_spare.lengths, plain.lengths)
