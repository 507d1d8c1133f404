"""The id maps of a rank, which map the raw ids that all ranks requested to rows before the lookup.

Shapes: S slots of this rank, B_all samples of all ranks, N ids.

A map belongs to a row block of a table. Column stripes of a table have equal row blocks, so a rank that holds several
of them maps once for all, and ranks that hold one each get the same rows: they see the same ids in the same order.

[Note: open steps]
Between a lookup and its backward, its rows must not be assigned to other ids. So an id that is used by a step without
its backward yet is not evicted, as long as its autograd graph exists. A second backward over a retained graph is an
error if rows may have been reassigned since.

A step without a graph (``torch.utils.checkpoint`` with ``use_reentrant=True``, a pipeline's checkpoint) protects
nothing, but its rows are remembered: if a backward computes it again, it reads the same rows. That is an error if they
may have been reassigned since.

A load gives rows to other ids, whatever they are used by: no backward of a step before it may follow.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange import launching
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.route import Slot
from shardrec.exchange.to_device import staged
from shardrec.ids.device_maps import DeviceMaps, FoundRows
from shardrec.ids.id_map import COUNTED, IdMap
from shardrec.ids.options import DynamicIds
from shardrec.layout import Shard, TableLayout

Renew = Callable[[Shard, Tensor, int], None]
"""Draws rows of a shard again, after they were taken from their ids in a step: shard, rows (E,), step."""

_Key = tuple[str, int]  # table, first row of the block
_REMEMBERED = 256
"""Most steps without a graph whose rows are remembered."""


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """Rows instead of raw ids.

    Args:
        shard_input: the ids that are looked up, as rows; without the ids that are looked up as zeros.
        kept: per lookup group, (n,) bool, which ids are looked up. None if all are.
        step: number of the step; 0 for a lookup that changed nothing.
    """

    shard_input: ShardInput
    kept: list[Tensor] | None = None
    step: int = 0

    def in_place(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Per lookup group, (n, w) rows of all the ids, from those that were looked up."""
        if self.kept is None:
            return list(rows)
        all_rows = []
        for part, kept in zip(rows, self.kept, strict=True):
            places = torch.where(kept, kept.cumsum(0), 0).to(part.device)
            all_rows.append(nn.functional.pad(part, [0, 0, 1, 0]).index_select(0, places))
        return all_rows

    def of_looked_up(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The transpose of :meth:`in_place`."""
        if self.kept is None:
            return list(gradients)
        return [part[kept.to(part.device)] for part, kept in zip(gradients, self.kept, strict=True)]

    def of_all_ids(self, gradient: Tensor) -> Tensor:
        """(N,) gradient of all the ids' weights, from the gradient of the looked-up ids: 0 for the others."""
        if self.kept is None:
            return gradient
        kept = torch.cat(self.kept).to(gradient.device)
        return gradient.new_zeros(kept.numel()).masked_scatter_(kept, gradient)


@dataclass(eq=False)
class OpenStep:
    """A step before its backward has run. Its autograd graph keeps it alive. 0: its ids have lost their rows."""

    step: int


@dataclass(eq=False)
class _WithoutGraph:
    """A step whose lookup kept no graph: its ids, their rows, and its number."""

    ids: Tensor
    rows: Tensor
    step: int


class IdMaps:
    """The maps of this rank's shards.

    Args:
        slots: of this rank. The slots of a shard are next to each other.
        options: of the tables with dynamic ids, by their names in the plan.
        layouts: of these tables.
        renew: draws new values for evicted rows.
        device: of the tables.

    Attributes:
        step: steps so far.
        maps: by table and first row.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        options: Mapping[str, DynamicIds],
        layouts: Mapping[str, TableLayout],
        renew: Renew,
        device: torch.device,
    ) -> None:
        self.step = 0
        self._device = device
        self.options = dict(options)
        self.maps: dict[_Key, IdMap] = {}
        self._renew = renew
        self._runs: list[tuple[_Key | None, int]] = []  # map and number of slots
        self._shards: dict[_Key, list[Shard]] = {}
        self._open: weakref.WeakSet[OpenStep] = weakref.WeakSet()
        self._without_graph = deque[_WithoutGraph](maxlen=_REMEMBERED)
        for shard, run in groupby(slots, key=lambda slot: slot.shard):
            key = (shard.table, shard.row_start) if shard.table in options else None
            self._runs.append((key, len(list(run))))
            if key is None:
                continue
            self._shards.setdefault(key, []).append(shard)
            if key not in self.maps:
                id_options = options[shard.table]
                capacity = block_capacity(layouts[shard.table], shard, id_options)
                self.maps[key] = IdMap(shard.rows, id_options, capacity)
        for shards in self._shards.values():  # stripes of several widths are in several lookup groups
            shards.sort()
        plain = (slot.shard for slot in slots if slot.shard.table not in options)
        self._is_wide = any(shard.rows > 2**31 for shard in plain)
        self._on_device = self._device_maps()

    def runs(self) -> list[tuple[IdMap | None, int]]:
        """The map of each run of slots of this rank, None for plain rows, and its number of slots."""
        return [(None if key is None else self.maps[key], count) for key, count in self._runs]

    def find_rows(self, shard_input: ShardInput) -> FoundRows | None:
        """With maps on a GPU, begin to look ids up before the step that will assign rows to new ones."""
        return None if self._on_device is None else self._on_device.find(shard_input)

    def __call__(
        self,
        shard_input: ShardInput,
        assign_new_ids: bool,
        found_rows: FoundRows | None = None,
        *,
        has_graph: bool = True,
    ) -> Mapped:
        """Map the ids that the ranks requested.

        Args:
            shard_input: with raw ids, int64. Ids of tables without dynamic ids are rows.
            assign_new_ids: count a step, and assign rows to new ids. Otherwise nothing changes.
            found_rows: what :meth:`find_rows` returned for the ids.
            has_graph: :meth:`open_step` will protect the step.
        """
        self.step += assign_new_ids
        protect = min((open_step.step for open_step in self._open), default=self.step)
        if self._on_device is None:
            rows, lacking = self._on_host(shard_input, assign_new_ids, protect)
        elif assign_new_ids:
            rows, evicted, lacking = self._on_device.assign(shard_input, found_rows, step=self.step, protect=protect)
            for shards, evicted_rows in zip(self._shards.values(), evicted, strict=True):
                self._renew_all(shards, evicted_rows)
        else:
            rows = self._on_device.find(shard_input, frozen=True).rows
            lacking = any(options.fallback_rows == 0 for options in self.options.values())
        if self._is_wide:
            plain = torch.tensor([key is None for key, count in self._runs for _ in range(count)], device=rows.device)
            sizes = shard_input.lengths.sum(dim=1, dtype=torch.int64).to(rows.device)
            plain_N = plain.repeat_interleave(sizes, output_size=rows.numel())
            rows = torch.where(plain_N, shard_input.ids.to(rows.device), rows)
        step = self.step if assign_new_ids else 0
        if step and not has_graph:
            self._without_graph.append(_WithoutGraph(shard_input.ids.clone(), rows, step))
        if not lacking:
            return Mapped(shard_input=replace(shard_input, ids=rows.to(shard_input.ids.device)), step=step)
        return self._without_zeros(shard_input, rows, step)

    def again(self, shard_input: ShardInput, *, had_graph: bool) -> Mapped:
        """Map the ids of a step that a backward computes again.

        Args:
            shard_input: as before.
            had_graph: the step's own graph protects its rows.

        Raises:
            ConfigError: if its rows may have been reassigned since.
        """
        forwards = [] if had_graph else reversed(self._without_graph)  # a backward reaches the last forward first
        forward = next((each for each in forwards if torch.equal(each.ids, shard_input.ids)), None)
        if forward is None:
            return self(shard_input, False)
        self._without_graph.remove(forward)
        if any(each.last_of_evicted >= forward.step for each in self.maps.values()):
            raise ConfigError(
                f"a backward computes a forward again in which ids of the tables {', '.join(map(repr, self.options))} "
                "had rows that later forwards gave to other ids. Call torch.utils.checkpoint with use_reentrant=False, "
                'a pipeline with checkpoint="never", or make fewer forwards before a backward'
            )
        return self._without_zeros(shard_input, forward.rows, 0)

    def _on_host(self, shard_input: ShardInput, assign_new_ids: bool, protect: int) -> tuple[Tensor, bool]:
        """(N,) rows, on the host, and whether any is -1."""
        ids = shard_input.ids.cpu()  # with tables on a GPU, the host waits for the device here
        rows = torch.empty(ids.numel(), dtype=torch.int32)
        # A slot's ids fit 32 bits, and torch adds int32 up as int32 ten times as fast as it does as int64.
        ends = [0, *accumulate(shard_input.lengths.sum(dim=1, dtype=torch.int32).tolist())]
        done: dict[_Key, slice] = {}
        slot, lacking = 0, 0
        for key, count in self._runs:
            span, slot = slice(ends[slot], ends[slot + count]), slot + count
            if key is None:
                rows[span].copy_(ids[span])
            elif key in done:
                rows[span].copy_(rows[done[key]])
                lacking += 1
            else:
                looked = self.maps[key].look_up(
                    ids[span], rows[span], step=self.step, assign_new_ids=assign_new_ids, protect=protect
                )
                done[key] = span
                lacking += looked.lacking
                self._renew_all(self._shards[key], looked.evicted)
        return rows, bool(lacking) and bool((rows < 0).any())

    def _device_maps(self) -> DeviceMaps | None:
        """The copies of the maps on the device, if it has the kernels. Their memory is of the present stream."""
        if not launching.has_kernels(self._device):
            return None
        numbers = {key: number for number, key in enumerate(self._shards)}
        slot_maps = [-1 if key is None else numbers[key] for key, count in self._runs for _ in range(count)]
        counted: list[bool] = []
        done: set[_Key] = set()
        for key, count in self._runs:
            counted += [key is not None and key not in done] * count
            done |= set() if key is None else {key}
        return DeviceMaps([self.maps[key] for key in self._shards], slot_maps, counted, self._device)

    def _renew_all(self, shards: Sequence[Shard], rows: Tensor) -> None:
        for shard in shards if rows.numel() else ():
            self._renew(shard, rows, self.step)

    def _without_zeros(self, shard_input: ShardInput, rows: Tensor, step: int) -> Mapped:
        """Leave the ids out that are looked up as rows of zeros. The host waits for their number."""
        device, here = shard_input.ids.device, rows.device
        kept = rows >= 0
        before = nn.functional.pad(kept.cumsum(0), [1, 0])
        edges = nn.functional.pad(shard_input.lengths.reshape(-1).cumsum(0).to(here), [1, 0])
        lengths = before[edges].diff().to(torch.int32).view(shard_input.lengths.shape)
        groups = staged([0, *accumulate(shard_input.group_ids)], torch.int64, here)
        group_ids = before[groups].diff().tolist()
        count = sum(group_ids)
        if count == rows.numel():
            return Mapped(shard_input=replace(shard_input, ids=rows.to(device)), step=step)
        # As `kept.nonzero()`, for which the host need not wait again.
        places = torch.empty(count + 1, dtype=torch.int64, device=here)
        places.scatter_(0, torch.where(kept, before[:-1], count), torch.arange(rows.numel(), device=here))
        places = places[:count]
        looked_up = replace(
            shard_input,
            lengths=lengths.to(device),
            ids=rows.index_select(0, places).to(device),
            weights=None if shard_input.weights is None else shard_input.weights.index_select(0, places.to(device)),
            group_ids=tuple(group_ids),
            order=None,
            offsets=None,
        )
        return Mapped(shard_input=looked_up, kept=list(kept.split(list(shard_input.group_ids))), step=step)

    def blocks(self, table: str) -> Iterator[tuple[list[Shard], IdMap]]:
        """This rank's row blocks of a table: the shards, one per column stripe in column order, and their map.

        If several ranks hold a block, the map of the rank with the table's first column is counted and saved.
        """
        for key, shards in self._shards.items():
            if key[0] == table:
                yield shards, self.maps[key]

    def keep(self, others: IdMaps) -> None:
        """Take over the maps of row blocks that another plan has as well."""
        for key, id_map in others.maps.items():
            if key in self.maps and self.maps[key].records.shape == id_map.records.shape:
                self.maps[key] = id_map
        self._on_device = self._device_maps()

    def set_options(self, layout: TableLayout, options: DynamicIds) -> None:
        """Set the capacity of a table's maps from ``options``. It is not lower than before."""
        self.options[layout.name] = options
        for shards, id_map in self.blocks(layout.name):
            id_map.open_reserve(block_capacity(layout, shards[0], options))

    def open_step(self, mapped: Mapped) -> OpenStep | None:
        """Protects the rows of a step, for as long as it is held, until :meth:`close`. None if nothing changed."""
        if not mapped.step:
            return None
        open_step = OpenStep(mapped.step)
        self._open.add(open_step)
        return open_step

    def close(self, open_step: OpenStep) -> None:
        """Called when the backward of a step begins.

        Raises:
            ConfigError: if it is not the step's first backward, and rows may have been reassigned since; or after a
                load.
        """
        if open_step not in self._open and any(each.last_of_evicted >= open_step.step for each in self.maps.values()):
            raise ConfigError(
                f"this backward is a further one of a step of tables {', '.join(map(repr, self.options))}, or follows "
                "a load, and ids of the step have lost their rows since. Add the losses up, call backward once, and "
                "load after it"
            )
        self._open.discard(open_step)

    def forget_steps(self) -> None:
        """The rows have other ids than in the steps so far."""
        for open_step in self._open:
            open_step.step = 0
        self._open.clear()
        self._without_graph.clear()


def block_capacity(layout: TableLayout, shard: Shard, options: DynamicIds) -> int:
    """Rows of a row block that ids may have: the block's share of the capacity, or all but the fallback rows."""
    if options.capacity is None:
        return shard.rows - options.fallback_rows
    end, start = (options.capacity * row // layout.num_embeddings for row in (shard.row_end, shard.row_start))
    return end - start


def cut_faults(layout: TableLayout, options: DynamicIds) -> str:
    """The reason why a table cannot have dynamic ids under this layout, or ""."""
    name = f"table {layout.name!r} with dynamic ids"
    if layout.replicated:
        return (
            f"{name} is replicated, and each rank would give its rows to other ids. Cut it table-wise, column-wise or "
            "row-wise in the plan"
        )
    if layout.num_embeddings > 2**31:
        return f"{name} has {layout.num_embeddings} rows. The most are 2^31: give the table fewer"
    stripes = layout.stripes()
    if len({stripe.boundaries for stripe in stripes}) > 1:
        return (
            f"{name} has column stripes with different row cuts, and ids would have another row in each. "
            "Cut the rows of all its column stripes in the same way"
        )
    for shard in stripes[0].shards:
        capacity = block_capacity(layout, shard, options)
        if not 1 <= capacity <= shard.rows - options.fallback_rows:
            return (
                f"{name} has {shard.rows} rows from {shard.row_start} on, of which {options.fallback_rows} are of the "
                f"fallback and {capacity} would be for ids. There must be 1 or more, in each row block: raise "
                "num_embeddings, lower capacity or fallback_rows, or cut the table into fewer row blocks"
            )
    return ""


def collective_stats(
    maps: Sequence[IdMaps], collectives: Collectives, device: torch.device
) -> dict[str, dict[str, int]]:
    """Counts of all the tables' maps over all ranks, by table. One all-to-all if any table has dynamic ids."""
    tables = [(table, id_maps) for id_maps in maps for table in id_maps.options]
    if not tables:
        return {}
    names = (*COUNTED, "rows", "used")
    local_counts = torch.zeros((len(tables), len(names)), dtype=torch.int64)
    for number, (table, id_maps) in enumerate(tables):
        for shards, block in id_maps.blocks(table):
            if not shards[0].col_start:
                counts = block.counts()
                local_counts[number] += torch.tensor([counts[name] for name in names])
    sizes = [local_counts.numel()] * collectives.world_size
    total = torch.stack(collectives.gather(local_counts.view(-1).to(device), sizes, "id counts")).cpu().sum(dim=0)
    sums = total.view(len(tables), len(names)).tolist()
    return {table: dict(zip(names, counts, strict=True)) for (table, _), counts in zip(tables, sums, strict=True)}
