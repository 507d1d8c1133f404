"""Tables with dynamic ids in a checkpoint: ids and rows, which are restored under any plan and size.

A checkpoint has the maps' records as a tensor (rows, 3) of each such table, under ``ids.<table>.records``, and those of
the ids that wait for a row under ``ids.<table>.candidates``. If the row blocks, the number of rows or of fallback rows
differ from the saved ones, each id is moved to the block that its hash gives, in the order of the saved rows, together
with its row and the row's optimizer states. Home rows are in proportion to the rows of the table, so that a block only
reads the saved blocks that it overlaps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardrec.checkpoint.files import BLOCK_BYTES, DTYPES
from shardrec.checkpoint.manifest import Manifest, SavedPart, SavedTensor
from shardrec.checkpoint.parts import HeldTensor, Part, Rect
from shardrec.errors import ConfigError
from shardrec.ids.id_map import IdMap
from shardrec.ids.maps import IdMaps
from shardrec.ids.options import Evict
from shardrec.ids.restore import RestoredIds, restored_ids
from shardrec.layout import Shard, TableLayout
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.model import ShardedModel
from shardrec.modules.table import ShardedTable

__all__ = ["DynamicTable", "Moves", "dynamic_tables"]

_PARTS = ("records", "candidates")


@dataclass(frozen=True, kw_only=True)
class DynamicTable:
    """A table with dynamic ids.

    Args:
        path: of its module in the model.
        layout: where it is.
        collection: that has it.
        maps: of the collection.
    """

    path: str
    layout: TableLayout
    collection: ShardedCollection
    maps: IdMaps

    def blocks(self) -> Iterator[tuple[list[Shard], IdMap]]:
        """See :meth:`shardrec.ids.maps.IdMaps.blocks`."""
        return self.maps.blocks(self.layout.name)

    def held(self) -> dict[str, HeldTensor]:
        """The maps' tensors, by name."""
        waits = self.maps.options[self.layout.name].admit_after > 1
        tensors = {}
        for name in _PARTS if waits else _PARTS[:1]:
            parts = tuple(
                Part(
                    rect=Rect(shard.row_start, shard.row_end, 0, 3),
                    values=getattr(id_map, name),
                    saved=shard.col_start == 0,
                )
                for (shard, *_), id_map in self.blocks()
            )
            shape = (self.layout.num_embeddings, 3)
            # Ids wait in places of their own, which are not those of rows.
            rows_of = self.layout.name if name == "records" else f"{self.layout.name}.{name}"
            tensors[f"ids.{self.path}.{name}"] = HeldTensor(
                shape=shape, dtype=torch.int64, parts=parts, rows_of=rows_of
            )
        return tensors


def dynamic_tables(model: ShardedModel) -> list[DynamicTable]:
    """The tables with dynamic ids of a model, alike on every rank."""
    path_of = {id(module): path for path, module in model.module.named_modules() if isinstance(module, ShardedTable)}
    return [
        DynamicTable(path=path_of[id(table)], layout=table.layout, collection=collection, maps=collection.id_maps)
        for collection in model.module.modules()
        if isinstance(collection, ShardedCollection) and collection.id_maps is not None
        for table in collection.tables().values()
        if table.layout.name in collection.id_maps.options
    ]


class Moves:
    """The new rows of the saved rows of tables with dynamic ids.

    Args:
        model: that loads.
        manifest: of the checkpoint.
        read: reads the intersection of a saved part and a matrix in memory.
    """

    def __init__(
        self,
        model: ShardedModel,
        manifest: Manifest,
        read: Callable[[SavedPart, torch.dtype, Tensor, Rect], None],
    ) -> None:
        self._manifest = manifest
        self._read = read
        self._tables = [table for table in dynamic_tables(model) if f"ids.{table.path}.records" in manifest.tensors]
        self._placed: dict[tuple[str, int], RestoredIds] = {}  # by path and first row
        self._waiting: dict[tuple[str, int], RestoredIds] = {}

    def has(self, name: str) -> bool:
        """Whether a tensor has a row for each row of a table with dynamic ids, so that its rows may be moved."""
        return self._path(name) is not None

    def may_lack(self, name: str) -> bool:
        """Whether the checkpoint or the model may lack a tensor: ids that wait, if ids need not."""
        return self.has(name) and name.endswith(".candidates")

    def find(self) -> None:
        """Read the saved ids, and compute their rows. Does not change the model."""
        for table in self._tables:
            saved = self._manifest.tensors[f"ids.{table.path}.records"]
            waiting = self._manifest.tensors.get(f"ids.{table.path}.candidates")
            options = table.maps.options[table.layout.name]
            step = self._manifest.step_counts.get(f"ids of {table.layout.name}", 0)
            if saved.shape[0] != table.layout.num_embeddings:
                self._refuse_ordinary(table)
            for (shard, *_), id_map in table.blocks():
                key = table.path, shard.row_start
                fresh = IdMap(shard.rows, options, id_map.counts()["rows"])
                placed_ids = self._placed_in(shard, table.layout, saved, fresh.records, options.evict, step)
                self._placed[key] = placed_ids
                if waiting is not None and id_map.candidates.size(0):
                    self._waiting[key] = self._placed_in(shard, table.layout, waiting, fresh.candidates, "lru", step)
                if placed_ids.lost:
                    warnings.warn(
                        f"table {table.layout.name!r}: rows {shard.row_start} to {shard.row_end} have no room for "
                        f"{placed_ids.lost} of the saved ids, which are left out, those first that "
                        f"evict={options.evict!r} evicts first; raise num_embeddings to keep them all",
                        stacklevel=2,
                    )

    def place(self) -> None:
        """Write the maps, and draw new values for the rows without an id."""
        for table in self._tables:
            for (shard, *others), id_map in table.blocks():
                key = table.path, shard.row_start
                placed_ids = self._placed[key]
                if not placed_ids.in_place and table.maps.step:
                    free = torch.ones(shard.rows, dtype=torch.bool).index_fill_(0, placed_ids.targets, False)
                    free[: placed_ids.fallback] = False
                    for stripe in (shard, *others):
                        table.collection.renew_rows(stripe, free.nonzero().squeeze(1), table.maps.step)
                id_map.records.copy_(placed_ids.records)
                id_map.candidates.zero_()
                if key in self._waiting:
                    id_map.candidates.copy_(self._waiting[key].records)
                id_map.rebuild()

    def read(self, name: str, part: Part, into: Tensor) -> bool:
        """Read a part whose rows have moved.

        Args:
            name: of its tensor.
            part: of the model.
            into: its values as a matrix.

        Returns:
            Whether they have moved; else nothing is done.
        """
        path = self._path(name)
        if path is None or self._placed[path, part.rect.row_start].in_place:
            return False
        placed_ids = self._placed[path, part.rect.row_start]
        saved = self._manifest.tensors[name]
        dtype = DTYPES[saved.dtype]
        mean = torch.zeros((placed_ids.fallback, into.size(1)), dtype=torch.float64)
        for saved_part in saved.parts:
            left, right = (
                max(saved_part.rect.col_start, part.rect.col_start),
                min(saved_part.rect.col_end, part.rect.col_end),
            )
            if left >= right:
                continue
            columns = into[:, left - part.rect.col_start : right - part.rect.col_start]
            for first, share in placed_ids.shares:
                # Of a mean of equal rows, float64 leaves what they were.
                rows = torch.empty((placed_ids.fallback, right - left), dtype=dtype)
                place = Rect(first, first + placed_ids.fallback, left, right)
                if saved_part.rect.common(place) == place:
                    self._read(saved_part, dtype, rows, place)
                    mean[:, left - part.rect.col_start : right - part.rect.col_start] += rows.double() * share
            length = max(1, BLOCK_BYTES // ((right - left) * dtype.itemsize))
            for start in range(saved_part.rect.row_start, saved_part.rect.row_end, length):
                end = min(start + length, saved_part.rect.row_end)
                chosen = (placed_ids.sources >= start) & (placed_ids.sources < end)
                if not bool(chosen.any()):
                    continue
                rows = torch.empty((end - start, right - left), dtype=dtype)
                self._read(saved_part, dtype, rows, Rect(start, end, left, right))
                moved = rows.index_select(0, placed_ids.sources[chosen] - start).to(into.device, into.dtype)
                columns.index_copy_(0, placed_ids.targets[chosen].to(into.device), moved)
        into[: placed_ids.fallback] = mean.to(into.device, into.dtype)
        return True

    def _path(self, name: str) -> str | None:
        for table in self._tables:
            if name.startswith(tuple(f"{kind}.{table.path}." for kind in ("model", "fused", "ids", "average"))):
                return table.path
            if name.startswith(f"optimizer.{table.path}.weight."):
                rows = self._manifest.tensors[name].shape[:1]
                return table.path if rows == self._manifest.tensors[f"ids.{table.path}.records"].shape[:1] else None
        return None

    def _refuse_ordinary(self, table: DynamicTable) -> None:
        if any(name.startswith(f"optimizer.{table.path}.weight.") for name in self._manifest.tensors):
            raise ConfigError(
                f"table {table.layout.name!r} has another number of rows than the saved one, and an ordinary "
                "optimizer's states; load it with as many rows, or give it an optimizer with "
                "apply_optimizer_in_backward"
            )

    def _placed_in(
        self, shard: Shard, layout: TableLayout, saved: SavedTensor, fresh: Tensor, evict: Evict, step: int
    ) -> RestoredIds:
        """Read the saved blocks that a row block overlaps, and give their ids its rows."""
        old, new = saved.shape[0], layout.num_embeddings
        blocks = []
        for block in sorted(saved.parts, key=lambda part: part.rect.row_start):
            if block.rect.row_start * new < shard.row_end * old and block.rect.row_end * new > shard.row_start * old:
                records = torch.empty((block.rect.row_end - block.rect.row_start, 3), dtype=torch.int64)
                self._read(block, torch.int64, records, block.rect)
                blocks.append((block.rect.row_start, records))
        return restored_ids(blocks, old, fresh, shard, layout, evict, step)
