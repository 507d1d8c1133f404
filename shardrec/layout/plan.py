"""A sharding plan: every table's layout, as data that can be saved, read and checked."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from shardrec.errors import PlanError
from shardrec.files import read_json
from shardrec.layout.report import PlanReport
from shardrec.layout.table_layout import Shard, TableLayout
from shardrec.layout.topology import Topology

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TableChange:
    """The difference of a table between two plans.

    Args:
        name: of the table.
        old: its layout in the old plan. None if it is new.
        new: its layout in the new plan. None if it is gone.
        moved_numel: number of weights that ranks have to receive; 0 if the table is new or gone.
    """

    name: str
    old: TableLayout | None
    new: TableLayout | None
    moved_numel: int


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The layout of every table of a model.

    Args:
        topology: the ranks that the plan is for.
        tables: one layout per table, each covering its table exactly once.
        report: the planner's report, which :func:`shardrec.planner.explain` shows. Equality and fingerprint ignore it.

    Raises:
        PlanError: with every fault of every table.
    """

    topology: Topology
    tables: tuple[TableLayout, ...] = field(default=())
    report: PlanReport | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        faults = [
            f"table {name!r} comes {count} times. Names must be unique in a plan"
            for name, count in Counter(table.name for table in self.tables).items()
            if count > 1
        ]
        for table in self.tables:
            faults += table.faults(self.topology.world_size)
        if faults:
            raise PlanError(faults)

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan is for."""
        return self.topology.world_size

    @cached_property
    def by_name(self) -> Mapping[str, TableLayout]:
        """The layouts by table name."""
        return {table.name: table for table in self.tables}

    @cached_property
    def fingerprint(self) -> int:
        """A number that is equal for equal plans, in every process (48 bits)."""
        shape = {name: value for name, value in self.to_json().items() if name != "report"}
        text = json.dumps(shape, sort_keys=True)
        return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)

    def check_tables(self, shapes: Mapping[str, tuple[int, int]], *, partial: bool = False) -> None:
        """Check that the plan is for exactly these tables.

        Args:
            shapes: ``(num_embeddings, embedding_dim)`` per table of the model, by name.
            partial: ``shapes`` has only some of the model's tables, so the plan may have others.

        Raises:
            PlanError: if a table is missing, unknown or of another shape. Names each of them.
        """
        if faults := self.table_faults(shapes, partial=partial):
            raise PlanError(faults)

    def table_faults(self, shapes: Mapping[str, tuple[int, int]], *, partial: bool = False) -> list[str]:
        """What :meth:`check_tables` raises, one sentence each."""
        faults = []
        for name, (rows, cols) in shapes.items():
            layout = self.by_name.get(name)
            if layout is None:
                faults.append(f"the plan has no table {name!r}. Plan the model again, or add a layout for it")
            elif (layout.num_embeddings, layout.embedding_dim) != (rows, cols):
                faults.append(
                    f"table {name!r} is ({rows}, {cols}) in the model and ({layout.num_embeddings}, "
                    f"{layout.embedding_dim}) in the plan. Plan the model again"
                )
        known = ", ".join(map(repr, shapes))
        faults += [
            f"the plan has a table {name!r} that the model lacks. Its tables are {known or 'none'}"
            for name in self.by_name
            if name not in shapes and not partial
        ]
        return faults

    def on_one_rank(self) -> ShardingPlan:
        """The plan for one rank: the row blocks of each table's first stripe, which dynamic ids depend on, uncut."""
        tables = []
        for table in self.tables:
            blocks = [shard for stripe in table.stripes()[:1] for shard in stripe.shards]
            shards = (replace(shard, rank=0, col_end=table.embedding_dim) for shard in blocks)
            tables.append(replace(table, shards=tuple(shards)))
        if self.world_size == 1:
            return replace(self, tables=tuple(tables))
        return ShardingPlan(topology=Topology(ranks_per_host=1), tables=tuple(tables))

    def local_numel(self, rank: int) -> int:
        """Number of embedding weights that ``rank`` holds."""
        return sum(table.local_numel(rank) for table in self.tables)

    def diff(self, other: ShardingPlan) -> tuple[TableChange, ...]:
        """The changes from this plan to another one.

        A table that is cut and placed in the same way is left out, whatever the name of its cut is.

        Args:
            other: for as many ranks.

        Returns:
            A change for each table that differs, in the order of their names.

        Raises:
            PlanError: if the plans are for different numbers of ranks, or a table is of another shape in each.
        """
        faults = []
        if self.world_size != other.world_size:
            faults.append(
                f"the plans are for {self.world_size} and {other.world_size} ranks. Compare plans for the same ranks"
            )
        changes = []
        for name in sorted({*self.by_name, *other.by_name}):
            old, new = self.by_name.get(name), other.by_name.get(name)
            if old is None or new is None:
                changes.append(TableChange(name=name, old=old, new=new, moved_numel=0))
                continue
            shapes = [(each.num_embeddings, each.embedding_dim) for each in (old, new)]
            if shapes[0] != shapes[1]:
                faults.append(f"table {name!r} is {shapes[0]} in one plan and {shapes[1]} in the other. Rename one")
            elif _held(old) != _held(new):
                moved = old.moved_numel(new, self.world_size)
                changes.append(TableChange(name=name, old=old, new=new, moved_numel=moved))
        if faults:
            raise PlanError(faults)
        return tuple(changes)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-compatible data. A shard is ``[row_start, row_end, col_start, col_end, rank]``."""
        data: dict[str, Any] = {
            "format": _FORMAT,
            "topology": self.topology.to_json(),
            "tables": [
                {
                    "name": table.name,
                    "num_embeddings": table.num_embeddings,
                    "embedding_dim": table.embedding_dim,
                    "cut": table.cut,
                    "replicated": table.replicated,
                    "shards": [[s.row_start, s.row_end, s.col_start, s.col_end, s.rank] for s in table.shards],
                    # Without these, a plan is what earlier versions wrote and read.
                    **({} if table.tier == "device" else {"tier": table.tier, "load_factor": table.load_factor}),
                }
                for table in self.tables
            ],
        }
        if self.report is not None:
            data["report"] = self.report.to_json()
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardingPlan:
        """The plan that :meth:`to_json` returned.

        Raises:
            PlanError: if the data is not a plan, or an invalid one.
        """
        try:
            if data["format"] != _FORMAT:
                raise PlanError(
                    f"the plan has format {data['format']!r} and this release reads format {_FORMAT}. Plan again"
                )
            return cls(
                topology=Topology.from_json(data["topology"]),
                tables=tuple(map(_table_from_json, _field(data, "tables", list))),
                report=None if data.get("report") is None else PlanReport.from_json(data["report"]),
            )
        except PlanError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"this is not a sharding plan: {type(error).__name__} {error}. Expected what ShardingPlan.save writes"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ShardingPlan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: if the file is not a plan. The message names the file.
        """
        try:
            return cls.from_json(read_json(path))
        except PlanError as error:
            raise PlanError([f"{path}: {fault}" for fault in error.faults]) from error
        except ValueError as error:
            raise PlanError(f"{path}: not JSON ({error}). Expected what ShardingPlan.save writes") from error


_T = TypeVar("_T")


def _held(table: TableLayout) -> tuple[object, ...]:
    """The fields that are equal if a table is cut and placed in the same way."""
    return set(table.shards), table.replicated, table.tier, table.load_factor


def _field(data: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    return _checked(data[key], kind, key)


def _checked(value: object, kind: type[_T], what: str) -> _T:
    # Not isinstance, which would accept True for 1.
    if type(value) is not kind:
        raise TypeError(f"{what} is {value!r}, which is not a {kind.__name__}")
    return value


def _table_from_json(data: Mapping[str, Any]) -> TableLayout:
    name = _field(data, "name", str)
    return TableLayout(
        name=name,
        num_embeddings=_field(data, "num_embeddings", int),
        embedding_dim=_field(data, "embedding_dim", int),
        cut=_field(data, "cut", str),
        replicated=_field(data, "replicated", bool),
        tier=_checked(data.get("tier", "device"), str, "tier"),
        load_factor=_checked(data.get("load_factor", 0.0), float, f"load_factor of table {name!r}"),
        shards=tuple(_shards_from_json(name, _field(data, "shards", list))),
    )


def _shards_from_json(name: str, rows: Iterable[Iterable[object]]) -> Iterable[Shard]:
    for row in rows:
        top, bottom, left, right, rank = (
            _checked(number, int, f"a shard of table {name!r} in {row}") for number in row
        )
        yield Shard(table=name, row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rank)
