"""What docs/dynamic_ids.md says of an id map, with a dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardrec.ids import DynamicIds

__all__ = ["DictMap"]

MASK = 2**64 - 1


def mixed(number: int) -> int:
    """SplitMix64's finaliser."""
    number &= MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


@dataclass
class Entry:
    row: int
    uses: int
    last: int


@dataclass
class Rows:
    """Ids and their rows."""

    free: set[int]
    size: int
    entries: dict[int, Entry] = field(default_factory=dict)

    def make_room(self, wanted: int, may_go: Callable[[Entry], bool], worth: Callable[[Entry], float]) -> list[int]:
        """The ids that lose their rows."""
        lacking = wanted - len(self.free)
        if lacking <= 0:
            return []
        found = [(worth(one), one.last, one.row, key) for key, one in self.entries.items() if may_go(one)]
        return [key for _, _, _, key in sorted(found)[: max(lacking, self.size // 64)]]

    def remove(self, key: int) -> Entry:
        one = self.entries.pop(key)
        self.free.add(one.row)
        return one

    def insert(self, key: int, uses: int, last: int) -> int | None:
        if not self.free:
            return None
        row = min(self.free)
        self.free.remove(row)
        self.entries[key] = Entry(row, uses, last)
        return row


class DictMap:
    """An id map."""

    def __init__(self, rows: int, options: DynamicIds, capacity: int) -> None:
        first = options.fallback_rows
        self.options = options
        self.rows = Rows(set(range(first, first + capacity)), capacity)
        self.waiting = Rows(set(range(rows)), rows)
        self.counts = dict.fromkeys(
            ("lookups", "hits", "inserts", "evictions", "fallbacks", "no_room", "collisions"), 0
        )

    def fallback(self, key: int) -> int:
        rows = self.options.fallback_rows
        return (mixed(key) & 0xFFFFFFFF) % rows if rows else -1

    def frozen(self, ids: Sequence[int]) -> list[int]:
        return [self.rows.entries[key].row if key in self.rows.entries else self.fallback(key) for key in ids]

    def learn(self, ids: Sequence[int], step: int, protect: int | None = None) -> tuple[list[int], list[int]]:
        """The row of each id, and the rows that were evicted."""
        options, entries = self.options, self.rows.entries
        self.counts["lookups"] += len(ids)
        self.counts["hits"] += sum(key in entries for key in ids)
        fresh = []
        for key in dict.fromkeys(ids):
            if key not in entries:
                fresh.append(key)
                continue
            entries[key].uses += 1
            entries[key].last = step
        due = {key: 1 for key in fresh}
        if options.admit_after > 1:
            unknown = [key for key in fresh if key not in self.waiting.entries]
            for key in fresh:
                if key in self.waiting.entries:
                    one = self.waiting.entries[key]
                    one.uses, one.last = one.uses + 1, step
                    due[key] = one.uses
            for key in self.waiting.make_room(len(unknown), lambda one: one.last < step, lambda one: 0):
                self.waiting.remove(key)
            for key in unknown:
                self.waiting.insert(key, 1, step)
            due = {key: uses for key, uses in due.items() if uses >= options.admit_after}
        evicted = []
        if options.evict != "never":
            kept_from = step if protect is None else protect
            for key in self.rows.make_room(
                len(due),
                lambda one: one.last < kept_from and (options.ttl is None or step - one.last > options.ttl),
                lambda one: {"lfu": one.uses, "score": one.uses / max(step - one.last, 1)}.get(options.evict, 0),
            ):
                evicted.append(self.rows.remove(key).row)
        for key, uses in due.items():
            if self.rows.insert(key, uses, step) is None:
                self.counts["no_room"] += 1
                continue
            self.counts["inserts"] += 1
            if key in self.waiting.entries:
                self.waiting.remove(key)
        self.counts["evictions"] += len(evicted)
        self.counts["fallbacks"] += sum(key not in entries for key in ids)
        shared = [self.fallback(key) for key in fresh if key not in entries]
        self.counts["collisions"] += len(shared) - len(set(shared)) if options.fallback_rows else 0
        return self.frozen(ids), sorted(evicted)
