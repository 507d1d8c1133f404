"""fbgemm's operators with inputs and outputs of the sizes that CUDA's have; what is left over is poison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardrec.exchange.check import safe_ids
from tests.cuda_double.device import ACTIVE, POISON, inner_of, to_device

__all__ = ["bucketize", "check_ids", "permute_2d", "rows_of_ids"]


def rows_of_ids(bases: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """The row of each id, counted over all tables, by the bags of its feature."""
    bags = (len(offsets) - 1) // (len(bases) - 1)
    feature = torch.searchsorted(offsets[bags:-1:bags].contiguous(), torch.arange(len(ids)), right=True)
    return ids.long() + bases[feature]


def check_ids(
    values: Tensor,
    offsets: Tensor,
    limits: Tensor,
    flag: Tensor,
    ids: Tensor,
    safe_offsets: Tensor,
    lengths: Tensor,
    bags: int,
    count: int,
    number: int,
) -> None:
    """The kernel in Triton of this name."""
    assert (lengths.size(1), values.numel()) == (bags, count)
    is_sound, safe = safe_ids(offsets.diff().view(lengths.shape), offsets, values, limits, ids.dtype)
    for out, made in zip((ids, safe_offsets, lengths), safe, strict=True):
        out.copy_(made)
    if not is_sound:
        flag.fill_(number)


def permute_2d(
    func: Any,
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> Any:
    if permuted_lengths_sum is None:
        ACTIVE[-1].wait("permute_2D_sparse_data without the number of permuted ids")
    places, of_bags, ids = inner_of(permute), inner_of(lengths), inner_of(values)
    count = int(of_bags.sum())
    if not places.numel() or not of_bags.size(1):
        return lengths.clone(), values.clone(), None if weights is None else weights.clone()
    if permuted_lengths_sum is not None:
        # The last segment runs to the size that is told.
        begins = (of_bags.flatten().cumsum(0) - of_bags.flatten()).view(of_bags.shape)
        last = permuted_lengths_sum - (int(of_bags[places].sum()) - int(of_bags[places[-1], -1]))
        end = int(begins[places[-1], -1]) + last
        assert end <= ids.numel(), f"the last segment is read up to {end} of {ids.numel()} ids"
    given = None if weights is None else inner_of(weights)[:count]
    found = func(places, of_bags, ids[:count], given, None)
    if permuted_lengths_sum is not None:
        assert found[1].numel() <= permuted_lengths_sum, f"{found[1].numel()} ids do not fit {permuted_lengths_sum}"
    return tuple(
        None if one is None else to_device(one if number == 0 else _padded(one, permuted_lengths_sum))
        for number, one in enumerate(found)
    )


def bucketize(func: Any, args: Any, kwargs: Any) -> Any:
    (lengths, values, *others), named = tree_map(inner_of, (args, kwargs))
    given = dict(zip((one.name for one in func._schema.arguments[2:]), others, strict=False)) | named
    if not lengths.numel():
        raise RuntimeError("block_bucketize_sparse_features: grid.x value 0 is not within the range (0, 2147483647]")
    if given["sequence"]:
        ACTIVE[-1].orders_kept += 1
        ACTIVE[-1].longest_loop = max(ACTIVE[-1].longest_loop, int(lengths.max()))
    if given.get("block_bucketize_pos") is not None:
        ACTIVE[-1].pageable_copies += 1
    count, size = int(lengths.sum()), values.numel()
    if given.get("weights") is not None:
        given["weights"] = given["weights"][:count]
    found = func(lengths, values[:count], **given)
    return tuple(
        None if one is None else to_device(one if number == 0 else _padded(one, size))
        for number, one in enumerate(found)
    )


def _padded(values: Tensor, size: int | None) -> Tensor:
    if size is None or size == values.numel():
        return values
    poison = torch.full((size - values.numel(),), POISON, dtype=torch.int64).to(values.dtype)
    return torch.cat([values, poison])
