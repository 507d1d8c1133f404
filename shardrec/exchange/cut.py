"""Cut a batch's ids into the slots that they are sent in, without reading a tensor's value on the host.

Shapes: F keys of the batch, U units, K blocks, S slots of all ranks (see :mod:`shardrec.exchange.route`), B batch size,
N ids.

::

    (F, B) ── permute ──► (U, B) ── bucketize ──► (K·U, B) ── permute ──► (S, B)

On CUDA the host does not know the number of ids in the units if some keys are unused or in several units, and takes an
upper bound: the remaining elements at the end of values and positions are not ids. :meth:`Cutter.in_slots` drops them
once the header has told the number.

[Note: fbgemm's kernels on CUDA]
``permute_2D_sparse_data`` reads its last segment up to the given number of values, beyond the ids: rows are moved by an
index instead (:func:`row_positions`). ``block_bucketize_sparse_features`` refuses to run for no bags, has a thread for
each bag if the order is kept, and copies boundaries in each call: boundaries are left out if the blocks per unit are
even.

Dynamic ids are cut by their home rows (:mod:`shardrec.exchange.hashing`), and are sent to the blocks unchanged.

A route with one block needs no bucketizing, and its two permutes are one. On the CPU, where the sizes are known at
once, one C++ operator (:mod:`shardrec.native`) does all three: for 819,200 ids of 200 tables, a third of them cut by
rows, it takes 8 ms instead of 38 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardrec import native
from shardrec.exchange.batch import KEY_ORDERS, Batch
from shardrec.exchange.hashing import home_rows
from shardrec.exchange.route import Route


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A batch cut into blocks (by the C++ operator: into slots), and the block per slot.

    Args:
        row_lengths: (K·U, B); (F, B) with one block; (S, B) by the C++ operator.
        values: (N,) ids in that order, local to the block unless dynamic; on CUDA, elements that are not ids may
            follow.
        weights: (N,) or None.
        positions: (N,) integer position per id in the batch, or None if they are not needed.
        slots: (S,) the row of ``row_lengths`` per slot. None if the rows are the slots, in order.
        lengths: (S, B) lengths per slot.
        borrowed: values or weights are the caller's own memory.
    """

    row_lengths: Tensor
    values: Tensor
    weights: Tensor | None
    positions: Tensor | None
    slots: Tensor | None
    lengths: Tensor
    borrowed: bool


@dataclass(frozen=True, kw_only=True)
class _KeyOrder:
    """Constants for one order of the batch's keys."""

    units: Tensor | None  # (U,) int32 position of each unit's key. None if they are all the keys, in order
    most_units: int  # of one key
    described: list[int]  # the units, as the C++ operator takes them
    slots: Tensor | None  # (S,) position of each slot's key, for one block. None if they are all the keys, in order


class Cutter:
    """Cuts batches by a route.

    Attributes:
        block_sizes: (U,) rows of a block per unit if all its blocks but the last have as many, else of its table
            (the name is fbgemm's).
        boundaries: per unit, (K + 1,) the rows at which its blocks begin and end. Empty if ``block_sizes`` says it.
        slot_rows: (S,) int64, row per slot in the cut lengths.
        dynamic: (U,) bool, which units' ids are dynamic. None if none are.
        id_dtype: of the batches' ids: int32 where the tables' rows allow.
    """

    def __init__(self, route: Route, device: torch.device) -> None:
        self._route = route
        self._device = device
        self._order = lru_cache(maxsize=KEY_ORDERS)(self._new_order)
        self.slot_rows = self._tensor(route.slot_rows)
        in_place = route.slot_rows == tuple(range(route.blocks * len(route.unit_keys)))
        self._slots = None if in_place else self.slot_rows
        self.dynamic = self._tensor(route.dynamic_units, torch.bool) if any(route.dynamic_units) else None
        # The rows of the whole table count, because ids are narrowed before they are cut.
        rows = max((edges[-1] for edges in route.unit_boundaries), default=0)
        self.id_dtype = torch.int64 if rows > 2**31 - 1 or self.dynamic is not None else torch.int32
        units = route.unit_boundaries
        even = self.dynamic is None and all(_is_even(edges, route.blocks, self.id_dtype) for edges in units)
        self.block_sizes = self._tensor([edges[1 if even else -1] for edges in units], self.id_dtype)
        self.boundaries = [
            self._tensor([*edges, *[edges[-1]] * (route.blocks + 1 - len(edges))], self.id_dtype)
            for edges in ([] if even else units)
        ]

    def cut(self, batch: Batch, *, keep_positions: bool, given: Batch) -> Cut:
        """Cut into the blocks per unit.

        Args:
            batch: checked.
            keep_positions: return the position per id in the batch.
            given: the batch as it was read from the input. Its memory belongs to the caller.
        """
        order = self._order(batch.keys)
        slots, blocks = order.slots, self._route.blocks
        if (blocks > 1 or slots is not None) and self._device.type == "cpu" and native.has_operators():
            return self._cut_at_once(batch, order, keep_positions)
        lengths, values, weights = batch.lengths, batch.values, batch.weights
        # fbgemm keeps the order of a bag's ids on CUDA, and so of its sum, if positions are asked for.
        in_order = keep_positions or (self._device.type == "cuda" and torch.are_deterministic_algorithms_enabled())
        positions = torch.arange(values.numel(), dtype=torch.int32, device=self._device) if in_order else None
        if blocks > 1:
            slots = self._slots
            if order.units is not None:
                most = None if self._device.type == "cpu" else values.numel() * order.most_units
                lengths, values, weights, positions = permuted(order.units, lengths, values, weights, positions, most)
            lengths, values, weights, positions = in_blocks(
                lengths, values, weights, positions, self.dynamic, self.block_sizes, blocks, self.boundaries
            )
        return Cut(
            row_lengths=lengths,
            values=values,
            weights=weights,
            positions=positions if keep_positions else None,
            slots=slots,
            lengths=lengths if slots is None else lengths.index_select(0, slots),
            borrowed=values is given.values or (weights is not None and share_memory(weights, given.weights)),
        )

    def _cut_at_once(self, batch: Batch, order: _KeyOrder, keep_positions: bool) -> Cut:
        """:meth:`cut` by one operator, which also puts the ids in the order of the slots."""
        count = len(self._route.slot_rows)
        lengths, ids, weights, positions = torch.ops.shardrec.cut_ids(
            batch.values, batch.lengths, batch.weights, order.described, count, keep_positions
        )
        return Cut(
            row_lengths=lengths,
            values=ids,
            weights=None if batch.weights is None else weights,
            positions=positions if keep_positions else None,
            slots=None,
            lengths=lengths,
            borrowed=False,
        )

    def in_slots(self, cut: Cut, total: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Ids, weights and int64 positions in the order of the slots.

        ``total`` is the number of ids, counted once for each column stripe.
        """
        values, weights, positions = cut.values, cut.weights, cut.positions
        if cut.slots is not None:
            order = cut.slots.to(torch.int32)
            _, values, weights, positions = permuted(order, cut.row_lengths, values, weights, positions, total)
        else:
            if values.size(0) != total:
                values, weights = values[:total], None if weights is None else weights[:total]
                positions = None if positions is None else positions[:total]
            if cut.borrowed:
                # The caller's own memory may change before backward reads it.
                values, weights = values.clone(), None if weights is None else weights.clone()
        return values, weights, None if positions is None else positions.to(torch.int64)

    def _tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self._device)

    def _new_order(self, keys: tuple[str, ...]) -> _KeyOrder:
        identity, position = list(range(len(keys))), {key: index for index, key in enumerate(keys)}
        units = [position[key] for key in self._route.unit_keys]
        slots = [units[slot.unit] for rank_slots in self._route.slots for slot in rank_slots]
        return _KeyOrder(
            units=None if units == identity else self._tensor(units, torch.int32),
            most_units=max(map(units.count, units), default=0),
            slots=None if slots == identity else self._tensor(slots),
            described=_described(self._route, units),
        )


def permuted(
    order: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None, positions: Tensor | None, total: int | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Permute rows of lengths (F, B), and the values per row. TorchScript also compiles it.

    Args:
        order: int32 rows to take. A row may occur several times or never.
        lengths: (F, B).
        values: (N,).
        weights: (N,) or None.
        positions: (N,) or None.
        total: the new N, or None if the host does not know it; on CUDA never None, and possibly an upper bound.
    """
    if values.is_cuda:
        assert total is not None, "the host would wait for the number"
        index = row_positions(order, lengths, values.size(0), total)
        return (
            lengths.index_select(0, order),
            values.index_select(0, index),
            None if weights is None else weights.index_select(0, index),
            None if positions is None else positions.index_select(0, index),
        )
    if positions is not None:
        positions = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, positions, None, total)[1]
    lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, values, weights, total)
    return lengths, values, weights, positions


def row_positions(order: Tensor, lengths: Tensor, count: int, total: int) -> Tensor:
    """(total,) int64 positions, among ``count`` values, of the values of rows ``order`` of lengths (F, B), by row.

    Positions beyond the number of values in these rows are arbitrary. TorchScript also compiles it.
    """
    sizes_F = lengths.sum(dim=1, dtype=torch.int64)
    begins, sizes = (sizes_F.cumsum(0) - sizes_F).index_select(0, order), sizes_F.index_select(0, order)
    ends = sizes.cumsum(0)
    positions = torch.arange(total, device=lengths.device)
    rows = torch.searchsorted(ends, positions, right=True).clamp(max=ends.size(0) - 1)
    return (positions + (begins - ends + sizes).index_select(0, rows)).clamp(max=count - 1)


def chunked(lengths: Tensor, count: int) -> Tensor:
    """(..., C) lengths of chunks of bags with ``count`` ids in all, about 8 in each. TorchScript also compiles it.

    For kernels with a thread or a warp for each bag, where ids do not belong to bags: one may have all of a table's.
    """
    chunks = count // (8 * lengths.numel() + 1) + 1
    lengths = lengths.unsqueeze(-1)
    size = (lengths + (chunks - 1)) // chunks
    before = size * torch.arange(chunks, dtype=lengths.dtype, device=lengths.device)
    return torch.minimum((lengths - before).clamp(min=0), size)


def by_home_row(lengths: Tensor, ids: Tensor, dynamic: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each id is dynamic, (N,) bool, and the row that it is cut by, (N,) int64: its home row, or the id."""
    ends_U = lengths.sum(dim=1, dtype=torch.int64).cumsum(0)
    unit_N = torch.searchsorted(ends_U, torch.arange(ids.numel(), device=ids.device), right=True)
    unit_N = unit_N.clamp(max=rows.numel() - 1)
    dynamic_N = dynamic[unit_N]
    return dynamic_N, torch.where(dynamic_N, home_rows(ids, rows[unit_N]), ids)


def in_blocks(
    lengths: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    positions: Tensor | None,
    dynamic: Tensor | None,
    sizes: Tensor,
    blocks: int,
    boundaries: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """:func:`bucketized`, with dynamic ids cut by their home rows and unchanged. TorchScript also compiles it.

    ``dynamic`` (U,) bool says which units' ids are dynamic. None for no unit. No value is read on the host.
    """
    if dynamic is None:
        return bucketized(lengths, ids, weights, positions, sizes, blocks, boundaries)
    dynamic_N, rows = by_home_row(lengths, ids, dynamic, sizes)
    numbers = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    lengths, rows, weights, index = bucketized(lengths, rows, weights, numbers, sizes, blocks, boundaries)
    assert index is not None, "numbers were given"
    ids = torch.where(dynamic_N.index_select(0, index), ids.index_select(0, index), rows)
    if positions is not None:
        positions = positions.index_select(0, index)
    return lengths, ids, weights, positions


def bucketized(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    positions: Tensor | None,
    sizes: Tensor,
    blocks: int,
    boundaries: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Distribute the ids of units to blocks of rows, and make them local to their block. TorchScript also compiles it.

    Args:
        lengths: (U, B).
        values: (N,).
        weights: (N,) or None.
        positions: (N,) or None.
        sizes: (U,) rows of each unit, or without boundaries of its blocks.
        blocks: K, the most blocks of any unit.
        boundaries: per unit, (K + 1,). Empty if the blocks of every unit are even.

    Returns:
        (K·U, B) lengths, ids, weights, and positions.
    """
    units, batch = lengths.size(0), lengths.size(1)
    if values.is_cuda and lengths.numel() == 0:
        return lengths.new_zeros((blocks * units, batch)), values, weights, positions
    in_chunks = values.is_cuda and positions is not None
    if in_chunks:
        lengths = chunked(lengths, values.size(0))
    cut, values, weights, _, target = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths.reshape(-1),
        values,
        False,
        positions is not None,
        sizes,
        blocks,
        weights,
        block_bucketize_pos=boundaries if len(boundaries) > 0 else None,
    )
    if positions is not None:
        assert target is not None, "a bucketize that keeps the order tells where each id went"
        targets = target.to(torch.int64)
        if targets.is_cuda:
            # No positions are written beyond the ids, nor for an invalid batch, which has lengths 0.
            same = torch.arange(targets.size(0), device=targets.device)
            targets = torch.where(same < cut.sum(), targets, same)
        positions = torch.empty_like(positions).index_copy_(0, targets, positions)
    if in_chunks:
        cut = cut.view(blocks * units * batch, -1).sum(dim=1, dtype=cut.dtype)
    return cut.view(blocks * units, batch), values, weights, positions


def _is_even(edges: Sequence[int], blocks: int, dtype: torch.dtype) -> bool:
    """Whether the first boundary of a unit says the others, to fbgemm, which multiplies it by ``blocks``."""
    step, rows = edges[1], edges[-1]
    return step * blocks <= torch.iinfo(dtype).max and all(
        edge == min(number * step, rows) for number, edge in enumerate(edges)
    )


def _described(route: Route, keys: Sequence[int]) -> list[int]:
    """The units for ``shardrec::cut_ids``. ``keys`` are the positions of their keys."""
    slots: dict[tuple[int, int], list[int]] = {}
    all_slots = [slot for rank_slots in route.slots for slot in rank_slots]
    for number, slot in enumerate(all_slots):
        slots.setdefault((slot.unit, slot.block), []).append(number)
    described: list[int] = []
    for unit, (key, edges) in enumerate(zip(keys, route.unit_boundaries, strict=True)):
        described += (key, route.dynamic_units[unit], len(edges) - 1, *edges)
        for block in range(len(edges) - 1):
            here = slots.get((unit, block), [])
            described += (len(here), *here)
    return described


def share_memory(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether both are there, and parts of one storage."""
    if left is None or right is None:
        return False
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
