"""What became of the dynamic ids of a run, over its restarts."""

from __future__ import annotations

from collections.abc import Mapping

from shardrec.ids.id_map import COUNTED
from shardrec.modules import ShardedModel

__all__ = ["IdCounts"]


class IdCounts:
    """Counts of each table with dynamic ids since the run began.

    Args:
        model: whose tables.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._before: dict[str, dict[str, int]] = {}

    def now(self) -> dict[str, dict[str, int]]:
        """As :meth:`shardrec.ShardedModel.id_stats`, by table. Every rank calls it; one collective."""
        found = self._model.id_stats()
        return {
            table: {name: count + self._before.get(table, {}).get(name, 0) for name, count in counts.items()}
            for table, counts in found.items()
        }

    def load(self, saved: Mapping[str, Mapping[str, int]]) -> None:
        """Go on from what :meth:`now` gave. Every rank calls it."""
        self._before = {
            table: {name: saved.get(table, counts)[name] - counts[name] for name in COUNTED}
            for table, counts in self._model.id_stats().items()
        }
