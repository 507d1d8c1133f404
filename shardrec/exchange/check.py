"""Checks whether the lookups can use a batch: a fast check on the device, and a slow description of the fault.

Shapes: F features of the KeyedJaggedTensor, B samples, N ids.

[Note: validation without a host sync]
Nothing here reads a CUDA tensor's value on the host. :func:`checked_on_device` puts up the batch's flag if the batch is
faulty, and gives ids and bags with which no later kernel reads out of bounds, whatever the batch. Only where the host
finds the flag up (:mod:`shardrec.exchange.fault_flags`), or a header says so, is a message composed
(:func:`describe_fault`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardrec import native
from shardrec.exchange import launching
from shardrec.exchange.batch import NO_LIMIT, Batch, Expectation, shown
from shardrec.exchange.fault_flags import FaultFlag
from shardrec.exchange.to_device import staged

_MAX_SHARES = 32
"""Of a key's bags. Each is checked by one program."""
_MAX_PROGRAMS = 1024


def ids_are_valid(batch: Batch, limits: Tensor, *, unlimited: bool) -> Tensor:
    """Whether lengths add up and each id is in its table.

    Args:
        batch: the tensors of the input.
        limits: (F,) int64, one more than the largest id allowed, per key of the batch. ``NO_LIMIT`` for a key with
            arbitrary ids: no table uses it, or its ids are dynamic.
        unlimited: whether any limit is ``NO_LIMIT``.

    Returns:
        0-d bool tensor on the batch's device.
    """
    if limits.device.type == "cpu" and native.has_operators():
        lengths, values = batch.lengths.contiguous(), batch.values.contiguous()
        sound: Tensor = torch.ops.shardrec.are_sound(lengths, values, limits)
    else:
        sound = are_sound(batch.lengths, batch.values, limits, unlimited, True)
    if batch.offsets_fit is not None or batch.inverse is not None:
        for fits in _other_parts_fit(batch):
            sound = sound & fits
    return sound


def _other_parts_fit(batch: Batch) -> Iterator[Tensor]:
    """0-d bools, whether offsets and inverse indices are sound, where the batch has them."""
    if batch.offsets_fit is not None:
        yield batch.offsets_fit
    if batch.inverse is not None:
        bags_U = staged(list(batch.bags), torch.int64, batch.inverse.device)
        yield ((batch.inverse >= 0) & (batch.inverse < bags_U.unsqueeze(1))).all()


class SafeIds(NamedTuple):
    """Ids and bags by which no kernel reads out of bounds.

    Args:
        ids: (N,) in [0, the key's limit). For a sound batch, the given ids.
        offsets: (F·B + 1,) of the ids' dtype, where each bag begins among the ids. Ascending, in [0, N].
        lengths: (F, B) int32, of the same bags.
    """

    ids: Tensor
    offsets: Tensor
    lengths: Tensor


def checked_on_device(batch: Batch, limits: Tensor, id_dtype: torch.dtype, flag: FaultFlag) -> SafeIds:
    """Check a batch on CUDA, and make it safe to look up.

    Args:
        batch: the tensors of the input.
        limits: as :func:`ids_are_valid` takes them.
        id_dtype: of the result, int32 or int64.
        flag: is put up if the batch is faulty.
    """
    lengths_FB, values = batch.lengths, batch.values
    # The sums may overflow. Then they do not ascend, or are not in [0, N].
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_FB.reshape(-1))
    if limits.numel() and launching.has_kernels(limits.device):
        (keys, bags), count = lengths_FB.shape, values.numel()
        safe = SafeIds(
            torch.empty_like(values, dtype=id_dtype),
            torch.empty_like(offsets, dtype=id_dtype),
            torch.empty_like(lengths_FB, dtype=torch.int32, memory_format=torch.contiguous_format),
        )
        most = min(_MAX_SHARES, max(bags, count // keys) // 1024 + 1, _MAX_PROGRAMS // keys)
        shares = 1 << (max(most, 1).bit_length() - 1)
        constants = {"SHARES": shares, "STARTS": 1 << (keys * shares - 1).bit_length(), "BLOCK": 1024}
        launching.launch(
            "shardrec.exchange.input_kernels",
            "check_ids",
            (keys, shares),
            *(values.contiguous(), offsets, limits, flag.value, *safe, bags, count, flag.number),
            **constants,
        )
    else:
        is_sound, safe = safe_ids(lengths_FB, offsets, values, limits, id_dtype)
        flag.put_up(is_sound.logical_not())
    for fits in _other_parts_fit(batch):
        flag.put_up(fits.logical_not())
    return safe


def safe_ids(
    lengths_FB: Tensor, offsets: Tensor, values: Tensor, limits: Tensor, id_dtype: torch.dtype
) -> tuple[Tensor, SafeIds]:
    """What the kernel ``check_ids`` does, by torch's operators: whether the batch is sound, 0-d bool, and safe ids.

    Where offsets are faulty, all bags are empty. The kernel empties the bags of a share of a key.
    """
    bags, count = lengths_FB.size(1), values.numel()
    fit = (offsets[1:] >= offsets[:-1]).all() & (offsets[-1] == count)
    offsets = (offsets * fit).to(id_dtype)
    lengths = (lengths_FB * fit).to(torch.int32)
    if not limits.numel():
        return fit, SafeIds(values.to(id_dtype), offsets, lengths)
    ends_F = offsets[1:].view(-1, bags)[:, -1] if bags else offsets.expand(limits.numel())
    feature_N = torch.searchsorted(ends_F.contiguous(), torch.arange(count, device=values.device), right=True)
    limit_N = limits.index_select(0, feature_N.clamp(max=limits.numel() - 1))
    outside = ((values < 0) | (values >= limit_N)) & (limit_N != NO_LIMIT)
    return fit & outside.any().logical_not(), SafeIds(values.masked_fill(outside, 0).to(id_dtype), offsets, lengths)


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
        inside = inside | (limit_N == 9223372036854775807)  # NO_LIMIT, a global name that TorchScript does not see
    return sound & inside.all()


def add_up(lengths: Tensor, lengths_F: Tensor, count: int) -> Tensor:
    """Whether ``lengths`` (F, B), with the sums ``lengths_F``, add up to ``count`` ids.

    Each length is checked separately, because a sum of large lengths overflows: four times 2^62 is 0.
    """
    return ((lengths >= 0) & (lengths <= count)).all() & (lengths_F.sum() == count)


def describe_fault(batch: Batch, expect: Expectation) -> str:
    """Describe what is wrong with a batch that is not valid. Reads tensors on the host. Only for the failing step."""
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
            f"the lengths of features {shown(batch.keys)} add up to {total} and there are {count} ids. They must be "
            "equal: check how lengths (or offsets) and values were built"
        )
    if batch.offsets_fit is not None and not bool(batch.offsets_fit):
        return (
            f"the offsets of features {shown(batch.keys)} do not begin at 0, or do not match the lengths that the "
            "input also has. Give the KeyedJaggedTensor lengths alone, or offsets alone"
        )
    if batch.inverse is not None:
        for feature, bags, inverse in zip(expect.features, batch.bags, batch.inverse.cpu(), strict=True):
            wrong = ((inverse < 0) | (inverse >= bags)).nonzero()
            if len(wrong):
                return (
                    f"feature {feature!r}: the inverse index of sample {int(wrong[0])} is {int(inverse[wrong[0]])} and "
                    f"the feature has {bags} bags. Inverse indices must be in [0, {bags})"
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
                f"is outside [0, {limit}). Hash or clip the ids into the table, or raise num_embeddings"
            )
        start += length
    raise AssertionError("describe_fault was called for a batch without a fault")
