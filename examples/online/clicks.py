"""Clicks from a model that changes over time. The log odds turn from one planted model into another."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from examples.online.columns import SIZES
from shardrec.trainer.data import ClickSchema, SyntheticConfig
from shardrec.trainer.data.planted import PlantedModel, RandomStream

__all__ = ["Clicks"]


class Clicks:
    """Files of rows, each a function of its number, the seed and the angle.

    Args:
        rows: of a file.
        seed: of the models and the rows.
    """

    def __init__(self, rows: int, seed: int = 0) -> None:
        names, sizes = tuple(SIZES), tuple(SIZES.values())
        schema = ClickSchema(dense_names=(), sparse_names=names, num_embeddings=sizes)
        config = SyntheticConfig(
            schema=schema, seed=seed, logit_std=2.0, exponent=0.7, interaction_share=0.0, pairs=0, dense_share=0.0
        )
        self._rows, self._seed = rows, seed
        self._models = [PlantedModel(config, task) for task in range(2)]

    def write(self, path: Path, number: int, angle: float) -> NDArray[np.float64]:
        """Write a file.

        Args:
            path: of the file.
            number: of the file, from 0.
            angle: in radians, of the second model's part: 0 for the first model alone, π / 2 for the second.

        Returns:
            The true click probabilities, (rows,).
        """
        start = number * self._rows
        planted = [model.rows(RandomStream.TRAIN, start, start + self._rows) for model in self._models]
        first, second = (np.log(part.probabilities / (1 - part.probabilities)) for part in planted)
        probabilities = 1 / (1 + np.exp(-(math.cos(angle) * first + math.sin(angle) * second)))
        draws = np.random.default_rng([self._seed, number])
        columns = {"click": (draws.random(self._rows) < probabilities).astype(np.int64)}
        columns["at"] = number + np.arange(self._rows) / self._rows  # seconds of the stream
        columns |= {name: planted[0].ids[:, place] for place, name in enumerate(SIZES)}
        pq.write_table(pa.table(columns), path)
        return np.asarray(probabilities)
