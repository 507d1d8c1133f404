"""The map from raw ids to the rows of one row block, in plain tensors on the CPU.

::

    records   (R, 3) int64   of each row: id | uses | step of the last use
    buckets   (2^k,) int32   a hash table of the ids, made of the records

Uses are 0 for a free row and negative for a row that no id may have: a row of the fallback, or of the reserve. The
lookup, which also admits, inserts and evicts, is one C++ operator; :mod:`shardrec.portable.frozen_ids` looks ids up
with torch's operators. With tables on a GPU, :mod:`shardrec.ids.device_maps` looks up in a copy on the GPU, and
:meth:`IdMap.admit` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardrec import native
from shardrec.errors import ConfigError
from shardrec.ids.options import POLICIES, DynamicIds
from shardrec.lookup.huge_pages import zeros_in_huge_pages

FALLBACK, RESERVE = -1, -2
"""In place of the uses of a row: it is one of the fallback's. It may be given to ids when the capacity is raised."""

COUNTED = ("lookups", "hits", "inserts", "evictions", "fallbacks", "no_room", "collisions")
"""What a map counts while it assigns rows to new ids."""

_FIRST_COUNT = 3  # numbers of the state before those
_COUNTED_ON_DEVICE = [_FIRST_COUNT + COUNTED.index(name) for name in ("lookups", "hits", "fallbacks")]


class Looked(NamedTuple):
    """The result of a lookup.

    Args:
        evicted: (E,) int64, rows that were taken from their ids, ascending.
        lacking: ids that have neither a row nor a row of the fallback.
    """

    evicted: Tensor
    lacking: int


class Admitted(NamedTuple):
    """The result of :meth:`IdMap.admit`.

    Args:
        rows: (n,) int32, the row per id, or its row of the fallback. -1 for a row of zeros.
        evicted: (E,) int64, rows that were taken from their ids, ascending.
        changed: (c,) int64, rows with changed records.
        buckets: int64, places of the buckets that have changed, some several times.
    """

    rows: Tensor
    evicted: Tensor
    changed: Tensor
    buckets: Tensor


class IdMap:
    """The row per id.

    Args:
        rows: R, of the row block.
        options: of its table.
        capacity: rows that ids may have.

    Attributes:
        records: (R, 3) int64, see above.
        candidates: (R, 3) int64 in the same form, ids that wait for a row; (0, 3) if ids need not wait.
        buckets: see above.
        version: changes where records were written from outside.
        fetch: where the map has a copy that looks up, brings the records given up to date, and returns lookups, hits
            and fallbacks since the last time.

    Raises:
        ConfigError: without the C++ operators.
    """

    def __init__(self, rows: int, options: DynamicIds, capacity: int) -> None:
        if not native.has_operators():
            raise ConfigError(
                "dynamic ids need the C++ operators of shardrec, which are not there. Install it from its sources with "
                "a C++ compiler (pip install --no-build-isolation .), and leave SHARDREC_NATIVE unset"
            )
        self.options = options
        self._records = zeros_in_huge_pages(rows, 3, dtype=torch.int64)
        self._records[: options.fallback_rows, 1] = FALLBACK
        self._records[options.fallback_rows + capacity :, 1] = RESERVE
        self.candidates = torch.zeros((rows if options.admit_after > 1 else 0, 3), dtype=torch.int64)
        self._state = torch.zeros(_FIRST_COUNT + len(COUNTED), dtype=torch.int64)
        self.version = 0
        self.fetch: Callable[[Tensor], Sequence[int]] | None = None
        self.rebuild()

    @property
    def records(self) -> Tensor:
        """(R, 3) int64, see above. With a copy on a GPU, the host waits for the counts made there."""
        self._fetch()
        return self._records

    def _fetch(self) -> None:
        if self.fetch is not None:
            for place, count in zip(_COUNTED_ON_DEVICE, self.fetch(self._records), strict=True):
                self._state[place] += count

    def write(self, records: Tensor, candidates: Tensor | None = None) -> Tensor:
        """Have other records (R, 3), and other ids that wait; by default none.

        Returns: (n,) int64, the rows that have lost their ids.
        """
        before = self.records
        has_lost = (before[:, 1] > 0) & ((records[:, 1] <= 0) | (records[:, 0] != before[:, 0]))
        before.copy_(records)
        self.candidates.copy_(torch.zeros_like(self.candidates) if candidates is None else candidates)
        self.rebuild()
        return has_lost.nonzero().squeeze(1)

    def rebuild(self) -> None:
        """Rebuild the hash table, after records or candidates were written from outside."""
        self.buckets, self._candidate_buckets = _buckets_of(self.records), _buckets_of(self.candidates)
        self._state[:_FIRST_COUNT] = 0
        self.version += 1

    def prepared(self, records: Tensor) -> Callable[[], None]:
        """Make the hash table of other records (R, 3) int64. The result then replaces the map's hash table in one
        assignment."""
        buckets = _buckets_of(records)

        def replace() -> None:
            self._fetch()
            self._records, self.buckets = records, buckets
            self._state[:2] = 0
            self.version += 1

        return replace

    def look_up(
        self, ids: Tensor, rows: Tensor, *, step: int, assign_new_ids: bool, protect: int | None = None
    ) -> Looked:
        """Find the row per id.

        Args:
            ids: (N,) int64, any values.
            rows: (N,) int32, to which the rows are written; -1 for a row of zeros.
            step: number of this step, from 1 on, ascending.
            assign_new_ids: count uses, and assign rows to new ids. Otherwise the map does not change.
            protect: ids used in this step or a later one keep their rows. Default: ``step``.
        """
        options = self.options
        mapped = torch.ops.shardrec.map_ids(
            ids,
            rows,
            self.records,
            self.buckets,
            self.candidates,
            self._candidate_buckets,
            self._state,
            options.fallback_rows,
            options.admit_after,
            POLICIES.index(options.evict),
            options.ttl or 0,
            step,
            step if protect is None else protect,
            assign_new_ids,
        )
        return Looked(*mapped)

    def admit(self, ids: Tensor, victims: Callable[[int], tuple[Tensor, Tensor]], *, step: int) -> Admitted:
        """Do the part of :meth:`look_up` that is for new ids, where a copy of the map has looked up and counted.

        Args:
            ids: (n,) int64, distinct ids without a row, in the order in which they first come.
            victims: chooses the rows to evict, given how many lack: (E,) int64, ascending, and their last steps.
            step: number of this step.
        """
        options, evicted = self.options, None

        def admitted() -> tuple[Tensor, Tensor, int]:
            result: tuple[Tensor, Tensor, int] = torch.ops.shardrec.admit_ids(
                ids,
                self._records,
                self.buckets,
                self.candidates,
                self._candidate_buckets,
                self._state,
                options.fallback_rows,
                options.admit_after,
                POLICIES.index(options.evict),
                step,
                evicted,
            )
            return result

        rows, buckets, lacking = admitted()
        if lacking:
            evicted, last_steps = victims(lacking)
            self._records[evicted, 2] = last_steps
            rows, buckets, _ = admitted()
        evicted_rows = ids.new_empty(0) if evicted is None else evicted
        inserted = rows[rows >= options.fallback_rows].to(torch.int64)
        return Admitted(rows=rows, evicted=evicted_rows, changed=torch.cat([evicted_rows, inserted]), buckets=buckets)

    def written(self, rows: Tensor) -> Tensor:
        """(c, 3) the records of rows that :meth:`admit` has changed in this step."""
        return self._records[rows]

    def open_reserve(self, capacity: int) -> None:
        """Allow ids to have ``capacity`` rows from now on, at least as many as before."""
        uses = self.records[:, 1]
        closed = (uses == RESERVE).nonzero().squeeze(1)
        uses[closed[: max(0, capacity - int((uses >= 0).sum()))]] = 0
        self._state[0] = 0
        self.version += 1

    def copy_(self, other: IdMap) -> None:
        """Become a copy of another map of the same form."""
        for name in ("records", "candidates", "buckets", "_candidate_buckets", "_state"):
            getattr(self, name).copy_(getattr(other, name))
        self.version += 1

    @property
    def last_of_evicted(self) -> int:
        """The latest step that had used an id when it was evicted. 0 before any eviction."""
        return int(self._state[2])

    def counts(self) -> dict[str, int]:
        """Counts of :data:`COUNTED` so far; ``rows``, that ids may have; and ``used``, the rows that have an id."""
        uses = self.records[:, 1]
        counted = dict(zip(COUNTED, self._state[_FIRST_COUNT:].tolist(), strict=True))
        return counted | {"rows": int((uses >= 0).sum()), "used": int((uses > 0).sum())}


def _buckets_of(records: Tensor) -> Tensor:
    buckets = zeros_in_huge_pages(1 << (2 * max(records.size(0), 1) - 1).bit_length(), dtype=torch.int32)
    torch.ops.shardrec.index_ids(records, buckets)
    return buckets
