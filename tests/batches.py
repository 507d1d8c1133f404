"""Batches of bags in plain Python, and the KeyedJaggedTensor that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["Bags", "BagsOfSizes", "joined", "random_bags", "random_sizes_bags"]


@dataclass(frozen=True, kw_only=True)
class Bags:
    """One rank's batch.

    Args:
        keys: order of the features.
        size: samples B.
        ids: per feature and sample, its ids.
        weights: the same shape, or None.
    """

    keys: tuple[str, ...]
    size: int
    ids: Mapping[str, Sequence[Sequence[int]]]
    weights: Mapping[str, Sequence[Sequence[float]]] | None = None

    def kjt(self, id_dtype: torch.dtype = torch.int64, length_dtype: torch.dtype = torch.int32) -> KeyedJaggedTensor:
        """The batch as tensors."""
        flat = [one for key in self.keys for bag in self.ids[key] for one in bag]
        lengths = [len(bag) for key in self.keys for bag in self.ids[key]]
        weights = None
        if self.weights is not None:
            weights = torch.tensor([w for key in self.keys for bag in self.weights[key] for w in bag])
        return KeyedJaggedTensor(
            keys=list(self.keys),
            values=torch.tensor(flat, dtype=id_dtype),
            lengths=torch.tensor(lengths, dtype=length_dtype),
            weights=weights,
            stride=self.size,
        )


def random_bags(
    rng: Random,
    rows: Mapping[str, int],
    size: int,
    *,
    weighted: bool = False,
    extra: Sequence[str] = (),
    shuffled: bool = True,
) -> Bags:
    """Bags of 0 to 3 ids, the first and the last row more often than others.

    Args:
        rng: where the draws come from.
        rows: per feature, ids are below this.
        size: samples.
        weighted: draw weights, too.
        extra: further keys, whose ids are any number.
        shuffled: keys in any order.
    """
    keys = [*rows, *extra]
    if shuffled:
        rng.shuffle(keys)

    def one(key: str) -> int:
        if key not in rows:
            return rng.choice([-7, 0, 10**9, 2**31 - 1])
        return rng.choice([0, rows[key] - 1, rng.randrange(rows[key]), rng.randrange(rows[key])])

    ids = {key: [[one(key) for _ in range(rng.randrange(4))] for _ in range(size)] for key in keys}
    weights = None
    if weighted:
        # Positive: an id whose gradient is zero counts as looked up for the fused Adam and not for its dense likeness.
        weights = {key: [[rng.randint(1, 8) / 8 for _ in bag] for bag in bags] for key, bags in ids.items()}
    return Bags(keys=tuple(keys), size=size, ids=ids, weights=weights)


def joined(batches: Sequence[Bags]) -> Bags:
    """The global batch: the samples of all ranks, rank after rank, keys as on rank 0."""
    keys = batches[0].keys
    weights = None
    if batches[0].weights is not None:
        weights = {
            key: [bag for batch in batches if batch.weights is not None for bag in batch.weights[key]] for key in keys
        }
    return Bags(
        keys=keys,
        size=sum(batch.size for batch in batches),
        ids={key: [bag for batch in batches for bag in batch.ids[key]] for key in keys},
        weights=weights,
    )


@dataclass(frozen=True, kw_only=True)
class BagsOfSizes:
    """A batch whose features have a batch size each.

    Args:
        features: the input.
        samples: of the full batch.
    """

    features: KeyedJaggedTensor
    samples: int


def random_sizes_bags(
    rng: Random, rows: Mapping[str, int], *, weighted: bool = False, even: bool = False, inverse: bool = True
) -> BagsOfSizes:
    """1 to 4 bags per feature, chosen from by 0 to 5 samples; one further key; ids at the tables' ends.

    Args:
        rng: where the draws come from.
        rows: per feature, ids are below this.
        weighted: draw weights, too.
        even: all features have as many bags.
        inverse: give inverse indices.
    """
    keys = [*rows, "extra"]
    rng.shuffle(keys)
    samples = rng.randrange(6)
    size = rng.randint(1, 4)
    strides = {key: size if even else rng.randint(1, 4) for key in keys}
    if not samples:
        # Without samples there is nothing that could tell bags apart: one bag each, and empty.
        strides = dict.fromkeys(keys, 1)
    lengths: list[int] = []
    values: list[int] = []
    for key in keys:
        bags = [rng.randrange(4) if samples else 0 for _ in range(strides[key])]
        lengths += bags
        last = rows.get(key, 9) - 1
        values += [rng.choice([0, last, rng.randint(0, last)]) for _ in range(sum(bags))]
    inverse_keys = [key for key in keys if key != "extra"]
    rng.shuffle(inverse_keys)
    chosen = torch.tensor([[rng.randrange(strides[key]) for _ in range(samples)] for key in inverse_keys])
    features = KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        weights=torch.tensor([rng.randint(1, 8) / 8 for _ in values]) if weighted else None,
        stride_per_key_per_rank=[[strides[key]] for key in keys],
        inverse_indices=(inverse_keys, chosen) if samples and inverse else None,
    )
    return BagsOfSizes(features=features, samples=samples or 1)
