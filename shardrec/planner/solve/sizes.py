"""The loads of pieces in whole steps, and which parts are bound to hosts (:mod:`curve` says how they count)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardrec.planner.solve.encode import Block, Encoded, Floats, Ints

__all__ = ["GRID", "Sizes", "host_blocks"]

GRID = 400
"""G, steps of the most load. More steps prove more in the end, and take longer to."""


class Sizes:
    """The sizes of a problem's pieces.

    Args:
        encoded: the problem.
        step: load of a step.

    Attributes:
        local: L, ranks of a host; 1 if no part is bound to a host.
        free_option: (F,) which option a free piece is of; likewise its ``free`` steps and ``free_count``.
        bound_option: (B,) which option a part on a host is of; likewise ``bound``, the steps n of its least piece,
            ``beyond``, those that its largest has beyond, ``bound_count``, and its ``kind``.
        kinds: n and e of each kind of part.
        there: how many parts of each kind there can be at most.
        need: (O,) the least room that an option's pieces fit one by one; G + 1 if there is none.
    """

    def __init__(self, encoded: Encoded, step: float) -> None:
        self._step = step
        self.local, on_hosts = host_blocks(encoded)
        free: list[tuple[int, float, float]] = []
        bound: list[tuple[int, float, float]] = []
        beyond: list[float] = []
        for option, blocks in enumerate(encoded.option_blocks):
            for block, count in blocks:
                loads = encoded.blocks[block].loads
                least = 0.0
                if block in on_hosts:
                    least = float(loads.min())
                    bound.append((option, least, float(count)))
                    beyond.append(float(loads.max()) - least)
                free += [(option, float(load) - least, float(count)) for load in loads if load > least]
        self.free_option, self.free, self.free_count = self._items(free)
        self.bound_option, self.bound, self.bound_count = self._items(bound)
        self.beyond = self._steps(np.array(beyond))
        kinds, self.kind = np.unique(
            np.stack([self.bound, self.beyond], axis=1).reshape(-1, 2), axis=0, return_inverse=True
        )
        self.kinds: list[tuple[int, int]] = [(int(least), int(most)) for least, most in kinds]
        self.there = self._available(encoded)
        need: Ints = np.zeros(len(encoded.options), dtype=np.int64)
        np.maximum.at(need, self.free_option, self.free)
        np.maximum.at(need, self.bound_option, self.bound + self.beyond)
        self.need: Ints = np.minimum(need, GRID + 1)

    def _items(self, items: Sequence[tuple[int, float, float]]) -> tuple[Ints, Ints, Floats]:
        numbers = np.array([item[0] for item in items], dtype=np.int64)
        sizes = self._steps(np.array([item[1] for item in items], dtype=np.float64))
        return numbers, sizes, np.array([item[2] for item in items], dtype=np.float64)

    def _steps(self, loads: Floats) -> Ints:
        """Rounded down: a bound must not round up. What is larger than all is one step more than all."""
        return np.clip(np.floor(loads / self._step - 1e-6), 0, GRID + 1).astype(np.int64)

    def _available(self, encoded: Encoded) -> Ints:
        """Of each group, the parts of the option that has most."""
        found: Ints = np.zeros(len(self.kinds), dtype=np.int64)
        most: dict[tuple[int, int], float] = {}
        both: dict[tuple[int, int], float] = {}
        items = zip(self.bound_option.tolist(), self.kind.tolist(), self.bound_count.tolist(), strict=True)
        for option, kind, count in items:
            both[option, kind] = both.get((option, kind), 0.0) + count
        for (option, kind), count in both.items():
            group = int(encoded.option_group[option])
            most[group, kind] = max(most.get((group, kind), 0.0), count)
        for (group, kind), count in most.items():
            found[kind] += int(count) * int(encoded.sizes[group])
        return found


def host_blocks(encoded: Encoded) -> tuple[int, set[int]]:
    """Ranks of a host, and the kinds of parts that have a piece on each of a host's ranks, on any host."""
    found: dict[tuple[frozenset[int], ...], set[int]] = {}
    for number, kind in enumerate(encoded.blocks):
        hosts = _partition(kind, encoded.ranks)
        if hosts:
            found.setdefault(hosts, set()).add(number)
    if not found:
        return 1, set()
    hosts = max(found, key=lambda hosts: len(found[hosts]))
    return len(hosts[0]), found[hosts]


def _partition(kind: Block, ranks: int) -> tuple[frozenset[int], ...]:
    """The sets of ranks of a kind's places, if these are all the ranks in equal parts; else nothing."""
    if kind.single or len(kind.names) < 2:
        return ()
    hosts = dict.fromkeys(frozenset(place) for place in kind.names)
    if len(hosts) * len(kind.loads) != ranks or len(frozenset().union(*hosts)) != ranks:
        return ()
    return tuple(hosts)
