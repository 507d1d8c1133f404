"""Ids outside their tables, where a collection takes them: looked up as zeros, or wrapped."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.exchange.batch import OnBadId

__all__ = ["POLICIES", "like", "repaired", "spoiled"]

POLICIES: tuple[OnBadId, ...] = ("zero", "wrap", "error")


def like(features: KeyedJaggedTensor, **changes: Any) -> KeyedJaggedTensor:
    """A batch with other parts."""
    varying = features.variable_stride_per_key()
    parts: dict[str, Any] = {
        "keys": features.keys(),
        "values": features.values(),
        "weights": features.weights_or_none(),
        "lengths": features.lengths(),
        "stride": None if varying else features.stride(),
        "stride_per_key_per_rank": features.stride_per_key_per_rank() if varying else None,
        "inverse_indices": features.inverse_indices_or_none(),
    }
    return KeyedJaggedTensor(**{**parts, **changes})


def spoiled(
    features: KeyedJaggedTensor, rows: dict[str, int], policies: Mapping[str, str], rng: Random
) -> KeyedJaggedTensor:
    """The batch with some ids outside their tables, of features whose policy takes them."""
    values = features.values().clone()
    least, most = torch.iinfo(values.dtype).min, torch.iinfo(values.dtype).max
    start = 0
    for key, count in zip(features.keys(), features.length_per_key(), strict=True):
        for place in range(start, start + count):
            if policies.get(key, "error") != "error" and rng.random() > 0.7:
                values[place] = rng.choice([-1, rows[key], least, most, rng.randint(least, most)])
        start += count
    return like(features, values=values)


def repaired(
    features: KeyedJaggedTensor, rows: dict[str, int], policies: Mapping[str, str]
) -> tuple[KeyedJaggedTensor, dict[str, Tensor], dict[str, int]]:
    """What the unsharded collection is given in its place.

    Returns:
        The batch with wrapped ids, without those that are looked up as zeros; per feature which ids it still has; and
        how many ids were outside.
    """
    parts = features.values().split(features.length_per_key())
    values, kept, bad = [], {}, {}
    for key, ids in zip(features.keys(), parts, strict=True):
        limit, policy = rows.get(key), policies.get(key, "error")
        inside = torch.ones_like(ids, dtype=torch.bool) if limit is None else (ids >= 0) & (ids < limit)
        values.append(ids % limit if policy == "wrap" and limit is not None else ids)
        kept[key] = inside if policy == "zero" else torch.ones_like(inside)
        if policy != "error":
            bad[key] = int((~inside).sum())
    mask = torch.cat(list(kept.values()))
    bag = torch.repeat_interleave(torch.arange(features.lengths().numel()), features.lengths().long())
    lengths = torch.zeros_like(features.lengths()).index_add(0, bag, mask.to(features.lengths().dtype))
    weights = features.weights_or_none()
    given = None if weights is None else weights[mask]
    return like(features, values=torch.cat(values)[mask], weights=given, lengths=lengths), kept, bad
