"""Gap closed by enumeration: of options and ways, all that a better plan could have, chosen in whole numbers.

Asked for is a proof that no plan costs less than a target, or one that does. For a box of rooms and its prices
(:mod:`cells`), a plan below the target has a load on every rank within some *budget* of the bound. Each of its options
may cost that much more than its table's best, and each of its ways that much less than the room is worth, and no more:
what costs more is in no such plan (reduced costs). What is left is few where the box is small and the bound is near.
All of it goes into one integer programme, which has no solution, and the box is closed, however weak its bound was, or
has one, and its options are tried.

Only ways that cannot have another or a larger piece are listed; a piece may take a larger one's place.

The idea is from vehicle routing: Baldacci, Christofides and Mingozzi, "An exact algorithm for the vehicle routing
problem based on the set partitioning formulation with additional cuts" (2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest

import numpy as np

from shardrec.planner.solve.alike import Alike
from shardrec.planner.solve.cells import SHARED, Box, Cells, Prices
from shardrec.planner.solve.clock import AT_ONCE, Clock
from shardrec.planner.solve.encode import Encoded, Ints
from shardrec.planner.solve.fillings import Kind, fillings
from shardrec.planner.solve.integer import Chosen, Whole
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.placed import placed
from shardrec.planner.solve.pricing import Pricing
from shardrec.planner.solve.problem import SolveLimits
from shardrec.planner.solve.rows import Rows
from shardrec.planner.solve.sizes import GRID

__all__ = ["choose", "enumerated"]

Attempt = Callable[[Ints, Packing | None], object]
Stop = Callable[[], bool]

_MOST_WAYS = 12_000
_WIDTH = 2
"""Width of the boxes for which options and ways are listed."""
_WIDEST = GRID // 20
_AIM = 1.0
"""Of the gap: how far above the bound that is known the first level is."""
_STEP = 1.004
"""From one level to the next, at first."""
_LEAST_STEP = 1.0005
_LEAST_LEVEL = 0.1
"""Of what is to be proven; bounds of small problems may be below 0."""
_BOXES_PER_EFFORT = 3
_LEAST_SECONDS = 0.1
"""For a programme. It has a limit on nodes besides: its clock is not processor time."""


def enumerated(
    encoded: Encoded,
    rows: Rows,
    bound: float,
    limits: SolveLimits,
    cost: Callable[[], float],
    attempt: Attempt,
    clock: Clock,
    stop: Stop,
) -> float:
    """A bound of the cost; that which closes the gap, if it is not stopped.

    Args:
        encoded: the problem.
        rows: other limits.
        bound: proven already, or 0.
        limits: with the gap to be proven.
        cost: of the best plan so far; finite.
        attempt: packs (O,) counts of options, for which there may be a packing that is not bad.
        clock: counts what is done at once.
        stop: asked between boxes.

    Returns:
        The best bound; none better than that known if there are parts on hosts, and not two hosts.
    """
    most = cost()
    alike = Alike.of(encoded, most, rows) if most > 0 else None
    if alike is None:
        return bound

    def seconds() -> float:
        return max(_LEAST_SECONDS, limits.seconds - clock.passed())

    found = _Enumeration(encoded, alike, most, limits.gap, bound, seconds)
    return max(bound, found.run(_BOXES_PER_EFFORT * limits.effort, cost, attempt, clock, stop))


@dataclass(frozen=True, eq=False)
class _Found:
    """What was found in a box.

    Args:
        level: that its bound was to be raised to.
        prices: new ones.
        closed: whether they did.
        chosen: what the list of its options and ways came to, if they did not and it was made.
    """

    level: float
    prices: list[Prices]
    closed: bool
    chosen: Chosen | None = None


class _Enumeration:
    """The search: the box of the least bound is next, and its bound is to be raised to a *level*, as a first step.

    Plans are looked for among what is below the level. So a low one, to begin with, leaves little to list, and the
    plans found there make it unnecessary to go far above it.
    """

    def __init__(
        self, encoded: Encoded, alike: Alike, cost: float, gap: float, bound: float, seconds: Callable[[], float]
    ) -> None:
        self.encoded, self.alike, self.most, self.seconds = encoded, alike, cost, seconds
        self.pricings = [Pricing(alike) for _ in range(AT_ONCE)]
        shared = [(number, float(number)) for number in range(1, SHARED)] + [(SHARED, np.inf)]
        numbers = [(0, 0.0), *(shared if alike.share.any() else ())]
        self.cells = [Cells(alike.ranks, least, most) for least, most in numbers]
        self.step = _STEP
        self.per_cost = (1 + 1e-6) / (1 + gap) / cost
        self.target = cost * self.per_cost
        self.level = min(self.target, max(bound * (1 + _AIM * gap) / cost, self.target / 2))

    def run(self, boxes: int, cost: Callable[[], float], attempt: Attempt, clock: Clock, stop: Stop) -> float:
        for _ in range(boxes):
            least = min(cells.deciding for cells in self.cells)
            if stop() or least >= self.target:
                break
            while least >= self.level:
                self.level = min(self.level * self.step, self.target)
            chosen = self._boxes()
            shares = [chosen[number::AT_ONCE] for number in range(AT_ONCE)]
            tasks = [partial(self._looks, *each) for each in zip(self.pricings, shares, strict=True) if each[1]]
            for (cells, box), found in zip(chain(*shares), chain(*clock.together(tasks)), strict=True):
                self._learn(cells, box, found)
                if found.chosen is not None and found.chosen.counts is not None:
                    counts = self.alike.original(found.chosen.counts)
                    attempt(counts, placed(self.encoded, self.alike, found.chosen, self.most))
                    self._lower(cost() * self.per_cost)
        left = min(cells.deciding for cells in self.cells)
        return max(min(self.target, left), 0.0) * self.most * (1 - 1e-9)

    def _boxes(self) -> list[tuple[Cells, Box]]:
        """Those to be looked at next: that of the least bound, and of the others what is below the level, too."""
        found: list[tuple[Cells, Box]] = []
        # In the plane of two rooms, boxes have less to do with each other than on a line. With more of them for each
        # thread, none waits long for the others.
        for _ in range(AT_ONCE * len(self.alike.ranks)):
            least = [cells.deciding_outside([box for its, box in found if its is cells]) for cells in self.cells]
            at = int(np.argmin(least))
            if found and least[at] >= self.level:
                break
            found.append((self.cells[at], self.cells[at].box([box for its, box in found if its is self.cells[at]])))
        return found

    def _looks(self, pricing: Pricing, some: Sequence[tuple[Cells, Box]]) -> list[_Found]:
        return [self._look(pricing, box) for _, box in some]

    def _look(self, pricing: Pricing, box: Box) -> _Found:
        """Price a box, or list what is left in it; without any effect but on the pricing."""
        level = self.level
        if pricing.prices and pricing.bound(box)[0] + box.mean >= level:
            return _Found(level, [], True)
        prices = [pricing.price(box, level - box.mean)]
        closed = pricing.bound(box)[0] + box.mean >= level
        if closed or box.width > _WIDTH:
            return _Found(level, prices, closed)
        prices.append(pricing.price(box, level - box.mean, closely=True))
        return _Found(level, prices, closed, choose(pricing, box, level, self.seconds()))

    def _learn(self, cells: Cells, box: Box, found: _Found) -> None:
        """Raise the bounds, and say how wide the next boxes are."""
        for prices in found.prices:
            for pricing in self.pricings:
                pricing.know(prices)
            for each in self.cells:
                each.learn(prices, self.target)
        if found.closed:
            cells.width = min(2 * box.width + 1, _WIDEST)
        elif found.chosen is None:
            cells.failed(box)
        elif found.chosen.bound >= found.level:
            cells.raised(box, found.level)
            cells.width = _WIDTH
        elif box.width > 0:
            cells.failed(box)
        else:
            self._give_way(cells, box, found.chosen.bound)

    def _give_way(self, cells: Cells, box: Box, bound: float) -> None:
        """Where a single cell is not closed: aim lower, or leave it at that."""
        bound = max(bound, cells.least_in(box))
        low = max(bound, self.target * _LEAST_LEVEL)
        if self.level > low * _LEAST_STEP:
            self.level = float(np.sqrt(low * self.level))
            self.step = self.level / low
            return
        # There is no use in raising others above it.
        self._lower(bound)
        cells.raised(box, bound)
        cells.width = _WIDTH

    def _lower(self, target: float) -> None:
        if target < self.target:
            self.target, self.level = target, min(self.level, target)
            for cells in self.cells:
                cells.keep(target)


def choose(pricing: Pricing, box: Box, target: float, seconds: float) -> Chosen:
    """Whether a box has a plan below a target, in whole numbers.

    Args:
        pricing: with prices for the box.
        box: rooms.
        target: of the most load.
        seconds: time limit.
    """
    bound, prices = pricing.bound(box)
    budget = target - box.mean - bound
    if budget <= 0:
        return Chosen(bound + box.mean)
    over = pricing.over(prices, box.high[0])
    if not box.most:
        over = np.where(pricing.alike.share > 0, np.inf, over)
    able, memory = pricing.alike.beside(np.flatnonzero(over <= budget + 1e-9))
    if not len(able):
        return Chosen(target)
    options = undominated(pricing, able.tolist())
    there = set(options)
    kinds = sorted({kind for option, _, kind, _ in pricing.items() if option in there})
    worth = pricing.worth(prices, kinds)
    # Ranks of equal rooms are one class, if it does not matter which host they are of.
    same = len(set(box.high)) == 1
    listed = []
    for room in box.high[:1] if same else box.high:
        found = fillings(kinds, worth, float(prices.value[room, -1]), room, memory, budget + 1e-9, _MOST_WAYS)
        if found is None:
            return Chosen(bound + box.mean)
        listed.append(found)
    ranks, on_hosts = pricing.alike.ranks, bool((pricing.alike.share[options] > 0).any())
    if box.least and not on_hosts:
        return Chosen(target)
    if same and not on_hosts:
        ranks = (sum(ranks),)
    elif same:
        listed *= len(ranks)
    return Whole(pricing, box, options, listed, ranks).solve(target, bound + box.mean, seconds)


def undominated(pricing: Pricing, options: Sequence[int]) -> list[int]:
    """The options than which no other of the table is better in everything that a programme counts."""
    alike = pricing.alike
    limits = alike.rows[list(pricing.limits)]
    # By part, the free pieces first: those of a part stay together.
    pieces: dict[int, dict[int, list[Kind]]] = {option: {-1: []} for option in options}
    for part, option in enumerate(alike.part_option.tolist()):
        if option in pieces:
            pieces[option][part] = []
    for option, part, kind, count in pricing.items():
        if option in pieces:
            pieces[option][part] += [kind] * int(count)
    held = {option: [sorted(sizes, reverse=True) for sizes in parts.values()] for option, parts in pieces.items()}
    shares = {
        option: [(alike.part_share[part], alike.part_count[part]) for part in parts if part >= 0]
        for option, parts in pieces.items()
    }

    def order(option: int) -> tuple[float, int, int, int]:
        sizes = [size for part in held[option] for size, _, _ in part]
        return float(pricing.base[option]), len(sizes), sum(sizes), option

    # What is earlier has no more load on every rank.
    comparable: dict[object, list[int]] = {}
    found: dict[int, list[int]] = {}
    for option in sorted(options, key=order):
        group = int(alike.group[option])
        comparable.setdefault((group, *shares[option]), []).append(option)
        found.setdefault(group, []).append(option)
    kept: set[int] = set()
    for those in comparable.values():
        # The largest piece of each, the second, and so on, part by part. One that is not there is smaller than any.
        by_part = zip(*(held[option] for option in those), strict=True)
        pieces_at = [pieces_of for part in by_part for pieces_of in zip_longest(*part, fillvalue=(0, 0, -1))]
        columns = np.array(pieces_at, dtype=np.int64).reshape(-1, len(those), 3)
        better = np.triu(np.ones((len(those), len(those)), dtype=bool), 1)
        for column in (*columns.transpose(2, 0, 1).reshape(-1, len(those)), *limits[:, those]):
            better &= column[:, None] <= column
        kept.update(np.array(those)[~better.any(axis=0)].tolist())
    return [option for those in found.values() for option in those if option in kept]
