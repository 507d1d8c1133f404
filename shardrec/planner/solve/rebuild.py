"""Local search: a few tables are taken off their ranks and put back, each with whichever option suits the moment best.

What is lowered is not the highest load alone but a soft maximum of all ranks' loads,

    sum over ranks of exp(p (load / T - 1)),        T the cost to beat, p its sharpness

which sees every rank that stands in the way, and which is cheap: a piece of load s multiplies the term of its rank by
exp(p s / T), and an option's load on every rank multiplies all of them. So the best ranks of an option's pieces are
those of the least terms, and all the options of a table are compared by one product of a matrix and the sorted terms.
Memory tiers enter in the same way, and as hard limits. Half of the time, a table goes instead where it takes least of
the *value* of the room that is left (:mod:`patterns`), which fills ranks to the brim.

Ruin and recreate is from Schrimpf et al. (2000). The random numbers have a fixed seed: the result is a function of the
problem and of the number of rounds.

Shapes: R ranks, M memory tiers, O options of a table, N most free pieces of one of them, P places of a kind of part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from shardrec.planner.solve.choices import Choices, choices_of
from shardrec.planner.solve.encode import Encoded, Floats
from shardrec.planner.solve.packing import Packing

__all__ = ["Rebuilder"]

_SHARPNESS = (25.0, 120.0)
"""p in the first round and in the last."""
_PATIENCE = 0.02
"""A state that is so much worse, at most, is gone on from; less towards the end."""
_SKIP = 0.03
"""Part of the tables that take their second-best option."""
_TIGHT = 0.75
"""Part of a memory tier that must be full for it to be steered, not just kept."""


@dataclass(eq=False)
class _State:
    """Where everything is: loads and bytes, and each table's option and places."""

    base: float
    base_memory: Floats
    loads: Floats
    memory: Floats
    option: list[int]
    spots: list[tuple[tuple[int, int], ...]]


class Rebuilder:
    """The search.

    Args:
        encoded: the problem.
        value: (G + 1,) of room on a rank, in steps of 1/G.
        seed: of the random numbers.
    """

    def __init__(self, encoded: Encoded, value: Floats, seed: int = 0) -> None:
        self.encoded = encoded
        # Values of sizes that no plan used so far come from knapsacks of others and are low; a part is their share.
        self._value = 0.6 * value + 0.4 * np.linspace(0, 1, len(value))
        self._rng = Random(seed)
        self._limit = encoded.capacity * (1 + 1e-12)
        self._group = [number for number, names in enumerate(encoded.groups) for _ in names]
        self._choices: list[Choices] = []
        self._steered: list[int] = []
        self._reaching: list[set[tuple[int, int]]] = [set() for _ in range(encoded.ranks)]
        """Per rank, the (block, place) that put something on it."""
        for block, kind in enumerate(encoded.blocks):
            for place, ranks in enumerate(kind.names):
                for rank in ranks:
                    self._reaching[rank].add((block, place))

    def run(self, start: Packing, rounds: int, stop: Callable[[], bool], floor: float = 0.0) -> Packing | None:
        """A better packing than one that there is.

        Args:
            start: where to begin.
            rounds: of taking off and putting back.
            stop: asked now and then; ends the search.
            floor: a cost with which to be content.

        Returns:
            The best found; None if nothing is better than ``start``.
        """
        self._choices = [choices_of(self.encoded, span, start.cost) for span in self.encoded.group_options]
        state, cost = self._unpacked(start), start.cost
        best, best_cost, improved = state, cost, False
        for number in range(rounds):
            if best_cost <= floor or (number % 16 == 0 and stop()):
                break
            part = number / rounds
            sharpness = _SHARPNESS[0] * (_SHARPNESS[1] / _SHARPNESS[0]) ** part
            top = min(best_cost, cost)
            before = self._height(state, top, sharpness)
            trial = self._rebuilt(state, top, sharpness)
            if trial is None:
                continue
            after = self._height(trial, top, sharpness)
            # The soft maximum itself, not the sum, so that patience has the same meaning at every sharpness.
            if np.log(after / before) / sharpness <= _PATIENCE * (1 - part) * self._rng.random() ** 2:
                state, cost = trial, _cost(trial)
                if cost < best_cost * (1 - 1e-9):
                    best, best_cost, improved = state, cost, True
        return self._packed(best) if improved else None

    def _rebuilt(self, state: _State, top: float, sharpness: float) -> _State | None:
        """A state in which some tables were taken off and put back; None if one fitted nowhere."""
        chosen = self._ruined(state)
        trial = _State(
            base=state.base,
            base_memory=state.base_memory.copy(),
            loads=state.loads.copy(),
            memory=state.memory.copy(),
            option=state.option.copy(),
            spots=state.spots.copy(),
        )
        for table in chosen:
            self._take(trial, table)
        weight = self.encoded.total_load
        chosen.sort(key=lambda table: -weight[state.option[table]] * (0.8 + 0.4 * self._rng.random()))
        room = top * (1 - 0.02 * self._rng.random() ** 2) - state.base if self._rng.random() < 0.5 else 0.0
        for table in chosen:
            if not (room > 0 and self._fill(trial, table, room)) and not self._put(trial, table, top, sharpness):
                return None
        return trial

    def _ruined(self, state: _State) -> list[int]:
        """Some tables of a highly loaded rank, and of a few others."""
        rng, ranks = self._rng, self.encoded.ranks
        order = np.argsort(-state.loads, kind="stable")
        worst = int(order[0] if rng.random() < 0.7 else order[rng.randrange(min(ranks, 6))])
        others = [int(order[-1 - rng.randrange(max(1, ranks // 3))]) if rng.random() < 0.5 else rng.randrange(ranks)]
        if rng.random() < 0.5:
            others.append(rng.randrange(ranks))
        chosen: list[int] = []
        for rank, most in ((worst, 3), *((other, 2) for other in others)):
            here = [table for table in self._on(state, rank) if table not in chosen]
            rng.shuffle(here)
            chosen += here[: rng.randint(1, most)]
        if rng.random() < 0.3:
            table = rng.randrange(len(state.option))
            chosen += [table] * (table not in chosen)
        return chosen

    def _on(self, state: _State, rank: int) -> list[int]:
        """The tables that hold something on a rank."""
        reaching = self._reaching[rank]
        return [table for table, spots in enumerate(state.spots) if not reaching.isdisjoint(spots)]

    def _take(self, state: _State, table: int) -> None:
        encoded, option = self.encoded, state.option[table]
        state.base -= float(encoded.base_load[option])
        state.base_memory -= encoded.base_memory[option]
        for block, place in state.spots[table]:
            kind = encoded.blocks[block]
            np.subtract.at(state.loads, kind.places[place], kind.loads)
            np.subtract.at(state.memory, kind.places[place], kind.memory)
        state.spots[table] = ()

    def _put(self, state: _State, table: int, top: float, sharpness: float) -> bool:
        """Place a table with the option that adds least; False if none fits."""
        choices = self._choices[self._group[table]]
        factor = sharpness / top
        terms = np.exp(factor * (state.base + state.loads) - sharpness)
        full = [
            np.exp(sharpness * (state.memory[:, t] + state.base_memory[t]) / self._limit[t] - sharpness)
            for t in self._steered
        ]
        height = self._prices(choices, terms, full, factor, sharpness)
        order = np.argsort(height, kind="stable")[:6].tolist()
        if len(order) > 1 and self._rng.random() < _SKIP:
            order[0], order[1] = order[1], order[0]
        for number in order:
            if np.isfinite(height[number]) and self._place(
                state, table, choices.numbers[number], terms, full, factor, sharpness
            ):
                return True
        return (
            any(
                self._place(state, table, choices.numbers[number], terms, full, factor, sharpness)
                for number in np.argsort(
                    choices.base_memory.sum(axis=1) + choices.memory.sum(axis=(0, 2)), kind="stable"
                ).tolist()
            )
            if np.isfinite(self._limit).any()
            else False
        )

    def _fill(self, state: _State, table: int, room: float) -> bool:
        """Place a table where it takes least of the value of the room that is left; False if it has no place there."""
        encoded, choices = self.encoded, self._choices[self._group[table]]
        left = room - state.loads
        scale = (len(self._value) - 1) / room
        now = self._worth(left, scale)
        lost = now[None] - self._worth(left[None] - choices.sizes[:, None], scale)
        lost = np.where(choices.sizes[:, None] <= left[None], lost, np.inf)
        lost[-1] = 0.0
        lost.sort(axis=1)
        price = lost[choices.which, choices.turn].sum(axis=1) + choices.base * (encoded.ranks / room)
        for each in choices.bound:
            there = left[each.places]
            after = there[:, :, None] - each.loads[None]
            losses = (now[each.places][:, :, None] - self._worth(after, scale)).sum(axis=1)
            losses = np.where((after >= 0).all(axis=1), losses, np.inf)
            losses.sort(axis=0)
            losses = losses.cumsum(axis=0)
            extra = losses[each.counts - 1, np.arange(len(each.options))] + np.where(each.rounds > 0, np.inf, 0.0)
            np.add.at(price, each.options, extra)
        order = np.argsort(price, kind="stable")[:5].tolist()
        if len(order) > 1 and self._rng.random() < _SKIP:
            order[0], order[1] = order[1], order[0]
        return any(
            np.isfinite(price[number]) and self._fit(state, table, choices.numbers[number], room) for number in order
        )

    def _worth(self, left: Floats, scale: float) -> Floats:
        found: Floats = self._value[np.clip(left * scale, 0, len(self._value) - 1).astype(np.int64)]
        return found

    def _fit(self, state: _State, table: int, option: int, room: float) -> bool:
        """Place a table with an option, each part where it takes least value."""
        encoded = self.encoded
        base_memory = state.base_memory + encoded.base_memory[option]
        limit = self._limit - base_memory
        if (state.memory > limit).any():
            return False
        loads, memory = state.loads.copy(), state.memory.copy()
        scale = (len(self._value) - 1) / room
        spots: list[tuple[int, int]] = []
        for block, count in encoded.option_blocks[option]:
            kind = encoded.blocks[block]
            for _ in range(count):
                left = room - loads[kind.places]
                after = left - kind.loads
                fits = (after >= 0).all(axis=1) & (memory[kind.places] + kind.memory <= limit).all(axis=(1, 2))
                lost = (self._worth(left, scale) - self._worth(after, scale)).sum(axis=1)
                place = int(np.where(fits, lost, np.inf).argmin())
                if not fits[place]:
                    return False
                np.add.at(loads, kind.places[place], kind.loads)
                np.add.at(memory, kind.places[place], kind.memory)
                spots.append((block, place))
        if (memory > limit).any():
            return False
        state.loads, state.memory, state.base_memory = loads, memory, base_memory
        state.base += float(encoded.base_load[option])
        state.option[table], state.spots[table] = option, tuple(spots)
        return True

    def _prices(
        self, choices: Choices, terms: Floats, full: Sequence[Floats], factor: float, sharpness: float
    ) -> Floats:
        """(O,) the sum that each option leads to, about: its pieces do not see each other on a rank."""
        most = choices.loads.shape[1]
        order = np.argsort(sum(full, terms), kind="stable")[:most]
        added = np.expm1(factor * choices.loads) @ terms[order]
        for tier, values in zip(self._steered, full, strict=True):
            added += np.expm1(sharpness / self._limit[tier] * choices.memory[tier]) @ values[order]
        for each in choices.bound:
            price = terms[each.places] @ np.expm1(factor * each.loads)
            for tier, values in zip(self._steered, full, strict=True):
                price += values[each.places] @ np.expm1(sharpness / self._limit[tier] * each.memory[tier])
            price.sort(axis=0)
            price = price.cumsum(axis=0)
            columns = np.arange(len(each.options))
            np.add.at(added, each.options, price[each.counts - 1, columns] + each.rounds * price[-1])
        height: Floats = np.exp(np.minimum(factor * choices.base, 600.0)) * (terms.sum() + added)
        for tier, values in zip(self._steered, full, strict=True):
            height += np.expm1(sharpness / self._limit[tier] * choices.base_memory[:, tier]) * values.sum()
        return height

    def _place(
        self,
        state: _State,
        table: int,
        option: int,
        terms: Floats,
        full: Sequence[Floats],
        factor: float,
        sharpness: float,
    ) -> bool:
        """Place a table with an option, each part where it adds least; False, and nothing done, if one fits nowhere."""
        encoded = self.encoded
        base_memory = state.base_memory + encoded.base_memory[option]
        room = self._limit - base_memory
        if (state.memory > room).any():
            return False
        terms, full = terms.copy(), [values.copy() for values in full]
        loads, memory = state.loads.copy(), state.memory.copy()
        spots: list[tuple[int, int]] = []
        for block, count in sorted(
            encoded.option_blocks[option], key=lambda item: -float(encoded.blocks[item[0]].loads.max())
        ):
            kind = encoded.blocks[block]
            grow = np.expm1(factor * kind.loads)
            for _ in range(count):
                score = terms[kind.places] @ grow
                for tier, values in zip(self._steered, full, strict=True):
                    score += values[kind.places] @ np.expm1(sharpness / self._limit[tier] * kind.memory[:, tier])
                fits = (memory[kind.places] + kind.memory <= room).all(axis=(1, 2))
                place = int(np.where(fits, score, np.inf).argmin())
                if not fits[place]:
                    return False
                at = kind.places[place]
                np.add.at(loads, at, kind.loads)
                np.add.at(memory, at, kind.memory)
                np.multiply.at(terms, at, grow + 1)
                for tier, values in zip(self._steered, full, strict=True):
                    np.multiply.at(values, at, np.exp(sharpness / self._limit[tier] * kind.memory[:, tier]))
                spots.append((block, place))
        if (memory > room).any():
            return False  # two pieces of a part on one rank
        state.loads, state.memory, state.base_memory = loads, memory, base_memory
        state.base += float(encoded.base_load[option])
        state.option[table], state.spots[table] = option, tuple(spots)
        return True

    def _height(self, state: _State, top: float, sharpness: float) -> float:
        # Far above the aim, how far makes no difference.
        total = float(np.exp(np.minimum(sharpness * ((state.base + state.loads) / top - 1), 600.0)).sum())
        for tier in self._steered:
            total += float(
                np.exp(sharpness * ((state.memory[:, tier] + state.base_memory[tier]) / self._limit[tier] - 1)).sum()
            )
        return total

    def _unpacked(self, packing: Packing) -> _State:
        """The state of a packing: which of equal parts is whose does not matter."""
        encoded = self.encoded
        left = {block: [p for p, n in enumerate(at) for _ in range(int(n))] for block, at in packing.at.items()}
        options: list[int] = []
        spots: list[tuple[tuple[int, int], ...]] = []
        for span in encoded.group_options:
            for option in span:
                for _ in range(int(packing.counts[option])):
                    options.append(option)
                    spots.append(
                        tuple(
                            (block, left[block].pop())
                            for block, count in encoded.option_blocks[option]
                            for _ in range(count)
                        )
                    )
        counts = packing.counts.astype(np.float64)
        base, base_memory = float(counts @ encoded.base_load), counts @ encoded.base_memory
        state = _State(
            base=base,
            base_memory=base_memory,
            loads=packing.loads - base,
            memory=packing.memory - base_memory,
            option=options,
            spots=spots,
        )
        self._steer(state)
        return state

    def _steer(self, state: _State) -> None:
        """Memory tiers that are full enough to matter."""
        used = (state.memory + state.base_memory).max(axis=0)
        self._steered = np.flatnonzero(np.isfinite(self._limit) & (used > _TIGHT * self._limit)).tolist()

    def _packed(self, state: _State) -> Packing | None:
        counts = np.bincount(state.option, minlength=len(self.encoded.options)).astype(np.int64)
        packing = Packing(self.encoded, counts)
        for spots in state.spots:
            for block, place in spots:
                packing.put(block, place)
        return packing if packing.fits() else None


def _cost(state: _State) -> float:
    return state.base + float(state.loads.max())
