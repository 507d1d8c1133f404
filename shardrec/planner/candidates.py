"""The ways to cut a table, priced, as options of the solver; and the layout of the one that was chosen.

Cuts that cannot be better than another that is allowed are left out. This cost model does not know sums inside hosts,
and without them it makes no difference on which hosts the blocks of a table are: row blocks on any ranks include those
on the ranks of one host (``table_row_wise``), and column stripes likewise. Those are made where a constraint asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, product

from shardrec.errors import ConfigError
from shardrec.layout import COLUMN_UNIT, Shard, TableLayout, Topology
from shardrec.planner.constraint import CUTS, Constraint
from shardrec.planner.cost import Cost, CostModel, TableLoad
from shardrec.planner.solve.problem import Option, Part, Piece, Place

__all__ = ["Candidate", "CandidateMaker", "lay_out", "priced_layout"]

_BLOCKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of row blocks that are tried, besides one for each rank."""
_UNEVEN = 16
"""Most stripes that are cut where columns do not divide evenly."""
_SPLITS = 16
"""Steps in which the edge between two stripes is moved."""
_MIXED_STRIPES, _MIXED_BLOCKS = (2, 4, 8), (2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to cut a table.

    Args:
        cut: name of the cut.
        widths: columns of each stripe.
        blocks: row blocks of each.
        option: the same for the solver.
        on_all: its blocks are one on each rank, and part of what the option puts everywhere.
        pinned: the layout, where it was given.
    """

    cut: str
    widths: tuple[int, ...]
    blocks: int
    option: Option
    on_all: bool = False
    pinned: TableLayout | None = None


class CandidateMaker:
    """Makes the candidates of tables; equal tables get the same objects.

    Args:
        model: prices them.
    """

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._topology = model.topology
        self._anywhere: dict[tuple[int, ...], tuple[Place, ...]] = {}
        self._hosts: dict[tuple[int, ...], tuple[Place, ...]] = {}
        self._made: dict[tuple[TableLoad, Constraint], tuple[Candidate, ...]] = {}

    def candidates(self, name: str, table: TableLoad, limit: Constraint) -> tuple[Candidate, ...]:
        """All the ways to cut a table within its constraint.

        Raises:
            ConfigError: if there is none.
        """
        key = table, limit
        if key not in self._made:
            if limit.pinned is not None:
                found: tuple[Candidate, ...] = (self._pinned(name, table, limit.pinned),)
            else:
                found = tuple(self._all(name, table, limit))
            if not found:
                raise ConfigError(_nothing_left(name, table, limit, self._topology))
            self._made[key] = found
        return self._made[key]

    def _all(self, name: str, table: TableLoad, limit: Constraint) -> Iterator[Candidate]:
        topology, world = self._topology, self._topology.world_size
        allowed = tuple(cut for cut in (limit.cuts or CUTS) if not (cut == "data_parallel" and limit.ranks))
        ranks = tuple(sorted(set(limit.ranks))) or tuple(range(world))
        hosts = tuple(h for h in range(topology.hosts) if set(ranks).issuperset(topology.host_ranks(h)))
        per_host, rows = topology.ranks_per_host, table.num_embeddings
        whole, stripes = (table.embedding_dim,), tuple(_stripes(table, limit.min_columns))
        if "table_wise" in allowed:
            yield self._free(table, "table_wise", whole, 1, ranks)
        if "data_parallel" in allowed and (world > 1 or allowed == ("data_parallel",)):
            yield self._replicas(table)
        if "row_wise" in allowed:
            for blocks in sorted({min(rows, count) for count in (*_BLOCKS, len(ranks)) if count <= len(ranks)}):
                if blocks > 1 or "table_wise" not in allowed:
                    yield self._free(table, "row_wise", whole, blocks, ranks)
        if "column_wise" in allowed:
            for widths in stripes:
                if len(widths) <= len(ranks) and (len(widths) > 1 or "table_wise" not in allowed):
                    yield self._free(table, "column_wise", widths, 1, ranks)
        even = {len(widths): widths for widths in stripes if len(set(widths)) == 1}
        if not limit.cuts:
            for count, blocks in product(_MIXED_STRIPES, _MIXED_BLOCKS):
                if count in even and count * blocks <= len(ranks) and blocks <= rows:
                    yield self._free(table, "mixed", even[count], blocks, ranks)
        if not hosts:
            return
        if "table_row_wise" in allowed and "row_wise" not in allowed:
            yield self._by_host(table, "table_row_wise", whole, min(per_host, rows), hosts)
        if "table_column_wise" in allowed and "column_wise" not in allowed and even:
            yield self._by_host(table, "table_column_wise", even[max(n for n in even if n <= per_host)], 1, hosts)
        if "grid" in allowed and (topology.hosts > 1 or "row_wise" not in allowed):
            for count in sorted(count for count in even if count <= len(hosts)):
                if count > 1 or allowed == ("grid",):
                    yield self._by_host(table, "grid", even[count], min(per_host, rows), hosts)

    def _free(
        self, table: TableLoad, cut: str, widths: tuple[int, ...], blocks: int, ranks: tuple[int, ...]
    ) -> Candidate:
        everywhere = self._model.everywhere(table, stripes=len(widths), blocks=blocks)
        label = _label(cut, widths, blocks)
        if len(widths) == 1 and blocks == self._topology.world_size == len(ranks) and blocks > 1:
            piece = self._block(table, widths[0], len(widths), blocks)
            option = Option(label=label, everywhere=_piece(everywhere + piece))
            return Candidate(cut=cut, widths=widths, blocks=blocks, option=option, on_all=True)
        places = self._anywhere.setdefault(ranks, tuple((rank,) for rank in ranks))
        parts = tuple(
            Part(
                pieces=(_piece(self._block(table, width, len(widths), blocks)),),
                places=places,
                count=len(list(same)) * blocks,
            )
            for width, same in groupby(widths)
        )
        option = Option(label=label, everywhere=_piece(everywhere), parts=parts)
        return Candidate(cut=cut, widths=widths, blocks=blocks, option=option)

    def _by_host(
        self, table: TableLoad, cut: str, widths: tuple[int, ...], blocks: int, hosts: tuple[int, ...]
    ) -> Candidate:
        used = len(widths) if cut == "table_column_wise" else blocks
        ranks = [self._topology.host_ranks(host)[:used] for host in hosts]
        places = self._hosts.setdefault((used, *hosts), tuple(ranks))
        piece = _piece(self._block(table, widths[0], len(widths), blocks))
        count = 1 if cut == "table_column_wise" else len(widths)
        part = Part(pieces=(piece,) * used, places=places, count=count)
        everywhere = self._model.everywhere(table, stripes=len(widths), blocks=blocks)
        option = Option(label=_label(cut, widths, blocks), everywhere=_piece(everywhere), parts=(part,))
        return Candidate(cut=cut, widths=widths, blocks=blocks, option=option)

    def _replicas(self, table: TableLoad) -> Candidate:
        option = Option(label="data_parallel", everywhere=_piece(self._model.replicated(table)))
        return Candidate(cut="data_parallel", widths=(table.embedding_dim,), blocks=1, option=option)

    def _pinned(self, name: str, table: TableLoad, layout: TableLayout) -> Candidate:
        shape = (layout.num_embeddings, layout.embedding_dim)
        if shape != (table.num_embeddings, table.embedding_dim):
            raise ConfigError(
                f"table {name!r} is {(table.num_embeddings, table.embedding_dim)} and is pinned to a layout of "
                f"{shape}; pin it to one of its own shape"
            )
        faults = layout.faults(self._topology.world_size)
        if faults:
            raise ConfigError(f"table {name!r} is pinned to a layout that cannot be: {'; '.join(faults)}")
        if layout.replicated:
            candidate = self._replicas(table)
            return Candidate(cut=layout.cut, widths=candidate.widths, blocks=1, option=candidate.option, pinned=layout)
        everywhere, parts = priced_layout(self._model, table, layout)
        pieces = tuple(_piece(cost) for _, cost in parts)
        widths = tuple(stripe.col_end - stripe.col_start for stripe in layout.stripes())
        place = tuple(shard.rank for shard, _ in parts)
        option = Option(
            label=f"{layout.cut} (pinned)",
            everywhere=_piece(everywhere),
            parts=(Part(pieces=pieces, places=(place,)),),
        )
        return Candidate(cut=layout.cut, widths=widths, blocks=1, option=option, pinned=layout)

    def _block(self, table: TableLoad, width: int, stripes: int, blocks: int) -> Cost:
        rows = -(-table.num_embeddings // blocks)
        return self._model.shard(table, rows=rows, cols=width, share=1 / blocks, whole_table_wide=stripes == 1)


def priced_layout(model: CostModel, table: TableLoad, layout: TableLayout) -> tuple[Cost, list[tuple[Shard, Cost]]]:
    """What any layout costs every rank, and what each of its shards costs the rank that holds it."""
    if layout.replicated:
        return model.replicated(table), []
    stripes = layout.stripes()
    blocks = max((len(stripe.shards) for stripe in stripes), default=1)
    everywhere = model.everywhere(table, stripes=len(stripes), blocks=blocks)
    shards = []
    for stripe in stripes:
        for shard in stripe.shards:
            share = shard.rows / table.num_embeddings
            cost = model.shard(table, rows=shard.rows, cols=shard.cols, share=share, whole_table_wide=len(stripes) == 1)
            shards.append((shard, cost))
    return everywhere, shards


def lay_out(name: str, table: TableLoad, candidate: Candidate, places: Sequence[Place], world: int) -> TableLayout:
    """The layout of a candidate whose parts were placed."""
    rows, cols = table.num_embeddings, table.embedding_dim
    if candidate.pinned is not None:
        pinned = candidate.pinned
        shards = tuple(
            Shard(
                table=name,
                row_start=s.row_start,
                row_end=s.row_end,
                col_start=s.col_start,
                col_end=s.col_end,
                rank=s.rank,
            )
            for s in pinned.shards
        )
        return TableLayout(
            name=name,
            num_embeddings=rows,
            embedding_dim=cols,
            shards=shards,
            replicated=pinned.replicated,
            cut=pinned.cut,
        )
    if candidate.cut == "data_parallel":
        return TableLayout(name=name, num_embeddings=rows, embedding_dim=cols, replicated=True, cut="data_parallel")
    ranks = list(range(world)) if candidate.on_all else [rank for place in places for rank in place]
    columns = [0, *accumulate(candidate.widths)]
    edges = [rows * block // candidate.blocks for block in range(candidate.blocks + 1)]
    rectangles = [(*block, *stripe) for stripe in pairwise(columns) for block in pairwise(edges)]
    return TableLayout(
        name=name,
        num_embeddings=rows,
        embedding_dim=cols,
        cut=candidate.cut,
        shards=tuple(
            Shard(table=name, row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rank)
            for (top, bottom, left, right), rank in zip(rectangles, ranks, strict=True)
        ),
    )


def _piece(cost: Cost) -> Piece:
    return Piece(load=cost.ms, memory=(cost.bytes,))


def _label(cut: str, widths: tuple[int, ...], blocks: int) -> str:
    if cut in ("table_wise", "data_parallel"):
        return cut
    stripes = str(len(widths)) if len(set(widths)) == 1 else "|".join(map(str, widths))
    if len(widths) > 1 and blocks > 1:
        return f"{cut} {stripes}×{blocks}"
    return f"{cut} ×{blocks}" if len(widths) == 1 else f"{cut} {'×' * stripes.isdigit()}{stripes}"


def _stripes(table: TableLoad, least: int) -> Iterator[tuple[int, ...]]:
    """Widths of the stripes that columns are cut into; none if the kernels cannot take the width at all.

    As even as whole units allow, for any number of stripes, and two stripes of any widths, which is what balances a few
    large tables over the ranks.
    """
    units, rest = divmod(table.embedding_dim, COLUMN_UNIT)
    if rest:
        return
    least_units = max(1, -(-least // COLUMN_UNIT))
    # Stripes of one width only: the rows of a sequence table are looked up width by width.
    even_only = table.whole_row_state and not table.pooled
    most = max(1, units // least_units)
    for count in range(1, most + 1):
        base, more = divmod(units, count)
        if not more or (count <= _UNEVEN and not even_only):
            yield (COLUMN_UNIT * (base + 1),) * more + (COLUMN_UNIT * base,) * (count - more)
    step = max(1, units // _SPLITS)
    if not even_only:
        for narrow in range(step, (units - 1) // 2 + 1, step):
            if narrow >= least_units and units - narrow - narrow > 1:
                yield COLUMN_UNIT * (units - narrow), COLUMN_UNIT * narrow


def _nothing_left(name: str, table: TableLoad, limit: Constraint, topology: Topology) -> str:
    allowed = [cut for cut in (limit.cuts or CUTS) if not (cut == "data_parallel" and limit.ranks)]
    if not allowed:
        return f"table {name!r}: its constraint leaves no cut; allow another one of {', '.join(CUTS)}"
    per_column = {"column_wise", "table_column_wise", "grid"}
    if table.embedding_dim % COLUMN_UNIT and per_column & set(allowed):
        reason = f"cannot cut {table.embedding_dim} columns"
    else:
        reason = f"needs all the ranks of a host ({topology.ranks_per_host} each), not {limit.ranks}"
    return (
        f"table {name!r}: its constraint allows only {', '.join(allowed)}, which {reason}; allow row_wise or table_wise"
    )
