"""The kernels of id maps on a GPU, in Triton, which torch's builds for CUDA bring along. Imported where they run.

Shapes: N ids, M maps, P claims (a power of two, at least 2N), R rows of all maps.

The hash table of a map equals the table of ``shardrec/native/ids.cpp``, bucket for bucket, so that the host updates it
by the places that changed. A lane goes from the home bucket of its id on until it meets the id or an empty bucket:
eight buckets come with each sector of memory that is read, and at most half of them are in use.

::

    maps_N      int32   the map per id; -1 where the id is a row already
    tables_M    int64   (M, 6): first bucket | buckets - 1 | first record | rows | their bit length | fallback rows
    claims      int32   (P + 1,) zeros: of each distinct id without a row, the least position plus 1; the last is waste
    missing     int64   (N + 1, 2): the number of these ids | 0, then in any order: map and position | id
"""

# Types of the kernels' arguments are Triton's, and it is not there without CUDA.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find(
    ids_N,
    maps_N,
    tables_M,
    buckets,
    records_R,
    rows_N,
    claims,
    claim_mask,
    count,
    CLAIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the row per id to ``rows_N``, int32. The map does not change.

    Of an id without a row: with ``CLAIM``, -1, and it is entered into ``claims``. Otherwise its row of the fallback,
    or -1 for none.
    """
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    key = tl.load(ids_N + position, mask=inside, other=0)
    number = tl.load(maps_N + position, mask=inside, other=-1)
    mapped = inside & (number >= 0)
    table = tables_M + number.to(tl.int64) * 6
    first_bucket = tl.load(table, mask=mapped, other=0)
    bucket_mask = tl.load(table + 1, mask=mapped, other=0)
    first_record = tl.load(table + 2, mask=mapped, other=0)
    size = tl.load(table + 3, mask=mapped, other=0)
    row_bits = tl.load(table + 4, mask=mapped, other=0)
    fallback_rows = tl.load(table + 5, mask=mapped, other=0)
    # shardrec/native/hashing.h
    mixed = key.to(tl.uint64, bitcast=True)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    place = (mixed & 0xFFFFFFFF).to(tl.int64) & bucket_mask
    tag = (((mixed >> 32) << row_bits.to(tl.uint64)) & 0xFFFFFFFF).to(tl.int64)
    row = tl.full([BLOCK], -1, tl.int64)
    probing = mapped
    while tl.max(probing.to(tl.int32), axis=0) > 0:
        bucket = tl.load(buckets + first_bucket + place, mask=probing, other=0).to(tl.int64) & 0xFFFFFFFF
        candidate = (bucket ^ tag) - 1
        same_tag = probing & (candidate >= 0) & (candidate < size)
        held = tl.load(records_R + (first_record + candidate) * 3, mask=same_tag, other=0)
        hit = same_tag & (held == key)
        row = tl.where(hit, candidate, row)
        probing = probing & (bucket != 0) & (hit == 0)
        place = (place + 1) & bucket_mask
    if CLAIM:
        claiming = mapped & (row < 0)
        place = ((mixed >> 32).to(tl.int64) ^ number.to(tl.int64)) & claim_mask
        while tl.max(claiming.to(tl.int32), axis=0) > 0:
            claim = claims + tl.where(claiming, place, claim_mask + 1)
            before = tl.atomic_cas(claim, tl.zeros_like(position), position + 1)
            claimed = claiming & (before > 0)
            other_key = tl.load(ids_N + before - 1, mask=claimed, other=0)
            other_number = tl.load(maps_N + before - 1, mask=claimed, other=-1)
            same = claiming & ((before == 0) | ((other_key == key) & (other_number == number)))
            tl.atomic_min(claim, position + 1, mask=same)
            claiming = claiming & (same == 0)
            place = (place + 1) & claim_mask
    else:
        share = (mixed & 0xFFFFFFFF) % tl.maximum(fallback_rows, 1).to(tl.uint64)
        fallback = tl.where(fallback_rows > 0, share.to(tl.int64), -1)
        row = tl.where(row < 0, fallback, row)
    tl.store(rows_N + position, tl.where(mapped, row, key).to(tl.int32), mask=inside)


@triton.jit
def emit(ids_N, maps_N, claims, missing, count, BLOCK: tl.constexpr):
    """Put the ids that :func:`find` entered into the first ``count`` claims into ``missing``."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    claim = tl.load(claims + place, mask=place < count, other=0)
    used = claim > 0
    number = tl.load(maps_N + claim - 1, mask=used, other=0).to(tl.int64)
    key = tl.load(ids_N + claim - 1, mask=used, other=0)
    mine = used.to(tl.int64)
    start = tl.atomic_add(missing, tl.sum(mine, axis=0))
    entry = missing + (start + tl.cumsum(mine, axis=0)) * 2
    tl.store(entry, (number << 32) | (claim - 1).to(tl.int64), mask=used)
    tl.store(entry + 1, key, mask=used)


@triton.jit(do_not_specialize=["step"])
def stamp(maps_N, tables_M, records_R, rows_N, step, count, BLOCK: tl.constexpr):
    """Let step ``step`` use the rows that :func:`find` wrote: each counts once, however often it is there."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(maps_N + position, mask=position < count, other=-1)
    row = tl.load(rows_N + position, mask=number >= 0, other=-1).to(tl.int64)
    hit = row >= 0
    first_record = tl.load(tables_M + number.to(tl.int64) * 6 + 2, mask=hit, other=0)
    record = records_R + (first_record + row) * 3
    now = tl.zeros_like(row) + step
    last = tl.atomic_xchg(record + 2, now, mask=hit)
    tl.atomic_add(record + 1, tl.full([BLOCK], 1, tl.int64), mask=hit & (last != now))
