"""From the programme of :mod:`joint` to pieces on ranks: its solution is rounded step by step.

What is whole in the solution stays, what is nearest to it is rounded up, and columns are generated for the ranks and
tables that are left. When all ranks have their ways, options are chosen for them in whole numbers. What has no slot
then is left over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from shardrec.planner.solve.encode import Ints
from shardrec.planner.solve.joint import JointProgramme, quantities
from shardrec.planner.solve.packing import Packing, rounded

__all__ = ["dive"]

_ROUNDS = 4
"""Rounds of generating columns in a step."""
_UP = 0.75
"""Fractions that are rounded up together."""


def dive(programme: JointProgramme, stop: Callable[[], bool]) -> tuple[Packing, Counter[int]]:
    """Round the solution of a programme.

    Args:
        programme: with its columns.
        stop: asked between steps; pieces of ranks that have no way then are left over.

    Returns:
        Where pieces are, the tables that were kept with them, and how many parts of each kind are left over.
    """
    used: Counter[int] = Counter()
    while _step(programme, used) and not stop():
        programme.generate(stop, _ROUNDS)
    return _packed(programme, used)


def _step(programme: JointProgramme, used: Counter[int]) -> bool:
    """Use what is whole, or nearly, and the way that is nearest to it; whether ranks are left, and one got a way."""
    ways, values = programme.ways(), programme.values()
    left = programme.many.copy()
    for number, many in used.items():
        left[ways[number][0]] -= many
    fixed = False
    for place, number in enumerate(sorted(ways, key=lambda number: used[number] - values[number])):
        kind, more = ways[number][0], float(values[number]) - used[number]
        many = int(np.floor(more + (1 - _UP if more < 1 else 1e-6))) or int(place == 0 and more > 1e-6)
        many = min(many, int(left[kind]))
        if many > 0:
            used[number] += many
            left[kind] -= many
            programme.fix(number, used[number])
            fixed = True
    return fixed and bool(left.any())


def _packed(programme: JointProgramme, used: Mapping[int, int]) -> tuple[Packing, Counter[int]]:
    """The packing of so many ways, and the parts without a slot."""
    encoded, kept, sizes = programme.encoded, programme.kept, programme.sizes
    counts = _counts(programme, used)
    packing = Packing(encoded, counts)
    for block, at in kept.at.items():
        for place in np.flatnonzero(at).tolist():
            packing.put(block, place, int(at[place]))
    rest: Counter[int] = Counter()
    for option in np.flatnonzero(counts > kept.counts).tolist():
        for block, count in encoded.option_blocks[option]:
            rest[block] += count * int(counts[option] - kept.counts[option])
    slots = _slots(programme, used)
    number_of = {tuple(size): number for number, size in enumerate(sizes.tolist())}
    kinds: dict[int, int] = {}
    for block in rest:
        part = encoded.blocks[block]
        if part.single and len(part.names) == encoded.ranks:
            size = quantities(encoded, part.loads, part.memory) / programme.scale
            kinds[block] = number_of[tuple(size[0].tolist())]
    # The largest first, each into the slots of its own kind, then of the next larger ones.
    for block in sorted(kinds, key=lambda block: -float(sizes[kinds[block]].max())):
        size = sizes[kinds[block]]
        places = {int(rank): place for place, rank in enumerate(encoded.blocks[block].places[:, 0])}
        fit = [slot for slot in slots if (sizes[slot] >= size).all() and not programme.small[kinds[block]]]
        for slot in sorted(fit, key=lambda slot: float((sizes[slot] - size).sum())):
            while rest[block] and slots[slot]:
                packing.put(block, places[slots[slot].pop()])
                rest[block] -= 1
    return packing, +rest


def _counts(programme: JointProgramme, used: Mapping[int, int]) -> Ints:
    """(O,) how many tables take each option; those that have no place take what is easiest to find room for."""
    encoded = programme.encoded
    chosen = programme.choose(used) + programme.kept.counts
    short = encoded.sizes - np.bincount(encoded.option_group, chosen, len(encoded.groups))
    for group in np.flatnonzero(short > 1e-6):
        span = encoded.group_options[group]
        chosen[span.start + int(programme.awkward[span.start : span.stop].argmin())] += short[group]
    return rounded(encoded, chosen)


def _slots(programme: JointProgramme, used: Mapping[int, int]) -> dict[int, list[int]]:
    """Per kind of piece, the ranks that have a slot for it."""
    ranks = [np.flatnonzero(programme.class_of == number).tolist() for number in range(len(programme.many))]
    ways = programme.ways()
    slots: dict[int, list[int]] = {}
    for number, many in used.items():
        kind_of_rank, way = ways[number]
        for _ in range(many):
            rank = ranks[kind_of_rank].pop()
            for kind, count in way.items():
                slots.setdefault(kind, []).extend([rank] * count)
    return slots
