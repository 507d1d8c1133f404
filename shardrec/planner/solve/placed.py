"""A packing from what a programme chose: options, hosts of parts, and ways to fill ranks.

Parts are put on their hosts, the largest first, where two or more ranks are to be filled in ways that have room for
their largest pieces; then single pieces take the places that the ways have for them. What finds no place is put where
it does least harm: rounding and nearly equal tables make a programme's plan a sketch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardrec.planner.solve.alike import MEMORY, Alike, short_tier
from shardrec.planner.solve.encode import Encoded, Ints
from shardrec.planner.solve.integer import Chosen, Slot, Way
from shardrec.planner.solve.packing import Packing, demand
from shardrec.planner.solve.sizes import GRID, host_blocks

__all__ = ["placed"]


def placed(encoded: Encoded, alike: Alike, chosen: Chosen, most: float) -> Packing | None:
    """The packing; None if it breaks a memory limit.

    Args:
        encoded: the problem.
        alike: the smaller problem.
        chosen: a solution of it.
        most: the load that its loads are in units of.
    """
    if chosen.counts is None:
        return None
    counts = alike.original(chosen.counts)
    packing = Packing(encoded, counts)
    sketch = _Sketch(packing, chosen.ways, most)
    first = _on_first(encoded, alike, chosen, counts)
    wanted = demand(encoded, counts)
    rest: list[int] = []
    for block in sorted(wanted, key=lambda block: (encoded.blocks[block].single, -encoded.blocks[block].loads.max())):
        for number in range(wanted[block]):
            if not sketch.place(block, int(number >= first[block]) if block in first else None):
                rest.append(block)
    return packing if all(packing.place_best(block) for block in rest) and packing.fits() else None


def _on_first(encoded: Encoded, alike: Alike, chosen: Chosen, counts: Ints) -> dict[int, int]:
    """Per kind of part that is bound to a host, how many are to be on the first one."""
    found: dict[int, int] = {}
    if len(chosen.ways) < 2:
        return found
    on_hosts = host_blocks(encoded)[1]
    parts: dict[int, list[int]] = {}
    for part, option in enumerate(alike.part_option.tolist()):
        parts.setdefault(option, []).append(part)
    for option, mine in parts.items():
        group = int(alike.group[option])
        for index, part in enumerate(mine):
            left = chosen.first.get(part, 0)
            for start in alike.first[group]:
                member = start + option - int(alike.starts[group])
                bound = [(block, count) for block, count in encoded.option_blocks[member] if block in on_hosts]
                many = min(left, bound[index][1] * int(counts[member]))
                found[bound[index][0]] = found.get(bound[index][0], 0) + many
                left -= many
    return found


class _Sketch:
    """Ranks and what is to be on them.

    Args:
        packing: to put parts into.
        ways: per class of ranks: all, or those of each of two hosts.
        most: the load of G steps.
    """

    def __init__(self, packing: Packing, ways: Sequence[Sequence[Way]], most: float) -> None:
        self._packing, self._step, self._tier = packing, most / GRID, short_tier(packing.encoded)
        encoded = packing.encoded
        self._class = [0] * encoded.ranks
        if len(ways) > 1:
            some = encoded.blocks[min(host_blocks(encoded)[1])]
            self._class = [int(rank not in some.names[0]) for rank in range(encoded.ranks)]
        self._left = [[list(way) for way in found] for found in ways]
        self._slots: dict[int, list[Slot]] = {}

    def place(self, block: int, host: int | None) -> bool:
        """Put a part, its pieces beyond the least if it is bound to a host, where its slots are least too large.

        Returns:
            Whether there are slots for it.
        """
        kind = self._packing.encoded.blocks[block]
        least = float(kind.loads.min()) if host is not None else 0.0
        sizes = np.maximum(np.floor((kind.loads - least) / self._step - 1e-6), 0).astype(np.int64).tolist()
        heavy = [0] * len(sizes)
        if self._tier is not None:
            limit = float(self._packing.encoded.capacity[self._tier])
            heavy = np.floor(kind.memory[:, self._tier] / limit * MEMORY).astype(np.int64).tolist()
        kinds = list(zip(sizes, heavy, strict=True))
        best: tuple[int, _Trial] | None = None
        for place, ranks in enumerate(kind.places.tolist()):
            if host is None or self._class[ranks[0]] == host:
                trial = self._tried(kinds, ranks)
                if trial is not None and (best is None or trial.price < best[1].price):
                    best = place, trial
        if best is None:
            return False
        for kind_of_rank, number in best[1].begun:
            self._left[kind_of_rank][number] = []
        self._slots |= best[1].slots
        self._packing.put(block, best[0])
        return True

    def _tried(self, kinds: Sequence[Slot], ranks: Sequence[int]) -> _Trial | None:
        trial = _Trial()
        for kind, rank in zip(kinds, ranks, strict=True):
            if not kind[0]:
                continue
            slots = trial.slots.get(rank, self._slots.get(rank))
            if slots is None:
                its = self._class[rank]
                waiting = self._left[its]
                fitting = [
                    (_misfit(slot, kind), number)
                    for number, way in enumerate(waiting)
                    if (its, number) not in trial.begun and (slot := _slot(way, kind)) is not None
                ]
                if not fitting:
                    return None
                number = min(fitting)[1]
                slots = waiting[number]
                trial.begun.add((its, number))
            slot = _slot(slots, kind)
            if slot is None:
                return None
            trial.slots[rank] = list(slots)
            trial.slots[rank].remove(slot)
            trial.misfit = tuple(map(sum, zip(trial.misfit, _misfit(slot, kind), strict=True)))
        return trial


class _Trial:
    """What putting a part somewhere leads to: ways that are begun, by class and number, and slots that are left."""

    def __init__(self) -> None:
        self.misfit: tuple[int, ...] = (0, 0, 0)
        self.begun: set[tuple[int, int]] = set()
        self.slots: dict[int, list[Slot]] = {}

    @property
    def price(self) -> tuple[tuple[int, ...], int]:
        return self.misfit, len(self.begun)


def _slot(slots: Sequence[Slot], kind: Slot) -> Slot | None:
    """The slot that fits a piece best; one that is a step too small will do."""
    fitting = [slot for slot in slots if slot[0] >= kind[0] - 1 and slot[1] >= kind[1] - 1]
    return min(fitting, key=lambda slot: _misfit(slot, kind), default=None)


def _misfit(slot: Slot, kind: Slot) -> tuple[int, int, int]:
    """Whether it is too small, then what is too large, memory first: that of others may not fit elsewhere."""
    return slot[0] < kind[0] or slot[1] < kind[1], abs(slot[1] - kind[1]), abs(slot[0] - kind[0])
