"""The tables of a workload: presets, and tables described by four numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardrec.errors import ConfigError

__all__ = ["PRESETS", "WorkloadTable", "parse_tables"]

_SPEC = re.compile(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?")


@dataclass(frozen=True, kw_only=True)
class WorkloadTable:
    """A table, and the feature that is looked up in it.

    Args:
        rows: number of embeddings.
        dim: columns.
        pooling: ids of each bag.
        name: of the table.
    """

    rows: int
    dim: int
    pooling: int = 1
    name: str = ""

    @property
    def feature(self) -> str:
        """Key of its feature."""
        return f"f_{self.name}"


def _criteo() -> list[WorkloadTable]:
    from shardrec.trainer.data.schema import CRITEO_CARDINALITIES

    return [WorkloadTable(rows=rows, dim=64) for rows in CRITEO_CARDINALITIES]


def _criteo_128() -> list[WorkloadTable]:
    return [replace(table, dim=128) for table in _criteo()]


def _multi_hot() -> list[WorkloadTable]:
    rows = (
        40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
        11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
    )  # fmt: skip
    ids = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
    return [WorkloadTable(rows=row, dim=128, pooling=count) for row, count in zip(rows, ids, strict=True)]


def _small() -> list[WorkloadTable]:
    return [WorkloadTable(rows=1000, dim=16)] * 200


PRESETS = {"criteo": _criteo, "criteo_128": _criteo_128, "multi_hot": _multi_hot, "small": _small}
"""``criteo``: the 26 features of Criteo Kaggle, 64 columns. ``criteo_128``: 128 columns. ``multi_hot``: DLRM-DCN v2 of
MLPerf training, 26 features of 1 to 100 ids. ``small``: 200 tables."""


def parse_tables(texts: Sequence[str], *, max_rows: int, pooling: int | None = None) -> tuple[WorkloadTable, ...]:
    """The tables that ``texts`` describe, named t0, t1 and so on.

    Args:
        texts: each a preset, or ``NUMBERxROWSxDIM``, with ids of a bag as a fourth number.
        max_rows: most rows of a preset's table.
        pooling: ids of every bag. Default: as the tables say, else 1.

    Raises:
        ConfigError: for another form, or a number that is 0.
    """
    found: list[WorkloadTable] = []
    for text in texts:
        if text in PRESETS:
            found += [replace(table, rows=min(table.rows, max_rows)) for table in PRESETS[text]()]
            continue
        match = _SPEC.fullmatch(text)
        numbers = [int(number) for number in match.groups() if number] if match else [0]
        if 0 in numbers:
            raise ConfigError(
                f"tables (--tables) is {text!r}: give NUMBERxROWSxDIM, such as 26x20000x64, or with the ids of a bag "
                f"26x20000x64x10, or a preset: {', '.join(PRESETS)}"
            )
        count, rows, dim, *ids = numbers
        found += [WorkloadTable(rows=rows, dim=dim, pooling=ids[0] if ids else 1)] * count
    if not found:
        raise ConfigError("tables (--tables) is empty: give one table at least, such as 1x1000x16")
    return tuple(
        replace(table, name=f"t{number}", pooling=pooling or table.pooling) for number, table in enumerate(found)
    )
