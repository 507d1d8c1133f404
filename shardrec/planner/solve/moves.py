"""Many changes of an assignment at once, as arrays: tables taken off their ranks and put back, and the cost of the
result.

A :class:`Batch` holds, for each of B proposals, the load and the bytes of every rank. :meth:`Batch.put` puts one table
on in each proposal, with an option of its own: the places of equal gangs are compared as a matrix (proposals, places),
and as many of the best are taken as there are gangs. :meth:`Batch.fill` takes the first of many options that has enough
places left.

Shapes: B proposals, R ranks, D dimensions of a size (load, then bytes of each memory tier), K kinds of gangs, J items
of all kinds, O options, G groups, C most options of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrec.planner.solve.encode import Bools, Encoded, Family, Floats, Ints

_STEEPEST = 230.0
"""Largest exponent: by how much a load that is so far above the cost exceeds it makes no difference."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedGangs:
    """Gangs that were put on.

    Args:
        step: (n,) :attr:`Batch.step` when it was.
        proposal: (n,).
        kind: (n,).
        place: (n,).
    """

    step: Ints
    proposal: Ints
    kind: Ints
    place: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharpness:
    """How the soft maximum of a proposal's loads is taken.

    Args:
        cost: (B,) T.
        exponent: (B,) p.
        weight: (B,) of bytes over the capacity.
        soft: (B,) whether ranks may be over it.
    """

    cost: Floats
    exponent: Floats
    weight: Floats
    soft: Bools

    def __getitem__(self, index: Ints) -> Sharpness:
        """Of the proposals, or searches, with these numbers."""
        return Sharpness(
            cost=self.cost[index], exponent=self.exponent[index], weight=self.weight[index], soft=self.soft[index]
        )


class Batch:
    """Proposals.

    Args:
        encoded: the problem.
        load: (B, D, R + 1) load and bytes of the items on each rank; changed.
        base: (B, D) what the options put on every rank; changed.

    Attributes:
        alive: (B,) whether each table found a place so far.
        step: number of the table that is put on; for :meth:`placed`.
    """

    def __init__(self, encoded: Encoded, load: Floats, base: Floats) -> None:
        self.encoded, self.load, self.base = encoded, load, base
        self.alive = np.ones(len(load), dtype=np.bool_)
        self._placed: list[tuple[int, Ints, Ints, Ints]] = []
        self.step = 0

    def take(self, proposal: Ints, option: Ints, ranks: Ints, items: Ints) -> None:
        """Take tables off.

        Args:
            proposal: (n,) per table.
            option: (n,) that it has.
            ranks: (n, I) of its items. R for none.
            items: (n, I). J for none.
        """
        wide = self.load.shape[2]
        index = (proposal[:, None] * wide + ranks).ravel()
        for dim in range(self.load.shape[1]):
            off = np.bincount(index, self.encoded.size[items.ravel(), dim], minlength=len(self.load) * wide)
            self.load[:, dim] -= off.reshape(-1, wide)
            self.base[:, dim] -= np.bincount(proposal, self.encoded.base[option, dim], minlength=len(self.load))

    def fill(self, options: Ints, budget: Floats, *, tries: int, best_fit: bool = True) -> Ints:
        """Put a table on in each proposal, with the first of its options for which there are places below a budget.

        Args:
            options: (B, C), -1 for none.
            budget: (B,) load of the items of a rank.
            tries: options that are put on to see whether their gangs find places.
            best_fit: as for :meth:`put`.

        Returns:
            (B,) the option that was put on. -1 for none.
        """
        fits = self._promising(np.where(self.alive[:, None], options, -1), budget, best_fit)
        chosen = np.full(len(options), -1, dtype=np.int64)
        row_numbers = np.arange(len(options))
        for _ in range(tries):
            first = fits.argmax(axis=1)
            option = np.where(fits[row_numbers, first], options[row_numbers, first], -1)
            if not (option >= 0).any():
                break
            done = self.put(option, budget, best_fit=best_fit)
            chosen[done] = option[done]
            fits[done] = False
            fits[row_numbers, first] = False
        return chosen

    def _promising(self, options: Ints, budget: Floats, best_fit: bool) -> Bools:
        """(B, C) whether ranks have so much load and memory left as the large items of an option take.

        Its runs are checked one after the other, as if each had the ranks for itself; in a best fit, no two of the
        items share one.
        """
        encoded, fits = self.encoded, options >= 0
        base = encoded.base[options]
        run_kind, run_count = encoded.runs
        for run in range(run_kind.shape[1]):
            kind = np.where(fits, run_kind[options, run], -1)
            used = kind >= 0
            if not used.any():
                break
            needed = run_count[options, run] * encoded.kind_heavy[kind]
            # (B, C, R): whether a rank has what one item takes, or how many of them fit.
            slots: Any = np.True_ if best_fit else needed[:, :, None]
            for dim, limit in enumerate([np.inf, *encoded.limit.tolist()]):
                if dim == 0 or limit < np.inf:
                    most = budget if dim == 0 else limit - self.base[:, dim]
                    left = (most[:, None] - self.load[:, dim, : encoded.ranks])[:, None]
                    top = encoded.kind_top[kind, dim, None]
                    extra = base[:, :, dim, None] if dim else 0.0
                    if best_fit:
                        slots = slots & (left >= top + extra)
                    else:
                        slots = np.minimum(slots, np.floor((left - extra) / np.maximum(top, 1e-300)))
            free = np.count_nonzero(slots, axis=2) if best_fit else slots.clip(min=0.0).sum(axis=2)
            fits &= ~used | (free >= np.minimum(needed, encoded.ranks))
        return fits

    def put(self, option: Ints, goal: Sharpness | Floats, *, best_fit: bool = True) -> Bools:
        """Put a table on in each proposal. Nothing is done where a gang fits nowhere.

        Args:
            option: (B,) that the table takes; -1: none.
            goal: gangs go where this soft maximum grows least; or (B,) a load of items that no rank may exceed, of
                which they leave the least.
            best_fit: or the most, if not.

        Returns:
            (B,) whether the table is on.
        """
        encoded = self.encoded
        tried = self.alive & (option >= 0)
        done, rows, before = tried.copy(), np.flatnonzero(tried), len(self._placed)
        self.base[rows] += encoded.base[option[rows]]
        if not isinstance(goal, Sharpness):
            memory = self.load[rows, 1:, : encoded.ranks].max(axis=2) + self.base[rows, 1:]
            done[rows] = (memory <= encoded.limit).all(axis=1)
        run_kind, run_count = encoded.runs
        for run in range(run_kind.shape[1]):
            rows = rows[done[rows]]
            kind = run_kind[option[rows], run]
            rows, kind = rows[kind >= 0], kind[kind >= 0]
            if not len(rows):
                break
            count, family = run_count[option[rows], run], encoded.kind_family[kind]
            for number in range(len(encoded.families)):
                if len(mine := np.flatnonzero(family == number)):
                    done[self._put_run(number, rows[mine], kind[mine], count[mine], goal, best_fit)] = False
        failed = tried & ~done
        if failed.any():
            self.base[failed] -= encoded.base[option[failed]]
            for index, (step, at, kinds, place) in enumerate(self._placed[before:], before):
                off = failed[at]
                if off.any():
                    family = encoded.families[encoded.kind_family[kinds[0]]]
                    self._add(family, at[off], kinds[off], place[off], -1)
                self._placed[index] = step, at[~off], kinds[~off], place[~off]
        return done

    def _put_run(
        self, number: int, rows: Ints, kind: Ints, count: Ints, goal: Sharpness | Floats, best_fit: bool
    ) -> Ints:
        """Put equal gangs on in each of some proposals. Those in which they do not fit, where some may be on."""
        family, failed = self.encoded.families[number], []
        # Equal gangs go to different places, if there are enough.
        apart = isinstance(goal, Sharpness) or best_fit
        while len(rows):
            score = self._scores(family, rows, kind, goal, best_fit)
            # Equal gangs with places that share ranks go to different hosts in one move. With fewer hosts, some gangs
            # share a host.
            cluster = np.zeros((len(rows), 0), dtype=np.int64)
            if family.clusters is not None:
                score, cluster = _best_of(score, family.clusters[self.encoded.kind_set[kind]])
            free = np.count_nonzero(score < np.inf, axis=1)
            placed_count = np.minimum(count, score.shape[1] if apart else free)
            good = (placed_count > 0) & (free >= placed_count)
            which = np.repeat(np.arange(len(rows)), np.where(good, placed_count, 0))
            if (placed_count <= 1).all():
                place = score.argmin(axis=1)[which]
            else:
                order = np.argsort(score, axis=1)
                place = order[np.arange(score.shape[1]) < np.where(good, placed_count, 0)[:, None]]
            if family.clusters is not None:
                place = cluster[which, place]
            failed.append(rows[~good])
            self._add(family, rows[which], kind[which], place, 1)
            self._placed.append((self.step, rows[which], kind[which], place))
            more = np.flatnonzero(good & (count > placed_count))
            rows, kind, count = rows[more], kind[more], (count - placed_count)[more]
        return np.concatenate(failed)

    def _scores(self, family: Family, rows: Ints, kind: Ints, goal: Sharpness | Floats, best_fit: bool) -> Floats:
        """(n, P) per place, the less the better. Infinite where a gang does not fit."""
        encoded = self.encoded
        load, sets = self.load[rows, 0], encoded.kind_set[kind]
        places = None if family.anywhere else family.places[sets]
        item = encoded.kind_first[kind][:, None] if places is None else self._item(kind, places.shape[2])
        index = None if places is None else places + np.arange(len(rows))[:, None, None] * load.shape[1]
        size = encoded.size[item]

        def at(of_ranks: Floats) -> Floats:
            """(n, P, width) of the ranks of each place, from (n, R + 1); of single ranks (n, P)."""
            return of_ranks[:, : encoded.ranks] if index is None else of_ranks.take(index)

        def fits(of_ranks: Floats, dim: int) -> Bools:
            """(n, P) whether the items find so much on their ranks, from (n, R + 1)."""
            if index is None:
                single: Bools = at(of_ranks) >= size[:, 0, dim, None]
                return single
            enough: Bools = np.logical_and.reduce(at(of_ranks) >= size[:, None, :, dim], axis=2)
            return enough

        free: Bools = np.array(True)
        if not isinstance(goal, Sharpness):
            left = goal[rows, None] - load
            free = fits(left, 0)
            score = at(left) if index is None else at(left).sum(axis=2)
            score = score if best_fit else -score
        elif family.anywhere and not goal.soft[rows].any():
            # The soft maximum grows least where the load is least.
            score = at(load)
        else:
            exponent = goal.exponent[rows, None]
            steep = exponent / goal.cost[rows, None]
            term = np.exp(np.minimum(steep * (load + self.base[rows, :1]) - exponent, _STEEPEST))
            grown = np.expm1(np.minimum(steep * size[:, :, 0], _STEEPEST))
            score = at(term) * grown if index is None else np.einsum("npw,nw->np", at(term), grown)
        for tier, limit in enumerate(encoded.limit.tolist(), 1):
            memory = self.load[rows, tier]
            most = limit - self.base[rows, tier]
            if limit == np.inf or (memory.max(axis=1) + encoded.kind_top[kind, tier] <= most).all():
                continue
            # What takes no bytes may go to a rank that has too many.
            space = np.maximum(most[:, None] - memory, 0.0)
            if isinstance(goal, Sharpness):
                over = np.maximum(size[:, None, :, tier] - at(space).reshape(*score.shape, -1), 0.0).sum(axis=2)
                score = score + over * (goal.weight[rows] / max(limit, 1.0))[:, None]
            else:
                free = free & fits(space, tier)
        if family.missing is not None:
            free = free & ~family.missing[sets]
        scores: Floats = np.where(free, score, np.inf)
        return scores

    def _item(self, kind: Ints, width: int) -> Ints:
        """(n, width) items of kinds. J for none."""
        first = self.encoded.kind_first
        item = first[kind][:, None] + np.arange(width)
        return np.where(item < first[kind + 1][:, None], item, len(self.encoded.size) - 1)

    def _add(self, family: Family, rows: Ints, kind: Ints, place: Ints, sign: int) -> None:
        """Add gangs to the loads, or take them off."""
        ranks = family.places[self.encoded.kind_set[kind], place]
        size = sign * self.encoded.size[self._item(kind, ranks.shape[1])]
        if family.anywhere:
            self.load[rows, :, ranks[:, 0]] += size[:, 0]
        else:
            np.add.at(self.load.transpose(0, 2, 1), (rows[:, None], ranks), size)

    def placed(self, proposals: Ints) -> PlacedGangs:
        """What was put on in some proposals."""
        of = np.zeros(len(self.load), dtype=np.bool_)
        of[proposals] = True
        empty = np.zeros(0, dtype=np.int64)
        parts = [(np.full(len(rows), step), rows, kind, place) for step, rows, kind, place in self._placed]
        columns = zip((empty, empty, empty, empty), *parts, strict=True)
        step, rows, kind, place = (np.concatenate(column) for column in columns)
        kept = of[rows]
        return PlacedGangs(step=step[kept], proposal=rows[kept], kind=kind[kept], place=place[kept])

    def rank_excess(self) -> Floats:
        """(B, R) bytes over the capacity, as fractions of it."""
        limit = self.encoded.limit[:, None]
        memory = self.load[:, 1:, : self.encoded.ranks] + self.base[:, 1:, None]
        over: Floats = np.where(np.isinf(limit), 0.0, memory - limit).clip(min=0) / np.maximum(limit, 1.0)
        of_ranks: Floats = over.sum(axis=1)
        return of_ranks

    def excess(self) -> Floats:
        """(B,) of all ranks together."""
        excess: Floats = self.rank_excess().sum(axis=1)
        return excess

    def costs(self) -> Floats:
        """(B,) of the most loaded rank."""
        costs: Floats = self.base[:, 0] + self.load[:, 0, : self.encoded.ranks].max(axis=1)
        return costs

    def heights(self, sharpness: Sharpness) -> Floats:
        """(B,) soft maximum of the loads, and the weighted bytes over the capacity."""
        load = self.load[:, 0, : self.encoded.ranks] + self.base[:, 0, None]
        exponent = sharpness.exponent[:, None] * (load / sharpness.cost[:, None] - 1)
        heights: Floats = np.exp(np.minimum(exponent, _STEEPEST)).sum(axis=1) + sharpness.weight * self.excess()
        return heights


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """The options that a search considers, per group.

    Args:
        options: (G, C) those with the least work first, then -1.
        counts: (G,) how many.
    """

    options: Ints
    counts: Ints

    @classmethod
    def of(cls, encoded: Encoded, able: Bools) -> Choices:
        """Those that are able, (O,)."""
        order = np.lexsort((encoded.total[:, 0], encoded.option_group))
        order = order[able[order]]
        group = encoded.option_group[order]
        counts = np.bincount(group, minlength=len(encoded.groups))
        options = np.full((len(encoded.groups), int(counts.max(initial=1))), -1, dtype=np.int64)
        options[group, np.arange(len(order)) - (np.cumsum(counts) - counts)[group]] = order
        return cls(options=options, counts=counts)


def _best_of(score: Floats, clusters: Ints) -> tuple[Floats, Ints]:
    """(n, H) the best score, (n, P), of the places of each cluster, (n, H, Q); and (n, H) which place that is."""
    padded = np.concatenate([score, np.full((len(score), 1), np.inf)], axis=1)
    of_places = padded[np.arange(len(score))[:, None, None], clusters]
    best = of_places.argmin(axis=2)[:, :, None]
    return np.take_along_axis(of_places, best, axis=2)[:, :, 0], np.take_along_axis(clusters, best, axis=2)[:, :, 0]
