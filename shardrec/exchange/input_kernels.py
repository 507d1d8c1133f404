"""Kernels of the input exchange on a GPU, in Triton (:mod:`shardrec.exchange.launching`).

Each takes the place of a dozen of torch's operators, of which the host launches about one in 8 microseconds: for
batches that take the device less than that, the host is what a step waits for.

Shapes: F keys, B bags of a key, N ids, W ranks, G lookup groups, S slots of all ranks, C columns of the header.
"""

# Types of the kernels' arguments are Triton's, and it is not there without CUDA.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["check_ids", "clear", "sum_lengths", "write_header"]


@triton.jit
def clear(value):
    """Write 0: whether anything can be compiled and launched here."""
    tl.store(value, 0)


@triton.jit(do_not_specialize=["bags", "count"])
def sum_lengths(lengths_FB, sums_F, valid, bags, count, BLOCK: tl.constexpr):
    """Write the sum of a key's lengths, int64, or -1 if one is negative or above ``count``; set ``valid`` (int8)."""
    key = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int64)
    wrong = tl.zeros([BLOCK], tl.int32)
    row = lengths_FB + key.to(tl.int64) * bags
    for start in range(0, bags, BLOCK):
        bag = start + tl.arange(0, BLOCK)
        length = tl.load(row + bag, mask=bag < bags, other=0).to(tl.int64)
        total += length
        wrong |= ((length < 0) | (length > count)).to(tl.int32)
    tl.store(sums_F + key, tl.where(tl.max(wrong, axis=0) > 0, -1, tl.sum(total, axis=0)))
    if key == 0:
        tl.store(valid, 1)


@triton.jit(do_not_specialize=["keys", "count"])
def check_ids(
    ids_N, limits_F, sums_F, valid, keys, count, KEYS: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr
):
    """Clear ``valid`` if an id of a key is not in [0, its limit), a sum is -1, or they are not those of ``count`` ids.

    KEYS is a power of two, at least ``keys``; SHARES programs share the ids of a key. Reads no id outside of N.
    """
    key, share = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, KEYS)
    sums = tl.load(sums_F + number, mask=number < keys, other=0)
    if (tl.sum(sums, axis=0) != count) | (tl.min(sums, axis=0) < 0):
        tl.store(valid, 0)
    begin = tl.minimum(tl.maximum(tl.sum(tl.where(number < key, sums, 0), axis=0), 0), count)
    size = tl.minimum(tl.maximum(tl.sum(tl.where(number == key, sums, 0), axis=0), 0), count - begin)
    limit = tl.load(limits_F + key)
    if limit != 9223372036854775807:  # NO_LIMIT, of which a kernel sees no global name
        wrong = tl.zeros([BLOCK], tl.int32)
        for start in range(share * BLOCK, size, SHARES * BLOCK):
            place = start + tl.arange(0, BLOCK)
            raw = tl.load(ids_N + begin + place, mask=place < size, other=0).to(tl.int64)
            wrong |= ((place < size) & ((raw < 0) | (raw >= limit))).to(tl.int32)
        if tl.max(wrong, axis=0) > 0:
            tl.store(valid, 0)


@triton.jit(do_not_specialize=["bags", "groups", "width", "column", "checksum"])
def write_header(
    lengths_SB,
    edges,
    valid,
    header_WC,
    bags,
    groups,
    width,
    column,
    checksum,
    SIZES: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a call's part of the header, which was zeros: fault flag, checksum, bags, and the ids of each group.

    ``edges`` (W·G + 1,) says where each rank's groups begin among the slots; the call's columns begin at ``column``,
    with SIZES columns before those of its groups. SHARES programs share the lengths of a group.
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
        if tl.load(valid) == 0:
            tl.store(rank, 1)
        tl.store(rank + 1, checksum)
        tl.store(rank + column, bags)
