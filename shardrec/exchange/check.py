"""Checks whether the lookups can use a batch: a fast check on the device, and a slow description of what is wrong.

Shapes: F features of the KeyedJaggedTensor, B samples, N ids.

[Note: validation without a host sync]
Nothing here reads a CUDA tensor's value on the host before the header exchange does. :func:`ids_are_valid` gives a 0-d
tensor; the caller multiplies the lengths by it, so that the kernels downstream see an empty batch instead of reading
past the end of a bad one, and sends it in the header. Only if the header says that a rank's batch is bad does that rank
compose a message (:func:`describe_fault`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardrec import native
from shardrec.exchange import launching
from shardrec.exchange.batch import NO_LIMIT, Batch, Expectation, shown
from shardrec.exchange.to_device import staged

__all__ = ["add_up", "are_sound", "describe_fault", "ids_are_valid"]


def ids_are_valid(batch: Batch, limits: Tensor, *, unlimited: bool) -> Tensor:
    """Whether lengths add up and each id is in its table.

    Args:
        batch: the tensors of the input.
        limits: (F,) int64, one more than the largest id allowed, per key of the batch; ``NO_LIMIT`` for a key with
            arbitrary ids: no table uses it, or its ids are dynamic.
        unlimited: whether any limit is ``NO_LIMIT``.

    Returns:
        0-d bool tensor on the batch's device.
    """
    if limits.device.type == "cpu" and native.has_operators():
        lengths, values = batch.lengths.contiguous(), batch.values.contiguous()
        sound: Tensor = torch.ops.shardrec.are_sound(lengths, values, limits)
    elif limits.numel() and launching.has_kernels(limits.device):
        sound = _are_sound_on_device(batch.lengths.contiguous(), batch.values.contiguous(), limits)
    else:
        sound = are_sound(batch.lengths, batch.values, limits, unlimited, True)
    if batch.offsets_fit is not None:
        sound = sound & batch.offsets_fit
    if batch.inverse is not None:
        bags_U = staged(list(batch.bags), torch.int64, batch.inverse.device)
        sound = sound & ((batch.inverse >= 0) & (batch.inverse < bags_U.unsqueeze(1))).all()
    return sound


def _are_sound_on_device(lengths: Tensor, values: Tensor, limits: Tensor) -> Tensor:
    """:func:`are_sound` by two kernels."""
    (keys, bags), count = lengths.shape, values.numel()
    sums_F = torch.empty(keys, dtype=torch.int64, device=lengths.device)
    valid = torch.empty((), dtype=torch.int8, device=lengths.device)
    run = partial(launching.launch, "shardrec.exchange.input_kernels")
    run("sum_lengths", (keys,), lengths, sums_F, valid, bags, count, BLOCK=4096, num_warps=8)
    shares, padded = min(32, count // 1024 + 1), 1 << (keys - 1).bit_length()
    constants = {"KEYS": padded, "SHARES": 1 << (shares - 1).bit_length(), "BLOCK": 1024}
    run("check_ids", (keys, constants["SHARES"]), values, limits, sums_F, valid, keys, count, **constants)
    return valid.view(torch.bool)


def are_sound(lengths: Tensor, values: Tensor, limits: Tensor, unlimited: bool, may_read: bool) -> Tensor:
    """:func:`ids_are_valid` of plain tensors: ``lengths`` (F, B), ``values`` (N,). TorchScript also compiles it.

    With ``may_read``, it may read values that are on the host, which a tracer cannot.
    """
    count = values.size(0)
    lengths_F = lengths.sum(dim=1, dtype=torch.int64)
    sound = add_up(lengths, lengths_F, count)
    if limits.numel() == 0 or (may_read and count == 0):
        return sound
    if may_read and not values.is_cuda:
        if not bool(sound):
            return sound
        limit_N = limits.repeat_interleave(lengths_F, output_size=count)
    else:
        ends_F = lengths_F.cumsum(0)
        feature_N = torch.searchsorted(ends_F, torch.arange(count, device=ends_F.device), right=True)
        limit_N = limits.index_select(0, feature_N.clamp(max=limits.numel() - 1))
    inside = (values >= 0) & (values < limit_N)
    if unlimited:
        inside = inside | (limit_N == 9223372036854775807)  # NO_LIMIT, of which TorchScript sees no global name
    return sound & inside.all()


def add_up(lengths: Tensor, lengths_F: Tensor, count: int) -> Tensor:
    """Whether ``lengths`` (F, B), with the sums ``lengths_F``, are those of ``count`` ids.

    Each length is checked separately, because a sum of large lengths overflows: four times 2^62 is 0.
    """
    return ((lengths >= 0) & (lengths <= count)).all() & (lengths_F.sum() == count)


def describe_fault(batch: Batch, expect: Expectation) -> str:
    """Describe what is wrong with a batch that is not valid. Reads tensors on the host; only for the failing step."""
    lengths, count = batch.lengths.cpu(), batch.values.numel()
    impossible = ((lengths < 0) | (lengths > count)).nonzero()
    if len(impossible):
        row, sample = impossible[0].tolist()
        length = int(lengths[row, sample])
        which = "lengths must not be negative" if length < 0 else f"the batch has {count} ids in all"
        return (
            f"feature {batch.keys[row]!r}{expect.of_table(batch.keys[row])}: the length of sample {sample} is "
            f"{length}; {which}: check how lengths (or offsets) were built"
        )
    total = int(lengths.sum(dtype=torch.int64))
    if total != count:
        return (
            f"the lengths of features {shown(batch.keys)} add up to {total} and there are {count} ids; they must be "
            "equal: check how lengths (or offsets) and values were built"
        )
    if batch.offsets_fit is not None and not bool(batch.offsets_fit):
        return (
            f"the offsets of features {shown(batch.keys)} do not begin at 0, or are not those of the lengths that the "
            "input has, too; give the KeyedJaggedTensor lengths alone, or offsets alone"
        )
    if batch.inverse is not None:
        for feature, bags, inverse in zip(expect.features, batch.bags, batch.inverse.cpu(), strict=True):
            wrong = ((inverse < 0) | (inverse >= bags)).nonzero()
            if len(wrong):
                return (
                    f"feature {feature!r}: the inverse index of sample {int(wrong[0])} is {int(inverse[wrong[0]])} and "
                    f"the feature has {bags} bags; inverse indices must be in [0, {bags})"
                )
    start = 0
    for row, key in enumerate(batch.keys):
        length = int(lengths[row].sum())
        values = batch.values[start : start + length].cpu()
        limit = expect.rows(key)
        bad = ((values < 0) | (values >= limit)).nonzero()
        if limit != NO_LIMIT and key not in expect.on_bad_id and len(bad):
            position = int(bad[0])
            sample = int((lengths[row].cumsum(0) <= position).sum())
            more = f" (and {len(bad) - 1} more of this feature)" if len(bad) > 1 else ""
            return (
                f"feature {key!r}{expect.of_table(key)}: id {int(values[position])} in sample {sample}{more} "
                f"is outside [0, {limit}); hash or clip the ids into the table, or raise num_embeddings"
            )
        start += length
    raise AssertionError("describe_fault was called for a batch without a fault")
