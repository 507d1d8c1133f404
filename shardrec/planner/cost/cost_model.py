"""The cost model: the cost of a shard for the rank that holds it, and of a cut for every rank.

The costs of a step (docs/design.md) and the ranks that bear them. B local batch, W ranks, G = B W, P ids and F bags of
a sample::

    component   on the rank that holds the shard                on every rank
    input       ids and lengths received                        ids sorted by rank and sent, per row partition
    lookup      rows read, per id and byte; bags
    output      pooled columns sent, or partial sums in a host  columns received, added up and put in order
    backward    gradient columns received                       gradient columns sent
    update      rows updated, per id and byte
    replicas                                                    lookup and update of copies, and their all-reduce

All of it is additive, so a rank's time is a sum over shards. A step takes as long as its slowest rank:
collectives keep the ranks in step, and which rank is slowest is nearly the same in every phase. What overlaps (the
exchange with the dense part) overlaps on every rank and for every plan, so it does not enter the comparison.

On several hosts, columns of which several ranks of a host hold row blocks are summed there before they leave it
(:mod:`shardrec.exchange.hosts`): the holders send partial sums inside the host, and then *each* rank of the host,
holder or not, adds up and sends the sums of the samples that are its to send: :meth:`CostModel.host_sum`.

A piece of a table is looked up by ``share`` of its ids: all of them for a column stripe, those in its rows for a row
block. Without a :class:`~shardrec.planner.cost.histogram.Histogram`, ids are spread evenly over rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from shardrec.layout import Topology
from shardrec.planner.cost.profile import Profile
from shardrec.planner.cost.table_load import TableLoad

COMPONENTS = ("input", "lookup", "output", "backward", "update", "replicas")
"""Where a rank's time goes."""
MEMORY = ("weights", "optimizer", "buffers")
"""What a rank's bytes hold."""

_FLOAT = 4
_ID = 4
_WIDE_ID = 8
_SLOT, _CACHED_ROW = 16, 4
"""Bytes on the device for each row that a cache has room for, and for each row of a table that has one."""
_SUMMED_BYTES = 256 << 10
"""Gradients that our kernels on the CPU add up in an array. Those of larger shards are sorted by row."""
_UPDATED, _CACHED = 2.0, 1 / 3
"""Time of a byte that is updated in memory, and of one that is read or updated in a cache, against one that is read
from memory. Fitted as coefficients of their own they predicted no better."""
_NS = 1e-6  # ms
_US = 1e-3  # ms


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time by component (ms), memory by use (bytes) and bytes of tiers in the host's memory."""

    times: tuple[float, ...] = (0.0,) * len(COMPONENTS)
    memory: tuple[float, ...] = (0.0,) * len(MEMORY)
    host_bytes: float = 0.0

    @property
    def ms(self) -> float:
        """The total time."""
        return sum(self.times)

    @property
    def forward_ms(self) -> float:
        """The time until the outputs are there. Nothing for replicas, because their time is not divided."""
        return sum(self.times[: COMPONENTS.index("backward")])

    @property
    def bytes(self) -> float:
        """The total memory."""
        return sum(self.memory)

    def times_each(self, factor: float) -> Cost:
        """The cost multiplied by a factor."""
        return Cost(
            times=tuple(factor * t for t in self.times),
            memory=tuple(factor * m for m in self.memory),
            host_bytes=factor * self.host_bytes,
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            times=tuple(a + b for a, b in zip(self.times, other.times, strict=True)),
            memory=tuple(a + b for a, b in zip(self.memory, other.memory, strict=True)),
            host_bytes=self.host_bytes + other.host_bytes,
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

    @cached_property
    def _route_ns(self) -> float:
        """Per id on its way. One rank by itself sends none."""
        return self.profile.route_id_ns if self.topology.world_size > 1 else 0.0

    @cached_property
    def _wire_ns(self) -> float:
        """Per byte that every rank sends to all ranks."""
        world, local = self.topology.world_size, self.topology.ranks_per_host
        inside = (local - 1) * self.profile.exchange_byte_ns
        return (inside + (world - local) * self.profile.host_exchange_byte_ns) / world

    def overhead_ms(self, *, forward: int, backward: int, reduces: bool) -> tuple[float, float]:
        """The time of forward and backward that does not depend on the shards: the host's work, and the latency of
        collectives.

        Args:
            forward: all-to-alls in forward.
            backward: all-to-alls in backward.
            reduces: there are replicated tables. (A model with a dense part all-reduces in any case.)
        """
        profile = self.profile
        if self.topology.world_size == 1:
            return profile.forward_us * _US, profile.backward_us * _US
        return (
            (profile.forward_us + forward * profile.exchange_us) * _US,
            (profile.backward_us + (backward + reduces) * profile.exchange_us) * _US,
        )

    def shard(
        self, table: TableLoad, *, rows: int, cols: int, share: float, stripes: int = 1, summed: bool = False
    ) -> Cost:
        """The cost of a shard for the rank that holds it. Args:
        table: the table.
        rows: of the shard.
        cols: of the shard.
        share: part of the table's ids that are in its rows.
        stripes: column stripes of the table.
        summed: its columns are summed inside the host.
        """
        profile, topology = self.profile, self.topology
        ids = self._sent_ids(table) * topology.world_size * share
        bags = (self.batch_size if table.pooled else 1) * topology.world_size * table.features
        out = (bags if table.pooled else ids) * cols * _FLOAT
        read, written = self._rows(table, rows, cols, ids, share)
        received = ids * (_ID if rows < 2**31 else _WIDE_ID) + bags * _ID
        copies = out * profile.pooled_byte_ns
        sent = out * self._wire_ns
        if summed:
            local = topology.ranks_per_host
            # They are put in the order of the ranks of the host once more.
            sent = out * ((local - 1) / local * profile.exchange_byte_ns + profile.pooled_byte_ns)
        if table.whole_row_state and stripes > 1:
            # The stripes of a row tell each other their part of its mean square: a float per distinct row.
            told = _FLOAT * (stripes - 1) * (table.distinct(ids / share) * share if share else 0.0)
            told *= topology.world_size / max(topology.world_size - 1, 1)  # none goes to its own rank
            written += told * self._wire_ns + ids * (self._update_id_ns(rows, cols) + self._route_ns)
        times = (
            received * self._wire_ns + ids * self._route_ns,
            read + copies + bags * profile.bag_ns / 2,
            sent,
            sent + copies,
            written + bags * profile.bag_ns / 2,
            0.0,
        )
        each = profile.shard_us * _US / 2
        received_ms, read_ms, sent_ms, returned_ms, written_ms, copied_ms = (time * _NS for time in times)
        weights, state, on_host = rows * cols * table.weight_bytes, rows * cols * table.state_bytes, 0
        if not table.fused:
            state += rows * cols * table.weight_bytes
        if table.tier != "device":
            loaded_ms, stored_ms = self._link(table, rows, cols, ids, share)
            read_ms, written_ms = read_ms + loaded_ms, written_ms + stored_ms
            on_host, state = weights + state, 0
            weights = ceil(table.load_factor * rows) * (cols * table.weight_bytes + _SLOT)
            weights += rows * _CACHED_ROW * (table.tier == "cached")
        return Cost(
            times=(received_ms, read_ms + each, sent_ms, returned_ms, written_ms + each, copied_ms),
            memory=(weights, state + rows * table.row_state_bytes, 2 * out + ids * (_ID + _WIDE_ID) + bags * _ID),
            host_bytes=on_host,
        )

    def _link(self, table: TableLoad, rows: int, cols: int, ids: float, share: float) -> tuple[float, float]:
        """ms of the link to the host's memory, for the lookup of rows, and for their update. As many rows leave a cache
        as it misses. States kept per weight are not cached."""
        row_ms = cols * table.weight_bytes * self.profile.memory_link_byte_ns * _NS
        state_ms = cols * table.state_bytes * self.profile.memory_link_byte_ns * _NS
        distinct = self._distinct(table, rows, ids, share)
        if table.tier == "host":
            return ids * row_ms, 2 * distinct * (row_ms + state_ms)
        missed = table.misses(ids, share, rows, table.load_factor * rows)
        return missed * row_ms, missed * row_ms + 2 * distinct * state_ms

    def host_sum(self, table: TableLoad, *, cols: int, blocks: int) -> Cost:
        """The cost for each rank of a host of summing row blocks there, whether it holds a block or not.

        Args:
            table: the table.
            cols: summed.
            blocks: row blocks of these columns on the host.
        """
        profile, hosts = self.profile, self.topology.hosts
        out = self.batch_size * hosts * table.features * cols * _FLOAT
        each_way = out * ((hosts - 1) / hosts * profile.host_exchange_byte_ns + blocks * profile.pooled_byte_ns) * _NS
        return Cost(
            times=(0.0, 0.0, each_way, each_way, 0.0, 0.0),
            memory=(0.0, 0.0, 2 * (blocks + 1) * out),
        )

    def sums_in_hosts(self, table: TableLoad) -> bool:
        """Whether row blocks on several ranks of a host are summed there."""
        return table.pooled and self.topology.hosts > 1 and self.topology.ranks_per_host > 1

    def everywhere(self, table: TableLoad, *, stripes: int, shards: int, sources: float) -> Cost:
        """The cost of a cut for every rank, in addition to its shards.

        Args:
            table: the table.
            stripes: column stripes. Each one sends the ids again.
            shards: of the table. Each one is sent lengths.
            sources: rows that a rank adds up for a pooled row of its own: rows of row blocks, and of hosts that have
                summed theirs. The mean over the columns.
        """
        profile = self.profile
        ids = self._sent_ids(table)
        bags = self.batch_size * table.features if table.pooled else table.features
        rows_out = self.batch_size * table.features if table.pooled else ids
        # Without pooling a row comes from a single block.
        out = rows_out * table.embedding_dim * _FLOAT * (sources if table.pooled else 1)
        sent = ids * stripes * self._route_ns + bags * shards * profile.bag_ns / 4
        if shards > stripes:
            sent += ids * profile.route_id_ns
        copies = out * profile.pooled_byte_ns * _NS
        return Cost(
            times=(sent * _NS, 0.0, copies, copies, 0.0, 0.0),
            memory=(0.0, 0.0, 2 * out + ids * stripes * _ID),
        )

    def replicated(self, table: TableLoad) -> Cost:
        """The cost for each rank of a copy on every rank."""
        profile = self.profile
        rows, cols = table.num_embeddings, table.embedding_dim
        ids = self.batch_size * table.ids_per_sample
        bags = self.batch_size * table.features
        read, written = self._rows(table, rows, cols, ids, 1.0)
        out = (bags if table.pooled else ids) * cols * _FLOAT
        size = rows * cols * _FLOAT
        time = read + written + bags * profile.bag_ns
        time += 2 * out * profile.pooled_byte_ns + size * profile.replica_byte_ns
        if self.topology.world_size > 1:
            time += size * profile.reduce_byte_ns
        state = rows * cols * table.state_bytes + rows * table.row_state_bytes
        return Cost(
            times=(0.0, 0.0, 0.0, 0.0, 0.0, time * _NS + profile.shard_us * _US),
            memory=(rows * cols * table.weight_bytes, state, 2 * size + 2 * out),
        )

    def _sent_ids(self, table: TableLoad) -> float:
        """Ids that one rank sends for a table: all, or each distinct one once."""
        ids = self.batch_size * table.ids_per_sample
        return table.distinct(ids) if table.dedup and not table.pooled else ids

    def _rows(self, table: TableLoad, rows: int, cols: int, ids: float, share: float) -> tuple[float, float]:
        """ns of the lookup of rows, and of their update."""
        profile, row_bytes = self.profile, cols * table.weight_bytes
        distinct = self._distinct(table, rows, ids, share)
        beyond = max(0.0, 1 - profile.cache_bytes / max(rows * row_bytes, 1.0))
        from_memory = distinct * beyond * row_bytes
        cached = _CACHED * (ids * row_bytes - from_memory)
        read = ids * profile.lookup_id_ns + (from_memory + cached) * profile.row_byte_ns
        written = ids * self._update_id_ns(rows, cols) + (_UPDATED * from_memory + cached) * profile.row_byte_ns
        if table.weight_bytes < _FLOAT:
            written += (distinct * cols + 2 * ids) * profile.decode_ns
        return read, written

    def _distinct(self, table: TableLoad, rows: int, ids: float, share: float) -> float:
        return min(table.distinct(ids / share) * share if share else 0.0, ids, float(rows))

    def _update_id_ns(self, rows: int, cols: int) -> float:
        return self.profile.summed_id_ns if rows * cols * _FLOAT <= _SUMMED_BYTES else self.profile.update_id_ns
