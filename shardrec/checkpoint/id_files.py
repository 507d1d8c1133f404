"""The ids of a model's tables and their rows as Parquet files, for other programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardrec.checkpoint.ids import dynamic_tables
from shardrec.errors import CheckpointError
from shardrec.exchange.agree import on_all_ranks
from shardrec.exchange.hashing import home_rows
from shardrec.layout import Shard, TableLayout
from shardrec.modules.sharded_model import ShardedModel

_REMEDY = "see that every rank can read and write there, and that all ranks see the same files"


def export_ids(model: ShardedModel, folder: str | Path) -> None:
    """Write the ids and their rows, one Parquet file per rank. Every rank calls it.

    Columns: ``table`` (its name in the plan) and int64 ``id``, ``row`` (of the whole table), ``uses`` and ``last`` (the
    step of the last use).

    Args:
        model: with dynamic ids.
        folder: of the files. Files of the same names in it are replaced.

    Raises:
        CheckpointError: on every rank, if one of them cannot write.
    """

    def write() -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        Path(folder).mkdir(parents=True, exist_ok=True)
        schema = pa.schema([("table", pa.string()), *((name, pa.int64()) for name in ("id", "row", "uses", "last"))])
        parts = [schema.empty_table()]
        for table in dynamic_tables(model):
            for (shard, *_), id_map in table.blocks():
                if shard.col_start:
                    continue
                rows = (id_map.records[:, 1] > 0).nonzero().squeeze(1)
                ids, uses, last = id_map.records[rows].t().numpy()
                columns = {"id": ids, "row": (rows + shard.row_start).numpy(), "uses": uses, "last": last}
                parts.append(pa.table({"table": [table.layout.name] * len(rows), **columns}, schema=schema))
        pq.write_table(pa.concat_tables(parts), Path(folder) / f"ids-{model.ranks.rank:05}.parquet")

    on_all_ranks(write, model.ranks, "save", remedy=_REMEDY)


@torch.inference_mode(False)  # an inference tensor could not be written later
def import_ids(model: ShardedModel, folder: str | Path) -> None:
    """Assign rows to ids according to Parquet files, replacing the current ids. Every rank calls it. The rows' values
    do not change. A table that is not in the files keeps its ids.

    Args:
        model: with dynamic ids.
        folder: all its ``*.parquet`` files are read, with the columns ``table``, ``id`` and ``row`` of
            :func:`export_ids`, and ``uses`` and ``last`` where they are there (else 1 and 0). Where the last uses of a
            table lie ahead of this model's steps, all are moved back, so that the latest is the present step.

    Raises:
        CheckpointError: on every rank, before anything changes, for files that cannot be read, tables without dynamic
            ids, columns with nulls or other values than integers, duplicate ids or rows, and rows that an id cannot
            have: fallback rows, reserved rows, or rows outside the row block that its hash gives. To move ids to
            another plan's row blocks, use a checkpoint.
    """
    updates: list[Callable[[], None]] = []

    def read() -> None:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        def numbers(entries: pa.Table, name: str) -> Tensor:
            column = entries[name]
            if column.null_count or not pa.types.is_integer(column.type):
                raise CheckpointError(
                    f"table {table.layout.name!r}: column {name!r} is {column.type} with {column.null_count} nulls. "
                    "Write it as int64 without nulls"
                )
            return torch.tensor(column.cast(pa.int64()).to_numpy())

        files = sorted(Path(folder).glob("*.parquet"))
        if not files:
            raise CheckpointError(f"{folder} has no *.parquet files. Give a folder that export_ids wrote")
        try:
            whole = pa.concat_tables([pq.read_table(file) for file in files])
        except pa.ArrowException as error:
            raise CheckpointError(f"the ids in {folder} cannot be read: {error}. Write them again") from error
        for name in ("table", "id", "row"):
            if name not in whole.column_names:
                raise CheckpointError(f'the ids in {folder} cannot be read: column "{name}" does not exist. Add it')
        tables = dynamic_tables(model)
        known = [table.layout.name for table in tables]
        if unknown := [name for name in whole["table"].unique().to_pylist() if name not in known]:
            raise CheckpointError(
                f"{folder} has ids of tables {unknown}, those with dynamic ids are {known}. Leave out the other rows"
            )
        for table in tables:
            entries = whole.filter(pc.equal(whole["table"], table.layout.name))
            if not entries.num_rows:
                continue
            ids, rows = (numbers(entries, name) for name in ("id", "row"))
            uses, last = (
                numbers(entries, name) if name in entries.column_names else torch.full((entries.num_rows,), default)
                for name, default in (("uses", 1), ("last", 0))
            )
            _check(table.layout, ids, rows)
            last -= (last.max() - table.maps.step).clamp(min=0)  # an id that was used after this step is never evicted
            for shards, id_map in table.blocks():
                shard = shards[0]
                here = ((rows >= shard.row_start) & (rows < shard.row_end)).nonzero().squeeze(1)
                records, places = id_map.records.clone(), rows[here] - shard.row_start
                records[records[:, 1] > 0] = 0
                _check_block(table.layout, shard, records, ids[here], places)
                records[places] = torch.stack([ids[here], uses[here].clamp(min=1), last[here]], dim=1)
                updates.append(partial(table.write, shards, id_map, records))

    on_all_ranks(read, model.ranks, "load", remedy=_REMEDY)
    for update in updates:
        update()


def _check(layout: TableLayout, ids: Tensor, rows: Tensor) -> None:
    if len(ids.unique()) < len(ids) or len(rows.unique()) < len(rows):
        raise CheckpointError(f"table {layout.name!r}: an id or a row comes twice. Give each id one row of its own")
    outside = ((rows < 0) | (rows >= layout.num_embeddings)).nonzero()
    if len(outside):
        row = int(rows[outside[0]])
        raise CheckpointError(f"table {layout.name!r}: row {row} is outside of its {layout.num_embeddings} rows")


def _check_block(layout: TableLayout, shard: Shard, records: Tensor, ids: Tensor, places: Tensor) -> None:
    home = home_rows(ids, torch.tensor(layout.num_embeddings))
    wrong = (home < shard.row_start) | (home >= shard.row_end) | (records[places, 1] < 0)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise CheckpointError(
            f"table {layout.name!r}: id {int(ids[first])} cannot have row {int(places[first]) + shard.row_start}, "
            "which is of the fallback, of the reserve, or of another row block than its hash says. Give it another "
            "row, or load a checkpoint, which finds new rows under another plan"
        )
