"""A batch checked by operators and plain data, as TorchScript, torch.compile and torch.export take it.

Shapes: F features of the input, B samples, N ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.exchange.batch import NO_LIMIT, Expectation, fit
from shardrec.exchange.check import add_up, are_sound

__all__ = ["FAULTS", "ScriptedBatch", "list_of", "plain", "sound_unasked"]

FAULTS = [
    "",
    "an id is outside its table, or lengths and ids do not fit (call the eager model with this batch: it says which)",
    "the input lacks a feature that a table looks up",
    "the ids are not int32 or int64, or not one-dimensional",
    "the collection is weighted and the input has no floating-point weight for each id, or the other way around",
    "the features have a batch size each, which scripted models do not take",
    "there is not exactly one length for each feature and sample",
    "the weights of the ids take a gradient, which scripted models do not carry back",
    "there are ids and no samples",
    "the lengths (or offsets) are not int32 or int64",
]
"""What a header's number says is wrong."""


def list_of(kind: Any, values: Iterable[Any]) -> Any:
    """A list attribute whose type TorchScript is told, for an empty one does not show it."""
    return torch.jit.Attribute(list(values), list[kind])


def plain(module: nn.Module) -> nn.Module:
    """``module``, in which each value that was marked for TorchScript is the value itself, as Python needs it."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.jit.Attribute):
                setattr(part, name, value.value)
    return module


class ScriptedBatch(nn.Module):
    """Checks a batch.

    Args:
        expect: what the input must look like.
        wide_ids: ids need 64 bits.
    """

    def __init__(self, expect: Expectation, *, wide_ids: bool) -> None:
        super().__init__()
        self.weighted = expect.weighted
        self.features = list_of(str, list(expect.features))
        self.limits = list_of(int, [expect.rows(feature) for feature in expect.features])
        self.no_limit = NO_LIMIT
        self.wide_ids = wide_ids
        self.faults = list_of(str, FAULTS)
        self.nothing = torch.zeros(0, dtype=torch.int64, device=expect.device)

    def structural_fault(self, features: KeyedJaggedTensor) -> int:
        """A number of :data:`FAULTS` that shows without reading a tensor; 0 if there is none."""
        keys = features.keys()
        values, weights = features.values(), features.weights_or_none()
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

    def checked(self, features: KeyedJaggedTensor) -> tuple[list[str], Tensor, Tensor, Tensor | None, Tensor]:
        """Keys, (F, B) int32 lengths, ids, weights, and the number of the fault; of empty bags if there is one."""
        fault = self.structural_fault(features)
        if fault != 0:
            none = self.nothing.to(torch.float32) if self.weighted else None
            # Of as many samples: a tracer goes on to the model's other layers before the fault is raised.
            lengths = self.nothing.new_zeros([len(self.features), features.stride()], dtype=torch.int32)
            ids = self.nothing.to(torch.int64 if self.wide_ids else torch.int32)
            return self.features, lengths, ids, none, torch.full_like(self.nothing.sum(), fault)
        keys = features.keys()
        limits: list[int] = []
        unused = False
        for key in keys:
            limit = self.no_limit
            for number, feature in enumerate(self.features):
                if feature == key:
                    limit = self.limits[number]
            unused = unused or limit == self.no_limit
            limits.append(limit)
        given, offsets = features.lengths_or_none(), features.offsets_or_none()
        lengths = features.lengths().view(len(keys), -1 if len(keys) > 0 else 0)
        values = features.values()
        weights = features.weights_or_none()
        limits_F = torch.tensor(limits, dtype=torch.int64, device=values.device)
        if torch.jit.is_scripting():
            valid = are_sound(lengths, values, limits_F, unused)
        else:
            valid = sound_unasked(lengths, values, limits_F, unused)
        if offsets is not None:
            valid = valid & fit(offsets, given)
        values = values.to(torch.int64 if self.wide_ids else torch.int32)
        lengths = lengths.to(torch.int32) * valid
        if not torch.jit.is_scripting():
            # A batch of as many ids, all in its first bag: a tracer cannot have it become a shorter one.
            values = values * valid
            ids = values.size(0) * valid.logical_not().to(torch.int32)
            first = torch.arange(lengths.numel(), device=lengths.device).view(lengths.size()) == 0
            lengths = lengths + ids * first
        elif not values.is_cuda and not bool(valid):
            # The CPU's kernels compare the number of ids with the lengths; those of CUDA read by the lengths alone.
            values = values[:0]
            if weights is not None:
                weights = weights[:0]
        if weights is not None:
            weights = weights.detach().to(torch.float32).contiguous()
        return keys, lengths.contiguous(), values.contiguous(), weights, valid.logical_not().to(torch.int64)


def sound_unasked(lengths: Tensor, values: Tensor, limits: Tensor, unused_keys: bool) -> Tensor:
    """:func:`~shardrec.exchange.check.are_sound` that reads no value on the host, as a tracer cannot."""
    count = values.numel()
    lengths_F = lengths.sum(dim=1, dtype=torch.int64)
    sound = add_up(lengths, lengths_F, count)
    if limits.numel() == 0:
        return sound
    places = torch.arange(count, device=values.device)
    feature_N = torch.searchsorted(lengths_F.cumsum(0), places, right=True).clamp(max=limits.numel() - 1)
    limit_N = limits.index_select(0, feature_N)
    inside = (values >= 0) & (values < limit_N)
    if unused_keys:
        inside = inside | (limit_N == NO_LIMIT)
    return sound & inside.all()
