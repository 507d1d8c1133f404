"""Constraints of the user on a table's cut and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardrec.errors import ConfigError
from shardrec.ids.options import DynamicIds
from shardrec.layout import TableLayout, tier_fault

CUTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
)


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Limits on one table's cut.

    Args:
        cuts: the cuts that may be used. Default: any that the planner knows.
        ranks: the ranks that may hold a shard. Default: all.
        min_columns: least width of a column stripe. Default: the kernels' unit.
        tiers: where on CUDA the rows may be. Default: ``"device"``, and ``"cached"`` if tables fit in no other way.
        load_factor: part of the rows that a cache has room for. Default: what the planner finds best.
        pinned: the table's layout, which the planner does not change.
    """

    cuts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    min_columns: int = 0
    pinned: TableLayout | None = None
    tiers: tuple[str, ...] = ()
    load_factor: float = 0.0

    def __post_init__(self) -> None:
        unknown = [cut for cut in self.cuts if cut not in CUTS]
        if unknown:
            raise ConfigError(f"there is no cut {unknown[0]!r}. The cuts are {', '.join(CUTS)}")
        if self.ranks and self.cuts and set(self.cuts) <= {"data_parallel"}:
            raise ConfigError("a data_parallel table is on every rank. Name no ranks for it")
        if self.min_columns < 0:
            raise ConfigError(f"min_columns is {self.min_columns}. Give a number of columns, at least 0")
        for tier in self.tiers:
            if fault := tier_fault(tier, (self.load_factor or 1.0) * (tier == "cached")):
                raise ConfigError(fault)
        if self.tiers and "device" not in self.tiers and self.cuts and set(self.cuts) <= {"data_parallel"}:
            raise ConfigError(f"a data_parallel table is in tier 'device'. Allow that one, not {self.tiers} alone")
        if self.load_factor and (fault := tier_fault("cached", self.load_factor)):
            raise ConfigError(fault)
        if self.load_factor and self.tiers and "cached" not in self.tiers:
            raise ConfigError(
                f"load_factor is {self.load_factor} and tiers {self.tiers}, which have no cache: allow 'cached'"
            )
        if self.pinned is not None and any((self.cuts, self.ranks, self.min_columns, self.tiers, self.load_factor)):
            raise ConfigError(
                "a pinned table is laid out already. Leave cuts, ranks, min_columns, tiers and load_factor empty"
            )


def constraints_by_table(
    tables: Mapping[str, object], constraints: Mapping[str, Constraint] | None, world_size: int
) -> dict[str, Constraint]:
    """Each table's constraint: its own, else the constraint of the first pattern (``*``, ``?``) that matches.

    A name or pattern that matches no whole name (``"path.of.collection.table"``) stands for the tables' own names.

    Raises:
        ConfigError: for a name or pattern that matches no table, a table's own name that several collections have, or
            a rank that does not exist.
    """
    by_table: dict[str, Constraint] = {}
    for pattern, constraint in (constraints or {}).items():
        matching = [pattern] if pattern in tables else _matching(tables, pattern) or _matching(tables, f"*.{pattern}")
        if not matching:
            known = ", ".join(map(repr, tables))
            raise ConfigError(f"a constraint is for an unknown table {pattern!r}. The tables are {known}")
        if len(matching) > 1 and not set("*?[") & set(pattern):
            several = ", ".join(map(repr, matching))
            raise ConfigError(
                f"a constraint is for table {pattern!r} and there are {several}. Give one of these, or '*.{pattern}'"
            )
        wrong = [rank for rank in constraint.ranks if not 0 <= rank < world_size]
        if wrong:
            raise ConfigError(
                f"the constraint of table {pattern!r} names rank {wrong[0]}. There are ranks 0 to {world_size - 1}"
            )
        for name in matching:
            if name not in by_table or pattern in tables:
                by_table[name] = constraint
    return by_table


def _matching(tables: Mapping[str, object], pattern: str) -> list[str]:
    return [name for name in tables if fnmatchcase(name, pattern)]


def constraints_of(dynamic_ids: Mapping[str, DynamicIds]) -> dict[str, Constraint]:
    """Planner constraints for tables with dynamic ids: cuts that give all column stripes the same row blocks."""
    cuts = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise")
    return {table: Constraint(cuts=cuts) for table in dynamic_ids}
