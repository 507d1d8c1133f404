"""Rounds of the large neighbourhood search (:mod:`rebuild`).

A round makes many proposals per state. Each takes some tables off their ranks and puts them back:

- One to three tables take options at random, or keep theirs, and go where the soft maximum, with what is over the
  memory, grows least. In half of these rounds, tables of the rank that then is fullest, or has most load, are put back
  in the second way (an ejection chain).
- Tables of a highly loaded rank and of one or two others are packed below an aim: each takes the first option that
  fits, of some with little work, and its gangs go where they leave the least budget over. What fits nowhere goes back
  with the option that it had.

Of the proposals that lower the height of a state, those are taken that do so together: loads add up, so proposals of
different tables need only be added. Where no proposal does, the search may continue from one that is not much higher.

Ruin and recreate is from Schrimpf et al. (2000).

Shapes: B proposals, C searches, R ranks, D dimensions of a size, K tables of a proposal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardrec.planner.solve.encode import Bools, Floats, Ints
from shardrec.planner.solve.moves import Batch, Sharpness
from shardrec.planner.solve.states import Gangs, States

_AIM = 0.02
"""How far below the cost, at most, the aim is."""
_WHOLE = (0.05, 16)
"""How often tables of many ranks are taken off, and how many at most."""
_OPTIONS = 8
"""Options of a table that are looked at below an aim."""
_TRIES = 2
"""Of these, the most that are put on to see whether they fit."""
_TOGETHER = 12
"""Proposals of a state that are taken together, at most."""
_RELIEVED = 0.5
"""Share of the rounds of the first kind after which the rank that is fullest, or has most load, is relieved."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A table per proposal and the option that it took, (B,). -1 for none."""

    table: Ints
    option: Ints


class Round:
    """One round."""

    def __init__(self, states: States, sharpness: Sharpness, proposals: int, rng: np.random.Generator) -> None:
        self.states, self.encoded, self.rng, self.proposals = states, states.encoded, rng, proposals
        self.search = np.repeat(np.arange(len(states.best)), proposals)
        self.batch = states.batch(self.search)
        self.of_states, self.sharpness = sharpness, sharpness[self.search]
        self.budget = self.sharpness.cost * (1.0 - _AIM * self._random() ** 2) - self.batch.base[:, 0]
        self.steps: list[_Step] = []

    def run(self, patience: Floats) -> None:
        """Make the proposals and continue from the best.

        Args:
            patience: (C,) by how much the logarithm of a state's height may grow.
        """
        if self.rng.random() < 0.5:
            self._vary()
        else:
            self._refill(self._ruined())
        before = self.states.batch(np.arange(len(patience)))
        heights = np.where(self.batch.alive, self.batch.heights(self.sharpness), np.inf)
        moved = np.stack([step.table for step in self.steps], axis=1)
        for search, height in enumerate(before.heights(self.of_states).tolist()):
            first = search * self.proposals
            of_search = heights[first : first + self.proposals]
            order = first + np.argsort(of_search)[:_TOGETHER]
            order = order[heights[order] < height * (1 - 1e-9)]
            if not len(order):
                near = (of_search <= height * np.exp(patience[search])) & (np.abs(of_search / height - 1) > 1e-9)
                order = first + self.rng.permutation(np.flatnonzero(near))[:1]
            if len(order):
                self._accept(search, order.tolist(), heights, moved)

    def _vary(self) -> None:
        """Give a few tables other options, or other ranks."""
        states, drawn = self.states, self.rng.random()
        tables = self._some((len(self.search), 1 + (drawn >= 0.5) + (drawn >= 0.85)), states.option.shape[1])
        on_hot = states.on_rank(self.search, self._hot(), self.rng)
        tables[:, 0] = np.where((self._random() < 0.5) & (on_hot >= 0), on_hot, tables[:, 0])
        tables = self._largest_first(_distinct(tables))
        group, choices = self.encoded.group[tables], states.choices
        other = choices.options[group, (self.rng.random(tables.shape) * choices.counts[group]).astype(np.int64)]
        option = np.where(self.rng.random(tables.shape) < 0.5, other, states.option[self.search[:, None], tables])
        states.take(self.batch, self.search, tables)
        for table, chosen in zip(tables.T, np.where(tables >= 0, option, -1).T, strict=True):
            self._step(table, chosen, self.batch.put(chosen, self.sharpness))
        if self.rng.random() < _RELIEVED:
            excess = self.batch.rank_excess()
            full = excess.max(axis=1, keepdims=True) > 0
            worst = np.where(full, excess, self.batch.load[:, 0, : self.encoded.ranks]).argmax(axis=1)
            others = [states.on_rank(self.search, worst, self.rng) for _ in range(1 + int(3 * self.rng.random()))]
            self._refill(_distinct(np.stack([*tables.T, *others], axis=1))[:, tables.shape[1] :])

    def _ruined(self) -> Ints:
        """(B, K) tables of a highly loaded rank and of one or two others, or now and then of many ranks."""
        if self._coin(_WHOLE[0]):
            first, picked = self._hot(), np.exp(self._random() * np.log(self.encoded.ranks + 1.0)).astype(np.int64)
            columns = min(_WHOLE[1], self.states.option.shape[1])
            ranks = [(first + (self._random() * picked).astype(np.int64)) % self.encoded.ranks for _ in range(columns)]
            tables = [self.states.on_rank(self.search, rank, self.rng) for rank in ranks]
            return self._largest_first(_distinct(np.stack(tables, axis=1)))
        ranks = [
            self._hot(),
            *(self._some((len(self.search),), self.encoded.ranks) for _ in range(1 + self._coin(0.5))),
        ]
        tables = [
            self.states.on_rank(self.search, rank, self.rng)
            for number, rank in enumerate(ranks)
            for _ in range(1 + int(self.rng.random() * (2 if number else 3)))
        ]
        if self._coin(0.3):
            tables.append(self._some((len(self.search),), self.states.option.shape[1]))
        return self._largest_first(_distinct(np.stack(tables, axis=1)))

    def _refill(self, tables: Ints) -> None:
        """Take tables, (B, K), off and pack them below the aim."""
        states, choices = self.states, self.states.choices
        states.take(self.batch, self.search, tables)
        for table in tables.T:
            group = self.encoded.group[table]
            drawn = np.sort(self.rng.random((len(table), _OPTIONS)) ** 2, axis=1) * choices.counts[group][:, None]
            options = np.where((table >= 0)[:, None], choices.options[group[:, None], drawn.astype(np.int64)], -1)
            option = self.batch.fill(options, self.budget, tries=_TRIES)
            left = np.where((option < 0) & (table >= 0), states.option[self.search, table], -1)
            done = self.batch.put(left, self.sharpness) | (option >= 0)
            self._step(table, np.maximum(option, left), done)

    def _step(self, table: Ints, option: Ints, done: Bools) -> None:
        self.batch.alive &= done | (table < 0)
        self.batch.step += 1
        self.steps.append(_Step(table=table, option=option))

    def _accept(self, search: int, order: list[int], heights: Floats, moved: Ints) -> None:
        """Take the first of some proposals, and those that lower the height further together with it."""
        states, batch = self.states, self.batch
        old_load, old_base = states.load[search], states.base[search]
        accepted, lowest = order[:1], heights[order[0]]
        load, base = batch.load[order[0]].copy(), batch.base[order[0]].copy()
        tables, sharpness = {*moved[order[0]].tolist()} - {-1}, self.of_states[np.array([search])]
        for proposal in order[1:]:
            others = {*moved[proposal].tolist()} - {-1}
            if tables & others:
                continue
            sums = load + (batch.load[proposal] - old_load), base + (batch.base[proposal] - old_base)
            height = float(Batch(self.encoded, sums[0][None], sums[1][None]).heights(sharpness)[0])
            if height < lowest * (1 - 1e-9):
                (load, base), lowest, tables = sums, height, tables | others
                accepted.append(proposal)
        placed = batch.placed(np.array(accepted))
        gangs: dict[int, tuple[int, Gangs]] = {}
        for proposal in accepted:
            for number, step in enumerate(self.steps):
                if (table := int(step.table[proposal])) >= 0:
                    mine = (placed.proposal == proposal) & (placed.step == number)
                    gangs[table] = int(step.option[proposal]), (placed.kind[mine], placed.place[mine])
        states.move(search, load, base, gangs)

    def _hot(self) -> Ints:
        """(B,) the rank with most load, or another with much."""
        index = np.where(self._random() < 0.7, 0.0, self._random() ** 2 * self.encoded.ranks)
        return self.states.hottest[self.search, index.astype(np.int64)]

    def _largest_first(self, tables: Ints) -> Ints:
        """The tables of each proposal, approximately by their work."""
        work = self.encoded.total[self.states.option[self.search[:, None], tables], 0]
        order = np.argsort(np.where(tables >= 0, -work * self.rng.uniform(0.8, 1.2, tables.shape), np.inf), axis=1)
        ordered: Ints = np.take_along_axis(tables, order, axis=1)
        return ordered

    def _random(self) -> Floats:
        return self.rng.random(len(self.search))

    def _some(self, shape: tuple[int, ...], count: int) -> Ints:
        return (self.rng.random(shape) * count).astype(np.int64)

    def _coin(self, share: float) -> bool:
        return bool(self.rng.random() < share)


def _distinct(tables: Ints) -> Ints:
    """(B, K) the same, with -1 for a table that comes again in its row."""
    for column in range(1, tables.shape[1]):
        tables[(tables[:, :column] == tables[:, column, None]).any(axis=1), column] = -1
    return tables
