"""Ids outside their table, for features with another policy than an error: they are looked up as zero rows, or wrapped.

Shapes: F features of the input, B samples, N ids.

::

    feature   a          b              a          b          dropped
    ids       1 2 | 9    7 -4 | 3  ──►  1 2 |      7 | 3      9 -4 |        (zero; 8 rows each)
    ids       1 2 | 9    7 -4 | 3  ──►  1 2 | 1    7  4 | 3                 (wrap)

An id that is looked up as a zero row leaves its bag and goes to the first bag of one more key, which no table looks up:
the number of ids is unchanged, so the host needs to read nothing, and the next stages see an ordinary batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange.batch import Batch, OnBadId, WithDropped

POLICIES: tuple[OnBadId, ...] = get_args(OnBadId)
"""In the order of their numbers: 0, 1, 2."""

DROPPED = "\0dropped"
"""The key of the ids that are looked up as zero rows."""


def policies_of(on_bad_id: OnBadId | Mapping[str, OnBadId], features: Iterable[str]) -> dict[str, OnBadId]:
    """The policy per feature with bad ids that are not an error.

    Args:
        on_bad_id: the policy of all features, or by feature. A feature that is not named has ``"error"``.
        features: of the model's tables.

    Raises:
        ConfigError: for another policy, or a feature that no table looks up.
    """
    known = sorted(set(features))
    policies = dict(on_bad_id) if isinstance(on_bad_id, Mapping) else dict.fromkeys(known, on_bad_id)
    for feature, policy in policies.items():
        if policy not in POLICIES:
            raise ConfigError(
                f"on_bad_id is {policy!r} for feature {feature!r}. Give one of {', '.join(map(repr, POLICIES))}"
            )
        if feature not in known:
            raise ConfigError(
                f"on_bad_id names feature {feature!r}, which no table of the model looks up. Its features are "
                f"{', '.join(map(repr, known))}"
            )
    return {feature: policy for feature, policy in policies.items() if policy != "error"}


def mend(
    lengths: Tensor, values: Tensor, limits: Tensor, policies: Tensor, drops: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A batch without the bad ids of features that have a policy. TorchScript also compiles it. It reads no value.

    Args:
        lengths: (F, B) ids per bag. If they do not add up to N, the result's do not either.
        values: (N,) ids.
        limits: (F,) int64, one more than the largest id per key.
        policies: (F,) int64, numbers of ``POLICIES``.
        drops: whether any policy is to drop.

    Returns:
        Lengths, (F, B) or, with ``drops``, (F + 1, B). Ids as they are looked up (N,), in the order given, 0 for those
        that are dropped; with ``drops``, the place that each id of the result has in it (N,) and whether each given id
        is looked up (N,) bool, else two empty tensors, and the number of bad ids per key (F,) int64.
    """
    places = torch.arange(values.numel(), device=values.device)
    ends_F = lengths.sum(dim=1, dtype=torch.int64).cumsum(0)
    feature_N = torch.searchsorted(ends_F, places, right=True).clamp(max=limits.numel() - 1)
    limit_N, policy_N = limits.index_select(0, feature_N), policies.index_select(0, feature_N)
    bad = ((values < 0) | (values >= limit_N)) & (policy_N != 0)
    bad_F = torch.zeros_like(limits).index_add(0, feature_N, bad.to(torch.int64))
    looked_up = torch.where(policy_N == 2, values.remainder(limit_N), values)
    if not drops:
        return lengths, looked_up, places[:0], bad[:0], bad_F
    drop = bad & (policy_N == 1)
    bag_N = torch.searchsorted(lengths.reshape(-1).cumsum(0), places, right=True).clamp(max=lengths.numel() - 1)
    gone_FB = torch.zeros_like(lengths).view(-1).index_add(0, bag_N, drop.to(lengths.dtype)).view(lengths.size())
    last = nn.functional.pad(drop.sum().to(lengths.dtype).view(1, 1), [0, lengths.size(1) - 1])
    order = torch.argsort(drop, stable=True)
    looked_up = looked_up.masked_fill(drop, 0)
    return torch.cat([lengths - gone_FB, last]), looked_up, order, drop.logical_not(), bad_F


def mended(batch: Batch, limits: Tensor, policies: Tensor, *, drops: bool) -> tuple[Batch, Tensor]:
    """:func:`mend` of a batch, and the number of bad ids per key (F,)."""
    lengths, values, order, kept, bad_F = mend(batch.lengths, batch.values, limits, policies, drops)
    if not drops:
        return replace(batch, values=values), bad_F
    with_dropped = WithDropped(order=order, kept=kept, lengths=batch.lengths, values=values)
    mended = replace(
        batch,
        keys=(*batch.keys, DROPPED),
        lengths=lengths,
        values=values.index_select(0, order),
        weights=None if batch.weights is None else batch.weights.index_select(0, order),
        sizes=None if batch.sizes is None else (*batch.sizes, batch.size),
        with_dropped=with_dropped,
    )
    return mended, bad_F


def places_of_rows(kept: Tensor, distinct_index: Tensor | None) -> Tensor:
    """The index of each id's row among the received rows, which follow a zero row at index 0.

    TorchScript also compiles it.

    Args:
        kept: (M,) bool, whether the id was looked up, in the order of the output.
        distinct_index: (number kept,) index of the row per looked-up id. None if every id has a row.

    Returns:
        (M,) int64.
    """
    places = torch.where(kept, kept.cumsum(0), 0)
    if distinct_index is None:
        return places
    return nn.functional.pad(distinct_index + 1, [1, 0]).index_select(0, places)
