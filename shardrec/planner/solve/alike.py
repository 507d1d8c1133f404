"""A problem made smaller for bounds: tables that are nearly equal are equal, and parts on hosts are single pieces.

Tables whose options correspond one by one, with nearly the same loads, are taken as tables with the least of each load.
So a plan for the tables at hand is one for these, of no greater cost, and there are far fewer ways to exchange tables.

A part with something on each rank of a host is taken as its *share*, the least of its pieces, and what its other pieces
have beyond that as single pieces that may be on any rank, but no two of a table on the same. A host's share is the sum
of those of its parts. On two hosts, let r be c less the share of a rank's host: the room for single pieces. The mean of
r1 and r2 is c less half of the shares of both, and they differ by no more than both shares come to.

Shapes: G groups, O options, K kinds of pieces, P kinds of parts on hosts, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Block, Encoded, Floats, Ints
from shardrec.planner.solve.rows import Rows
from shardrec.planner.solve.sizes import host_blocks

__all__ = ["MEMORY", "Alike", "short_tier"]

MEMORY = 160
"""Steps of a rank's memory."""

_EVERYWHERE, _PIECE = 3e-5, 1.5e-3
"""Of the most load, how much loads on every rank and of pieces may differ."""
_BYTES = 0.01
"""Of a rank's memory, how much that of pieces may differ."""


@dataclass(frozen=True, eq=False)
class Alike:
    """The smaller problem; loads are in units of the most that a useful plan costs.

    Args:
        ranks: per class of ranks with the same room, how many: those of each of two hosts, or all.
        tables: per group, how many tables each of the problem's groups in it has.
        sizes: (G,) tables.
        starts: (G,) first option.
        group: (O,) which group an option is of.
        first: where the options of each of these begin in the problem.
        options: of the problem.
        base: (O,) load on every rank.
        share: (O,) of all hosts together.
        option: (K,) which option a piece is of.
        load: (K,)
        count: (K,)
        heavy: (K,) memory of a piece, in whole parts of that of a rank, in the tier that is short.
        everywhere: (O,) part of that memory that an option takes on every rank, at least.
        alone: (K,) whether a rank has no more than one such piece of the table.
        used: part of that memory, of all ranks, that is in use at least.
        part: (K,) number of the part on a host that a piece is of, -1 if it may be on any rank.
        part_option: (P,) which option a part on a host is of.
        part_share: (P,)
        part_count: (P,)
        rows: (N, O) other limits.
        limits: (N,)
        fits: (O,)
    """

    ranks: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    first: tuple[tuple[int, ...], ...]
    options: int
    sizes: Ints
    starts: Ints
    group: Ints
    base: Floats
    share: Floats
    option: Ints
    load: Floats
    count: Floats
    heavy: Ints
    everywhere: Floats
    alone: NDArray[np.bool_]
    used: float
    part: Ints
    part_option: Ints
    part_share: Floats
    part_count: Floats
    rows: Floats
    limits: Floats
    fits: NDArray[np.bool_]

    @classmethod
    def of(cls, encoded: Encoded, most: float, rows: Rows) -> Alike | None:
        """None if there are parts on hosts, and not two hosts."""
        local, blocks = host_blocks(encoded)
        hosts = encoded.ranks // local
        if blocks and hosts != 2:
            return None
        tier = short_tier(encoded)
        kinds = [_Kinds(encoded, span, blocks, most, tier) for span in encoded.group_options]
        held = 0.0 * encoded.base_load if tier is None else encoded.base_memory[:, tier] / encoded.capacity[tier]
        found: list[tuple[list[int], Floats, Floats]] = []
        by_shape: dict[object, list[int]] = {}
        for number, kind in enumerate(kinds):
            for at in by_shape.setdefault(kind.shape, []):
                members, low, high = found[at]
                new_low, new_high = np.minimum(low, kind.loads), np.maximum(high, kind.loads)
                if (new_high - new_low <= kind.slack).all():
                    found[at] = [*members, number], new_low, new_high
                    break
            else:
                by_shape[kind.shape].append(len(found))
                found.append(([number], kind.loads, kind.loads))
        options = [len(encoded.group_options[members[0]]) for members, _, _ in found]
        starts = np.cumsum([0, *options[:-1]])
        base, share, matrix, fits = [], [], [], []
        option, load, count, heavy, everywhere, alone = [], [], [], [], [], []
        part, part_option, part_share, part_count, parts = [], [], [], [], 0
        for start, (members, low, _) in zip(starts.tolist(), found, strict=True):
            kind, spans = kinds[members[0]], [encoded.group_options[number] for number in members]
            base.append(low[: len(spans[0])])
            part.append(np.where(kind.part < 0, -1, kind.part + parts))
            parts += len(kind.part_option)
            part_option.append(kind.part_option + start)
            part_share.append(kind.least(low))
            part_count.append(kind.part_count)
            share.append(np.bincount(kind.part_option, part_share[-1] * kind.part_count, len(spans[0])))
            option.append(kind.option + start)
            load.append(kind.free(low))
            count.append(kind.count)
            heavy.append(kind.heavy(low))
            everywhere.append(np.min([held[span.start : span.stop] for span in spans], axis=0))
            alone.append(kind.alone & (encoded.sizes[members].sum() == 1))
            matrix.append(np.min([rows.matrix[:, span.start : span.stop] for span in spans], axis=0))
            fits.append(np.any([rows.fits[span.start : span.stop] for span in spans], axis=0))
        return cls(
            ranks=(local, local) if blocks else (encoded.ranks,),
            tables=tuple(tuple(encoded.sizes[members].tolist()) for members, _, _ in found),
            first=tuple(tuple(encoded.group_options[number].start for number in members) for members, _, _ in found),
            options=len(encoded.options),
            sizes=np.array([encoded.sizes[members].sum() for members, _, _ in found]),
            starts=starts,
            group=np.repeat(np.arange(len(found)), options),
            base=np.concatenate(base),
            share=np.concatenate(share),
            option=np.concatenate(option),
            load=np.concatenate(load),
            count=np.concatenate(count),
            heavy=np.concatenate(heavy),
            everywhere=np.concatenate(everywhere),
            alone=np.concatenate(alone),
            used=0.0 if tier is None else float(_least(encoded)[tier]),
            part=np.concatenate(part),
            part_option=np.concatenate(part_option),
            part_share=np.concatenate(part_share),
            part_count=np.concatenate(part_count),
            rows=np.concatenate(matrix, axis=1),
            limits=rows.limits,
            fits=np.concatenate(fits),
        )

    def beside(self, options: Ints) -> tuple[Ints, int]:
        """What fits memory beside the least that all other tables put on every rank.

        Args:
            options: that tables may take.

        Returns:
            Those of them whose pieces fit, and steps of memory that are left on a rank for pieces; none if some table
            has no option left.
        """
        heaviest: Ints = np.zeros(len(self.base), dtype=np.int64)
        np.maximum.at(heaviest, self.option, self.heavy)
        while True:
            least = np.full(len(self.sizes), np.inf)
            np.minimum.at(least, self.group[options], self.everywhere[options])
            total = float(least @ self.sizes)
            if not np.isfinite(total):
                return options[:0], 0
            own = total - least[self.group[options]] + self.everywhere[options]
            fits = heaviest[options] <= (1.0 - own) * MEMORY + 1e-6
            if fits.all():
                return options, int(np.floor((1.0 - total) * MEMORY + 1e-6))
            options = options[fits]

    def original(self, counts: Mapping[int, int]) -> Ints:
        """The number of tables that take each option of the problem, from that of each option."""
        found: Ints = np.zeros(self.options, dtype=np.int64)
        for group, (first, tables) in enumerate(zip(self.first, self.tables, strict=True)):
            start = int(self.starts[group])
            taken = [o - start for o in sorted(counts) if self.group[o] == group for _ in range(counts[o])]
            for begin, many in zip(first, tables, strict=True):
                for option in taken[:many]:
                    found[begin + option] += 1
                taken = taken[many:]
        return found


def short_tier(encoded: Encoded) -> int | None:
    """The tier of memory of which most is in use at least; None if none has a limit."""
    used = _least(encoded)
    return int(used.argmax()) if used.max(initial=0.0) > 0 else None


def _least(encoded: Encoded) -> Floats:
    """(M,) the part of each tier, of all ranks, that is in use at least; 0 if it has no limit."""
    limited = np.isfinite(encoded.capacity) & (encoded.capacity > 0)
    starts = [span.start for span in encoded.group_options]
    least = encoded.sizes @ np.minimum.reduceat(encoded.total_memory, starts, axis=0)
    found: Floats = np.where(limited, least / np.where(limited, encoded.capacity * encoded.ranks, 1.0), 0.0)
    return found


def _apart(kind: Block) -> bool:
    """Whether it is pieces that are on different ranks."""
    ranks = np.sort(kind.places, axis=1)
    return not kind.single and bool((ranks[:, 1:] > ranks[:, :-1]).all())


class _Kinds:
    """The options of a group as numbers that can be compared with those of another.

    ``loads`` has the load of each option on every rank, then those of the pieces, in the order of ``option``, then the
    part of a rank's memory that each of these takes.
    """

    def __init__(self, encoded: Encoded, span: range, blocks: set[int], most: float, tier: int | None) -> None:
        options, loads, counts, parts, shape = [], [], [], [], []
        memory: list[float] = []
        alone: list[bool] = []
        part_option: list[int] = []
        part_count: list[float] = []
        for number, at in enumerate(span):
            several = sum(count for block, count in encoded.option_blocks[at] if not encoded.blocks[block].single)
            for block, count in encoded.option_blocks[at]:
                pieces = encoded.blocks[block].loads
                on_host = block in blocks
                alone += [several == 1 and _apart(encoded.blocks[block])] * len(pieces)
                shape.append((number, len(pieces), count, on_host))
                options += [number] * len(pieces)
                loads += pieces.tolist()
                bytes_ = (
                    0.0 * pieces if tier is None else encoded.blocks[block].memory[:, tier] / encoded.capacity[tier]
                )
                memory += bytes_.tolist()
                counts += [float(count)] * len(pieces)
                parts += [len(part_option) if on_host else -1] * len(pieces)
                if on_host:
                    part_option.append(number)
                    part_count.append(float(count))
        base = encoded.base_load[span.start : span.stop]
        self.shape = (len(span), tuple(shape))
        self.option = np.array(options, dtype=np.int64)
        self.count = np.array(counts)
        self.part = np.array(parts, dtype=np.int64)
        self.alone = np.array(alone, dtype=bool)
        self.part_option = np.array(part_option, dtype=np.int64)
        self.part_count = np.array(part_count)
        # What no useful plan has need not be alike.
        useful = np.minimum(np.concatenate([base, np.array(loads)]) / most, 1.01)
        self.loads = np.concatenate([useful, np.array(memory)])
        slacks = ((len(span), _EVERYWHERE), (len(loads), _PIECE), (len(loads), _BYTES))
        self.slack = np.concatenate([np.full(many, slack) for many, slack in slacks])
        self._pieces = slice(len(span), len(span) + len(loads))

    def least(self, loads: Floats) -> Floats:
        """(parts,) the share of each part on a host."""
        least = np.full(len(self.part_option), np.inf)
        on_host = self.part >= 0
        np.minimum.at(least, self.part[on_host], loads[self._pieces][on_host])
        return least

    def free(self, loads: Floats) -> Floats:
        """(pieces,) load of the pieces, less their shares."""
        pieces = loads[self._pieces].copy()
        on_host = self.part >= 0
        pieces[on_host] -= self.least(loads)[self.part[on_host]]
        return pieces

    def heavy(self, loads: Floats) -> Ints:
        """(pieces,) steps of memory, rounded down."""
        return np.floor(loads[self._pieces.stop :] * MEMORY * (1 - 1e-9)).astype(np.int64)
