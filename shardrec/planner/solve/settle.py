"""Pieces put where they go over the limits least, and then moved and swapped until nothing is over.

Where memory is nearly full everywhere, putting pieces one by one where they fit ends with some that fit nowhere. Here
they may be over at first. With the quantities of a rank as parts u of what they may be (a cost to aim at, and the
capacity of each tier), what is lowered is

    sum over ranks and quantities of  max(0, u - 1) + w u^2

the first term of which is 0 where everything fits. The second, with a small weight w, keeps ranks alike.

Shapes: R ranks, Q quantities, S kinds of single pieces in use.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.joint import quantities
from shardrec.planner.solve.packing import Packing

__all__ = ["settled"]

_EVEN = 2e-3
"""w."""
_FIRM = 4.0
"""Weight of memory against time: the former is a limit, the latter an aim."""
_LEAST = 1e-9
_WORST = 4
"""Ranks that are over and taken in turn."""
_EASED = (1.0, 1.01, 1.03)
"""The aim is so much higher where memory cannot be had for less."""
_PATIENCE = 150
"""Steps without a new least sum."""
_BARRED = 12
"""Steps for which a piece that left a rank does not come back there."""


def settled(packing: Packing, rest: Mapping[int, int], aim: float, rounds: int) -> bool:
    """Place the rest, and move and swap pieces that may be on any rank; whether all is within memory.

    Args:
        packing: is changed.
        rest: how many parts of each kind are not placed yet.
        aim: the cost to get to.
        rounds: most moves and swaps.
    """
    encoded = packing.encoded
    limit = quantities(encoded, np.array([aim]), encoded.capacity[None])[0]
    _place(packing, rest, limit)
    for factor in _EASED:
        limit[0] = aim * factor
        _Settler(packing, limit).run(rounds)
        if packing.fits():
            return True
    return False


def _place(packing: Packing, rest: Mapping[int, int], limit: Floats) -> None:
    """Parts of several pieces first, then the largest, each where the sum rises least."""
    blocks = packing.encoded.blocks
    sizes = {block: quantities(packing.encoded, blocks[block].loads, blocks[block].memory) / limit for block in rest}
    used = quantities(packing.encoded, packing.loads, packing.memory) / limit
    for block in sorted(rest, key=lambda block: (blocks[block].single, -float(sizes[block].max()), block)):
        places = blocks[block].places
        for _ in range(rest[block]):
            there = used[places]
            place = int((_height(there + sizes[block]) - _height(there)).sum(axis=1).argmin())
            np.add.at(used, places[place], sizes[block])
            packing.put(block, place)


def _height(used: Floats) -> Floats:
    """(...) of quantities (..., Q)."""
    over = np.maximum(used - 1, 0.0)
    found: Floats = over[..., 0] + _FIRM * over[..., 1:].sum(axis=-1) + _EVEN * (used**2).sum(axis=-1)
    return found


class _Settler:
    """A packing's kinds of pieces that may be on any rank, as matrices."""

    def __init__(self, packing: Packing, limit: Floats) -> None:
        encoded = self.encoded = packing.encoded
        self.packing, self.limit = packing, limit
        blocks = encoded.blocks
        self.kinds = [
            block for block in sorted(packing.at) if blocks[block].single and len(blocks[block].names) == encoded.ranks
        ]
        self.sizes: Floats = np.zeros((len(self.kinds), len(limit)))
        self.place: Ints = np.zeros((len(self.kinds), encoded.ranks), dtype=np.int64)
        self.count: Ints = np.zeros((len(self.kinds), encoded.ranks), dtype=np.int64)
        for row, block in enumerate(self.kinds):
            kind, ranks = blocks[block], blocks[block].places[:, 0]
            self.sizes[row] = quantities(encoded, kind.loads, kind.memory)[0] / limit
            self.place[row, ranks] = np.arange(len(ranks))
            self.count[row, ranks] = packing.at[block]
        self.used = quantities(encoded, packing.loads, packing.memory) / limit

    def run(self, rounds: int) -> None:
        """Lower the sum until nothing is over, with steps that raise it where none lowers it; end with the least."""
        barred: Ints = np.full(self.count.shape, -1, dtype=np.int64)
        least, best, best_number = np.inf, self.count.copy(), 0
        for number in range(rounds):
            over = np.maximum(self.used - 1 - _LEAST, 0.0)
            over[:, 1:] *= _FIRM
            height = float(over.sum())
            if height < least - _LEAST:
                least, best, best_number = height, self.count.copy(), number
            if height <= 0 or number - best_number > _PATIENCE:
                break
            worst = np.argsort(-over.sum(axis=1), kind="stable")[: min(_WORST, int((over.sum(axis=1) > 0).sum()))]
            self._step(int(worst[(number - best_number) % len(worst)]), barred, number)
        for kind, rank in zip(*np.nonzero(best != self.count), strict=True):
            block, more = self.kinds[kind], int(best[kind, rank] - self.count[kind, rank])
            self.packing.put(block, int(self.place[kind, rank]), more)

    def _step(self, worst: int, barred: Ints, number: int) -> None:
        """The best move of a piece off a rank, or swap of one for another's."""
        here = np.flatnonzero(self.count[:, worst])
        if not len(here):
            return
        now = _height(self.used)
        size = self.sizes[here]
        moved = (_height(self.used[worst] - size) - now[worst])[:, None]
        moved = moved + _height(self.used[None] + size[:, None]) - now[None]  # (h, R)
        moved[barred[here] > number] = np.inf
        moved[:, worst] = np.inf
        kinds, ranks = np.nonzero(self.count)
        others = (ranks != worst) & (barred[kinds, worst] <= number)
        kinds, ranks = kinds[others], ranks[others]
        delta = size[:, None] - self.sizes[kinds][None]  # (h, pairs, Q)
        swapped = _height(self.used[worst] - delta) - now[worst]
        swapped += _height(self.used[ranks][None] + delta) - now[ranks][None]
        swapped[(barred[here][:, ranks] > number) | (here[:, None] == kinds[None])] = np.inf
        best, other = float(moved.min()), float(swapped.min(initial=np.inf))
        if not np.isfinite(min(best, other)):
            return
        row, at = divmod(
            int((moved if best <= other else swapped).argmin()), moved.shape[1] if best <= other else len(kinds)
        )
        there = at if best <= other else int(ranks[at])
        self._shift(int(here[row]), worst, there)
        barred[here[row], worst] = number + _BARRED
        if best > other:
            self._shift(int(kinds[at]), there, worst)
            barred[kinds[at], there] = number + _BARRED

    def _shift(self, kind: int, source: int, target: int) -> None:
        block = self.kinds[kind]
        self.packing.put(block, int(self.place[kind, source]), -1)
        self.packing.put(block, int(self.place[kind, target]), 1)
        self.count[kind, source] -= 1
        self.count[kind, target] += 1
        self.used[source] -= self.sizes[kind]
        self.used[target] += self.sizes[kind]
