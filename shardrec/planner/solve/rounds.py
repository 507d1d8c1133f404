"""Rounds of the large neighbourhood search (:mod:`rebuild`), compiled by numba.

A round takes some tables off their ranks, puts them back, and is kept or undone. There are two kinds:

- One to three tables take options at random, or keep theirs, and go where the soft maximum, with what is over the
  memory, grows least. In half of these rounds, the tables that they share overloaded ranks with are put back in the way
  of the second kind (an ejection chain).
- Tables of a highly loaded rank and of one or two others, or all of some, are packed below an aim: each takes the first
  option that fits, of those with the least work first, and its gangs go where they leave the least budget over. Now and
  then an option or a place is passed over ("blinks"), so that rounds differ.

Ruin and recreate is from Schrimpf et al. (2000), blinks from Christiaens and Vanden Berghe (2020).

Shapes: R ranks, D dimensions of a size (load, then bytes of each memory tier), N tables, K kinds of gangs, J items of
all kinds, O options, G groups, C options of all groups that are looked at, S most gangs of an option.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, log
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Floats, Ints

__all__ = ["Arrays", "State", "Undo", "pack", "rounds"]

_F = TypeVar("_F", bound=Callable[..., Any])

_STEEPEST = 230.0
"""Largest exponent: what is so far above the cost, how far makes no difference."""
_WHOLE = (0.05, 128)
"""How often whole ranks are emptied, and how many at most: a round takes time by the square of the tables on them."""
_AIM = 0.02
"""How far below the cost, at most, the aim is."""
_REPAIRED = 0.5
"""Share of the rounds of the first kind after which overloaded ranks are relieved."""
_EVICTED = 16
"""Most tables that are taken off them."""
_BLINK = 0.04
"""How often an option or a place is passed over."""


def _compiled(function: _F) -> _F:
    return cast(_F, numba.njit(nogil=True, error_model="numpy")(function))


def _kept(function: _F) -> _F:
    """Compiled together with what it calls, when it is first called, and kept on disk where there is a place for it."""
    try:
        return cast(_F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return _compiled(function)


class Arrays(NamedTuple):
    """A problem in flat arrays; those named ``first`` say where a row of a flat one begins, the last where it ends.

    Args:
        limit: (D,) of a rank; infinite for loads.
        group: (N,) of each table.
        set_first: (sets + 1,) of ``set_ranks``; ``set_width``: ranks of a place.
        set_ranks: places of each set, (places, width) in a row.
        kind_set: (K,) the places of each kind of gang.
        kind_first: (K + 1,) of ``size``.
        size: (J, D) of the items.
        option_first: (O + 1,) of the gangs.
        gang_kind: of each of an option's gangs, the largest first.
        base: (O, D) of the options, on every rank.
        work: (O,) load on all ranks together.
        choice_first: (G + 1,) of ``choice``.
        choice: (C,) the options of each group that are looked at, those with the least work first.
    """

    limit: Floats
    group: Ints
    set_first: Ints
    set_width: Ints
    set_ranks: Ints
    kind_set: Ints
    kind_first: Ints
    size: Floats
    option_first: Ints
    gang_kind: Ints
    base: Floats
    work: Floats
    choice_first: Ints
    choice: Ints


class State(NamedTuple):
    """Where everything is, which the rounds change.

    Args:
        sums: (D, R) load and bytes of the items.
        base: (D,) what the options put on every rank.
        option: (N,).
        spot: (N, S), the place of each of its gangs.
        on: (R, N), how many items of a table are on a rank.
        cost: (2,) now, and the best so far.
        best_option: (N,) of the best; likewise ``best_spot``.
        terms: (R,) of the soft maximum.
        steep: (3,) how it grows with the load, what is taken off the exponent, and the weight of bytes over the limits.
    """

    sums: Floats
    base: Floats
    option: Ints
    spot: NDArray[np.int32]
    on: NDArray[np.int32]
    cost: Floats
    best_option: Ints
    best_spot: NDArray[np.int32]
    terms: Floats
    steep: Floats


class Undo(NamedTuple):
    """What a round puts back where it is not kept, and which tables it takes off; plain loops keep compiling short.

    Args:
        tables: (N,) the first of them are taken off.
        chosen: (N,) options that they are to take.
        keys: (N,) by which they are sorted.
        sums: as in the state; likewise ``base``.
        option: (N,) of the tables taken off, in their order; likewise ``spot``.
    """

    tables: Ints
    chosen: Ints
    keys: Floats
    sums: Floats
    base: Floats
    option: Ints
    spot: NDArray[np.int32]


@_kept
def rounds(a: Arrays, s: State, u: Undo, rng: np.random.Generator, patience: Floats) -> None:
    """Go through rounds, in each of which the logarithm of the soft maximum may grow by so much, (rounds,)."""
    for rank in range(s.sums.shape[1]):
        _set_term(s.terms, s.sums, s.steep, rank)
    before = _height(a, s)
    for number in range(len(patience)):
        random = rng.random() < 0.5
        many = _varied(a, s, u, rng) if random else _ruined(a, s, u, rng)
        _copy(s.sums, s.base, u.sums, u.base)
        _take(a, s, u, 0, many)
        done, back = True, 0
        if random:
            while done and back < many:
                done = _put(a, s, rng, u.tables[back], u.chosen[back], 0.0, True)
                back += done
        if not random or (done and rng.random() < _REPAIRED):
            aim = s.cost[1] * (1.0 - _AIM * rng.random() ** 2)
            budget = aim - (s.base[0] if random else u.base[0])
            done = budget > 0.0
            if random and done:
                first, many = many, _overloaded(a, s, u, rng, many, budget)
                _take(a, s, u, first, many)
            while done and back < many:
                done = _fill(a, s, rng, u.tables[back], budget, True)
                back += done
        after = _height(a, s)
        if done and after <= before * exp(patience[number]):
            before = after
            _keep(a, s)
        else:
            _restore(a, s, u, many, back)


@_kept
def pack(a: Arrays, s: State, rng: np.random.Generator, order: Ints, least: Floats, budget: float) -> int:
    """Put tables on empty ranks in an order, (N,), on the least loaded ones; how many there is budget for.

    What tables yet to come put on every rank at least, (G, D), is kept free.
    """
    for table in order:
        _add_base(s.base, least, a.group[table], 1)
    for number in range(len(order)):
        _add_base(s.base, least, a.group[order[number]], -1)
        if not _fill(a, s, rng, order[number], budget, False):
            return number
    return len(order)


@_compiled
def _copy(sums: Floats, base: Floats, kept_sums: Floats, kept_base: Floats) -> None:
    for dim in range(len(base)):
        kept_base[dim] = base[dim]
        for rank in range(sums.shape[1]):
            kept_sums[dim, rank] = sums[dim, rank]


@_compiled
def _restore(a: Arrays, s: State, u: Undo, many: int, back: int) -> None:
    """Undo a round that took many tables off, some of which are back."""
    for index in range(back):
        _count(a, s, u.tables[index], -1)
    for index in range(many):
        table = u.tables[index]
        s.option[table] = u.option[index]
        for slot in range(s.spot.shape[1]):
            s.spot[table, slot] = u.spot[index, slot]
        _count(a, s, table, 1)
    _copy(u.sums, u.base, s.sums, s.base)
    for rank in range(s.sums.shape[1]):
        _set_term(s.terms, s.sums, s.steep, rank)


@_compiled
def _count(a: Arrays, s: State, table: int, sign: int) -> None:
    """Bring up to date on which ranks a table is."""
    first = a.option_first[s.option[table]]
    for gang in range(first, a.option_first[s.option[table] + 1]):
        width = a.set_width[a.kind_set[a.gang_kind[gang]]]
        start = a.set_first[a.kind_set[a.gang_kind[gang]]] + s.spot[table, gang - first] * width
        for index in range(start, start + width):
            s.on[a.set_ranks[index], table] += sign


@_compiled
def _set_term(terms: Floats, sums: Floats, steep: Floats, rank: int) -> None:
    terms[rank] = exp(min(steep[0] * sums[0, rank] - steep[1], _STEEPEST))


@_compiled
def _height(a: Arrays, s: State) -> float:
    total, excess = 0.0, 0.0
    for rank in range(len(s.terms)):
        total += s.terms[rank]
        for dim in range(1, len(s.base)):
            over = s.base[dim] + s.sums[dim, rank] - a.limit[dim]
            if over > 0.0:
                excess += over / max(a.limit[dim], 1.0)
    height: float = exp(min(s.steep[0] * s.base[0], _STEEPEST)) * total + s.steep[2] * excess
    return height


@_compiled
def _keep(a: Arrays, s: State) -> None:
    s.cost[0] = s.base[0] + s.sums[0, _hottest(s.sums)]
    if s.cost[0] < s.cost[1] * (1.0 - 1e-9) and _within(a.limit, s.sums, s.base):
        s.cost[1] = s.cost[0]
        for table in range(len(s.option)):
            s.best_option[table] = s.option[table]
            for slot in range(s.spot.shape[1]):
                s.best_spot[table, slot] = s.spot[table, slot]


@_compiled
def _hottest(sums: Floats) -> int:
    found = 0
    for rank in range(sums.shape[1]):
        if sums[0, rank] > sums[0, found]:
            found = rank
    return found


@_compiled
def _below(rng: np.random.Generator, count: int) -> int:
    return min(int(rng.random() * count), count - 1)


@_compiled
def _among(tables: Ints, many: int, table: int) -> bool:
    found = False
    for index in range(many):
        found = found or tables[index] == table
    return found


@_compiled
def _find(on: NDArray[np.int32], tables: Ints, rank: int, many: int) -> int:
    """Put the tables of a rank after the first so many, unless they are among these; how many there are then."""
    end = many
    for table in range(len(tables)):
        if on[rank, table] and not _among(tables, many, table):
            tables[end] = table
            end += 1
    return end


@_compiled
def _varied(a: Arrays, s: State, u: Undo, rng: np.random.Generator) -> int:
    """A few tables and the options that they are to take; how many."""
    drawn, many = rng.random(), 0
    most = 1 + (drawn >= 0.5) + (drawn >= 0.85)
    if rng.random() < 0.5:
        end = _find(s.on, u.tables, _hottest(s.sums), 0)
        if end:
            u.tables[0], many = u.tables[_below(rng, end)], 1
    while many < most:
        table = _below(rng, len(s.option))
        if _among(u.tables, many, table):
            break
        u.tables[many] = table
        many += 1
    _largest_first(a.work, s.option, u.tables, u.keys, rng, 0, many)
    for index in range(many):
        table = u.tables[index]
        u.chosen[index] = s.option[table]
        if rng.random() < 0.5:
            first = a.choice_first[a.group[table]]
            u.chosen[index] = a.choice[first + _below(rng, a.choice_first[a.group[table] + 1] - first)]
    return many


@_compiled
def _ruined(a: Arrays, s: State, u: Undo, rng: np.random.Generator) -> int:
    """Some tables of a highly loaded rank, and of a few others; how many."""
    many, ranks, whole = 0, s.sums.shape[1], rng.random() < _WHOLE[0]
    picked = int(exp(rng.random() * log(min(ranks, _WHOLE[1]) + 1.0))) if whole else 2 + (rng.random() < 0.5)
    start = _below(rng, ranks)
    for number in range(picked):
        rank = (start + number) % ranks if whole else _below(rng, ranks)
        if number == 0 and rng.random() < 0.7:
            rank = _hottest(s.sums)
        end = _find(s.on, u.tables, rank, many)
        most = end if whole else 1 + _below(rng, 2 if number else 3)
        for _ in range(min(end - many, most)):
            other = many + _below(rng, end - many)
            u.tables[many], u.tables[other] = u.tables[other], u.tables[many]
            many += 1
    table = _below(rng, len(s.option))
    if rng.random() < 0.3 and not _among(u.tables, many, table):
        u.tables[many] = table
        many += 1
    _largest_first(a.work, s.option, u.tables, u.keys, rng, 0, many)
    return many


@_compiled
def _overloaded(a: Arrays, s: State, u: Undo, rng: np.random.Generator, many: int, budget: float) -> int:
    """The tables of the ranks that are over the budget or the memory go, too; how many in all."""
    first, last = many, many + _EVICTED
    for rank in range(s.sums.shape[1]):
        over = s.sums[0, rank] > budget
        for dim in range(1, len(s.base)):
            over = over or s.sums[dim, rank] + s.base[dim] > a.limit[dim]
        if over and many < last:
            many = min(_find(s.on, u.tables, rank, many), last)
    _largest_first(a.work, s.option, u.tables, u.keys, rng, first, many)
    return many


@_compiled
def _largest_first(
    work: Floats, option: Ints, tables: Ints, keys: Floats, rng: np.random.Generator, first: int, last: int
) -> None:
    """By work, about; they are few."""
    for index in range(first, last):
        table, place = tables[index], index
        key = work[option[table]] * (0.8 + 0.4 * rng.random())
        while place > first and keys[place - 1] < key:
            tables[place], keys[place] = tables[place - 1], keys[place - 1]
            place -= 1
        tables[place], keys[place] = table, key


@_compiled
def _take(a: Arrays, s: State, u: Undo, first: int, last: int) -> None:
    """Take tables off their ranks, and keep where they were."""
    for index in range(first, last):
        table = u.tables[index]
        option = u.option[index] = s.option[table]
        for slot in range(s.spot.shape[1]):
            u.spot[index, slot] = s.spot[table, slot]
        start = a.option_first[option]
        for gang in range(start, a.option_first[option + 1]):
            _shift(a, s, table, a.gang_kind[gang], s.spot[table, gang - start], -1)
        _add_base(s.base, a.base, option, -1)


@_compiled
def _add_base(base: Floats, of_option: Floats, option: int, sign: int) -> None:
    for dim in range(len(base)):
        base[dim] += sign * of_option[option, dim]


@_compiled
def _shift(a: Arrays, s: State, table: int, kind: int, place: int, sign: int) -> None:
    """Add a gang at a place, or take it off."""
    width, item = a.set_width[a.kind_set[kind]], a.kind_first[kind]
    first = a.set_first[a.kind_set[kind]] + place * width
    for index in range(width):
        rank = a.set_ranks[first + index]
        s.on[rank, table] += sign
        for dim in range(len(s.base)):
            s.sums[dim, rank] += sign * a.size[item + index, dim]
        _set_term(s.terms, s.sums, s.steep, rank)


@_compiled
def _fill(a: Arrays, s: State, rng: np.random.Generator, table: int, budget: float, best_fit: bool) -> bool:
    """Put a table on with an option of little work for which there is budget; whether there is one."""
    for number in range(a.choice_first[a.group[table]], a.choice_first[a.group[table] + 1]):
        if (not best_fit or rng.random() >= _BLINK) and _put(a, s, rng, table, a.choice[number], budget, best_fit):
            return True
    return False


@_compiled
def _put(a: Arrays, s: State, rng: np.random.Generator, table: int, option: int, budget: float, best_fit: bool) -> bool:
    """Put a table on with an option, each gang at its best place; if one has none, nothing is done: False."""
    _add_base(s.base, a.base, option, 1)
    first, end = a.option_first[option], a.option_first[option + 1]
    fits, gang = budget <= 0.0 or _within(a.limit, s.sums, s.base), first
    while gang < end and fits:
        place = _best_place(a, s, rng, a.gang_kind[gang], budget, best_fit)
        fits = place >= 0
        if fits:
            _shift(a, s, table, a.gang_kind[gang], place, 1)
            s.spot[table, gang - first] = place
            gang += 1
            # Two items of a gang may be on one rank.
            single = a.set_width[a.kind_set[a.gang_kind[gang - 1]]] == 1
            fits = budget <= 0.0 or single or _within(a.limit, s.sums, s.base)
    if fits:
        s.option[table] = option
        return True
    while gang > first:
        gang -= 1
        _shift(a, s, table, a.gang_kind[gang], s.spot[table, gang - first], -1)
    _add_base(s.base, a.base, option, -1)
    return False


@_compiled
def _within(limit: Floats, sums: Floats, base: Floats) -> bool:
    """Whether every rank is within its memory."""
    for dim in range(1, len(base)):
        for rank in range(sums.shape[1]):
            if sums[dim, rank] > limit[dim] - base[dim]:
                return False
    return True


@_compiled
def _best_place(a: Arrays, s: State, rng: np.random.Generator, kind: int, budget: float, best_fit: bool) -> int:
    """Where a gang leaves the least of the budget (best fit), or the most, or, where that is 0, where the soft maximum
    grows least; -1 if it fits nowhere."""
    width, item, first = a.set_width[a.kind_set[kind]], a.kind_first[kind], a.set_first[a.kind_set[kind]]
    places = (a.set_first[a.kind_set[kind] + 1] - first) // width
    best, found = inf, -1
    common = exp(min(s.steep[0] * s.base[0], _STEEPEST))
    for place in range(places):
        score, fits = 0.0, True
        for index in range(width):
            rank, load = a.set_ranks[first + place * width + index], a.size[item + index, 0]
            for dim in range(1, len(s.base)):
                held = s.sums[dim, rank] + s.base[dim]
                over = held + a.size[item + index, dim] - max(held, a.limit[dim])
                if over > 0.0:
                    fits = fits and budget <= 0.0
                    score += s.steep[2] * over / max(a.limit[dim], 1.0)
            if not fits or score >= best:
                break
            if budget > 0:
                left = budget - s.sums[0, rank] - load
                fits = left >= 0
                score += left if best_fit else s.sums[0, rank] + load
            else:
                score += common * s.terms[rank] * (exp(min(s.steep[0] * load, _STEEPEST)) - 1.0)
            if not fits or score >= best:
                break
        if fits and score < best and (budget <= 0 or not best_fit or rng.random() >= _BLINK):
            best, found = score, place
    return found
