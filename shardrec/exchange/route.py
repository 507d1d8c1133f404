"""Which ids go to which rank: computed once from the plan, without tensors.

The ids of a lookup (one feature looked up in one table) go to every column stripe of the table, and inside a stripe
to the row block that holds the row. So the ids are cut once per distinct row partition of a table (a *unit*), each
unit into its *blocks*, and a *slot* is what one shard receives for one lookup::

    key ──► unit (key, row boundaries) ──► block k of the unit ──► slot of every shard with just these rows
    "f1"    ("f1", 0|500|1000)             0: rows 0..499           f1 → t1[0:500, 0:64] on rank 0
                                           1: rows 500..999         f1 → t1[500:1000, 0:64] on rank 1

Slots are ordered by rank, then lookup group, then table, then shard, then lookup: the order in which ids travel and in
which the pooled columns come back. The lookups of one shard are neighbours, as fbgemm's backward needs them to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardrec.layout import Shard, Stripe, TableLayout


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """One feature looked up in one table.

    Args:
        feature: key of the input KeyedJaggedTensor.
        layout: where the table lives.
        group: number of the table's lookup group (one kernel call each).
        width_groups: (columns, group) pairs, where a table's stripes of different widths are in different groups.
        output: key of the output KeyedTensor.
        mean: mean pooling (else sum).
        dynamic: the table has dynamic ids, which go to row blocks by their hash and are mapped there.
    """

    feature: str
    layout: TableLayout
    group: int
    output: str
    mean: bool = False
    dynamic: bool = False
    width_groups: tuple[tuple[int, int], ...] = ()

    def group_of(self, stripe: Stripe) -> int:
        """The lookup group of one of the table's stripes."""
        return dict(self.width_groups).get(stripe.col_end - stripe.col_start, self.group)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The ids that one shard receives for one lookup: block ``block`` of unit ``unit``."""

    lookup: int
    shard: Shard
    unit: int
    block: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Route:
    """The route of the ids of all the sharded lookups.

    Args:
        unit_keys: per unit, the feature with the ids that it cuts.
        unit_boundaries: per unit, the row boundaries of its blocks.
        dynamic_units: per unit, whether its ids are dynamic, and unchanged in every block.
        slots: per rank, its slots in order of travel.
        groups: number of lookup groups of the module.
    """

    unit_keys: tuple[str, ...]
    unit_boundaries: tuple[tuple[int, ...], ...]
    dynamic_units: tuple[bool, ...]
    slots: tuple[tuple[Slot, ...], ...]
    groups: int

    @cached_property
    def blocks(self) -> int:
        """The most blocks any unit has."""
        return max((len(boundaries) - 1 for boundaries in self.unit_boundaries), default=1)

    @cached_property
    def slot_rows(self) -> tuple[int, ...]:
        """Per slot, rank after rank, its row in the cut lengths, which are (blocks, units, B)."""
        units = len(self.unit_keys)
        return tuple(slot.block * units + slot.unit for rank_slots in self.slots for slot in rank_slots)

    @cached_property
    def in_whole(self) -> bool:
        """Whether no table is cut by rows or columns, so that each lookup has one slot, with its ids in order."""
        slots = [slot.lookup for rank_slots in self.slots for slot in rank_slots]
        return self.blocks == 1 and 0 < len(slots) == len(set(slots))

    def slot_counts(self) -> tuple[int, ...]:
        """Number of slots per rank."""
        return tuple(len(rank_slots) for rank_slots in self.slots)

    def width(self, rank: int) -> int:
        """Pooled columns that ``rank`` sends back per sample."""
        return sum(slot.shard.cols for slot in self.slots[rank])

    @cached_property
    def wide_ids(self) -> bool:
        """Whether ids travel as 64 bits: if any are dynamic, or a shard has more rows than 32 bits can number."""
        return any(self.dynamic_units) or any(
            slot.shard.rows > 2**31 - 1 for rank_slots in self.slots for slot in rank_slots
        )


def build_route(lookups: Sequence[Lookup], world_size: int, groups: int) -> Route:
    """The route of ``lookups``. Lookups of replicated tables are left out, because their ids are not sent.

    Args:
        lookups: in the order of the unsharded module's output.
        world_size: number of ranks W.
        groups: number of lookup groups of the module.
    """
    units: dict[tuple[str, tuple[int, ...], bool], int] = {}
    slots: list[list[Slot]] = [[] for _ in range(world_size)]
    for index, lookup in enumerate(lookups):
        for stripe in lookup.layout.stripes():
            unit = units.setdefault((lookup.feature, stripe.boundaries, lookup.dynamic), len(units))
            for block, shard in enumerate(stripe.shards):
                slots[shard.rank].append(
                    Slot(lookup=index, shard=shard, unit=unit, block=block, group=lookup.group_of(stripe))
                )
    first_lookup: dict[str, int] = {}
    for index, lookup in enumerate(lookups):
        first_lookup.setdefault(lookup.layout.name, index)
    for rank_slots in slots:
        rank_slots.sort(
            key=lambda slot: (
                slot.group,
                first_lookup[slot.shard.table],
                slot.shard.col_start,
                slot.shard.row_start,
                slot.lookup,
            )
        )
    return Route(
        unit_keys=tuple(key for key, _, _ in units),
        unit_boundaries=tuple(boundaries for _, boundaries, _ in units),
        dynamic_units=tuple(dynamic for _, _, dynamic in units),
        slots=tuple(map(tuple, slots)),
        groups=groups,
    )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Columns from ``start`` on of the block that rank ``block`` sent.

    Blocks from W on are the sums of each host, if there are any, then the columns of replicated tables on this rank.
    """

    block: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """``width`` adjacent columns of the output: the sum of as many columns per source."""

    width: int
    sources: tuple[Source, ...]


def output_pieces(
    lookups: Sequence[Lookup], route: Route, sums: Sequence[Sequence[tuple[tuple[int, int], int]]] = ()
) -> tuple[Piece, ...]:
    """How the output's columns, in the unsharded order, come from the received blocks.

    Neighbouring columns with sources that are also neighbours are one piece, so that 200 row-wise tables are one sum of
    W blocks, and table-wise tables in order are one copy per run.

    Args:
        lookups: in the order of the unsharded module's output.
        route: of the lookups.
        sums: per host, ``((lookup, first column), width)`` of the columns that are summed there first (see
            :mod:`shardrec.exchange.hosts`); blocks W, W + 1, ... are these sums.
    """
    world_size = len(route.slots)
    ranks_per_host = world_size // max(1, len(sums))
    sources: dict[tuple[int, int], list[Source]] = {}
    summed = [{key for key, _ in host} for host in sums]
    for rank, rank_slots in enumerate(route.slots):
        start = 0
        for slot in rank_slots:
            key = (slot.lookup, slot.shard.col_start)
            if summed and key in summed[rank // ranks_per_host]:
                continue
            sources.setdefault(key, []).append(Source(block=rank, start=start))
            start += slot.shard.cols
    for host, columns in enumerate(sums):
        start = 0
        for key, width in columns:
            sources.setdefault(key, []).append(Source(block=world_size + host, start=start))
            start += width
    pieces: list[Piece] = []
    copied = 0
    for index, lookup in enumerate(lookups):
        if lookup.layout.replicated:
            copies = Source(block=world_size + len(sums), start=copied)
            add_columns(pieces, Piece(width=lookup.layout.embedding_dim, sources=(copies,)))
            copied += lookup.layout.embedding_dim
        for stripe in lookup.layout.stripes():
            parts = tuple(sources[index, stripe.col_start])
            add_columns(pieces, Piece(width=stripe.col_end - stripe.col_start, sources=parts))
    return tuple(pieces)


def add_columns(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or extend the last one if the piece continues it."""
    if pieces:
        last = pieces[-1]
        follow = tuple(Source(block=source.block, start=source.start + last.width) for source in last.sources)
        if follow == piece.sources:
            pieces[-1] = Piece(width=last.width + piece.width, sources=last.sources)
            return
    pieces.append(piece)
