"""A batch checked by operators and plain data, as TorchScript and torch.export take them.

Shapes: F features of the input, B samples, N ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._torchscript import dict_of, list_of
from shardrec.exchange.bad_ids import DROPPED, POLICIES, mend
from shardrec.exchange.batch import NO_LIMIT, Expectation, fit
from shardrec.exchange.check import add_up, are_sound

__all__ = ["FAULTS", "Checked", "PortableBatch"]

FAULTS = [
    "",
    "an id is outside its table, or lengths and ids do not fit (call the eager model with this batch: it says which)",
    "the input lacks a feature that a table looks up",
    "the ids are not int32 or int64, or not one-dimensional",
    "the collection is weighted and the input has no floating-point weight for each id, or the other way around",
    "the features have a batch size each, which portable programs do not take",
    "there is not exactly one length for each feature and sample",
    "the weights of the ids take a gradient, which portable programs do not carry back",
    "there are ids and no samples",
    "the lengths (or offsets) are not int32 or int64",
    "the offsets do not begin at 0, or are not those of the lengths that the input has, too",
]
"""What a header's number says is wrong."""


# Spelled as a call, for TorchScript wants types where an annotation is text.
Checked = NamedTuple(  # noqa: UP014
    "Checked",
    [
        ("keys", list[str]),
        ("lengths", Tensor),
        ("values", Tensor),
        ("weights", Tensor | None),
        ("fault", Tensor),
        ("bad_ids", Tensor),
        ("dropped", bool),
        ("given", Tensor),
        ("looked_up", Tensor),
        ("kept", Tensor),
    ],
)
"""A batch as the lookups take it: checked, without its bad ids, and of empty bags if it is faulty.

``keys``: F of the input, and ``DROPPED`` where ids may have been taken out. ``lengths``: (F, B) or (F + 1, B) int32.
``values``: (N,) ids. ``weights``: (N,) float32 or None. ``fault``: 0-d int64, a number of :data:`FAULTS`. ``bad_ids``:
(U,) int64, bad ids of each feature that were no error; empty if there can be none. ``dropped``: ids may have been taken
out; of the batch as it was given then ``given``: (F, B) int32 lengths, ``looked_up``: (N,) ids, 0 where they were taken
out, and ``kept``: (N,) bool, whether they were not.
"""


class PortableBatch(nn.Module):
    """Checks a batch.

    Args:
        expect: what the input must look like.
        wide_ids: ids need 64 bits.
        bad_ids: (U,) int64, per feature, where bad ids that are no error are counted.
    """

    def __init__(self, expect: Expectation, *, wide_ids: bool, bad_ids: Tensor) -> None:
        super().__init__()
        policies = [POLICIES.index(expect.on_bad_id.get(feature, "error")) for feature in expect.features]
        self.policies = list_of(int, [*policies, 0])
        self.mends = len(expect.on_bad_id) > 0
        self.drops = POLICIES.index("zero") in policies
        self.dropped_key = DROPPED
        self.bad_ids = bad_ids
        self.weighted = expect.weighted
        self.features = list_of(str, list(expect.features))
        self.limits = list_of(int, [*map(expect.rows, expect.features), NO_LIMIT])
        self.no_limit = NO_LIMIT
        # Place of each feature in these; the last is of a key that no table looks up.
        self.places = dict_of(int, {name: place for place, name in enumerate(expect.features)})
        self.wide_ids = wide_ids
        self.faults = list_of(str, FAULTS)
        self.nothing = torch.zeros(0, dtype=torch.int64, device=expect.device)

    def structural_fault(self, features: KeyedJaggedTensor) -> int:
        """A number of :data:`FAULTS` that shows without reading a tensor; 0 if there is none."""
        keys = features.keys()
        values, weights = features.values(), self.weights_of(features)
        for feature in self.features:
            if feature not in keys:
                return 2
        if values.dim() != 1 or (values.dtype != torch.int64 and values.dtype != torch.int32):
            return 3
        if self.weighted != (weights is not None):
            return 4
        if weights is not None:
            if not weights.is_floating_point() or weights.numel() != values.numel():
                return 4
            if weights.requires_grad and torch.is_grad_enabled():
                return 7
        if features.variable_stride_per_key():
            return 5
        if features.lengths().dtype != torch.int64 and features.lengths().dtype != torch.int32:
            return 9
        if features.lengths().numel() != len(keys) * features.stride():
            return 6
        exported = False
        if not torch.jit.is_scripting():
            exported = torch.compiler.is_exporting()
        # Of an exported program no size is asked (the answer would hold for all): its check of the sums tells.
        if not exported and features.lengths().numel() == 0 and values.numel() > 0:
            return 8
        return 0

    def weights_of(self, features: KeyedJaggedTensor) -> Tensor | None:
        """The weights of the ids; those given to a collection that is not weighted are ignored."""
        return features.weights_or_none() if self.weighted else None

    def count_bad_ids(self, bad_ids: Tensor) -> None:
        """Add a batch's to those so far; not in an exported program, which has no state."""
        exported = False
        if not torch.jit.is_scripting():
            exported = torch.compiler.is_exporting()
        if self.mends and not exported and bad_ids.numel() > 0:
            self.bad_ids.add_(bad_ids)

    def checked(self, features: KeyedJaggedTensor) -> Checked:
        """The batch as the lookups take it."""
        fault = self.structural_fault(features)
        if fault != 0:
            none = self.nothing.to(torch.float32) if self.weighted else None
            # Of as many samples: a tracer goes on to the model's other layers before the fault is raised.
            lengths = self.nothing.new_zeros([len(self.features), features.stride()], dtype=torch.int32)
            ids = self.nothing.to(torch.int64 if self.wide_ids else torch.int32)
            told = torch.full_like(self.nothing.sum(), fault)
            return Checked(
                self.features, lengths, ids, none, told, self.nothing, False, lengths, ids, ids.to(torch.bool)
            )
        keys = features.keys()
        limits: list[int] = []
        policies: list[int] = []
        unused = False
        for key in keys:
            place = self.places.get(key, -1)
            unused = unused or self.limits[place] == self.no_limit
            limits.append(self.limits[place])
            policies.append(self.policies[place])
        given, offsets = features.lengths_or_none(), features.offsets_or_none()
        lengths = features.lengths().view(len(keys), -1 if len(keys) > 0 else 0)
        values = features.values()
        weights = self.weights_of(features)
        limits_F = torch.tensor(limits, dtype=torch.int64, device=values.device)
        looked_up, whole, kept, bad_ids, dropped = values, lengths, self.nothing.to(torch.bool), self.nothing, False
        valid = are_sound(lengths, values, limits_F, unused, torch.jit.is_scripting())
        # Of nothing but good ids the lookups can be told at once, where the host may ask.
        good = False
        if torch.jit.is_scripting() and self.mends and not values.is_cuda:
            good = values.numel() == 0 or bool(valid)
        if self.mends and not good:
            policies_F = torch.tensor(policies, dtype=torch.int64, device=values.device)
            sums_F = lengths.sum(dim=1, dtype=torch.int64)
            whole, looked_up, order, kept, bad_F = mend(lengths, values, limits_F, policies_F, self.drops)
            values = looked_up
            keys, dropped, limits_W = list(keys), self.drops, limits_F
            if self.drops:
                values = looked_up.index_select(0, order)
                keys.append(self.dropped_key)
                limits_W = torch.cat([limits_F, torch.full_like(limits_F[:1], self.no_limit)])
                if weights is not None:
                    weights = weights.index_select(0, order)
            valid = add_up(lengths, sums_F, values.size(0))
            valid = valid & are_sound(whole, values, limits_W, unused or self.drops, torch.jit.is_scripting())
            places: list[int] = []
            for feature in self.features:
                places.append(keys.index(feature))
            bad_ids = bad_F.index_select(0, torch.tensor(places, dtype=torch.int64, device=values.device))
        told = valid.logical_not().to(torch.int64)
        if offsets is not None:
            fits = fit(offsets, given)
            told = torch.where(fits, told, 10)
            valid = valid & fits
        dtype = torch.int64 if self.wide_ids else torch.int32
        values, looked_up = values.to(dtype), looked_up.to(dtype)
        if not torch.jit.is_scripting():
            # A batch of as many ids, all in its first bag: a tracer cannot have it become a shorter one.
            values, looked_up = values * valid, looked_up * valid
            lengths, whole = in_first_bag(lengths, values, valid), in_first_bag(whole, values, valid)
        else:
            lengths, whole = lengths.to(torch.int32) * valid, whole.to(torch.int32) * valid
        if torch.jit.is_scripting() and not values.is_cuda and not bool(valid):
            # The CPU's kernels compare the number of ids with the lengths; those of CUDA read by the lengths alone.
            values = values[:0]
            if weights is not None:
                weights = weights[:0]
        if weights is not None:
            weights = weights.detach().to(torch.float32).contiguous()
        return Checked(
            keys, whole.contiguous(), values.contiguous(), weights, told, bad_ids, dropped, lengths, looked_up, kept
        )


def in_first_bag(lengths: Tensor, values: Tensor, valid: Tensor) -> Tensor:
    """Lengths as int32, or if the batch is not valid those of as many ids in the first bag."""
    ids = values.size(0) * valid.logical_not().to(torch.int32)
    first = torch.arange(lengths.numel(), device=lengths.device).view(lengths.size()) == 0
    return lengths.to(torch.int32) * valid + ids * first
