"""Kernels of the input exchange on a GPU, in Triton (:mod:`shardrec.exchange.launching`).

Each replaces a dozen of torch's operators. The host launches about one operator in 8 microseconds: for
batches that take the device less than that, the host is what a step waits for.

Shapes: F keys, B bags of a key, N ids, W ranks, G lookup groups, S slots of all ranks, C columns of the header.
"""

# Types of the kernels' arguments are Triton's, and it is not there without CUDA.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clear(value):
    """Write 0: whether anything can be compiled and launched here."""
    tl.store(value, 0)


@triton.jit(do_not_specialize=["bags", "count", "number"])
def check_ids(
    values_N,
    offsets,
    limits_F,
    flag,
    ids_N,
    safe_offsets,
    lengths_FB,
    bags,
    count,
    number,
    SHARES: tl.constexpr,
    STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``number`` to ``flag`` if offsets do not ascend from 0 to ``count``, or an id is not in [0, its limit).

    ::

        share      bags 0 1 2 | 3 4 5 | 6 7        of a key; the next key's shares follow
        starts     0          | 4     | 9     | ... | count     clamped, and ascending whatever the offsets

    The program of a share keeps its bags and ids between its start and the next share's, so that a bag reads only ids
    that were compared with the limit of its key: writes them as ``ids_N``, 0 for an id outside; as ``safe_offsets``,
    of empty bags if the share's do not ascend, and as ``lengths_FB``, int32. STARTS is a power of two, at least
    keys times SHARES.
    """
    key, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(0) * SHARES
    mine, size = key * SHARES + share, tl.cdiv(bags, SHARES)
    part = tl.arange(0, STARTS)
    first_bags = (part // SHARES).to(tl.int64) * bags + tl.minimum(part % SHARES * size, bags)
    starts = tl.load(offsets + first_bags, mask=part < shares, other=0).to(tl.int64)
    starts = tl.minimum(tl.maximum(starts, 0), count)
    begin = tl.max(tl.where(part <= mine, starts, 0), axis=0)
    end = tl.max(tl.where(part <= mine + 1, starts, 0), axis=0)
    row = key.to(tl.int64) * bags
    first, last = row + tl.minimum(share * size, bags), row + tl.minimum((share + 1) * size, bags)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        bag = start + tl.arange(0, BLOCK)
        here = tl.load(offsets + bag, mask=bag < last, other=0)
        following = tl.load(offsets + bag + 1, mask=bag < last, other=0)
        wrong |= ((bag < last) & (following < here)).to(tl.int32)
    is_wrong = tl.max(wrong, axis=0) > 0
    ids_end = end
    if mine == shares - 1:
        total = tl.load(offsets + last).to(tl.int64)
        end = tl.minimum(tl.maximum(total, begin), count)
        tl.store(safe_offsets + last, end)
        ids_end = begin * 0 + count
        if total != count:
            tl.store(flag, number)
    for start in range(first, last, BLOCK):
        bag = start + tl.arange(0, BLOCK)
        here = tl.load(offsets + bag, mask=bag < last, other=0).to(tl.int64)
        following = tl.load(offsets + bag + 1, mask=bag < last, other=0).to(tl.int64)
        here = tl.where(is_wrong, begin, tl.minimum(tl.maximum(here, begin), end))
        following = tl.where(is_wrong, begin, tl.minimum(tl.maximum(following, begin), end))
        following = tl.where(bag == last - 1, end, following)
        tl.store(safe_offsets + bag, here, mask=bag < last)
        tl.store(lengths_FB + bag, following - here, mask=bag < last)
    limit = tl.load(limits_F + key)
    has_limit = limit != 9223372036854775807  # NO_LIMIT, a global name that a kernel does not see
    outside = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, ids_end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(values_N + place, mask=place < ids_end, other=0).to(tl.int64)
        is_outside = has_limit & ((value < 0) | (value >= limit))
        outside |= ((place < ids_end) & is_outside).to(tl.int32)
        tl.store(ids_N + place, tl.where(is_outside, 0, value), mask=place < ids_end)
    if is_wrong | (tl.max(outside, axis=0) > 0):
        tl.store(flag, number)


@triton.jit(do_not_specialize=["number", "bags", "groups", "width", "column", "checksum"])
def write_header(
    lengths_SB,
    edges,
    flag,
    header_WC,
    number,
    bags,
    groups,
    width,
    column,
    checksum,
    SIZES: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a call's part of the header, which was zeros: fault flag, checksum, bags, and the ids per group.

    The batch is faulty if ``flag`` is its ``number``.
    ``edges`` (W·G + 1,) says where each rank's groups begin among the slots. The call's columns begin at ``column``,
    with SIZES columns before its groups' columns. SHARES programs share the lengths of a group.
    """
    pair, share = tl.program_id(0), tl.program_id(1)
    rank = header_WC + (pair // groups).to(tl.int64) * width
    begin = tl.load(edges + pair) * bags
    size = tl.load(edges + pair + 1) * bags - begin
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(share * BLOCK, size, SHARES * BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(lengths_SB + begin + place, mask=place < size, other=0).to(tl.int64)
    tl.atomic_add(rank + column + SIZES + pair % groups, tl.sum(total, axis=0))
    if share == 0:
        if tl.load(flag) == number:
            tl.store(rank, 1)
        tl.store(rank + 1, checksum)
        tl.store(rank + column, bags)
