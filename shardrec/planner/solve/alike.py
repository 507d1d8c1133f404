"""A problem made smaller for bounds: tables that are nearly equal are equal, and parts on hosts are single pieces.

Tables whose options correspond one by one, with nearly the same loads, are taken as tables with the least of each load.
So a plan for the tables at hand is one for these, of no greater cost, and there are far fewer ways to exchange tables.

A part with something on each rank of a host is taken as its *share*, the least of its pieces, and what its other pieces
have beyond that as single pieces that may be on any rank. A host's share is the sum of those of its parts. On two
hosts, let r be c less the share of a rank's host: the room for single pieces. The mean of r1 and r2 is c less half of
the shares of both, and they differ by no more than both shares come to.

Shapes: G groups, O options, K kinds of pieces, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Encoded, Floats, Ints
from shardrec.planner.solve.rows import Rows
from shardrec.planner.solve.sizes import host_blocks

__all__ = ["Alike"]

_EVERYWHERE, _PIECE = 3e-5, 1.5e-3
"""Of the most load, how much loads on every rank and of pieces may differ."""


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
        kinds = [_Kinds(encoded, span, blocks, most) for span in encoded.group_options]
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
        option, load, count = [], [], []
        for start, (members, low, _) in zip(starts.tolist(), found, strict=True):
            kind, spans = kinds[members[0]], [encoded.group_options[number] for number in members]
            base.append(low[: len(spans[0])])
            share.append(kind.shares(low, hosts))
            option.append(kind.option + start)
            load.append(kind.free(low))
            count.append(kind.count)
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
            rows=np.concatenate(matrix, axis=1),
            limits=rows.limits,
            fits=np.concatenate(fits),
        )

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


class _Kinds:
    """The options of a group as numbers that can be compared with those of another.

    ``loads`` has the load of each option on every rank, then those of the pieces, in the order of ``option``.
    """

    def __init__(self, encoded: Encoded, span: range, blocks: set[int], most: float) -> None:
        options, loads, counts, shared, shape = [], [], [], [], []
        part = 0
        for number, at in enumerate(span):
            for block, count in encoded.option_blocks[at]:
                pieces = encoded.blocks[block].loads
                on_host = block in blocks
                shape.append((number, len(pieces), count, on_host))
                options += [number] * len(pieces)
                loads += pieces.tolist()
                counts += [float(count)] * len(pieces)
                shared += [part if on_host else -1] * len(pieces)
                part += on_host
        base = encoded.base_load[span.start : span.stop]
        self.shape = (len(span), tuple(shape))
        self.option = np.array(options, dtype=np.int64)
        self.count = np.array(counts)
        self._shared = np.array(shared, dtype=np.int64)
        self._parts = part
        # What no useful plan has need not be alike.
        self.loads = np.minimum(np.concatenate([base, np.array(loads)]) / most, 1.01)
        self.slack = np.concatenate([np.full(len(span), _EVERYWHERE), np.full(len(loads), _PIECE)])
        self._options = len(span)

    def _least(self, loads: Floats) -> Floats:
        """(parts,) the share of each part on a host."""
        least = np.full(self._parts, np.inf)
        on_host = self._shared >= 0
        np.minimum.at(least, self._shared[on_host], loads[self._options :][on_host])
        return least

    def shares(self, loads: Floats, hosts: int) -> Floats:
        """(options,) of all parts on hosts."""
        least, found = self._least(loads), np.zeros(self._options)
        seen = np.unique(self._shared, return_index=True)
        for part, at in zip(*(each.tolist() for each in seen), strict=True):
            if part >= 0:
                found[self.option[at]] += least[part] * self.count[at]
        return found

    def free(self, loads: Floats) -> Floats:
        """(pieces,) load of the pieces, less their shares."""
        pieces = loads[self._options :].copy()
        on_host = self._shared >= 0
        pieces[on_host] -= self._least(loads)[self._shared[on_host]]
        return pieces
