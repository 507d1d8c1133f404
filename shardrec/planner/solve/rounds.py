"""Rounds of the local search (:mod:`rebuild`), in Python; ``rebuild.cpp`` does the same, operation by operation.

A round takes some tables off their ranks, puts them back, and keeps that or undoes it. There are two kinds:

- One to three tables take options at random, or keep theirs, and go where the soft maximum grows least. In half of
  these rounds, the tables that they share overloaded ranks with go elsewhere then, in the way of the second kind.
- Tables of a highly loaded rank and of one or two others go, one after the other, where they take least of the *value*
  of the room that is left below an aim: all the options of a table are compared, and packed to the brim.

Whatever is random comes as numbers drawn before, (rounds, DRAWS); sums are in order of their terms.

Shapes: as in :mod:`choices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.choices import Choices
from shardrec.planner.solve.encode import Floats, Ints

__all__ = ["DRAWS", "Rounds", "State", "Steep"]

DRAWS = 48
"""Most random numbers of a round."""
_MOST = 1e100
"""Of a term: products of two of them are still finite."""
_OPTIONS = 24
"""Most options of a table that are tried."""
_AIM = 0.02
"""How far below the cost, at most, the aim is."""
_MENDED = 0.5
"""Part of the rounds of the first kind after which overloaded ranks are relieved."""
_EVICTED = 16
"""Most tables that are taken off them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class State:
    """Where everything is, which the rounds change.

    Args:
        sums: (D, R) load and bytes of the pieces.
        base: (D,) what the options put on every rank.
        option: (N,).
        spot: (N, slots) int32, the place of each of its parts.
        on: (R, N) int32, how many pieces of a table are on a rank.
        cost: (2,) now, and the best so far.
        best_option: (N,) of the best; likewise ``best_spot``.
    """

    sums: Floats
    base: Floats
    option: Ints
    spot: NDArray[np.int32]
    on: NDArray[np.int32]
    cost: Floats
    best_option: Ints
    best_spot: NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Steep:
    """How the soft maximum grows, for some rounds.

    Args:
        terms: (R,) exp(factor times load), changed with the state.
        lift: (1,) exp(factor times the load on every rank), likewise.
        grow: (J,) of a rank's term, by each piece, a factor; likewise ``shrink``, 1 / grow.
        rise: (O,) of ``lift``, by each option, a factor; likewise ``fall``, 1 / rise.
        value: (n,) of room on a rank, in even steps up to all of the room below the aim.
    """

    terms: Floats
    lift: Floats
    grow: Floats
    shrink: Floats
    rise: Floats
    fall: Floats
    value: Floats


class Rounds:
    """The rounds.

    Args:
        choices: the problem.
        state: to begin with, changed.
        steep: likewise.
    """

    def __init__(self, choices: Choices, state: State, steep: Steep) -> None:
        self.choices, self.state, self.steep = choices, state, steep
        self._lift, self._terms = float(steep.lift[0]), steep.terms
        self._draws: Iterator[float] = iter(())

    def run(self, draws: Floats, allowed: Floats) -> None:
        """Go through rounds.

        Args:
            draws: (rounds, DRAWS) from [0, 1).
            allowed: (rounds,) by which factor the soft maximum may grow.
        """
        before = self._height()
        for row, factor in zip(draws.tolist(), allowed.tolist(), strict=True):
            self._draws = iter(row)
            before = self._round(before, factor)
        self.steep.lift[0] = self._lift

    def _round(self, before: float, factor: float) -> float:
        """One of them, which leaves the soft maximum that is returned."""
        state = self.state
        random = next(self._draws) < 0.5
        wanted = self._varied() if random else self._ruined()
        kept, lift = (state.sums.copy(), state.base.copy(), self._terms.copy()), self._lift
        undo = [self._take(table) for table, _ in wanted]
        done = not random or all(self._put(table, option, 0.0) for table, option in wanted)
        if not random or (done and next(self._draws) < _MENDED):
            aim = min(float(state.cost[0]), float(state.cost[1])) * (1.0 - _AIM * self._square())
            room = aim - float(state.base[0])
            done = room > 0
            if random and done:
                wanted = self._overloaded(room, wanted)
                undo += [self._take(table) for table, _ in wanted]
            done = done and all(self._fill(table, room) for table, _ in wanted)
        after = self._height()
        if done and after <= before * factor:
            self._keep()
            return after
        state.sums[:], state.base[:], self._terms[:] = kept
        self._lift = lift
        for table, option, spot, on in undo:
            state.option[table], state.spot[table], state.on[:, table] = option, spot, on
        return before

    def _keep(self) -> None:
        state = self.state
        state.cost[0] = state.base[0] + state.sums[0].max()
        if state.cost[0] < state.cost[1] * (1.0 - 1e-9):
            state.cost[1] = state.cost[0]
            state.best_option[:], state.best_spot[:] = state.option, state.spot

    def _below(self, count: int) -> int:
        return min(int(next(self._draws) * count), count - 1)

    def _square(self) -> float:
        drawn = next(self._draws)
        return drawn * drawn

    def _varied(self) -> list[tuple[int, int]]:
        """A few tables and the options that they are to take."""
        choices, state = self.choices, self.state
        drawn = next(self._draws)
        many = 1 + (drawn >= 0.5) + (drawn >= 0.85)
        tables: list[int] = []
        if next(self._draws) < 0.5:
            here = np.flatnonzero(state.on[int(state.sums[0].argmax())])
            if len(here):
                tables.append(int(here[self._below(len(here))]))
        while len(tables) < many:
            table = self._below(len(state.option))
            if table in tables:
                break
            tables.append(table)
        wanted: list[tuple[int, int]] = []
        for table in tables:
            group = int(choices.table_group[table])
            first, last = choices.choice_first[group : group + 2].tolist()
            option = int(state.option[table])
            if next(self._draws) < 0.5:
                option = int(choices.choice[first + self._below(last - first)])
            wanted.append((table, option))
        return self._largest_first(wanted)

    def _ruined(self) -> list[tuple[int, int]]:
        """Some tables of a highly loaded rank, and of a few others, with their options."""
        state, ranks = self.state, self.choices.ranks
        worst = int(state.sums[0].argmax()) if next(self._draws) < 0.7 else self._below(ranks)
        picked = [worst, self._below(ranks)]
        if next(self._draws) < 0.5:
            picked.append(self._below(ranks))
        tables: list[int] = []
        for number, rank in enumerate(picked):
            here = [table for table in np.flatnonzero(state.on[rank]).tolist() if table not in tables]
            many = min(len(here), 1 + self._below(2 if number else 3))
            for index in range(many):
                other = index + self._below(len(here) - index)
                here[index], here[other] = here[other], here[index]
            tables += here[:many]
        if next(self._draws) < 0.3:
            table = self._below(len(state.option))
            tables += [table] * (table not in tables)
        return self._largest_first([(table, int(state.option[table])) for table in tables])

    def _overloaded(self, room: float, but: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The tables of the ranks that have more than there is room for, some left out."""
        state = self.state
        left_out = {table for table, _ in but}
        tables: list[int] = []
        for rank in np.flatnonzero(state.sums[0] > room).tolist():
            here = np.flatnonzero(state.on[rank]).tolist()
            tables += [table for table in here if table not in left_out and table not in tables]
        return self._largest_first([(table, int(state.option[table])) for table in tables[:_EVICTED]])

    def _largest_first(self, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """By work, about."""
        work = [float(self.choices.work[option]) * (0.8 + 0.4 * next(self._draws)) for _, option in wanted]
        return [wanted[number] for number in sorted(range(len(wanted)), key=lambda number: -work[number])]

    def _take(self, table: int) -> tuple[int, int, NDArray[np.int32], NDArray[np.int32]]:
        """Take a table off its ranks; returns it, and its option, places and ranks."""
        choices, state = self.choices, self.state
        option, spot, on = int(state.option[table]), state.spot[table].copy(), state.on[:, table].copy()
        spots = iter(spot.tolist())
        for part in range(*choices.option_first[option : option + 2].tolist()):
            for _ in range(int(choices.part_count[part])):
                self._shift(table, int(choices.part_kind[part]), next(spots), -1)
        state.base[:] -= choices.base[option]
        self._lift = min(self._lift * float(self.steep.fall[option]), _MOST)
        return table, option, spot, on

    def _shift(self, table: int, kind: int, place: int, sign: int) -> None:
        """Add a part at a place, or take it off."""
        choices, state = self.choices, self.state
        ranks = self._places(int(choices.kind_set[kind]))[place]
        pieces = slice(*choices.kind_first[kind : kind + 2].tolist())
        # A place may name a rank twice, so indexed addition would lose one.
        np.add.at(state.on, (ranks, table), sign)
        np.add.at(state.sums.T, ranks, sign * choices.size[pieces])
        np.multiply.at(self._terms, ranks, (self.steep.grow if sign > 0 else self.steep.shrink)[pieces])
        self._terms[ranks] = np.minimum(self._terms[ranks], _MOST)

    def _places(self, number: int) -> Ints:
        """(P, W) ranks of a set of places."""
        choices = self.choices
        first, last = choices.set_first[number : number + 2].tolist()
        return choices.set_ranks[first:last].reshape(-1, int(choices.set_width[number]))

    def _height(self) -> float:
        return self._lift * float(_total(self._terms))

    def _worth(self, left: Floats, scale: float) -> Floats:
        value = self.steep.value
        found: Floats = value[np.clip(left * scale, 0.0, len(value) - 1.0).astype(np.int64)]
        return found

    def _fill(self, table: int, room: float) -> bool:
        """Put a table where it takes least of the value of the room that is left; False if it has no place there."""
        choices = self.choices
        group = int(choices.table_group[table])
        price = self._prices(group, room)
        first = int(choices.choice_first[group])
        return any(
            price[number] < np.inf and self._put(table, int(choices.choice[first + number]), room)
            for number in np.argsort(price, kind="stable")[:_OPTIONS].tolist()
        )

    def _prices(self, group: int, room: float) -> Floats:
        """(C,) the value that each option takes, about: its parts do not see each other on a rank."""
        choices = self.choices
        options = choices.choice[slice(*choices.choice_first[group : group + 2].tolist())]
        level = choices.level[slice(*choices.level_first[group : group + 2].tolist())][:, None]
        left = room - self.state.sums[0]
        scale = (len(self.steep.value) - 1) / room
        lost = np.where(level <= left, self._worth(left, scale) - self._worth(left - level, scale), np.inf)
        # (L + 1, R): the last row is that of no piece.
        least = np.concatenate([np.sort(lost, axis=1), np.zeros((1, choices.ranks))])
        price: Floats = np.zeros(len(options))
        free = slice(*choices.free_first[group : group + 2].tolist())
        levels = choices.free_level[free].reshape(-1, len(options))
        for row, turns in zip(levels, choices.free_turn[free].reshape(-1, len(options)), strict=True):
            price += least[row, turns]
        price += choices.base[options, 0] * (choices.ranks / room)
        for number in range(*choices.bound_first[group : group + 2].tolist()):
            places = self._places(int(choices.bound_set[number]))
            columns = slice(*choices.column_first[number : number + 2].tolist())
            counts = choices.column_count[columns]
            cells = choices.column_level[slice(*choices.cell_first[number : number + 2].tolist())]
            each = _total(lost[cells.reshape(-1, len(counts)).T[:, None], places[None]])
            sums = np.add.accumulate(np.sort(each, axis=1), axis=1)[np.arange(len(counts)), counts - 1]
            np.add.at(price, choices.column_choice[columns], np.where(counts > 0, sums, np.inf))
        return price

    def _put(self, table: int, option: int, room: float) -> bool:
        """Put a table on with an option, each part where it takes least.

        Args:
            table: which is on no rank.
            option: to take.
            room: for pieces, whose value counts; 0: the soft maximum counts.

        Returns:
            Whether there is a place for each part; if not, nothing is done.
        """
        choices, state = self.choices, self.state
        limit = (choices.limit - (state.base + choices.base[option]))[1:, None]
        if (state.sums[1:] > limit).any():
            return False
        spots: list[int] = []
        kinds: list[int] = []
        for part in range(*choices.option_first[option : option + 2].tolist()):
            kind = int(choices.part_kind[part])
            for _ in range(int(choices.part_count[part])):
                place = self._least(kind, limit, room)
                if place >= 0:
                    self._shift(table, kind, place, 1)
                    spots.append(place)
                    kinds.append(kind)
                # Two pieces of a part may be on one rank.
                if place < 0 or (state.sums[1:] > limit).any():
                    for number, place in zip(kinds, spots, strict=True):
                        self._shift(table, number, place, -1)
                    return False
        state.base[:] += choices.base[option]
        self._lift = min(self._lift * float(self.steep.rise[option]), _MOST)
        state.option[table] = option
        state.spot[table, : len(spots)] = spots
        return True

    def _least(self, kind: int, limit: Floats, room: float) -> int:
        """The place where a part takes least; -1 if it fits nowhere."""
        choices, state = self.choices, self.state
        ranks = self._places(int(choices.kind_set[kind]))
        pieces = slice(*choices.kind_first[kind : kind + 2].tolist())
        size = choices.size[pieces]
        fits = np.all(state.sums[1:, ranks] + size.T[1:, None] <= limit[:, None], axis=(0, 2))
        if room > 0:
            left, scale = room - state.sums[0, ranks], (len(self.steep.value) - 1) / room
            after = left - size[:, 0]
            fits &= (after >= 0).all(axis=1)
            score = _total(self._worth(left, scale) - self._worth(after, scale))
        else:
            score = _total(self._terms[ranks] * (self.steep.grow[pieces] - 1.0))
        place = int(np.where(fits, score, np.inf).argmin())
        return place if fits[place] else -1


def _total(values: NDArray[Any]) -> NDArray[Any]:
    """Sum along the last axis, one after the other."""
    found: NDArray[Any] = np.add.accumulate(values, axis=-1)[..., -1]
    return found
