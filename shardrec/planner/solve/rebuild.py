"""Large neighbourhood search: a few tables are taken off their ranks and put back, each with whichever option suits.

What is lowered is not the highest load alone but a soft maximum of all ranks' loads,

    sum over ranks of exp(p (load / T - 1)) + w (bytes over the capacity / capacity),

T the least cost so far, p its sharpness, which sees every rank that stands in the way. :mod:`rounds` says what a round
does; the search goes through them in cycles, each longer than the one before, in which p grows and less and less of a
loss is gone on from.

With w very high no state is kept that does not fit memory. In a soft search w is low at the beginning of each cycle and
rises to its end, and so the search crosses the limit to and fro (strategic oscillation: Glover, 1977; with such a
weight: Gendreau, Hertz and Laporte, 1994): next to the limit, what changes one table at a time would have to be over it
on the way.

The random numbers have a fixed seed: the result is a function of the problem and of the number of rounds.

Shapes: as in :mod:`rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log

import numpy as np

from shardrec.planner.solve.clock import Clock
from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.rounds import Arrays, State, Undo, pack, rounds

__all__ = ["Rebuilder", "by_memory"]

_SHARPNESS = (60.0, 120.0)
"""p at the beginning of a cycle and at its end, at least."""
_NEAREST = 1e-3
"""Least gain, as a fraction of the cost, that p goes by."""
_STEEPEST_BASE = 200.0
"""Largest exponent of what is on every rank: below that at which :mod:`rounds` cuts exponents off."""
_PATIENCE = 5e-4
"""A state that is so much worse, at most, is gone on from; less towards the end of a cycle."""
_CYCLE = 1024
"""Rounds of the first cycle; each is twice as long as the one before."""
_WEIGHTS = (3.0, 1e4)
"""w at the beginning of a cycle of a soft search and at its end."""
_FORBIDDEN = 1e9
"""w of other searches."""
_PACKINGS = 8
"""Budgets for which tables are packed one by one, in each order."""
_BATCH = 128
"""Rounds between two questions whether to stop."""


class Rebuilder:
    """The search.

    Args:
        encoded: the problem.
        clock: does not count the seconds that it takes to compile the rounds, once on a machine; default: nothing does.
    """

    def __init__(self, encoded: Encoded, clock: Clock | None = None) -> None:
        self.encoded = encoded
        self._arrays = _arrays(encoded)
        self._least_cost, memory = _least_with(encoded)
        self._fits = (memory <= encoded.capacity * (1 + 1e-12)).all(axis=1)
        if clock is not None:
            clock.uncounted(self._compile)

    def run(
        self,
        start: Packing,
        most: int,
        stop: Callable[[], bool],
        *,
        floor: float = 0.0,
        seed: int = 0,
        soft: bool = False,
    ) -> Packing | None:
        """A better packing than one that there is.

        Args:
            start: where to begin.
            most: rounds of taking off and putting back.
            stop: asked now and then; ends the search.
            floor: a cost with which to be content.
            seed: of the random numbers.
            soft: go through states in which ranks are over their memory, too.

        Returns:
            The best found; None if nothing is better than ``start``.
        """
        rng = np.random.default_rng(seed)
        arrays, state, undo = self._below(start.cost), *_unpacked(self._arrays, start)
        done, first, length = 0, 0, _CYCLE
        while done < most and state.cost[1] > floor and not stop():
            if done == first + length:
                first, length = done, 2 * length
            batch = min(_BATCH, most - done, first + length - done)
            progress = (done - first) / length
            # The soft maximum is above the highest load by up to log(R) / p: no more than what can be gained.
            gain = max(1 - floor / state.cost[1], _NEAREST)
            sharper = max(1.0, log(self.encoded.ranks) / gain / _SHARPNESS[1])
            sharpness = sharper * _SHARPNESS[0] * (_SHARPNESS[1] / _SHARPNESS[0]) ** progress
            sharpness = min(sharpness, _STEEPEST_BASE * state.cost[1] / max(state.base[0], 1e-12))
            weight = _WEIGHTS[0] * (_WEIGHTS[1] / _WEIGHTS[0]) ** progress if soft else _FORBIDDEN
            state.steep[:] = sharpness / state.cost[1], sharpness, weight
            rounds(arrays, state, undo, rng, sharpness * _PATIENCE * (1 - progress) * rng.random(batch) ** 2)
            done += batch
        return _packed(arrays, state, self.encoded) if state.cost[1] < start.cost * (1 - 1e-9) else None

    def multifit(self, budget: float, stop: Callable[[], bool]) -> Iterator[Packing]:
        """First packings, table by table, for smaller and smaller budgets with which each table finds a place.

        Tables that take much of all ranks' budget or memory come first: of the larger of these shares, of both, or of
        memory alone.

        Args:
            budget: no packing is looked for in which the items of the most loaded rank come to less.
            stop: asked between two packings; ends the search.
        """
        encoded = self.encoded
        starts = [span.start for span in encoded.group_options]
        work = np.minimum.reduceat(encoded.total_load, starts) / max(budget, 1e-300)
        share = (encoded.total_memory / np.maximum(encoded.capacity, 1.0)).max(axis=1)
        memory = np.minimum.reduceat(share, starts)
        for size in (np.maximum(work, memory), work + memory, memory):
            order = np.argsort(-np.repeat(size, encoded.sizes), kind="stable")
            low, high, tried = budget, np.inf, np.inf
            for _ in range(_PACKINGS):
                packing = self.pack(order, tried)
                if packing is not None:
                    yield packing
                    high = packing.cost - packing.base
                elif tried == np.inf:
                    break
                else:
                    low = tried
                if stop():
                    return
                tried = (low + high) / 2

    def pack(self, order: Ints, budget: float) -> Packing | None:
        """Pack tables one after the other, with options of little work first; None if one fits nowhere.

        Args:
            order: (N,) numbers of the tables, group by group.
            budget: load of the items of a rank.
        """
        encoded, arrays = self.encoded, self._below(np.inf)
        state, _ = _unpacked(arrays, Packing(encoded, np.zeros(len(encoded.options), dtype=np.int64)))
        slots = int(np.diff(arrays.option_first).max())
        option, spot = np.zeros(len(order), dtype=np.int64), np.zeros((len(order), max(1, slots)), dtype=np.int32)
        on = np.zeros((encoded.ranks, len(order)), dtype=np.int32)
        state = state._replace(option=option, spot=spot, on=on, best_option=option, best_spot=spot)
        least = np.minimum.reduceat(arrays.base, [span.start for span in encoded.group_options], axis=0)
        done = pack(arrays, state, np.random.default_rng(0), order, least, budget)
        return _packed(arrays, state, encoded) if done == len(order) else None

    def _compile(self) -> None:
        start = Packing(self.encoded, np.zeros(len(self.encoded.options), dtype=np.int64))
        rounds(self._below(np.inf), *_unpacked(self._arrays, start), np.random.default_rng(0), np.zeros(0))
        self.pack(np.zeros(0, dtype=np.int64), np.inf)

    def _below(self, cost: float) -> Arrays:
        """The arrays with those options that a plan of less than a cost can have."""
        # Rounding must not take the options of the plan with this cost, so that each table keeps one.
        able = self._fits & (self._least_cost <= cost * (1 + 1e-9))
        choice = self._arrays.choice[able[self._arrays.choice]]
        groups = np.arange(len(self.encoded.groups) + 1)
        return self._arrays._replace(
            choice=choice, choice_first=np.searchsorted(self.encoded.option_group[choice], groups)
        )


def _least_with(encoded: Encoded) -> tuple[Floats, Floats]:
    """(O,) the least cost of a plan that has an option, and (O, M) its least memory of a rank: a bound for each.

    All other tables take what does least; then all ranks bear the mean of the work, and the one with the option's
    largest item bears what is on every rank and that item.
    """
    starts, option_group = [span.start for span in encoded.group_options], encoded.option_group

    def with_each(values: Floats) -> Floats:
        least = np.minimum.reduceat(values, starts)
        found: Floats = values - least[option_group] + encoded.sizes.astype(np.float64) @ least
        return found

    load, memory = np.zeros(len(option_group)), np.zeros_like(encoded.base_memory)
    np.maximum.at(load, encoded.item_option, encoded.item_load)
    np.maximum.at(memory, encoded.item_option, encoded.item_memory)
    mean = with_each(encoded.total_load / encoded.ranks)
    return np.maximum(mean, with_each(encoded.base_load) + load), with_each(encoded.base_memory) + memory


def by_memory(encoded: Encoded) -> Encoded:
    """The problem with bytes for loads, as fractions of the capacity of the tier that an item takes most of.

    There are no limits on memory in it. A packing of it whose cost is at most 1 fits memory.
    """

    def share(memory: Floats) -> Floats:
        found: Floats = (memory / np.maximum(encoded.capacity, 1.0)).max(axis=-1)
        return found

    return replace(
        encoded,
        capacity=np.full(len(encoded.capacity), np.inf),
        base_load=share(encoded.base_memory),
        total_load=share(encoded.total_memory),
        item_load=share(encoded.item_memory),
        blocks=tuple(replace(block, loads=share(block.memory)) for block in encoded.blocks),
    )


def _arrays(encoded: Encoded) -> Arrays:
    """The arrays of a problem, with all options."""
    sets: dict[int, int] = {}
    places: list[Ints] = []
    for kind in encoded.blocks:
        if sets.setdefault(id(kind.names), len(places)) == len(places):
            places.append(kind.places)
    largest = [-float(kind.loads.max()) for kind in encoded.blocks]
    gangs = [
        [block for block, count in sorted(blocks, key=lambda each: largest[each[0]]) for _ in range(count)]
        for blocks in encoded.option_blocks
    ]
    sizes = [np.column_stack([kind.loads, kind.memory]) for kind in encoded.blocks]
    return Arrays(
        limit=np.append(np.inf, encoded.capacity * (1 + 1e-12)),
        group=np.repeat(np.arange(len(encoded.groups)), encoded.sizes),
        set_first=_firsts([each.size for each in places]),
        set_width=np.array([each.shape[1] for each in places], dtype=np.int64),
        set_ranks=_joined(places),
        kind_set=np.array([sets[id(kind.names)] for kind in encoded.blocks], dtype=np.int64),
        kind_first=_firsts([len(kind.loads) for kind in encoded.blocks]),
        size=np.concatenate([np.zeros((0, 1 + len(encoded.capacity))), *sizes]),
        option_first=_firsts([len(each) for each in gangs]),
        gang_kind=np.array([block for each in gangs for block in each], dtype=np.int64),
        base=np.column_stack([encoded.base_load, encoded.base_memory]),
        work=encoded.total_load,
        choice_first=np.zeros(0, dtype=np.int64),
        choice=np.lexsort((encoded.total_load, encoded.option_group)),
    )


def _firsts(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64))]).astype(np.int64)


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(array.ravel() for array in arrays)]).astype(np.int64)


def _unpacked(arrays: Arrays, packing: Packing) -> tuple[State, Undo]:
    """The state of a packing, which of equal gangs is whose does not matter, and room for what rounds undo."""
    encoded, first = packing.encoded, arrays.option_first
    left = {block: [p for p, n in enumerate(at) for _ in range(int(n))] for block, at in packing.at.items()}
    option = np.repeat(np.arange(len(packing.counts)), packing.counts)
    spot = np.zeros((len(option), max(1, int(np.diff(first).max()))), dtype=np.int32)
    on = np.zeros((encoded.ranks, len(option)), dtype=np.int32)
    for table, each in enumerate(option.tolist()):
        for slot, block in enumerate(arrays.gang_kind[first[each] : first[each + 1]].tolist()):
            place = spot[table, slot] = left[block].pop()
            np.add.at(on, (encoded.blocks[block].places[place], table), 1)
    base = packing.counts.astype(np.float64) @ arrays.base
    state = State(
        sums=np.ascontiguousarray(np.column_stack([packing.loads, packing.memory]).T - base[:, None]),
        base=base,
        option=option,
        spot=spot,
        on=on,
        cost=np.full(2, packing.cost),
        best_option=option.copy(),
        best_spot=spot.copy(),
        terms=np.zeros(encoded.ranks),
        steep=np.ones(3),
    )
    undo = Undo(
        tables=np.zeros_like(option),
        chosen=np.zeros_like(option),
        keys=np.zeros(len(option)),
        sums=np.zeros_like(state.sums),
        base=np.zeros_like(base),
        option=np.zeros_like(option),
        spot=np.zeros_like(spot),
    )
    return state, undo


def _packed(arrays: Arrays, state: State, encoded: Encoded) -> Packing | None:
    first = arrays.option_first
    packing = Packing(encoded, np.bincount(state.best_option, minlength=len(encoded.options)))
    for option, spots in zip(state.best_option.tolist(), state.best_spot.tolist(), strict=True):
        for block, place in zip(arrays.gang_kind[first[option] : first[option + 1]].tolist(), spots, strict=False):
            packing.put(block, place)
    return packing if packing.fits() else None
