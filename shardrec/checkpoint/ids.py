"""Tables with dynamic ids in a checkpoint: ids and rows, which are restored under any plan and size.

A checkpoint has the maps' records as a tensor (rows, 3) per such table, under ``ids.<table>.records``, and those of
the ids that wait for a row under ``ids.<table>.candidates``. If the row blocks, the number of rows or of fallback rows
differ from the saved ones, each id is moved to the block that its hash gives, in the order of the saved rows, together
with its row and the row's optimizer states. Home rows are in proportion to the rows of the table, so that a block only
reads the saved blocks that it overlaps.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardrec.checkpoint.data_files import DTYPES
from shardrec.checkpoint.manifest import Manifest, Read, SavedPart, SavedTensor
from shardrec.checkpoint.parts import Part, Rect
from shardrec.errors import ConfigError
from shardrec.ids.id_map import IdMap
from shardrec.ids.maps import IdMaps
from shardrec.ids.options import Evict
from shardrec.ids.restore import RestoredIds, restored_ids
from shardrec.layout import Shard, TableLayout
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.inventory import Kind
from shardrec.modules.sharded_model import ShardedModel


@dataclass(frozen=True, kw_only=True)
class DynamicTable:
    """A table with dynamic ids."""

    path: str
    layout: TableLayout
    collection: ShardedCollection
    maps: IdMaps

    def blocks(self) -> Iterator[tuple[list[Shard], IdMap]]:
        """See :meth:`shardrec.ids.maps.IdMaps.blocks`."""
        return self.maps.blocks(self.layout.name)

    def write(self, shards: Sequence[Shard], id_map: IdMap, records: Tensor, candidates: Tensor | None = None) -> None:
        """Give the rows of a block to other ids. What backwards have left for ids that lose their rows is dropped."""
        lost = id_map.write(records, candidates)
        for shard in shards:
            self.collection.shards.drop_rows(shard, lost)
        self.maps.forget_steps()


def dynamic_tables(model: ShardedModel) -> list[DynamicTable]:
    """The tables with dynamic ids of a model, the same on every rank."""
    path_of = {id(table): path for path, table in model.named_tables().items()}
    return [
        DynamicTable(path=path_of[id(table)], layout=table.layout, collection=collection, maps=collection.id_maps)
        for collection in model.sharded_collections
        if collection.id_maps is not None
        for table in collection.tables().values()
        if table.layout.name in collection.id_maps.options
    ]


class Moves:
    """The new rows of the saved rows of tables with dynamic ids, and the reads of a load.

    Args:
        model: that loads.
        manifest: of the checkpoint.
        kept: maps of the model that have the saved ids already.
        warned: gets the names of the tables that were warned about for want of rows. Tables in it are not warned about
            again.
    """

    def __init__(
        self, model: ShardedModel, manifest: Manifest, kept: Collection[IdMap] = (), warned: set[str] | None = None
    ) -> None:
        self._manifest = manifest
        self._warned = set() if warned is None else warned
        self._silent = frozenset(self._warned)
        self._kept = {id(id_map) for id_map in kept}
        self._tables = [table for table in dynamic_tables(model) if f"ids.{table.path}.records" in manifest.tensors]
        self._placed: dict[tuple[str, int], RestoredIds] = {}  # by path and first row
        self._waiting: dict[tuple[str, int], RestoredIds] = {}

    def has(self, name: str) -> bool:
        """Whether a tensor has a row for each row of a table with dynamic ids, so that its rows may be moved."""
        return self._path(name) is not None

    def may_lack(self, name: str) -> bool:
        """Whether the checkpoint or the model may lack a tensor: ids that wait, if ids need not."""
        return self.has(name) and name.endswith(".candidates")

    def finding(self) -> Iterator[Read]:
        """The reads of the saved ids. Once they are made, the ids' rows are known. Does not change the model."""
        for table in self._tables:
            saved = self._manifest.tensors[f"ids.{table.path}.records"]
            waiting = self._manifest.tensors.get(f"ids.{table.path}.candidates")
            options = table.maps.options[table.layout.name]
            if saved.shape[0] != table.layout.num_embeddings:
                self._refuse_ordinary(table)
            for (shard, *_), id_map in table.blocks():
                if id(id_map) in self._kept:
                    continue
                fresh = IdMap(shard.rows, options, id_map.counts()["rows"])
                yield from self._placing(table, shard, saved, fresh.records, options.evict, self._placed)
                if waiting is not None and id_map.candidates.size(0):
                    yield from self._placing(table, shard, waiting, fresh.candidates, "lru", self._waiting)

    def place(self) -> None:
        """Write the maps, and draw new values for the rows without an id."""
        for table in self._tables:
            for shards, id_map in table.blocks():
                key = table.path, shards[0].row_start
                if key not in self._placed:
                    continue
                placed_ids = self._placed[key]
                if not placed_ids.in_place:
                    free = torch.ones(shards[0].rows, dtype=torch.bool).index_fill_(0, placed_ids.targets, False)
                    free[: placed_ids.fallback] = False
                    for shard in shards:
                        table.collection.renew_rows(shard, free.nonzero().squeeze(1), self._step(table))
                waiting = self._waiting.get(key)
                table.write(shards, id_map, placed_ids.records, None if waiting is None else waiting.records)

    def reads(self, name: str, part: Part, into: Tensor) -> Iterator[Read]:
        """The reads of a part of the model, after :meth:`place`."""
        path, rect = self._path(name), part.rect
        placed_ids = None if path is None else self._placed.get((path, rect.row_start))
        saved = self._manifest.tensors[name]
        dtype = DTYPES[saved.dtype]
        if placed_ids is None or placed_ids.in_place:
            for saved_part in saved.parts:
                if saved_part.rect.common(rect):
                    yield Read(source=saved_part, dtype=dtype, place=rect, into=into)
            return
        fallback = placed_ids.fallback
        if name.startswith("optimizer."):  # states of rows without an id begin again
            into.zero_()
        into[:fallback] = 0
        mean = torch.zeros((fallback, into.size(1)), dtype=torch.float64)
        for saved_part in saved.parts:
            columns = saved_part.rect._replace(row_start=0, row_end=1).common(rect._replace(row_start=0, row_end=1))
            if columns is None:
                continue
            # Averages of rows begin again in the fallback: blocks have steps of their own.
            for first, share in () if name.startswith(f"{Kind.AVERAGE.value}.") else placed_ids.shares:
                place = columns._replace(row_start=first, row_end=first + fallback)
                if saved_part.rect.common(place) == place:
                    yield _mean_read(saved_part, dtype, place, share, mean, into, rect)
            start, end = torch.searchsorted(placed_ids.sources, torch.tensor(saved_part.rect[:2])).tolist()
            if start < end:
                rows = placed_ids.sources[start:end], placed_ids.targets[start:end]
                yield Read(source=saved_part, dtype=dtype, place=rect, into=into, rows=rows)

    def _step(self, table: DynamicTable) -> int:
        return self._manifest.step_counts.get(f"ids of {table.layout.name}", 0)

    def _path(self, name: str) -> str | None:
        for table in self._tables:
            if name.startswith(tuple(f"{kind.value}.{table.path}." for kind in Kind)):
                return table.path
            if name.startswith(f"optimizer.{table.path}.weight."):
                rows = self._manifest.tensors[name].shape[:1]
                return table.path if rows == self._manifest.tensors[f"ids.{table.path}.records"].shape[:1] else None
        return None

    def _refuse_ordinary(self, table: DynamicTable) -> None:
        if any(name.startswith(f"optimizer.{table.path}.weight.") for name in self._manifest.tensors):
            raise ConfigError(
                f"table {table.layout.name!r} has another number of rows than the saved one, and an ordinary "
                "optimizer's states. Load it with as many rows, or give it an optimizer with "
                "apply_optimizer_in_backward"
            )

    def _placing(
        self,
        table: DynamicTable,
        shard: Shard,
        saved: SavedTensor,
        fresh: Tensor,
        evict: Evict,
        placed: dict[tuple[str, int], RestoredIds],
    ) -> Iterator[Read]:
        """Read the saved blocks that a row block overlaps, and give their ids its rows."""
        layout = table.layout
        old, new = saved.shape[0], layout.num_embeddings
        reads = []
        for block in sorted(saved.parts, key=lambda part: part.rect.row_start):
            if block.rect.row_start * new < shard.row_end * old and block.rect.row_end * new > shard.row_start * old:
                records = torch.empty((block.rect.row_end - block.rect.row_start, 3), dtype=torch.int64)
                reads.append(Read(source=block, dtype=torch.int64, place=block.rect, into=records))

        def place() -> None:
            blocks = [(read.place.row_start, read.into) for read in reads]
            restored = restored_ids(blocks, old, fresh, shard, layout, evict, self._step(table))
            placed[table.path, shard.row_start] = restored
            if restored.lost and placed is self._placed and layout.name not in self._silent:
                self._warned.add(layout.name)
                warnings.warn(
                    f"table {layout.name!r}: rows {shard.row_start} to {shard.row_end} lack room for "
                    f"{restored.lost} of the saved ids, which are left out, those first that evict={evict!r} evicts "
                    "first. Raise num_embeddings, or capacity if it is given, to keep them all",
                    stacklevel=2,
                )

        yield from reads[:-1]
        yield replace(reads[-1], then=place)


def _mean_read(
    source: SavedPart, dtype: torch.dtype, place: Rect, share: float, mean: Tensor, into: Tensor, rect: Rect
) -> Read:
    """The read of a block's fallback rows. Their share is then added to a mean of float64, which ``into`` gets.

    Of a mean of equal rows, float64 leaves what they were.
    """
    rows = torch.empty((len(mean), place.cols), dtype=dtype)

    def add() -> None:
        columns = place.cols_in(rect)
        mean[:, columns] += rows.double() * share
        into[: len(mean), columns] = mean[:, columns].to(into.device, into.dtype)

    return Read(source=source, dtype=dtype, place=place, into=rows, then=add)
