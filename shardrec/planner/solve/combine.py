"""Few tables that fill the ranks: all the combinations of their options that can be of use.

Where one table is a third of all memory, whether it is on half of the ranks or on all of them decides what the others
can do. To move tables one after the other does not lead from one to the other, and half of each proves nothing. So the
tables are gone through, the largest first, and for each option, and each way to share its parts among hosts, it is
asked whether a plan below the cost to beat is possible (:mod:`ways`):

::

    t3 on all ranks ─┬─ t2 on host 0 ─┬─ t4 on host 1 ── t0 on all ranks ── ...     a plan is made of it
                     │                └─ t4 on host 0                               not enough memory
                     ├─ t2 on all ranks ── ...
                     └─ t2 on half of each host                                     neither time nor memory

The tables that take little of anything are fluid at first. A combination of the large ones that stays possible is made
into a plan, which lowers the cost to beat; what is still possible then is gone through with the small tables, too. In
the end either nothing is, which is a proof that no plan is better by more than the gap; or the work allowed was used
up, and the least that is possible for what is left is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from shardrec.planner.solve.encode import Encoded, Ints
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.ways import Chosen, Fluid, Ways, undominated

__all__ = ["Combinations", "Combined", "combined"]

_SMALL = 0.04
"""Part of the ranks, in each quantity, below which a table is small."""
_MOST_TABLES = 24
_MOST_LARGE = 8
_MOST_SMALL = 0.15
"""Part of the ranks that small tables may take: with more, the answers are too coarse."""
_MOST_HOSTS = 2
_LEAST_GAP = 1e-5
"""More than the slack of the answers, so that what there is already is not of interest."""
_PLACINGS = 400
_ROUNDS = 400
_HALVINGS = 6


@dataclass(frozen=True, eq=False)
class Combined:
    """What the search came to.

    Args:
        bound: no plan costs less.
        packing: the best found, if it is better than what there was.
    """

    bound: float
    packing: Packing | None


def combined(encoded: Encoded, best: Packing | None, gap: float, most: int, stop: Callable[[], bool]) -> Combined:
    """Go through the combinations of a problem's options, if it is of the kind that this is for: few large tables.

    Args:
        encoded: the problem.
        best: a packing that there is.
        gap: plans are of interest that are better by this fraction.
        most: questions to ask.
        stop: asked now and then; ends the search.
    """
    if encoded.sizes.sum() > _MOST_TABLES:
        return Combined(0.0, None)
    tables = Combinations(encoded, best)
    return tables.search(gap, most, stop) if tables.useful else Combined(0.0, None)


class Combinations:
    """The tables of a problem, the large ones first.

    Args:
        encoded: the problem.
        best: a packing that there is.

    Attributes:
        useful: whether the problem is of the kind that this is for: few large tables, on one or two hosts.
    """

    def __init__(self, encoded: Encoded, best: Packing | None) -> None:
        self.encoded, self.best = encoded, best
        # Without a plan, more than if all were on one rank.
        spans = encoded.group_options
        worst = sum(
            int(size) * float(encoded.total_load[span.start : span.stop].max())
            for size, span in zip(encoded.sizes, spans, strict=True)
        )
        self._cost = 2 * worst if best is None else best.cost
        self._ways = Ways(encoded)
        self._options = self._affordable()
        self._group = [group for group, size in enumerate(encoded.sizes.tolist()) for _ in range(size)]
        self._large: list[int] = []
        self._small: list[int] = []
        self.useful = self._cost > 0 and all(self._options) and self._ways.hosts <= _MOST_HOSTS and self._sorted()
        if self.useful:
            self._fluid = [
                Fluid(base=self._ways.base[options].min(axis=0), sizes=undominated(self._ways.total[options]))
                for options in self._options
            ]

    def _affordable(self) -> list[list[int]]:
        """Per group, the options that leave enough for the other tables, in each quantity."""
        encoded, ways, group = self.encoded, self._ways, self.encoded.option_group
        limits, sizes = ways.limits(self._cost), encoded.sizes.astype(np.float64)
        spans = encoded.group_options
        least = np.array([ways.total[span.start : span.stop].min(axis=0) for span in spans])
        base = np.array([ways.base[span.start : span.stop].min(axis=0) for span in spans])
        fits = (ways.total - least[group] <= encoded.ranks * limits - sizes @ least).all(axis=1)
        room = limits - sizes @ base + base[group] - ways.base
        pieces = ways.quantities(encoded.piece_load, encoded.piece_memory)
        over = (pieces > room[encoded.piece_option]).any(axis=1)
        fits &= np.bincount(encoded.piece_option[over], minlength=len(fits)) == 0
        return [[option for option in span if fits[option]] for span in spans]

    def _sorted(self) -> bool:
        """Large tables and small ones; whether they are few, and little."""
        least = np.array([self._ways.total[options].min(axis=0) for options in self._options])
        shares = (least / (self.encoded.ranks * self._ways.limits(self._cost))).max(axis=1)[self._group]
        order = np.argsort(-shares, kind="stable").tolist()
        self._large = [table for table in order if shares[table] >= _SMALL]
        self._small = [table for table in order if shares[table] < _SMALL]
        return 0 < len(self._large) <= _MOST_LARGE and float(shares[self._small].sum()) <= _MOST_SMALL

    def search(self, gap: float, most: int, stop: Callable[[], bool]) -> Combined:
        """Go through the combinations, of a problem for which that is useful.

        Args:
            gap: plans are of interest that are better by this fraction.
            most: questions to ask.
            stop: asked now and then; ends the search.
        """
        self._gap, self._most, self._stop = gap, most, stop
        self._found: Packing | None = None
        self._open: list[tuple[float, tuple[Chosen, ...]]] = []
        if not self._descend((), self._large, self._small):
            return Combined(0.0, self._found)
        # What is left is in order of its bounds, so that the first that cannot be settled has the bound of all.
        tables, least = [*self._large, *self._small], np.inf
        for bound, chosen in sorted(self._open, key=lambda item: item[0]):
            if bound >= min(least, self._aim()):
                break
            self._open = []
            if not self._descend(chosen, tables, []):
                least = min(least, bound)
                break
            least = min([least, *(bound for bound, _ in self._open)])
        return Combined(min(least, self._aim()), self._found)

    def _aim(self) -> float:
        """The cost to beat: without a plan, any will do."""
        if self.best is None and self._found is None:
            return self._cost
        return self._cost / (1 + max(self._gap, _LEAST_GAP)) * (1 + 1e-9)

    def _descend(self, chosen: tuple[Chosen, ...], tables: Sequence[int], fluid: Sequence[int]) -> bool:
        """Go through the options of the tables that are left; False if that was not done to the end."""
        number = len(chosen)
        if number == len(tables):
            self._finish(chosen, fluid)
            return True
        table, rest = tables[number], [self._fluid[self._group[other]] for other in (*tables[number + 1 :], *fluid)]
        options = self._options[self._group[table]]
        if number and self._group[tables[number - 1]] == self._group[table]:
            options = options[options.index(chosen[-1].option) :]  # equal tables, in the order of their options
        for option in sorted(options, key=lambda option: (self._ways.total[option, 0], option)):
            splits = list(self._splits(option, chosen))
            if not self._plausible(chosen, option, rest, len(splits)):
                continue
            for split in splits:
                if self._aim() <= 0:
                    return True
                if self._ways.asked >= self._most or self._stop():
                    return False
                longer = (*chosen, Chosen(option, split))
                if self._ways.possible(longer, rest, self._aim()) and not self._descend(longer, tables, fluid):
                    return False
        return True

    def _plausible(self, chosen: Sequence[Chosen], option: int, rest: Sequence[Fluid], splits: int) -> bool:
        """Whether an option is possible, wherever its parts are: asked in so far as that is less work."""
        ways, ranks = self._ways, self.encoded.ranks
        total = ways.total[[*(each.option for each in chosen), option]].sum(axis=0)
        for table in rest:
            total = total + table.sizes.min(axis=0)
        if (total > ranks * ways.limits(self._aim())).any():
            return False
        if splits <= 2:
            return True
        return ways.possible(chosen, [*rest, Fluid(ways.base[option], ways.total[[option]])], self._aim())

    def _splits(self, option: int, chosen: Sequence[Chosen]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The ways to share an option's parts among hosts; one of each two where the hosts are still alike."""
        blocks = self.encoded.option_blocks[option]
        alike = all(len(set(shares)) <= 1 for each in chosen for shares in each.split)
        choices = [range(count, -1, -1) if self._ways.on_hosts(block) else (0,) for block, count in blocks]
        for first in product(*choices):
            split = tuple(
                (here, count - here) if self._ways.on_hosts(block) else ()
                for here, (block, count) in zip(first, blocks, strict=True)
            )
            if not alike or split >= tuple(shares[::-1] for shares in split):
                yield split

    def _finish(self, chosen: tuple[Chosen, ...], fluid: Sequence[int]) -> None:
        """Make a plan of what may be of use; and if it still may be, note how good one could be."""
        rest = [self._fluid[self._group[table]] for table in fluid]
        if not self._ways.possible(chosen, rest, self._aim(), whole=True):
            return
        packing = self._packed(chosen, fluid)
        if packing is not None and packing.cost < self._cost:
            self._cost, self._found = packing.cost, packing
        high = self._aim()
        if high <= 0 or not self._ways.possible(chosen, rest, high, whole=True):
            return
        low = float(self._ways.total[[each.option for each in chosen], 0].sum()) / self.encoded.ranks
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._ways.possible(chosen, rest, middle, whole=True):
                high = middle
            else:
                low = middle
        self._open.append((low, chosen))

    def _packed(self, chosen: Sequence[Chosen], small: Sequence[int]) -> Packing | None:
        """A packing of the options chosen, and of the small tables with whichever options suit; None if not found."""
        encoded = self.encoded
        counts = np.bincount([each.option for each in chosen], minlength=len(encoded.options)).astype(np.int64)
        packing = Packing(encoded, counts)
        parts = [
            (block, host)
            for each in chosen
            for (block, count), shares in zip(encoded.option_blocks[each.option], each.split, strict=True)
            for host, share in (enumerate(shares) if shares else [(-1, count)])
            for _ in range(share)
        ]
        limits = self._ways.limits(self._cost)

        def size(part: tuple[int, int]) -> tuple[float, int, int]:
            kind = encoded.blocks[part[0]]
            return -float((self._ways.quantities(kind.loads, kind.memory) / limits).max()), *part

        self._placings = _PLACINGS
        if not packing.fits() or not self._place(packing, sorted(parts, key=size), 0):
            return None
        for table in small:
            added = self._added(packing, self._options[self._group[table]])
            if added is None:
                return None
            packing = added
        packing.improve(_ROUNDS)
        return packing if packing.fits() else None

    def _place(self, packing: Packing, parts: Sequence[tuple[int, int]], number: int) -> bool:
        """Place the parts from a number on, the best places first; what does not fit in the end is taken back."""
        if number == len(parts):
            return True
        block, host = parts[number]
        kind = self.encoded.blocks[block]
        places: Ints = np.arange(len(kind.names))
        if host >= 0:
            places = np.flatnonzero(kind.places[:, 0] // self._ways.ranks == host)
        at = kind.places[places]
        loads, memory = packing.loads[at] + kind.loads, packing.memory[at] + kind.memory
        limits = self.encoded.capacity * (1 + 1e-12)
        fits = np.all(memory <= limits, axis=(1, 2)).tolist()
        full = np.maximum(
            loads.max(axis=1) / self._cost, (memory / np.maximum(limits, 1.0)).max(axis=(1, 2), initial=0.0)
        )
        # Where every rank can hold the same, one of those on a host that would be equal is enough.
        alike, seen = len(self.encoded.reaches) == 1, set()
        for index in np.argsort(full, kind="stable").tolist():
            state = (int(at[index, 0]) // self._ways.ranks, loads[index].tobytes(), memory[index].tobytes())
            if not fits[index] or (alike and state in seen):
                continue
            seen.add(state)
            self._placings -= 1
            if self._placings < 0:
                return False
            packing.put(block, int(places[index]))
            if self._place(packing, parts, number + 1):
                return True
            packing.put(block, int(places[index]), -1)
        return False

    def _added(self, packing: Packing, options: Sequence[int]) -> Packing | None:
        """The packing with one more table, with the option that raises the most loaded rank least."""
        encoded = self.encoded
        best: tuple[float, float] | None = None
        found: Packing | None = None
        for option in options:
            trial = packing.copy()
            trial.counts[option] += 1
            trial.loads += encoded.base_load[option]
            trial.memory += encoded.base_memory[option]
            parts = [block for block, count in encoded.option_blocks[option] for _ in range(count)]
            if all(trial.place_best(block) for block in parts) and trial.fits():
                value = (trial.cost, float(trial.loads.sum()))
                if best is None or value < best:
                    best, found = value, trial
        return found
