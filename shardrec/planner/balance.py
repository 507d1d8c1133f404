"""A simple balanced planner: cut what is large or hot, then longest-first onto the least loaded rank.

The load of a shard is what one global batch makes it do: rows looked up times columns, in bytes, plus the pooled
columns it sends back. Row-wise shards share the lookups but each sends every sample's columns, so rows are cut only
when a table is too much for one rank by memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardrec.errors import ConfigError
from shardrec.layout import COLUMN_UNIT, ShardingPlan, TableLayout, Topology, cuts
from shardrec.planner.constraint import CUTS, Constraint, constraints_by_table

__all__ = ["TableSize", "balanced_plan"]

_BYTES = 4
_COLUMN_CUTS = ("column_wise", "table_column_wise", "grid")
_HOST_CUTS = ("table_row_wise", "table_column_wise", "grid")
_REPLICATED_WEIGHTS = 4096
"""Tables of at most so many weights are replicated: their gradient costs less than their exchange."""


@dataclass(frozen=True, kw_only=True)
class TableSize:
    """What the planner needs to know of a table.

    Args:
        num_embeddings: rows.
        embedding_dim: columns.
        features: number of features that look it up.
    """

    num_embeddings: int
    embedding_dim: int
    features: int = 1

    @property
    def bytes(self) -> int:
        """fp32 weights."""
        return self.num_embeddings * self.embedding_dim * _BYTES


def balanced_plan(
    tables: Mapping[str, TableSize],
    topology: Topology,
    *,
    batch_size: int,
    constraints: Mapping[str, Constraint] | None = None,
) -> ShardingPlan:
    """A plan that balances bytes and load.

    Args:
        tables: by name.
        topology: the ranks.
        batch_size: samples per rank in a step.
        constraints: by table name or pattern.

    Raises:
        ConfigError: if a constraint is for an unknown table or rank, or cannot be met.
    """
    world_size = topology.world_size
    limits = constraints_by_table(tables, constraints, world_size)
    memory = [0.0] * world_size
    load = [0.0] * world_size
    budget = sum(size.bytes for size in tables.values()) / world_size
    layouts: dict[str, TableLayout] = {}
    for name in sorted(tables, key=lambda name: (-tables[name].bytes, name)):
        size, limit = tables[name], limits.get(name, Constraint())
        hosts = _whole_hosts(limit, topology)
        cut = _choose(name, size, limit, hosts, world_size, budget)
        ranks = _least_loaded(limit.ranks or range(world_size), load, memory)
        layout = _cut(name, size, cut, ranks, hosts, topology, load)
        layouts[name] = layout
        for shard in layout.shards:
            share = shard.rows / size.num_embeddings
            looked_up = batch_size * world_size * size.features * shard.cols * _BYTES
            load[shard.rank] += looked_up * (1 + share)
            memory[shard.rank] += shard.numel * _BYTES
    return ShardingPlan(topology=topology, tables=tuple(layouts[name] for name in tables))


def _whole_hosts(limit: Constraint, topology: Topology) -> list[int]:
    """The hosts that a cut over all the ranks of a host may use."""
    allowed = set(limit.ranks or range(topology.world_size))
    return [host for host in range(topology.hosts) if allowed.issuperset(topology.host_ranks(host))]


def _choose(name: str, size: TableSize, limit: Constraint, hosts: Sequence[int], world_size: int, budget: float) -> str:
    allowed = [cut for cut in (limit.cuts or CUTS) if not (cut == "data_parallel" and limit.ranks)]
    if not allowed:
        raise ConfigError(f"table {name!r}: its constraint leaves no cut; allow another one of {', '.join(CUTS)}")
    small = size.num_embeddings * size.embedding_dim <= _REPLICATED_WEIGHTS
    large = size.bytes > budget and size.num_embeddings >= world_size
    order: list[str] = []
    if world_size > 1 and small:
        order.append("data_parallel")
    if world_size > 1 and large:
        order += ["row_wise", "column_wise"]
    order += ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "data_parallel"]
    divisible = size.embedding_dim % COLUMN_UNIT == 0
    for cut in order:
        if cut not in allowed or (cut in _COLUMN_CUTS and not divisible) or (cut in _HOST_CUTS and not hosts):
            continue
        return cut
    reason = (
        f"cannot cut {size.embedding_dim} columns" if hosts else f"needs all the ranks of a host, not {limit.ranks}"
    )
    raise ConfigError(
        f"table {name!r}: its constraint allows only {', '.join(allowed)}, which {reason}; allow row_wise or table_wise"
    )


def _least_loaded(ranks: Sequence[int], load: Sequence[float], memory: Sequence[float]) -> list[int]:
    return sorted(ranks, key=lambda rank: (load[rank], memory[rank], rank))


def _cut(
    name: str,
    size: TableSize,
    cut: str,
    ranks: Sequence[int],
    hosts: Sequence[int],
    topology: Topology,
    load: Sequence[float],
) -> TableLayout:
    rows, dim = size.num_embeddings, size.embedding_dim
    host = min(hosts, key=lambda host: sum(load[rank] for rank in topology.host_ranks(host)), default=0)
    match cut:
        case "table_wise":
            return cuts.table_wise(name, rows, dim, rank=ranks[0])
        case "row_wise":
            return cuts.row_wise(name, rows, dim, ranks=sorted(ranks))
        case "column_wise":
            return cuts.column_wise(name, rows, dim, ranks=sorted(ranks[: max(1, dim // COLUMN_UNIT)]))
        case "table_row_wise":
            return cuts.table_row_wise(name, rows, dim, host=host, topology=topology)
        case "table_column_wise":
            return cuts.table_column_wise(name, rows, dim, host=host, topology=topology)
        case "grid":
            return cuts.grid(name, rows, dim, hosts=hosts, topology=topology)
        case _:
            return cuts.data_parallel(name, rows, dim)
