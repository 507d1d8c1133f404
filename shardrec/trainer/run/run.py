"""``Run``: what the parts of a run on one rank, from its loop to its checkpoints, work on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardrec import Constraint, ElasticModel, ShardedModel
from shardrec.launch import RankInfo
from shardrec.trainer.data import FeatureSpec
from shardrec.trainer.run.average import Average
from shardrec.trainer.run.config import TrainConfig
from shardrec.trainer.run.display import Announcer
from shardrec.trainer.run.held_out import Progressive
from shardrec.trainer.run.progress import Progress
from shardrec.trainer.run.source import Source


@dataclass(kw_only=True, eq=False)
class Run:
    """A run, on one of its ranks.

    Attributes:
        config: the options.
        rank_info: this rank.
        folder: of the results.
        source: of the rows.
        spec: what their columns are.
        model: with its fused optimizers.
        optimizer: of the dense part.
        average: of the weights, if they are averaged.
        progress: what was done so far.
        announcer: is told what people should know.
        constraints: of the planner, by the names of tables or patterns.
        progressive: of a feed, the scores of its last rows.
    """

    config: TrainConfig
    rank_info: RankInfo
    folder: Path
    source: Source
    spec: FeatureSpec
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    average: Average | None
    progress: Progress
    announcer: Announcer
    constraints: Mapping[str, Constraint]
    progressive: Progressive | None = None
    _ids_before: dict[str, dict[str, int]] = field(default_factory=dict, init=False)

    @property
    def elastic(self) -> ElasticModel | None:
        """The model, if it is one of replicas that come and go."""
        return self.model if isinstance(self.model, ElasticModel) else None

    def evaluated(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that are evaluated."""
        return nullcontext() if self.average is None else self.average.applied()

    def id_counts(self) -> dict[str, dict[str, int]]:
        """As :meth:`shardrec.ShardedModel.id_stats`, since the run began. Every rank calls it. One collective."""
        return {
            table: {name: count + self._ids_before.get(table, {}).get(name, 0) for name, count in counts.items()}
            for table, counts in self.model.id_stats().items()
        }

    def load_id_counts(self, saved: Mapping[str, Mapping[str, int]]) -> None:
        """Continue from the result of :meth:`id_counts`, over restarts. Every rank calls it."""
        self._ids_before = {
            table: {
                name: saved.get(table, counts)[name] - count
                for name, count in counts.items()
                if name not in ("rows", "used")  # which are not counts since a beginning
            }
            for table, counts in self.model.id_stats().items()
        }
