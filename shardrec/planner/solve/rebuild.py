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
from typing import NamedTuple

import numpy as np

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.rounds import Arrays, Batch, Sharpness, arrays_of, choices

__all__ = ["Rebuilder", "by_memory"]

_SHARPNESS = (60.0, 120.0)
"""p at the beginning of a cycle and at its end, at least."""
_NEAREST = 1e-3
"""Least gain, as a fraction of the cost, that p goes by."""
_STEEPEST_BASE = 200.0
"""Largest exponent of what is on every rank: below that at which :mod:`rounds` cuts exponents off."""
_PATIENCE = 5e-4
"""A state that is so much worse, at most, is gone on from; less towards the end of a cycle."""
_CYCLE = 64
"""Batches of the first cycle; each is twice as long as the one before."""
_WEIGHTS = (3.0, 1e4)
"""w at the beginning of a cycle of a soft search and at its end."""
_FORBIDDEN = 1e9
"""w of other searches."""
_BATCH = 16384
"""Loads of ranks in a batch, about."""
_PROPOSALS = (64, 512)
"""Least and most proposals of a batch."""
_ASKED = 64
"""Tables that are packed between two questions whether to stop."""
_AIM = 0.02
"""How far below the cost, at most, the aim is."""
_TOGETHER = 12
"""Proposals of a state that are taken together, at most."""
_OPTIONS = 8
"""Options of a table that are looked at below an aim."""
_TRIES = 2
"""Of these, the most that are put on to see whether they fit."""
_BUDGETS = 7
"""Budgets for which tables are packed one by one at once, in each order."""


class Rebuilder:
    """The search.

    Args:
        encoded: the problem.
    """

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self._arrays = arrays_of(encoded)
        self._least_cost, memory = _least_with(encoded)
        self._fits = (memory <= encoded.capacity * (1 + 1e-12)).all(axis=1)

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
        rng = np.random.default_rng(seed)
        highest = max(start.cost for start in starts)
        arrays = self._below(highest)
        chains = _Chains(arrays, starts)
        softly = np.array([*soft, *[False] * (len(starts) - len(soft))])
        each = min(max(_BATCH // self.encoded.ranks, _PROPOSALS[0]), _PROPOSALS[1]) // len(starts)
        done, first, length = 0, 0, _CYCLE
        while done * each * len(starts) < most and chains.best.min() > floor and not stop():
            if done == first + length:
                first, length = done, 2 * length
            progress = (done - first) / length
            gain = np.maximum(1 - floor / chains.best, _NEAREST)
            sharper = np.maximum(1.0, log(self.encoded.ranks) / gain / _SHARPNESS[1])
            exponent = sharper * _SHARPNESS[0] * (_SHARPNESS[1] / _SHARPNESS[0]) ** progress
            exponent = np.minimum(exponent, _STEEPEST_BASE * chains.best / np.maximum(chains.base[:, 0], 1e-12))
            weight = np.where(softly, _WEIGHTS[0] * (_WEIGHTS[1] / _WEIGHTS[0]) ** progress, _FORBIDDEN)
            sharpness = Sharpness(cost=chains.best, exponent=exponent, weight=weight, soft=softly)
            patience = exponent * _PATIENCE * (1 - progress) * rng.random(len(starts)) ** 2
            _round(arrays, chains, sharpness, patience, each, rng)
            done += 1
        return [chains.packing(number, self.encoded) for number in range(len(starts))]

    def multifit(self, budget: float, stop: Callable[[], bool]) -> Iterator[Packing]:
        """First packings, table by table, for smaller and smaller budgets with which each table finds a place.

        Tables that take much of all ranks' budget or memory come first: of the larger of these shares, of both, or of
        memory alone.

        Args:
            budget: no packing is looked for in which the items of the most loaded rank come to less.
            stop: asked now and then; ends the search.
        """
        encoded = self.encoded
        starts = [span.start for span in encoded.group_options]
        work = np.minimum.reduceat(encoded.total_load, starts) / max(budget, 1e-300)
        share = (encoded.total_memory / np.maximum(encoded.capacity, 1.0)).max(axis=1)
        memory = np.minimum.reduceat(share, starts)
        sizes = (np.maximum(work, memory), work + memory, memory)
        orders = [np.argsort(-np.repeat(size, encoded.sizes), kind="stable") for size in sizes]
        low, high = np.full(len(orders), budget), np.full(len(orders), np.inf)
        for grid in (np.array([np.inf]), *[np.arange(_BUDGETS) / _BUDGETS] * 2):
            which = np.flatnonzero(np.isinf(grid[0]) | np.isfinite(high))
            if not len(which) or stop():
                return
            tried = np.where(np.isinf(grid), np.inf, low[which, None] + np.where(np.isinf(high), 0, high - low)[which, None] * grid)
            packings = self.pack([orders[number] for number in which for _ in grid], tried.ravel(), stop)
            for number, packing, limit in zip(which.repeat(len(grid)), packings, tried.ravel(), strict=False):
                if packing is not None:
                    yield packing
                    high[number] = min(high[number], packing.cost - packing.base)
            for number, packing, limit in zip(which.repeat(len(grid)), packings, tried.ravel(), strict=False):
                if packing is None and limit < high[number]:
                    low[number] = max(low[number], limit)

    def pack(self, orders: Sequence[Ints], budgets: Floats, stop: Callable[[], bool] = lambda: False) -> list[Packing | None]:
        """Pack tables one after the other, with options of little work first; None if one fits nowhere.

        What tables yet to come put on every rank at least is kept free.

        Args:
            orders: for each packing, (N,) numbers of the tables, group by group.
            budgets: for each packing, load of the items of a rank.
            stop: asked now and then; ends the search without a packing.
        """
        encoded, arrays = self.encoded, self._below(np.inf)
        # A finite budget, so that what is left of it can be compared.
        budgets = np.minimum(budgets, 1.0 + 2.0 * float(encoded.sizes.max()) * float(encoded.total_load.sum()))
        order, count, dims = np.stack(orders), len(orders), arrays.base.shape[1]
        least = np.minimum.reduceat(arrays.base, [span.start for span in encoded.group_options], axis=0)
        base = np.tile(least[arrays.group].sum(axis=0), (count, 1))
        batch = Batch(arrays, np.zeros((count, dims, encoded.ranks + 1)), base, np.random.default_rng(0))
        options = np.zeros(order.shape, dtype=np.int64)
        nothing = np.zeros(count)
        sharpness = Sharpness(cost=nothing, exponent=nothing, weight=nothing, soft=nothing > 0)
        for step in range(order.shape[1]):
            if step % _ASKED == 0 and step and stop():
                return []
            group = arrays.group[order[:, step]]
            batch.base -= least[group]
            most = int(arrays.choices[group].max(initial=1))
            option = batch.fill(arrays.choice[group, :most], sharpness, budgets, tries=most, best_fit=False)
            batch.step += 1
            batch.alive &= option >= 0
            if not batch.alive.any():
                break
            options[:, step] = option
        placed = batch.placed(np.flatnonzero(batch.alive))
        found: list[Packing | None] = []
        for number in range(count):
            packing = None
            if batch.alive[number]:
                packing = Packing(encoded, np.bincount(options[number], minlength=len(encoded.options)))
                mine = placed.proposal == number
                for kind, place in zip(placed.kind[mine].tolist(), placed.place[mine].tolist(), strict=True):
                    packing.put(kind, place)
            found.append(packing if packing is not None and packing.fits() else None)
        return found

    def _below(self, cost: float) -> Arrays:
        """The arrays with those options that a plan of less than a cost can have."""
        # Rounding must not take the options of the plan with this cost, so that each table keeps one.
        able = self._fits & (self._least_cost <= cost * (1 + 1e-9))
        choice, counts = choices(self.encoded, able)
        return replace(self._arrays, choice=choice, choices=counts)


class _Chains:
    """The states of several searches.

    Attributes:
        option: (C, N) of each table.
        load: (C, D, R + 1) of the items.
        base: (C, D) on every rank.
        best: (C,) least cost so far.
        hottest: (C, R) ranks by their load, the highest first.
    """

    def __init__(self, arrays: Arrays, starts: Sequence[Packing]) -> None:
        self.arrays, count, tables = arrays, len(starts), len(arrays.group)
        dims, ranks = arrays.base.shape[1], arrays.ranks
        self.option = np.stack([np.repeat(np.arange(len(start.counts)), start.counts) for start in starts])
        self.gangs: list[list[tuple[Ints, Ints]]] = [_gangs(arrays, start, self.option[c]) for c, start in enumerate(starts)]
        widest = max([1, *(sum(len(arrays.items(k, p)[0]) for k, p in zip(*g)) for each in self.gangs for g in each)])
        self.rank = np.full((count, tables, widest), ranks, dtype=np.int32)
        self.item = np.full((count, tables, widest), len(arrays.size) - 1, dtype=np.int32)
        self.used = np.zeros((count, tables), dtype=np.int64)
        self.load = np.zeros((count, dims, ranks + 1))
        self.base = np.zeros((count, dims))
        self.hottest = np.zeros((count, ranks), dtype=np.int64)
        self.on_first = np.zeros((count, ranks + 2), dtype=np.int64)
        self.on_table: list[Ints] = [np.zeros(0, dtype=np.int64)] * count
        self.best = np.array([start.cost for start in starts])
        self.start = self.best.copy()
        self.found = [(self.option[c].copy(), [*self.gangs[c]]) for c in range(count)]
        for c, start in enumerate(starts):
            self.base[c] = start.counts.astype(np.float64) @ arrays.base
            self.load[c, :, :ranks] = np.column_stack([start.loads, start.memory]).T - self.base[c][:, None]
            for table in range(tables):
                self.lay(c, table, *self.gangs[c][table])
            self.index(c)

    def lay(self, chain: int, table: int, kinds: Ints, places: Ints) -> None:
        """Note where the gangs of a table are."""
        items = [self.arrays.items(kind, place) for kind, place in zip(kinds.tolist(), places.tolist(), strict=True)]
        count = sum(len(ranks) for ranks, _ in items)
        if count > self.rank.shape[2]:
            more = ((0, 0), (0, 0), (0, 2 * count - self.rank.shape[2]))
            self.rank = np.pad(self.rank, more, constant_values=self.arrays.ranks)
            self.item = np.pad(self.item, more, constant_values=len(self.arrays.size) - 1)
        self.rank[chain, table], self.item[chain, table] = self.arrays.ranks, len(self.arrays.size) - 1
        if items:
            self.rank[chain, table, :count] = np.concatenate([ranks for ranks, _ in items])
            self.item[chain, table, :count] = np.concatenate([number for _, number in items])
        self.used[chain, table] = count
        self.gangs[chain][table] = kinds, places

    def index(self, chain: int) -> None:
        """Bring up to date which tables are on which rank."""
        rank = self.rank[chain, :, : int(self.used[chain].max())]
        order = np.argsort(rank, axis=None, kind="stable")
        self.on_table[chain] = order // max(rank.shape[1], 1)
        self.on_first[chain] = np.searchsorted(rank.ravel()[order], np.arange(self.arrays.ranks + 2))
        self.hottest[chain] = np.argsort(-self.load[chain, 0, : self.arrays.ranks])

    def on_rank(self, chain: Ints, rank: Ints, rng: np.random.Generator) -> Ints:
        """(n,) a table on each of these ranks; -1 if there is none."""
        offsets = np.cumsum([0, *map(len, self.on_table)])[:-1]
        first, end = self.on_first[chain, rank], self.on_first[chain, rank + 1]
        index = offsets[chain] + first + (rng.random(len(chain)) * (end - first)).astype(np.int64)
        tables = np.concatenate([*self.on_table, np.zeros(1, dtype=np.int64)])[index]
        return np.where(end > first, tables, -1)

    def take(self, batch: Batch, chain: Ints, tables: Ints) -> None:
        """Take tables, (B, n) with -1 for none, off."""
        proposal, column = np.nonzero(tables >= 0)
        table, of = tables[proposal, column], chain[proposal]
        if len(table):
            most = int(self.used[of, table].max())
            ranks, items = self.rank[of, table, :most], self.item[of, table, :most]
            batch.take(proposal, self.option[of, table], ranks, items)

    def packing(self, chain: int, encoded: Encoded) -> Packing | None:
        if self.best[chain] >= self.start[chain] * (1 - 1e-9):
            return None
        option, gangs = self.found[chain]
        packing = Packing(encoded, np.bincount(option, minlength=len(encoded.options)))
        for kinds, places in gangs:
            for kind, place in zip(kinds.tolist(), places.tolist(), strict=True):
                packing.put(kind, place)
        return packing if packing.fits() else None


class _Step(NamedTuple):
    """One table of each proposal, (B,), and its option; -1 where there is none."""

    table: Ints
    option: Ints


def _round(
    arrays: Arrays, chains: _Chains, sharpness: Sharpness, patience: Floats, each: int, rng: np.random.Generator
) -> None:
    """Make proposals for each state, and go on from the best."""
    count = len(chains.best)
    before = _batch(arrays, chains, np.arange(count), rng)
    chain = np.repeat(np.arange(count), each)
    batch = _batch(arrays, chains, chain, rng)
    sharp = _of(sharpness, chain)
    budget = sharp.cost * (1.0 - _AIM * rng.random(len(chain)) ** 2) - chains.base[chain, 0]
    steps: list[_Step] = []
    if rng.random() < 0.5:
        tables = _varied(arrays, chains, chain, rng)
        option = chains.option[chain[:, None], tables]
        group = arrays.group[tables]
        drawn = (rng.random(tables.shape) * arrays.choices[group]).astype(np.int64)
        option = np.where(rng.random(tables.shape) < 0.5, arrays.choice[group, drawn], option)
        option = np.where(tables >= 0, option, -1)
        chains.take(batch, chain, tables)
        for column in range(tables.shape[1]):
            steps.append(_Step(tables[:, column], option[:, column]))
            batch.alive &= batch.put(option[:, column], sharp) | (tables[:, column] < 0)
            batch.step += 1
        if rng.random() < 0.5:
            hottest = batch.load[:, 0, : arrays.ranks].argmax(axis=1)
            more = [chains.on_rank(chain, hottest, rng) for _ in range(1 + int(3 * rng.random()))]
            extra = _distinct(np.stack([*tables.T, *more], axis=1))[:, tables.shape[1] :]
            _refill(arrays, chains, batch, chain, extra, sharp, budget, steps, rng)
    else:
        _refill(arrays, chains, batch, chain, _ruined(arrays, chains, chain, rng), sharp, budget, steps, rng)
    heights, height = batch.heights(sharp), before.heights(sharpness)
    heights[~batch.alive] = np.inf
    moved = np.stack([step.table for step in steps], axis=1)
    for number in range(count):
        mine = slice(number * each, (number + 1) * each)
        accepted = _accepted(before, batch, number, mine, heights[mine], height[number], patience[number], moved, sharpness, rng)
        if accepted:
            _accept(chains, batch, number, accepted, before, steps)


def _accepted(
    before: Batch,
    batch: Batch,
    number: int,
    mine: slice,
    heights: Floats,
    height: float,
    patience: float,
    moved: Ints,
    sharpness: Sharpness,
    rng: np.random.Generator,
) -> list[int]:
    """The proposals that a state takes: those that together lower its height, or one that does not raise it much."""
    order = np.argsort(heights)[:_TOGETHER]
    order = order[heights[order] < height * (1 - 1e-9)]
    if not len(order):
        near = (heights <= height * np.exp(patience)) & (np.abs(heights / height - 1) > 1e-9)
        worse = np.flatnonzero(near)
        return [mine.start + int(worse[int(rng.random() * len(worse))])] if len(worse) else []
    accepted = [mine.start + int(order[0])]
    load, base, lowest = batch.load[accepted[0]].copy(), batch.base[accepted[0]].copy(), heights[order[0]]
    tables = {*moved[accepted[0]].tolist()} - {-1}
    sharp = _of(sharpness, np.array([number]))
    for proposal in (mine.start + order[1:]).tolist():
        others = {*moved[proposal].tolist()} - {-1}
        if tables & others:
            continue
        both = load + (batch.load[proposal] - before.load[number])
        both_base = base + (batch.base[proposal] - before.base[number])
        together = Batch(batch.arrays, both[None], both_base[None], rng)
        new = float(together.heights(sharp)[0])
        if new < lowest * (1 - 1e-9):
            accepted.append(proposal)
            load, base, lowest, tables = both, both_base, new, tables | others
    return accepted


def _accept(chains: _Chains, batch: Batch, number: int, accepted: list[int], before: Batch, steps: list[_Step]) -> None:
    """Go on from some proposals for a state, of different tables."""
    placed = batch.placed(np.array(accepted))
    load, base = before.load[number], before.base[number]
    chains.load[number] = load + (batch.load[accepted] - load).sum(axis=0)
    chains.base[number] = base + (batch.base[accepted] - base).sum(axis=0)
    for proposal in accepted:
        mine = placed.proposal == proposal
        for step, (table, option) in enumerate(steps):
            if table[proposal] >= 0:
                of = mine & (placed.step == step)
                chains.option[number, table[proposal]] = option[proposal]
                chains.lay(number, int(table[proposal]), placed.kind[of], placed.place[of])
    chains.index(number)
    after = Batch(batch.arrays, chains.load[number : number + 1], chains.base[number : number + 1], batch.rng)
    cost = float(after.costs()[0])
    if cost < chains.best[number] * (1 - 1e-9) and after.excess()[0] <= 0:
        chains.best[number] = cost
        chains.found[number] = chains.option[number].copy(), [*chains.gangs[number]]


def _batch(arrays: Arrays, chains: _Chains, chain: Ints, rng: np.random.Generator) -> Batch:
    return Batch(arrays, chains.load[chain], chains.base[chain], rng)


def _of(sharpness: Sharpness, chain: Ints) -> Sharpness:
    return Sharpness(
        cost=sharpness.cost[chain],
        exponent=sharpness.exponent[chain],
        weight=sharpness.weight[chain],
        soft=sharpness.soft[chain],
    )


def _distinct(tables: Ints) -> Ints:
    """Those that come again in a row are none."""
    for column in range(1, tables.shape[1]):
        again = (tables[:, :column] == tables[:, column, None]).any(axis=1)
        tables[again, column] = -1
    return tables


def _largest_first(arrays: Arrays, chains: _Chains, chain: Ints, tables: Ints, rng: np.random.Generator) -> Ints:
    work = arrays.work[chains.option[chain[:, None], tables]] * rng.uniform(0.8, 1.2, tables.shape)
    order = np.argsort(np.where(tables >= 0, -work, np.inf), axis=1)
    ordered: Ints = np.take_along_axis(tables, order, axis=1)
    return ordered


def _hot(chains: _Chains, chain: Ints, rng: np.random.Generator) -> Ints:
    """A highly loaded rank."""
    index = np.where(rng.random(len(chain)) < 0.7, 0.0, rng.random(len(chain)) ** 2 * chains.hottest.shape[1])
    return chains.hottest[chain, index.astype(np.int64)]


def _varied(arrays: Arrays, chains: _Chains, chain: Ints, rng: np.random.Generator) -> Ints:
    drawn = rng.random()
    most = 1 + (drawn >= 0.5) + (drawn >= 0.85)
    tables = (rng.random((len(chain), most)) * chains.option.shape[1]).astype(np.int64)
    on_hot = chains.on_rank(chain, _hot(chains, chain, rng), rng)
    tables[:, 0] = np.where((rng.random(len(chain)) < 0.5) & (on_hot >= 0), on_hot, tables[:, 0])
    return _largest_first(arrays, chains, chain, _distinct(tables), rng)


def _ruined(arrays: Arrays, chains: _Chains, chain: Ints, rng: np.random.Generator) -> Ints:
    ranks = [_hot(chains, chain, rng)]
    ranks += [
        (rng.random(len(chain)) * arrays.ranks).astype(np.int64) for _ in range(1 + (rng.random() < 0.5))
    ]
    tables = [
        chains.on_rank(chain, rank, rng)
        for number, rank in enumerate(ranks)
        for _ in range(1 + int(rng.random() * (2 if number else 3)))
    ]
    if rng.random() < 0.3:
        tables.append((rng.random(len(chain)) * chains.option.shape[1]).astype(np.int64))
    return _largest_first(arrays, chains, chain, _distinct(np.stack(tables, axis=1)), rng)


def _refill(
    arrays: Arrays,
    chains: _Chains,
    batch: Batch,
    chain: Ints,
    tables: Ints,
    sharpness: Sharpness,
    budget: Floats,
    steps: list[_Step],
    rng: np.random.Generator,
) -> None:
    chains.take(batch, chain, tables)
    for column in range(tables.shape[1]):
        table = tables[:, column]
        group = arrays.group[table]
        drawn = np.sort(rng.random((len(table), _OPTIONS)) ** 2, axis=1)
        options = arrays.choice[group[:, None], (drawn * arrays.choices[group][:, None]).astype(np.int64)]
        option = batch.fill(np.where((table >= 0)[:, None], options, -1), sharpness, budget, tries=_TRIES)
        # What fits nowhere below the aim goes back with the option that it had, wherever that costs least.
        left = (option < 0) & (table >= 0)
        kept = np.where(left, chains.option[chain, table], -1)
        done = batch.put(kept, sharpness)
        batch.alive &= done | ~left
        batch.step += 1
        steps.append(_Step(table, np.where(left, kept, option)))


def _gangs(arrays: Arrays, packing: Packing, option: Ints) -> list[tuple[Ints, Ints]]:
    """Of each table, kinds and places of its gangs; which of equal gangs is whose does not matter."""
    left = {block: np.repeat(np.arange(len(at)), at).tolist() for block, at in packing.at.items()}
    gangs = []
    for each in option.tolist():
        kinds = [
            kind
            for kind, count in zip(arrays.run_kind[each].tolist(), arrays.run_count[each].tolist(), strict=True)
            for _ in range(count)
        ]
        gangs.append((np.array(kinds, dtype=np.int64), np.array([left[k].pop() for k in kinds], dtype=np.int64)))
    return gangs


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
