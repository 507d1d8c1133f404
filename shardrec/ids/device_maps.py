"""The id maps of a rank with tables on a GPU: ids are found and counted there, and the host decides on new ones.

Shapes: N ids, S slots, M maps, R rows of all maps, E evicted rows. The kernels: :mod:`shardrec.ids.map_kernels`.

::

    find     rows of the ids; distinct ids without one, which are copied to the host    ahead of the step, if it may be
    stamp    the step uses the rows that were found
    wait     for the ids without a row, if there are any
    admit    as on the CPU, by the host's copy of ids, free rows and waiting ids        IdMap.admit
    evict    if rows lack: the least by the policy, of the device's uses and steps      the host waits once more
    write    records and buckets that changed
    find     again, for the ids that had no row

The device's records are newer than the host's in uses and last steps. ``IdMap.records`` fetches them first. Where the
host's were written from outside, they are copied to the device before the next lookup. Lookups on several streams
(ahead of a step, in a step, in an evaluation) wait for each other on the device, in the order in which they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardrec.exchange import launching
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.to_device import moved
from shardrec.ids.id_map import IdMap

_BLOCK = 256  # ids of a program
_HEAD = 4096  # ids without a row, at least, that are copied before their number is known
_MOST, _LEAST = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min


def launch(kernel: str, count: int, *values: Any, **constants: Any) -> None:
    """Run a kernel of :mod:`shardrec.ids.map_kernels` on ``count`` ids or places. Its arguments are in its order."""
    grid = (-(-count // _BLOCK),)
    launching.launch("shardrec.ids.map_kernels", kernel, grid, *values, count, BLOCK=_BLOCK, **constants)


@dataclass(frozen=True, kw_only=True)
class FoundRows:
    """The result of :meth:`DeviceMaps.find`.

    Args:
        rows: (N,) int32, the row per id. -1 without one.
        maps: (N,) int32, the map per id; -1 for plain rows.
        ends: (S + 1,) int64, where the ids of each slot begin, and where the last slot's end.
        missing: (N + 1, 2) int64, see :mod:`shardrec.ids.map_kernels`.
        head: the first of these, on the host.
        copied: the event after which they are there. None on the CPU.
        version: of the maps.
    """

    rows: Tensor
    maps: Tensor
    ends: Tensor
    missing: Tensor
    head: Tensor
    copied: Any
    version: int

    def ids_without_row(self, maps: int) -> Sequence[Tensor]:
        """Per map, the distinct ids without a row, in the order in which they first come. The host waits for them."""
        if self.copied is not None:
            self.copied.synchronize()
        count = int(self.head[0, 0])
        entries = self.head[1 : count + 1] if count < len(self.head) else self.missing[1 : count + 1].cpu()
        keys, order = entries[:, 0].sort()
        ids: Sequence[Tensor] = entries[:, 1][order].split((keys >> 32).bincount(minlength=maps).tolist())
        return ids


class DeviceMaps:
    """Copies of a rank's id maps on a device.

    Args:
        maps: M maps.
        slot_maps: per slot, the number of its map; -1 for plain rows.
        counted: per slot, whether its ids count. Those of a second column stripe do not.
        device: of the ids.
    """

    def __init__(
        self, maps: Sequence[IdMap], slot_maps: Sequence[int], counted: Sequence[bool], device: torch.device
    ) -> None:
        self.maps = tuple(maps)
        self._device = device
        sizes = [len(id_map.records) for id_map in maps]
        places = [id_map.buckets.numel() for id_map in maps]
        self._first_rows, self._first_buckets = _starts(sizes), _starts(places)
        tables = [
            [bucket, count - 1, row, size, size.bit_length(), id_map.options.fallback_rows]
            for bucket, count, row, size, id_map in zip(
                self._first_buckets, places, self._first_rows, sizes, maps, strict=False
            )
        ]
        self._tables_M = torch.tensor(tables, dtype=torch.int64, device=device).view(-1, 6)
        self._maps_S = torch.tensor([*slot_maps, -1], dtype=torch.int32, device=device)
        of_counts = [number if counts else len(maps) for number, counts in zip(slot_maps, counted, strict=True)]
        self._counts_S = torch.tensor(of_counts, dtype=torch.int64, device=device)
        self._records_R = torch.empty((self._first_rows[-1], 3), dtype=torch.int64, device=device)
        self._buckets = torch.empty(self._first_buckets[-1], dtype=torch.int32, device=device)
        # Per map, and for slots that do not count: lookups, ids without a row, those that took the fallback.
        self._counts = torch.zeros((len(maps) + 1, 3), dtype=torch.int64, device=device)
        self._capacities = [0] * len(maps)
        self._versions = [-1] * len(maps)
        self._used = [False] * len(maps)  # by steps since the host's records equalled the device's
        self._writes = 0
        self._last: Any = None  # the event after the last lookup

    def find(self, shard_input: ShardInput, *, frozen: bool = False) -> FoundRows:
        """Find the rows of ids, on the current stream. Changes nothing, and the host does not wait.

        Args:
            shard_input: with raw ids, int64.
            frozen: ids without a row take the fallback immediately, and are not listed.
        """
        self._upload()
        ids, count = shard_input.ids, shard_input.ids.numel()
        ends = nn.functional.pad(shard_input.lengths.sum(dim=1, dtype=torch.int64).cumsum(0), [1, 0])
        slot_N = torch.searchsorted(ends[1:], torch.arange(count, device=self._device), right=True)
        maps_N = self._maps_S.index_select(0, slot_N)
        rows_N = torch.empty(count, dtype=torch.int32, device=self._device)
        claims = torch.zeros(1 if frozen else 1 + (1 << (2 * count).bit_length()), dtype=torch.int32, device=ids.device)
        missing = torch.zeros((1 if frozen else count + 1, 2), dtype=torch.int64, device=self._device)
        head, copied = missing[: max(_HEAD, count // 8) + 1], None
        if count:
            self._find(ids, maps_N, rows_N, claims, frozen)
            if not frozen:
                launch("emit", claims.numel() - 1, ids, maps_N, claims, missing)
        if ids.is_cuda and not frozen:
            head = torch.empty(head.shape, dtype=torch.int64, pin_memory=True).copy_(head, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._end_lookup()
        return FoundRows(
            rows=rows_N, maps=maps_N, ends=ends, missing=missing, head=head, copied=copied, version=self._writes
        )

    def assign(
        self, shard_input: ShardInput, found_rows: FoundRows | None, *, step: int, protect: int
    ) -> tuple[Tensor, list[Tensor], bool]:
        """Let a step use the ids, and assign rows to new ones.

        Args:
            shard_input: with raw ids, int64.
            found_rows: of it, if it was found ahead of the step.
            step: number of this step.
            protect: ids used in this step or a later one keep their rows.

        Returns:
            (N,) int32 rows, -1 for a row of zeros; per map, (E,) int64 rows that were taken from their ids, on the
            host; and whether any row is -1.
        """
        self._upload()
        if found_rows is None or found_rows.version != self._writes:
            found_rows = self.find(shard_input)
        rows, maps_N, count = found_rows.rows, found_rows.maps, found_rows.rows.numel()
        none = torch.empty(0, dtype=torch.int64)
        if not count:
            return rows, [none] * len(self.maps), False
        launch("stamp", count, maps_N, self._tables_M, self._records_R, rows, step)
        self._used = [True] * len(self.maps)
        self._counts[:, 0].index_add_(0, self._counts_S, found_rows.ends.diff())
        evicted, lacking = [none] * len(self.maps), False
        new_ids = found_rows.ids_without_row(len(self.maps))
        if any(ids.numel() for ids in new_ids):
            self._count(1, rows < 0, found_rows.ends)
            changes = []
            for number, ids in enumerate(new_ids):
                if ids.numel():
                    admitted = self.maps[number].admit(ids, partial(self._victims, number, step, protect), step=step)
                    evicted[number] = admitted.evicted
                    lacking |= bool((admitted.rows < 0).any())
                    changes.append((number, admitted.changed, admitted.buckets))
            self._write(changes)
            self._find(shard_input.ids, maps_N, rows, rows, True)
            fallback_N = self._tables_M[:, 5].index_select(0, maps_N.clamp(min=0))
            self._count(2, rows < fallback_N, found_rows.ends)
        self._end_lookup()
        return rows, evicted, lacking

    def _end_lookup(self) -> None:
        if self._device.type == "cuda":
            self._last = torch.cuda.Event()
            self._last.record()

    def _find(self, ids: Tensor, maps_N: Tensor, rows_N: Tensor, claims: Tensor, frozen: bool) -> None:
        arguments = ids, maps_N, self._tables_M, self._buckets, self._records_R, rows_N, claims, claims.numel() - 2
        launch("find", ids.numel(), *arguments, CLAIM=not frozen)

    def _count(self, column: int, chosen_N: Tensor, ends: Tensor) -> None:
        """Count the chosen ids per map."""
        before = nn.functional.pad(chosen_N.cumsum(0), [1, 0])
        self._counts[:, column].index_add_(0, self._counts_S, before.index_select(0, ends).diff())

    def _victims(self, number: int, step: int, protect: int, lacking: int) -> tuple[Tensor, Tensor]:
        """(E,) rows of a map with ids to evict, ascending, and their last steps. See ``make_room`` in ids.cpp."""
        options = self.maps[number].options
        _, uses, last = self._records_R[self._first_rows[number] : self._first_rows[number + 1]].unbind(1)
        row, age = torch.arange(uses.numel(), device=self._device), step - last
        tied = (uses > 0) & (last < protect)
        if options.ttl is not None:
            tied &= age > options.ttl
        # The bits of a double above 0 are in the order of its value.
        worth = {"lfu": uses, "score": (uses / age.double()).view(torch.int64)}.get(
            options.evict, torch.zeros_like(row)
        )
        count = min(max(lacking, self._capacities[number] // 64), row.numel())
        sure = torch.zeros_like(tied)
        for key in (worth, last, row):
            # Ids below the count-th are sure to be among the least. The next key decides among its equals.
            bound = torch.where(sure, _LEAST, torch.where(tied, key, _MOST)).kthvalue(count).values
            sure, tied = sure | (tied & (key < bound)), tied & (key == bound)
        least = torch.where(sure | tied, row, _MOST).topk(count, largest=False).values
        rows, steps = torch.stack([least, last.index_select(0, least.clamp(max=row.numel() - 1))]).cpu()
        return rows[rows < _MOST], steps[rows < _MOST]

    def _write(self, changes: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Bring rows and buckets of maps that have changed to the device: number, rows, places of buckets."""
        maps = self.maps
        rows = torch.cat([rows + self._first_rows[number] for number, rows, _ in changes])
        places = torch.cat([places + self._first_buckets[number] for number, _, places in changes])
        if rows.numel():
            records = torch.cat([maps[number].written(rows) for number, rows, _ in changes])
            buckets = torch.cat([maps[number].buckets[places] for number, _, places in changes])
            self._records_R.index_copy_(0, moved(rows, self._device), moved(records, self._device))
            self._buckets.index_copy_(0, moved(places, self._device), moved(buckets, self._device))
            self._writes += 1

    def _upload(self) -> None:
        """A lookup begins. Copy the maps that were written on the host since the last one."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)
        for number, id_map in enumerate(self.maps):
            if self._versions[number] != id_map.version:
                records = id_map.records
                self._records_R[self._first_rows[number] : self._first_rows[number + 1]].copy_(records)
                self._buckets[self._first_buckets[number] : self._first_buckets[number + 1]].copy_(id_map.buckets)
                self._capacities[number] = int((records[:, 1] >= 0).sum())
                self._versions[number] = id_map.version
                self._writes += 1
                id_map.fetch = partial(self._fetch, number)

    def _fetch(self, number: int, records: Tensor) -> tuple[int, int, int]:
        """Bring records (rows, 3) of a map to the host, where steps have used it since. Returns what was counted."""
        if not self._used[number]:
            return 0, 0, 0
        self._used[number] = False
        records.copy_(self._records_R[self._first_rows[number] : self._first_rows[number + 1]])
        lookups, missed, fallbacks = self._counts[number].tolist()
        self._counts[number].zero_()
        return lookups, lookups - missed, fallbacks


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin, and where the last one ends."""
    return [0, *torch.tensor(sizes).cumsum(0).tolist()]
