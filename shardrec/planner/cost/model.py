"""The cost model: what a shard costs the rank that holds it, and what a cut costs every rank.

A step of shardrec (docs/design.md), and who pays for it; B local batch, W ranks, G = B W, P ids and F bags of a
sample::

    component   on the rank that holds the shard                on every rank
    input       ids and lengths received                        ids sorted by rank and sent, per row partition
    lookup      rows read, per id and byte; bags
    output      pooled columns sent                             columns received, added up and put in order
    backward    gradient columns received                       gradient columns sent
    update      rows updated, per id and byte
    replicas                                                    lookup and update of copies, and their all-reduce

All of it is additive, so a rank's time is a sum over shards. The time of a step is that of its slowest rank:
collectives keep the ranks in step, and which rank is slowest is nearly the same in every phase. What overlaps (the
exchange with the dense part) overlaps on every rank and for every plan, so it does not enter the comparison.

A piece of a table is looked up by ``share`` of its ids: all of them for a column stripe, those in its rows for a row
block. Without a histogram, ids are spread evenly over rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardrec.layout import Topology
from shardrec.planner.cost.profile import Profile
from shardrec.planner.cost.table import TableLoad

__all__ = ["COMPONENTS", "MEMORY", "Cost", "CostModel"]

COMPONENTS = ("input", "lookup", "output", "backward", "update", "replicas")
"""Where a rank's time goes."""
MEMORY = ("weights", "optimizer", "buffers")
"""What a rank's bytes hold."""

_FLOAT = 4
_ID = 4
_WIDE_ID = 8
_NS = 1e-6  # ms
_US = 1e-3  # ms


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time by component (ms) and memory by use (bytes)."""

    times: tuple[float, ...] = (0.0,) * len(COMPONENTS)
    memory: tuple[float, ...] = (0.0,) * len(MEMORY)

    @property
    def ms(self) -> float:
        """All the time."""
        return sum(self.times)

    @property
    def bytes(self) -> float:
        """All the memory."""
        return sum(self.memory)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            times=tuple(a + b for a, b in zip(self.times, other.times, strict=True)),
            memory=tuple(a + b for a, b in zip(self.memory, other.memory, strict=True)),
        )


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Prices shards.

    Args:
        profile: coefficients of a rank.
        topology: the ranks.
        batch_size: samples per rank.
    """

    profile: Profile
    topology: Topology
    batch_size: int
    _off_rank: float = field(init=False, repr=False)
    _wire_ns: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        world, local = self.topology.world_size, self.topology.ranks_per_host
        inside, outside = (local - 1) / world, (world - local) / world
        wire = inside * self.profile.exchange_byte_ns + outside * self.profile.host_exchange_byte_ns
        object.__setattr__(self, "_off_rank", inside + outside)
        object.__setattr__(self, "_wire_ns", wire)

    @property
    def overhead_ms(self) -> float:
        """The part of a step that no plan changes: the latency of its collectives, and the host's work."""
        if self.topology.world_size == 1:
            return self.profile.step_us * _US
        return (self.profile.step_us + 4 * self.profile.exchange_us + self.profile.reduce_us) * _US

    def shard(self, table: TableLoad, *, rows: int, cols: int, share: float, whole_table_wide: bool = True) -> Cost:
        """What a shard costs the rank that holds it.

        Args:
            table: the table.
            rows: of the shard.
            cols: of the shard.
            share: part of the table's ids that are in its rows.
            whole_table_wide: its rows are not cut by columns.
        """
        profile = self.profile
        samples = self.batch_size * self.topology.world_size
        ids = self._sent_ids(table) * self.topology.world_size * share
        bags = samples * table.features if table.pooled else self.topology.world_size * table.features
        out = (bags if table.pooled else ids) * cols * _FLOAT
        row_bytes = cols * table.weight_bytes
        from_memory, cached = self._row_bytes(table, rows, row_bytes, ids, share)
        received = ids * (_ID if rows < 2**31 else _WIDE_ID) + bags * _ID
        read = ids * profile.lookup_id_ns + from_memory * profile.lookup_byte_ns + cached * profile.cached_byte_ns
        written = ids * profile.update_id_ns + from_memory * profile.update_byte_ns + cached * profile.cached_byte_ns
        copies = out * profile.pooled_byte_ns
        if table.whole_row_state and not whole_table_wide:
            # The stripes of a row tell each other its mean square: a float per distinct row, there and back.
            told = 2 * _FLOAT * table.distinct(ids)
            written += told * self._wire_ns + ids * (profile.update_id_ns + profile.route_id_ns)
        times = (
            received * self._wire_ns + ids * profile.route_id_ns,
            read + copies + bags * profile.bag_ns / 2,
            out * self._wire_ns,
            out * self._wire_ns + copies,
            written + bags * profile.bag_ns / 2,
            0.0,
        )
        first, *others = (time * _NS for time in times)
        state = rows * cols * table.state_bytes + rows * table.row_state_bytes
        if not table.fused:
            state += rows * cols * table.weight_bytes
        return Cost(
            times=(first, others[0] + profile.shard_us * _US, *others[1:]),
            memory=(rows * cols * table.weight_bytes, state, 2 * out + ids * (_ID + _WIDE_ID) + bags * _ID),
        )

    def everywhere(self, table: TableLoad, *, stripes: int, blocks: int) -> Cost:
        """What a cut costs every rank, besides its shards.

        Args:
            table: the table.
            stripes: column stripes, each of which sends the ids anew.
            blocks: row blocks of a stripe, whose partial sums each rank adds up.
        """
        profile = self.profile
        ids = self._sent_ids(table)
        bags = self.batch_size * table.features if table.pooled else table.features
        rows_out = self.batch_size * table.features if table.pooled else ids
        # Without pooling a row comes from the one block that has it.
        out = rows_out * table.embedding_dim * _FLOAT * (blocks if table.pooled else 1)
        sent = ids * stripes * profile.route_id_ns + bags * stripes * blocks * profile.bag_ns / 4
        if blocks > 1:
            sent += ids * profile.route_id_ns
        copies = out * profile.pooled_byte_ns * _NS
        return Cost(
            times=(sent * _NS, 0.0, copies, copies, 0.0, 0.0),
            memory=(0.0, 0.0, 2 * out + ids * stripes * _ID),
        )

    def replicated(self, table: TableLoad) -> Cost:
        """What a copy on every rank costs each of them."""
        profile = self.profile
        rows, cols = table.num_embeddings, table.embedding_dim
        ids = self.batch_size * table.ids_per_sample
        bags = self.batch_size * table.features
        from_memory, cached = self._row_bytes(table, rows, cols * table.weight_bytes, ids, 1.0)
        out = (bags if table.pooled else ids) * cols * _FLOAT
        size = rows * cols * _FLOAT
        time = ids * (profile.lookup_id_ns + profile.update_id_ns) + bags * profile.bag_ns
        time += from_memory * (profile.lookup_byte_ns + profile.update_byte_ns) + 2 * cached * profile.cached_byte_ns
        # The dense gradient is zeroed, filled, averaged and applied: four passes besides the all-reduce.
        time += 2 * out * profile.pooled_byte_ns + 4 * size * profile.pooled_byte_ns
        if self.topology.world_size > 1:
            time += size * profile.reduce_byte_ns
        state = rows * cols * table.state_bytes + rows * table.row_state_bytes
        return Cost(
            times=(0.0, 0.0, 0.0, 0.0, 0.0, time * _NS + profile.shard_us * _US),
            memory=(rows * cols * table.weight_bytes, state, 2 * size + 2 * out),
        )

    def _sent_ids(self, table: TableLoad) -> float:
        """Ids that one rank sends for a table: sequence tables send each distinct id once."""
        ids = self.batch_size * table.ids_per_sample
        return ids if table.pooled else table.distinct(ids)

    def _row_bytes(
        self, table: TableLoad, rows: int, row_bytes: float, ids: float, share: float
    ) -> tuple[float, float]:
        """Bytes of rows that come from memory, and from a cache."""
        distinct = min(table.distinct(ids / share) * share if share else 0.0, ids)
        beyond = max(0.0, 1 - self.profile.cache_bytes / max(rows * row_bytes, 1.0))
        from_memory = distinct * beyond * row_bytes
        return from_memory, ids * row_bytes - from_memory
