"""How many bytes a step sends, from rank to rank: the closed formula, as docs/performance.md writes it down.

Plain numbers in, plain numbers out. Nothing here runs an exchange, and nothing of the exchange's code is used. So that
what an exchange is counted to send (:mod:`benchmarks.harness.counting`) can be checked against it.

Every term is linear in the numbers of ids, bags and rows. With those of a batch the result is what that batch sends, to
the byte; with expected numbers (:func:`uniform_traffic`) it is the expectation.

Legend: W ranks in hosts of L, B_w samples of rank w, A row blocks of a table (:func:`row_edges`), p the rank that
sends, q the one that receives. What a rank keeps for itself is not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import expm1, log1p
from typing import TYPE_CHECKING

from shardrec.layout import COLUMN_UNIT, Shard, TableLayout, Topology

if TYPE_CHECKING:
    from shardrec.exchange.wire_format import QuantizedComms

__all__ = [
    "EXCHANGES",
    "CollectionTraffic",
    "TableTraffic",
    "Volume",
    "header_columns",
    "row_edges",
    "step_volume",
    "uniform_traffic",
]

EXCHANGES = ("header", "payload", "partial sums", "output", "gradient", "row norm", "weight gradient")
"""The all-to-alls of a step, as the collectives are told them. On several hosts there may be two of gradients, one of
the output and one of the partial sums."""

_WORD = 4
_HEADER_WORD = 8
_FIXED_COLUMNS = 2  # of a header: fault flag, checksum
_MODULE_COLUMNS = 2  # of a module's part of a header: batch size, words of bags
_REPEATS = 4  # calls of one module that a header has room for
_ELEMENT = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_ROW_EXTRA = {"int8": 8}  # scale and bias of a row
_WIDE_ROWS = 2**31 - 1  # a shard with more rows makes its module's ids travel as 64 bits


@dataclass(frozen=True, kw_only=True)
class TableTraffic:
    """What the ranks look up in one table in one step.

    Args:
        layout: where the table lives. Nothing is sent for a replicated one.
        lookups: number of features that are looked up in it; 1 where their ids are sent deduplicated.
        ids: (W, A) ids that each rank looks up in each row block, over all the lookups. Distinct ones if deduplicated.
        rows: (A,) distinct rows that all the ranks together look up. Read if ``whole_rows``.
        whole_rows: its optimizer takes the mean square of whole rows, and columns are cut: rowwise Adagrad.
        bags: per rank, bags over all the lookups where the features looked up have a batch size each, else None.
    """

    layout: TableLayout
    lookups: int
    ids: Sequence[Sequence[float]]
    rows: Sequence[float] = ()
    whole_rows: bool = False
    bags: Sequence[int | None] | None = None


@dataclass(frozen=True, kw_only=True)
class CollectionTraffic:
    """What the ranks look up in one sharded collection in one step.

    Args:
        tables: of the collection.
        batch_sizes: B_w. Where features have a batch size each, the largest of those that are looked up.
        pooled: bags are summed; else a row per id comes back.
        weighted: each id has a weight.
        learned: the weights take a gradient.
    """

    tables: Sequence[TableTraffic]
    batch_sizes: Sequence[int]
    pooled: bool = True
    weighted: bool = False
    learned: bool = False


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Bytes sent from rank to rank.

    Args:
        ranks_per_host: L. Ranks are numbered host by host.
        pairs: per exchange, (W, W) bytes from rank p to rank q; 0 where they are the same.
    """

    ranks_per_host: int
    pairs: Mapping[str, tuple[tuple[float, ...], ...]]

    @property
    def world_size(self) -> int:
        """W."""
        return len(next(iter(self.pairs.values())))

    def sent(self, *, exchange: str | None = None, rank: int | None = None, abroad: bool = False) -> float:
        """Bytes sent to other ranks.

        Args:
            exchange: of :data:`EXCHANGES`. Default: all of them.
            rank: by this rank. Default: by all of them.
            abroad: to other hosts only.
        """
        names = self.pairs if exchange is None else (exchange,)
        senders = range(self.world_size) if rank is None else (rank,)
        local = self.ranks_per_host
        return sum(
            count
            for name in names
            for source in senders
            for target, count in enumerate(self.pairs[name][source])
            if not abroad or source // local != target // local
        )

    def __add__(self, other: Volume) -> Volume:
        pairs = {
            name: tuple(
                tuple(a + b for a, b in zip(mine, theirs, strict=True))
                for mine, theirs in zip(rows, other.pairs[name], strict=True)
            )
            for name, rows in self.pairs.items()
        }
        return Volume(ranks_per_host=self.ranks_per_host, pairs=pairs)

    def differences(self, other: Volume) -> Iterator[tuple[str, int, int, float, float]]:
        """(exchange, p, q, bytes here, bytes there) wherever the two are not the same."""
        for name, rows in self.pairs.items():
            for source, (mine, theirs) in enumerate(zip(rows, other.pairs[name], strict=True)):
                for target, (here, there) in enumerate(zip(mine, theirs, strict=True)):
                    if here != there:
                        yield name, source, target, here, there

    @classmethod
    def of(cls, ranks_per_host: int, world_size: int, count: Callable[[str, int, int], float]) -> Volume:
        """From the bytes ``count(exchange, p, q)`` of each two ranks."""
        ranks = range(world_size)
        pairs = {
            name: tuple(tuple(0 if p == q else count(name, p, q) for q in ranks) for p in ranks) for name in EXCHANGES
        }
        return cls(ranks_per_host=ranks_per_host, pairs=pairs)


def header_columns(groups: Iterable[int]) -> int:
    """Columns of a model's header, each eight bytes.

    Args:
        groups: number of lookup groups of each sharded collection of the model.
    """
    return _FIXED_COLUMNS + _REPEATS * sum(_MODULE_COLUMNS + count for count in groups)


def row_edges(layout: TableLayout) -> tuple[int, ...]:
    """A + 1 ascending row numbers: wherever any stripe of the table is cut, and its ends."""
    inner = {edge for shard in layout.shards for edge in (shard.row_start, shard.row_end)}
    return tuple(sorted({0, layout.num_embeddings, *inner}))


def uniform_traffic(
    layout: TableLayout,
    ids: Sequence[float],
    *,
    lookups: int = 1,
    distinct: bool = False,
    whole_rows: bool = False,
) -> TableTraffic:
    """What is expected of ids that are drawn independently, each row as likely as any other.

    n draws from R rows meet R (1 - (1 - 1/R)^n) distinct ones.

    Args:
        layout: where the table lives.
        ids: per rank, ids over all the lookups.
        lookups: number of features that are looked up in it.
        distinct: the ids are sent deduplicated.
        whole_rows: as in :class:`TableTraffic`.
    """
    shares = [(end - start) / layout.num_embeddings for start, end in pairwise(row_edges(layout))]
    sent = [_distinct(count, layout.num_embeddings) if distinct else count for count in ids]
    rows = _distinct(sum(ids), layout.num_embeddings)
    return TableTraffic(
        layout=layout,
        lookups=1 if distinct else lookups,
        ids=tuple(tuple(count * share for share in shares) for count in sent),
        rows=tuple(rows * share for share in shares),
        whole_rows=whole_rows,
    )


def _distinct(draws: float, rows: int) -> float:
    if rows == 1:
        return min(draws, 1.0)
    return -rows * expm1(draws * log1p(-1 / rows))


def step_volume(
    collections: Sequence[CollectionTraffic],
    topology: Topology,
    *,
    columns: int,
    comms: QuantizedComms | None = None,
    train: bool = True,
) -> Volume:
    """What one step sends, if all the collections share one exchange.

    The all-reduce of the dense part, in which the gradients of replicated tables travel, is not among it.

    Args:
        collections: what is looked up.
        topology: the ranks.
        columns: of a header, see :func:`header_columns`.
        comms: formats of output and gradient.
        train: with a backward.
    """
    parts = [_Terms(one, topology) for one in collections]
    output, gradient = ("fp32", "fp32") if comms is None else (comms.output, comms.gradient)

    def count(exchange: str, p: int, q: int) -> float:
        match exchange:
            case "header":
                return _HEADER_WORD * columns
            case "payload":
                return sum(part.payload(p, q) for part in parts)
            case "partial sums":
                return sum(part.partial_sums(p, q) for part in parts)
            case "output":
                return sum(part.output(p, q, output) for part in parts)
        if not train:
            return 0
        match exchange:
            case "gradient":
                return sum(part.output(q, p, gradient) + part.partial_sums(q, p) for part in parts)
            case "row norm":
                return sum(part.row_norms[p][q] for part in parts)
            case _:
                return sum(part.weight_gradient(p, q) for part in parts)

    return Volume.of(topology.ranks_per_host, topology.world_size, count)


class _Terms:
    """The terms of one collection.

    Args:
        traffic: what is looked up.
        topology: the ranks.
    """

    def __init__(self, traffic: CollectionTraffic, topology: Topology) -> None:
        self._traffic = traffic
        self._per_host = topology.ranks_per_host
        self._tables = [table for table in traffic.tables if not table.layout.replicated]
        world_size = topology.world_size
        self._wide = any(shard.rows > _WIDE_ROWS for table in self._tables for shard in table.layout.shards)
        self._held = [
            [(table, shard) for table in self._tables for shard in table.layout.shards if shard.rank == rank]
            for rank in range(world_size)
        ]
        self._span = {shard: span for table in self._tables for shard, span in _spans(table.layout).items()}
        self._ids = [
            [sum(self._ids_in(table, p, shard) for table, shard in held) for held in self._held]
            for p in range(world_size)
        ]
        self._slots = [sum(table.lookups for table, _ in held) for held in self._held]
        summed = {shard: host for table in self._tables for shard, host in _summed(table.layout, topology)}
        self._direct = [[(table, shard) for table, shard in held if shard not in summed] for held in self._held]
        self._direct_width = [sum(table.lookups * shard.cols for table, shard in held) for held in self._direct]
        self._summed_width = [
            sum(table.lookups * shard.cols for table, shard in held if shard in summed) for held in self._held
        ]
        # On a host the blocks of a stripe make one sum.
        sums = {
            (host, shard.table, shard.col_start): table.lookups * shard.cols
            for table in self._tables
            for shard in table.layout.shards
            if (host := summed.get(shard)) is not None
        }
        self._host_width = [
            sum(width for (at, _, _), width in sums.items() if at == host) for host in range(topology.hosts)
        ]
        self.row_norms = _row_norms(self._tables, world_size)

    def payload(self, p: int, q: int) -> float:
        """Lengths, or sizes and lengths, then ids and weights: in words of four bytes."""
        words_of_id = (2 if self._wide else 1) + self._traffic.weighted
        return _WORD * (self._bag_words(p, q) + words_of_id * self._ids[p][q])

    def partial_sums(self, p: int, q: int) -> float:
        """To a rank of the same host: the samples of all ranks that have its place on their hosts."""
        if p // self._per_host != q // self._per_host or not self._traffic.pooled:
            return 0
        samples = sum(self._traffic.batch_sizes[q % self._per_host :: self._per_host])
        return _WORD * self._summed_width[p] * samples

    def output(self, p: int, q: int, wire: str) -> float:
        """Pooled columns of q's samples, and its host's sums; or a row for each of q's ids."""
        if not self._traffic.pooled:
            return sum(_wire_bytes(wire, self._ids_in(table, q, shard), shard.cols) for table, shard in self._held[p])
        rows = self._traffic.batch_sizes[q]
        if self._is_uneven(q):
            # Each slot by itself, for each has rows of its own.
            total: float = sum(_wire_bytes(wire, _bags(table, q), shard.cols) for table, shard in self._direct[p])
        else:
            total = _wire_bytes(wire, rows, self._direct_width[p])
        if (q - p) % self._per_host == 0:
            total += _wire_bytes(wire, rows, self._host_width[p // self._per_host])
        return total

    def weight_gradient(self, p: int, q: int) -> float:
        """One float for each id that q sent."""
        return _WORD * self._ids[q][p] if self._traffic.learned else 0

    def _bag_words(self, p: int, q: int) -> float:
        if not self._traffic.pooled:
            return self._slots[q]  # all the ids of a slot go as one bag
        if self._is_uneven(p):
            return sum(table.lookups + _bags(table, p) for table, _ in self._held[q])
        return self._slots[q] * self._traffic.batch_sizes[p]

    def _is_uneven(self, rank: int) -> bool:
        return any(table.bags is not None and table.bags[rank] is not None for table in self._tables)

    def _ids_in(self, table: TableTraffic, rank: int, shard: Shard) -> float:
        return sum(table.ids[rank][self._span[shard]])


def _wire_bytes(wire: str, rows: float, cols: int) -> float:
    padded = -(-cols // COLUMN_UNIT) * COLUMN_UNIT if wire in _ROW_EXTRA else cols
    return rows * (padded * _ELEMENT[wire] + _ROW_EXTRA.get(wire, 0)) if cols else 0


def _spans(layout: TableLayout) -> dict[Shard, slice]:
    """Which of the A row blocks are in each shard."""
    place = {edge: number for number, edge in enumerate(row_edges(layout))}
    return {shard: slice(place[shard.row_start], place[shard.row_end]) for shard in layout.shards}


def _bags(table: TableTraffic, rank: int) -> int:
    count = None if table.bags is None else table.bags[rank]
    assert count is not None, "where one table's features have batch sizes of their own, all have"
    return count


def _summed(layout: TableLayout, topology: Topology) -> Iterator[tuple[Shard, int]]:
    """The shards whose columns several ranks of one host add up, and that host. None where there is one host."""
    if topology.hosts == 1:
        return
    for stripe in layout.stripes():
        for host in range(topology.hosts):
            there = [shard for shard in stripe.shards if shard.rank // topology.ranks_per_host == host]
            if len({shard.rank for shard in there}) > 1:
                yield from ((shard, host) for shard in there)


def _row_norms(tables: Sequence[TableTraffic], world_size: int) -> list[list[float]]:
    """(W, W) bytes: a float for each distinct row that two stripes have in common."""
    found: list[list[float]] = [[0] * world_size for _ in range(world_size)]
    for table in tables:
        if not table.whole_rows:
            continue
        spans = _spans(table.layout)
        for source in table.layout.shards:
            for target in table.layout.shards:
                if source.col_start == target.col_start:
                    continue
                first = max(spans[source].start, spans[target].start)
                last = max(first, min(spans[source].stop, spans[target].stop))
                found[source.rank][target.rank] += _WORD * sum(table.rows[first:last])
    return found
