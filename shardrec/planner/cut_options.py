"""The ways to cut a table, priced, as options of the solver.

Cuts that cannot be better than another that is allowed are left out. On one host, row blocks on any ranks include those
on all of its ranks (``table_row_wise``), which are made only if a constraint asks for them. Column stripes on any ranks
include those of ``table_column_wise``, on any number of hosts.

On several hosts, what row blocks cost depends on which of them share a host (:meth:`CostModel.host_sum`). So there
their places are whole patterns: some or all of the ranks of a host, several hosts, or all ranks. Two of a table's
patterns on the same host cost no more than they are priced at. They may cost less, which the bound does not know. Less
still cost the table's blocks on that host alone, which is an option too, but for shards that just fit a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise, product
from math import inf

from shardrec.errors import ConfigError
from shardrec.layout import COLUMN_UNIT, TableLayout, Topology, cuts
from shardrec.planner.constraint import CUTS, Constraint
from shardrec.planner.cost import Cost, CostModel, TableLoad
from shardrec.planner.cut_option import Candidate
from shardrec.planner.price import priced_layout
from shardrec.planner.solve.problem import Gang, Item, Option, Place

Ints = tuple[int, ...]

_BLOCKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of row blocks that are tried, besides one for each rank."""
_UNEVEN = 16
"""Most stripes that are cut where columns do not divide evenly."""
_SPLITS = 32
"""Steps in which the edge between two stripes is moved."""
_MIXED_STRIPES, _MIXED_BLOCKS = (2, 4, 8), (2, 4, 8, 16)
_HOLDERS = (2, 3, 4, 5, 6)
"""Ranks of a host that hold row blocks, besides all of them, where the host sums them."""
_HOSTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of hosts that a table's row blocks are on, besides all of them."""
_LOAD_FACTORS = (0.01, 0.03, 0.1, 0.3)
"""Parts of a table's rows that a cache has room for."""
_ALIKE = 1.001
"""Row blocks count as equal if the load and bytes of any two differ by at most this factor."""


class CandidateMaker:
    """Makes the candidates of tables. Equal tables get the same objects.

    Args:
        model: prices them.
        least: a load (ms) and bytes. A table is not cut into shards that are smaller in both, nor into uneven stripes.
            It bounds how many candidates thousands of tables have. What is smaller hardly changes how ranks are filled.
        tiers: where a table without a constraint on it may be. Empty for a CPU.
    """

    def __init__(self, model: CostModel, least: tuple[float, float] | None = None, tiers: tuple[str, ...] = ()) -> None:
        self._model = model
        self._tiers = tiers
        self._least = least
        self._topology = model.topology
        self._reaches: dict[Ints, tuple[Ints, Ints]] = {}
        self._anywhere: dict[int, tuple[Place, ...]] = {}
        self._all_ranks: tuple[Place, ...] = (tuple(range(self._topology.world_size)),)
        self._hosts: dict[Ints, tuple[Place, ...]] = {}
        self._runs: dict[tuple[int, int], tuple[Place, ...]] = {}
        self._made: dict[tuple[TableLoad, Constraint], tuple[Candidate, ...]] = {}

    def candidates(self, name: str, table: TableLoad, limit: Constraint) -> tuple[Candidate, ...]:
        """All the ways to cut a table within its constraint.

        Raises:
            ConfigError: if no cut is possible.
        """
        key = table, limit
        if key not in self._made:
            if limit.pinned is not None:
                candidates: tuple[Candidate, ...] = (self._pinned(name, table, limit.pinned),)
            else:
                placed = self._in_tiers(name, table, limit)
                candidates = tuple(candidate for each in placed for candidate in self._all(each, limit))
            if not candidates:
                raise ConfigError(_nothing_left(name, table, limit, self._topology))
            self._made[key] = candidates
        return self._made[key]

    def _in_tiers(self, name: str, table: TableLoad, limit: Constraint) -> Iterator[TableLoad]:
        """The table in each tier that it may be in, and with caches of several sizes."""
        tiers = limit.tiers or self._tiers or ("device",)
        if "device" in tiers:
            yield table
        elif not (self._tiers and table.leaves_device):
            reason = "no kernel of fbgemm's runs its optimizer in backward" if self._tiers else "a CPU has no tiers"
            raise ConfigError(f"table {name!r} is to be in tier {tiers[0]!r}, and {reason}. Allow tier 'device'")
        if self._tiers and table.leaves_device:
            cuts_columns = table.cuts_columns and not table.whole_row_state
            if "cached" in tiers:
                for factor in (limit.load_factor,) if limit.load_factor else _LOAD_FACTORS:
                    yield replace(table, tier="cached", load_factor=factor, cuts_columns=cuts_columns)
            if "host" in tiers:
                yield replace(table, tier="host", cuts_columns=cuts_columns)

    def _all(self, table: TableLoad, limit: Constraint) -> Iterator[Candidate]:
        topology, world = self._topology, self._topology.world_size
        replicates = not limit.ranks and table.tier == "device"
        allowed = tuple(cut for cut in (limit.cuts or CUTS) if cut != "data_parallel" or replicates)
        ranks, hosts = self._reach(limit.ranks)
        per_host = topology.ranks_per_host
        most = inf if limit.cuts else self._most_shards(table)
        whole = (table.embedding_dim,)
        stripes = tuple(
            widths
            for widths in _stripes(table, limit.min_columns)
            if len(widths) <= most and (most == inf or len(set(widths)) == 1)
        )
        if "table_wise" in allowed:
            yield self._free(table, "table_wise", whole, (0, table.num_embeddings), ranks)
        # On one rank, table-wise is the same. A constraint may still leave no other cut.
        if "data_parallel" in allowed and (world > 1 or not {"table_wise", "column_wise", "row_wise"} & set(allowed)):
            yield self._replicas(table)
        if "column_wise" in allowed:
            for widths in stripes:
                if len(widths) <= len(ranks) and (len(widths) > 1 or "table_wise" not in allowed):
                    yield self._free(table, "column_wise", widths, (0, table.num_embeddings), ranks)
        even = {len(widths): widths for widths in stripes if len(set(widths)) == 1}
        if self._model.sums_in_hosts(table):
            blocks = self._host_blocks(table, allowed, even, ranks, hosts, most)
        else:
            blocks = self._free_blocks(table, allowed, even, ranks, hosts, most)
        yield from blocks
        if not limit.cuts:
            yield from self._mixed(table, even, ranks, most)
        if hosts and "table_column_wise" in allowed and "column_wise" not in allowed and even:
            widths = even[max(n for n in even if n <= per_host)]
            yield self._by_host(table, "table_column_wise", widths, (0, table.num_embeddings), hosts)

    def _reach(self, limited: Ints) -> tuple[Ints, Ints]:
        """The ranks that a table may be on, one object for equal ones, and the hosts that it may be all over."""
        if limited not in self._reaches:
            ranks = tuple(sorted(set(limited))) or tuple(range(self._topology.world_size))
            able = set(ranks)
            hosts = tuple(h for h in range(self._topology.hosts) if able.issuperset(self._topology.host_ranks(h)))
            self._reaches[limited] = ranks, hosts
            self._anywhere[id(ranks)] = tuple((rank,) for rank in ranks)
        return self._reaches[limited]

    def _most_shards(self, table: TableLoad) -> float:
        if self._least is None:
            return inf
        whole = self._model.shard(table, rows=table.num_embeddings, cols=table.embedding_dim, share=1.0)
        return max(whole.ms / max(self._least[0], 1e-12), whole.bytes / max(self._least[1], 1.0))

    def _free_blocks(
        self,
        table: TableLoad,
        allowed: tuple[str, ...],
        even: Mapping[int, Ints],
        ranks: Ints,
        hosts: Ints,
        most: float,
    ) -> Iterator[Candidate]:
        """Row blocks where it makes no difference which of them share a host."""
        per_host, rows, whole = self._topology.ranks_per_host, table.num_embeddings, (table.embedding_dim,)
        if "row_wise" in allowed:
            for blocks in sorted({min(rows, count) for count in (*_BLOCKS, len(ranks)) if count <= len(ranks)}):
                if (1 < blocks <= most) or (blocks == 1 and "table_wise" not in allowed):
                    for edges in _row_edges(table, blocks):
                        yield self._free(table, "row_wise", whole, edges, ranks)
        if hosts and "table_row_wise" in allowed and "row_wise" not in allowed:
            for edges in _row_edges(table, min(per_host, rows)):
                yield self._by_host(table, "table_row_wise", whole, edges, hosts)
        if "grid" in allowed and (self._topology.hosts > 1 or "row_wise" not in allowed):
            for count in sorted(count for count in even if count <= len(hosts) and count * min(per_host, rows) <= most):
                if count > 1 or allowed == ("grid",):
                    for edges in _row_edges(table, min(per_host, rows)):
                        yield self._by_host(table, "grid", even[count], edges, hosts)

    def _host_blocks(
        self,
        table: TableLoad,
        allowed: tuple[str, ...],
        even: Mapping[int, Ints],
        ranks: Ints,
        hosts: Ints,
        most: float,
    ) -> Iterator[Candidate]:
        """Row blocks that hosts sum."""
        per_host, rows, whole = self._topology.ranks_per_host, table.num_embeddings, (table.embedding_dim,)
        full = min(per_host, rows)
        if "row_wise" in allowed:
            if 1 < min(rows, len(ranks)) <= most:
                for edges in _row_edges(table, min(rows, len(ranks))):
                    yield self._fixed(table, edges, ranks)
            elif "table_wise" not in allowed:
                yield self._free(table, "row_wise", whole, (0, rows), ranks)
            for holders in _HOLDERS:
                if holders < full and holders <= most and self._runs_of(holders, ranks):
                    yield from self._summed(table, "row_wise", whole, holders, 1, ranks)
            for count in _HOSTS:
                if count <= len(hosts) and count < self._topology.hosts and count * per_host <= min(rows, most):
                    cut = "table_row_wise" if count == 1 and "table_row_wise" in allowed else "row_wise"
                    yield from self._summed(table, cut, whole, per_host, count, ranks)
        elif "table_row_wise" in allowed and hosts and full > 1:
            yield from self._summed(table, "table_row_wise", whole, full, 1, ranks)
        elif "table_row_wise" in allowed and hosts:
            yield self._free(table, "table_row_wise", whole, (0, rows), ranks)
        if "grid" in allowed and full > 1:
            for count in sorted(count for count in even if count <= len(hosts) and count * full <= most):
                if count > 1 or allowed == ("grid",):
                    yield from self._summed(table, "grid", even[count], full, 1, ranks)
        elif allowed == ("grid",):
            for count in sorted(count for count in even if count <= len(hosts)):
                yield self._by_host(table, "grid", even[count], _row_edges(table, full)[0], hosts)

    def _mixed(self, table: TableLoad, even: Mapping[int, Ints], ranks: Ints, most: float) -> Iterator[Candidate]:
        """Stripes cut into row blocks in ways that no named cut does."""
        rows = table.num_embeddings
        if not self._model.sums_in_hosts(table):
            for count, blocks in product(_MIXED_STRIPES, _MIXED_BLOCKS):
                if count in even and count * blocks <= min(len(ranks), most) and blocks <= rows:
                    for edges in _row_edges(table, blocks):
                        yield self._free(table, "mixed", even[count], edges, ranks)
            return
        full = min(rows, self._topology.ranks_per_host)
        for count, holders in product(_MIXED_STRIPES, _HOLDERS):
            if count in even and count * holders <= most and holders < full and self._runs_of(holders, ranks):
                yield from self._summed(table, "mixed", even[count], holders, 1, ranks)

    def _free(self, table: TableLoad, cut: str, widths: Ints, edges: Ints, ranks: Ints) -> Candidate:
        blocks, places = len(edges) - 1, self._anywhere[id(ranks)]
        everywhere = self._everywhere(table, len(widths), blocks, blocks)
        items = [item for width in widths for item in self._blocks(table, width, len(widths), edges)]
        gangs = tuple(Gang(items=(item,), places=places, count=len(list(same))) for item, same in groupby(items))
        if len(widths) == len(gangs) == 1 and blocks == self._topology.world_size == len(ranks) and blocks > 1:
            return _on_all(table, cut, widths, edges, everywhere, items[0])
        return _candidate(table, cut, widths, edges, everywhere, gangs)

    def _by_host(self, table: TableLoad, cut: str, widths: Ints, edges: Ints, hosts: Ints) -> Candidate:
        items = self._blocks(table, widths[0], len(widths), edges)
        count = len(widths)
        if cut == "table_column_wise":
            items, count = items * count, 1
        ranks = [self._topology.host_ranks(host)[: len(items)] for host in hosts]
        places = self._hosts.setdefault((len(items), *hosts), tuple(ranks))
        gang = Gang(items=items, places=places, count=count)
        everywhere = self._everywhere(table, len(widths), len(edges) - 1, len(edges) - 1)
        return _candidate(table, cut, widths, edges, everywhere, (gang,))

    def _fixed(self, table: TableLoad, edges: Ints, ranks: Ints) -> Candidate:
        """A row block on each of the first of these ranks, summed where they share a host."""
        cols, topology, blocks = table.embedding_dim, self._topology, len(edges) - 1
        if blocks == topology.world_size:
            everywhere = self._everywhere(table, 1, blocks, topology.hosts)
            host_sum = self._model.host_sum(table, cols=cols, blocks=topology.ranks_per_host)
            items, places = self._blocks(table, cols, 1, edges, host_sum), self._all_ranks
            if len(set(items)) == 1:
                return _on_all(table, "row_wise", (cols,), edges, everywhere, items[0])
        else:
            layout = cuts.row_wise("", table.num_embeddings, cols, ranks=ranks[:blocks], boundaries=edges)
            layout = replace(layout, tier=table.tier, load_factor=table.load_factor)
            shared, shards = priced_layout(self._model, table, layout)
            everywhere, items = _item(shared), tuple(_item(cost) for _, cost in shards)
            places = (tuple(rank for rank, _ in shards),)
        gang = Gang(items=items, places=places)
        return _candidate(table, "row_wise", (cols,), edges, everywhere, (gang,), holders=blocks)

    def _summed(
        self, table: TableLoad, cut: str, widths: Ints, holders: int, hosts: int, ranks: Ints
    ) -> Iterator[Candidate]:
        """Row blocks on a number of ranks of a number of hosts, with a pattern for each stripe and host."""
        per_host, blocks = self._topology.ranks_per_host, holders * hosts
        places, everywhere = self._runs_of(holders, ranks), self._everywhere(table, len(widths), blocks, hosts)
        host_sum = self._model.host_sum(table, cols=widths[0], blocks=holders)
        rest = (_item(host_sum),) * (per_host - holders)
        for edges in _row_edges(table, blocks):
            items = self._blocks(table, widths[0], len(widths), edges, host_sum)
            patterns = [items[first : first + holders] for first in range(0, blocks, holders)] * len(widths)
            gangs = tuple(
                Gang(items=pattern + rest, places=places, count=len(list(same))) for pattern, same in groupby(patterns)
            )
            yield _candidate(table, cut, widths, edges, everywhere, gangs, holders=holders)

    def _runs_of(self, holders: int, ranks: Ints) -> tuple[Place, ...]:
        """All of a host's ranks, once for each run of neighbouring ones that may hold shards, those first."""
        if (holders, id(ranks)) not in self._runs:
            runs, allowed = [], set(ranks)
            for host in range(self._topology.hosts):
                there = self._topology.host_ranks(host)
                able = [rank for rank in there if rank in allowed]
                last = len(able) - holders
                for start in sorted({*range(0, last + 1, holders), last} if last >= 0 else ()):
                    run = able[start : start + holders]
                    runs.append((*run, *(rank for rank in there if rank not in run)))
            self._runs[(holders, id(ranks))] = tuple(runs)
        return self._runs[(holders, id(ranks))]

    def _replicas(self, table: TableLoad) -> Candidate:
        whole, rows = (table.embedding_dim,), (0, table.num_embeddings)
        return _candidate(table, "data_parallel", whole, rows, _item(self._model.replicated(table)))

    def _pinned(self, name: str, table: TableLoad, layout: TableLayout) -> Candidate:
        shape = (layout.num_embeddings, layout.embedding_dim)
        if shape != (table.num_embeddings, table.embedding_dim):
            raise ConfigError(
                f"table {name!r} is {(table.num_embeddings, table.embedding_dim)} and is pinned to a layout of "
                f"{shape}. Pin it to one of its own shape"
            )
        faults = layout.faults(self._topology.world_size)
        if faults:
            raise ConfigError(f"table {name!r} is pinned to a layout that cannot be: {'; '.join(faults)}")
        if layout.replicated:
            return replace(self._replicas(table), cut=layout.cut, pinned=layout)
        everywhere, shards = priced_layout(self._model, table, layout)
        widths = tuple(stripe.col_end - stripe.col_start for stripe in layout.stripes())
        gang = Gang(items=tuple(_item(cost) for _, cost in shards), places=(tuple(rank for rank, _ in shards),))
        option = Option(label=f"{layout.cut} (pinned)", everywhere=_item(everywhere), gangs=(gang,))
        return Candidate(cut=layout.cut, widths=widths, edges=(0, shape[0]), option=option, pinned=layout)

    def _everywhere(self, table: TableLoad, stripes: int, blocks: int, sources: int) -> Item:
        shards = stripes * blocks
        return _item(self._model.everywhere(table, stripes=stripes, shards=shards, sources=float(sources)))

    def _blocks(
        self, table: TableLoad, width: int, stripes: int, edges: Ints, host_sum: Cost | None = None
    ) -> tuple[Item, ...]:
        """Each row block of a stripe. If hosts sum row blocks, a block's cost includes its host's sums.

        Blocks that are nearly equal are one item, with the load of the least: no plan costs less than its items. It has
        the bytes of the largest: each plan of the items fits.
        """
        spans = list(pairwise(edges))
        # Without a histogram, blocks with the same number of rows are equal.
        keys = [bottom - top if table.histogram is None else top for top, bottom in spans]
        distinct = {
            key: self._model.shard(
                table,
                rows=bottom - top,
                cols=width,
                share=table.share(top, bottom),
                stripes=stripes,
                summed=host_sum is not None,
            )
            for key, (top, bottom) in dict(zip(keys, spans, strict=True)).items()
        }
        items = {key: _item(cost if host_sum is None else cost + host_sum) for key, cost in distinct.items()}
        loads = [item.load for item in items.values()]
        sizes = [item.memory[0] for item in items.values()]
        if max(loads) <= _ALIKE * min(loads) and max(sizes) <= _ALIKE * min(sizes):
            return (Item(load=min(loads), memory=(max(sizes),)),) * len(spans)
        return tuple(items[key] for key in keys)


def _on_all(table: TableLoad, cut: str, widths: Ints, edges: Ints, everywhere: Item, block: Item) -> Candidate:
    """Blocks that are equal on each rank, as part of the option's load on every rank."""
    common = Item(load=everywhere.load + block.load, memory=(everywhere.memory[0] + block.memory[0],))
    return _candidate(table, cut, widths, edges, common, on_all=True)


def _candidate(
    table: TableLoad, cut: str, widths: Ints, edges: Ints, everywhere: Item, gangs: tuple[Gang, ...] = (), **more: int
) -> Candidate:
    label = _label(table, cut, widths, edges)
    if table.tier != "device":
        label += f", {table.tier}" + f" {table.load_factor:.2g}" * (table.tier == "cached")
    option = Option(label=label, everywhere=everywhere, gangs=gangs)
    candidate = Candidate(cut=cut, widths=widths, edges=edges, option=option, **more)  # type: ignore[arg-type]
    return replace(candidate, tier=table.tier, load_factor=table.load_factor)


def _row_edges(table: TableLoad, blocks: int) -> list[Ints]:
    """Where rows are cut: into equal blocks, and if ids hit some more than others, into blocks of equal work."""
    even = tuple(table.num_embeddings * block // blocks for block in range(blocks + 1))
    if table.histogram is None or blocks == 1:
        return [even]
    return list(dict.fromkeys([even, table.histogram.cut(blocks)]))


def _item(cost: Cost) -> Item:
    return Item(load=cost.ms, memory=(cost.bytes,))


def _label(table: TableLoad, cut: str, widths: Ints, edges: Ints) -> str:
    blocks = len(edges) - 1
    if cut in ("table_wise", "data_parallel"):
        return cut
    stripes = str(len(widths)) if len(set(widths)) == 1 else "|".join(map(str, widths))
    by_ids = " by ids" if table.histogram is not None and edges != _row_edges(table, blocks)[0] else ""
    if len(widths) > 1 and blocks > 1:
        return f"{cut} {stripes}×{blocks}{by_ids}"
    return f"{cut} ×{blocks}{by_ids}" if len(widths) == 1 else f"{cut} {'×' * stripes.isdigit()}{stripes}"


def _stripes(table: TableLoad, least: int) -> Iterator[Ints]:
    """Widths of the stripes that columns are cut into. None if the kernels cannot take the width at all.

    As even as whole units allow, for any number of stripes. A stripe and one or two narrower ones, and any number of
    equal stripes and a narrower one: what filling one rank after the other leaves of a table.
    """
    units, rest = divmod(table.embedding_dim, COLUMN_UNIT)
    if rest:
        return
    least_units = max(1, -(-least // COLUMN_UNIT))
    # Stripes of one width only: the rows of a sequence table are looked up width by width.
    even_only = table.whole_row_state and not table.pooled
    most = max(1, units // least_units) if table.cuts_columns else 1
    splits: dict[Ints, None] = {}
    for count in range(1, most + 1):
        base, more = divmod(units, count)
        if not more or (count <= _UNEVEN and not even_only):
            splits[(base + 1,) * more + (base,) * (count - more)] = None
    step = max(1, units // _SPLITS)
    if not even_only and table.cuts_columns:
        for wide in range(step, units, step):
            for count in range(1, units // wide + 1):
                left = units - wide * count
                for narrow in range(0, left // 2 + 1 if count == 1 else 1, 2 * step):
                    widths = (*(wide,) * count, *filter(None, (left - narrow, narrow)))
                    if left - narrow <= wide and widths[-1] >= least_units and len(widths) <= _UNEVEN:
                        splits[widths] = None
    for widths in splits:
        yield tuple(COLUMN_UNIT * width for width in widths)


def _nothing_left(name: str, table: TableLoad, limit: Constraint, topology: Topology) -> str:
    allowed = [cut for cut in (limit.cuts or CUTS) if not (cut == "data_parallel" and limit.ranks)]
    if not allowed:
        return f"table {name!r}: its constraint leaves no cut. Allow another one of {', '.join(CUTS)}"
    per_column = {"column_wise", "table_column_wise", "grid"}
    if table.embedding_dim % COLUMN_UNIT and per_column & set(allowed):
        reason = f"cannot cut {table.embedding_dim} columns"
    else:
        reason = f"needs all the ranks of a host ({topology.ranks_per_host} each), not {limit.ranks}"
    return (
        f"table {name!r}: its constraint allows only {', '.join(allowed)}, which {reason}. Allow row_wise or table_wise"
    )
