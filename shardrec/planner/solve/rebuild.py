"""Large neighbourhood search: a few tables are taken off their ranks and put back, each with whichever option suits.

What is lowered is not the highest load alone but a soft maximum of all ranks' loads,

    sum over ranks of exp(p (load / T - 1)) + w (bytes over the capacity / capacity),

T the least cost so far, p its sharpness, which sees every rank that stands in the way. :mod:`rounds` says what a round
does. The searches go through them in cycles, each longer than the one before, in which p grows and less and less of a
loss is accepted as the next state.

With w very high no state is kept that does not fit memory. In a soft search w is low at the beginning of each cycle and
rises to its end, and so the search crosses the limit to and fro (strategic oscillation: Glover, 1977; with such a
weight: Gendreau, Hertz and Laporte, 1994): next to the limit, what changes one table at a time would have to be over it
on the way.

The random numbers have a fixed seed: the result is a function of the problem and of the number of rounds.

Shapes: C searches, B proposals, N tables, R ranks, M memory tiers, D = 1 + M, G groups, O options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from math import log

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.moves import Batch, Choices, Sharpness
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.rounds import Round
from shardrec.planner.solve.states import States

_SHARPNESS = (60.0, 120.0)
"""p at the beginning of a cycle and at its end, at least."""
_NEAREST = 1e-3
"""Least gain, as a fraction of the cost, that p goes by."""
_STEEPEST_BASE = 200.0
"""Largest exponent of the load on every rank. It is below the exponent at which :mod:`moves` cuts off."""
_PATIENCE = 5e-4
"""The search continues from a state that is worse by at most this. The limit falls towards the end of a cycle."""
_CYCLE = 64
"""Rounds of the first cycle. Each is twice as long as the one before."""
_WEIGHTS = (3.0, 1e4)
"""w at the beginning of a cycle of a soft search and at its end."""
_FORBIDDEN = 1e9
"""w of other searches."""
_LOADS = 16384
"""Loads of ranks that a round works on, about."""
_PROPOSALS = (64, 512)
"""Least and most proposals of a round."""
_BUDGETS = 7
"""Budgets for which tables are packed in one pass, in each order."""
_AT_ONCE = 12
"""Options of a table that are compared in one pass, where the first that fits is wanted."""
_ASKED = 64
"""Tables that are packed between two questions whether to stop."""


class Rebuilder:
    """The search."""

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self._least_cost, memory = _least_with(encoded)
        self._fits = (memory <= encoded.limit).all(axis=1)

    def run(
        self,
        starts: Sequence[Packing],
        most: int,
        stop: Callable[[], bool],
        *,
        floor: float = 0.0,
        seed: int = 0,
        soft: Sequence[bool] = (),
    ) -> list[Packing | None]:
        """Better packings than some that there are, each sought for itself.

        Args:
            starts: where to begin.
            most: proposals for all of them together.
            stop: asked in each round. Ends the search.
            floor: a cost of any with which to be content.
            seed: of the random numbers.
            soft: for each start, whether states in which ranks exceed their memory are allowed on the way. Default: no.

        Returns:
            The best found from each start. None if nothing is better.
        """
        rng, count = np.random.default_rng(seed), len(starts)
        states = States(self.encoded, self.choices_below(max(start.cost for start in starts)), starts)
        softly = np.array([*soft, *[False] * (count - len(soft))])
        each = max(1, min(max(_LOADS // self.encoded.ranks, _PROPOSALS[0]), _PROPOSALS[1]) // count)
        done, first, length = 0, 0, _CYCLE
        while done * each * count < most and states.best.min() > floor and not stop():
            if done == first + length:
                first, length = done, 2 * length
            progress = (done - first) / length
            # The soft maximum is above the highest load by up to log(R) / p: no more than what can be gained.
            gain = np.maximum(1 - floor / np.maximum(states.best, 1e-300), _NEAREST)
            sharper = np.maximum(1.0, log(self.encoded.ranks) / gain / _SHARPNESS[1])
            exponent = sharper * _SHARPNESS[0] * (_SHARPNESS[1] / _SHARPNESS[0]) ** progress
            exponent = np.minimum(exponent, _STEEPEST_BASE * states.best / np.maximum(states.base[:, 0], 1e-12))
            weight = np.where(softly, _WEIGHTS[0] * (_WEIGHTS[1] / _WEIGHTS[0]) ** progress, _FORBIDDEN)
            sharpness = Sharpness(cost=states.best.copy(), exponent=exponent, weight=weight, soft=softly)
            Round(states, sharpness, each, rng).run(exponent * _PATIENCE * (1 - progress) * rng.random(count) ** 2)
            done += 1
        return [states.packing(search) for search in range(count)]

    def multifit(self, budget: float, stop: Callable[[], bool]) -> Iterator[Packing]:
        """First packings, table by table, for smaller and smaller budgets with which each table finds a place.

        Tables that take much of all ranks' budget or memory come first: of the larger of these shares, of both, or of
        memory alone. Each order is packed without a budget first, then for some budgets at once below what that came
        to, and then for as many between the largest that was too small and the smallest that was not.

        Args:
            budget: no packing is looked for in which the items of the most loaded rank come to less.
            stop: asked now and then. Ends the search.
        """
        encoded = self.encoded
        total_load, total_memory = encoded.total[:, 0], encoded.total[:, 1:]
        work = np.minimum.reduceat(total_load, encoded.starts) / max(budget, 1e-300)
        share = (total_memory / np.maximum(encoded.capacity, 1.0)).max(axis=1)
        memory = np.minimum.reduceat(share, encoded.starts)
        sizes = (np.maximum(work, memory), work + memory, memory)
        orders = [np.argsort(-np.repeat(size, encoded.sizes), kind="stable") for size in sizes]
        # More than all options of all tables together: a number, so that what is left of it can be compared.
        unlimited = 1.0 + float(total_load.sum()) * float(encoded.sizes.max())
        tried = [(number, unlimited) for number in range(len(orders))]
        low, high = [budget] * len(orders), [np.inf] * len(orders)
        for _ in range(3):
            if not tried or stop():
                return
            packings = self.pack([orders[number] for number, _ in tried], np.array([each for _, each in tried]), stop)
            for (number, _), packing in zip(tried, packings, strict=False):
                if packing is not None:
                    yield packing
                    high[number] = min(high[number], packing.cost - float(packing.base[0]))
            for (number, limit), packing in zip(tried, packings, strict=False):
                if packing is None and limit < high[number]:
                    low[number] = max(low[number], limit)
            able = [number for number in range(len(orders)) if high[number] < np.inf]
            tried = [(n, low[n] + (high[n] - low[n]) * part / _BUDGETS) for n in able for part in range(_BUDGETS)]

    def pack(self, orders: Sequence[Ints], budgets: Floats, stop: Callable[[], bool]) -> list[Packing | None]:
        """Pack tables one after the other, with options of little work first, on the least loaded ranks.

        What tables yet to come put on every rank at least is kept free.

        Args:
            orders: for each packing, (N,) numbers of the tables, group by group.
            budgets: for each packing, load of the items of a rank.
            stop: asked now and then. Ends the search with no packing.

        Returns:
            The packings. None where a table fits nowhere.
        """
        encoded, choices, count = self.encoded, self.choices_below(np.inf), len(orders)
        least = np.minimum.reduceat(encoded.base, encoded.starts, axis=0)
        load = np.zeros((count, encoded.base.shape[1], encoded.ranks + 1))
        base = np.tile(least[encoded.group].sum(axis=0), (count, 1))
        batch, order = Batch(encoded, load, base), np.stack(orders)
        options = np.zeros(order.shape, dtype=np.int64)
        for step in range(order.shape[1]):
            if not batch.alive.any() or (step % _ASKED == _ASKED - 1 and stop()):
                return [None] * count
            group = encoded.group[order[:, step]]
            batch.base -= least[group]
            considered, filled = choices.options[group, : int(choices.counts[group].max())], np.full(count, -1)
            for first in range(0, considered.shape[1], _AT_ONCE):
                part = np.where((filled < 0)[:, None], considered[:, first : first + _AT_ONCE], -1)
                option = batch.fill(part, budgets, tries=_AT_ONCE, best_fit=False)
                filled = np.where(option >= 0, option, filled)
                if (filled >= 0)[batch.alive].all():
                    break
            options[:, step] = filled
            batch.alive &= options[:, step] >= 0
        placed = batch.placed(np.flatnonzero(batch.alive))
        packings: list[Packing | None] = [None] * count
        for number in np.flatnonzero(batch.alive).tolist():
            counts, mine = np.bincount(options[number], minlength=len(encoded.base)), placed.proposal == number
            gangs = zip(placed.kind[mine].tolist(), placed.place[mine].tolist(), repeat(1))
            packings[number] = Packing.fitting(encoded, counts, gangs)
        return packings

    def choices_below(self, cost: float) -> Choices:
        """The options that a plan of less than a cost can have."""
        # Rounding must not take the options of the plan with this cost, so that each table keeps one.
        return Choices.of(self.encoded, self._fits & (self._least_cost <= cost * (1 + 1e-9)))


def _least_with(encoded: Encoded) -> tuple[Floats, Floats]:
    """(O,) the least cost of a plan that has an option, and (O, M) its least memory of a rank: a bound for each.

    All other tables take their cheapest option. Then all ranks bear the mean of the work, and the one with the option's
    largest item bears what is on every rank and that item.
    """

    def with_each(values: Floats) -> Floats:
        least = np.minimum.reduceat(values, encoded.starts)
        totals: Floats = values - least[encoded.option_group] + encoded.sizes.astype(np.float64) @ least
        return totals

    largest = np.zeros_like(encoded.base)
    np.maximum.at(largest, encoded.item_option, encoded.item_size)
    mean = with_each(encoded.total[:, 0] / encoded.ranks)
    cost = np.maximum(mean, with_each(encoded.base[:, 0]) + largest[:, 0])
    return cost, with_each(encoded.base[:, 1:]) + largest[:, 1:]


def by_memory(encoded: Encoded) -> Encoded:
    """The problem with bytes for loads, as fractions of the capacity of the tier that an item takes most of.

    There are no limits on memory in it. A packing of it whose cost is at most 1 fits memory.
    """

    def shares(sizes: Floats) -> Floats:
        memory = sizes[:, 1:]
        return np.column_stack([(memory / np.maximum(encoded.capacity, 1.0)).max(axis=1), memory])

    return replace(
        encoded,
        capacity=np.full(len(encoded.capacity), np.inf),
        base=shares(encoded.base),
        total=shares(encoded.total),
        item_size=shares(encoded.item_size),
        kinds=tuple(replace(kind, size=shares(kind.size)) for kind in encoded.kinds),
    )
