"""The rows of a run: what the options ask :mod:`shardrec.data` for, cut to the number of rows asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.data import (
    ClickBatch,
    ClickMetrics,
    ClickSchema,
    FileClickData,
    SyntheticClickData,
    SyntheticConfig,
    criteo_schema,
    open_click_data,
)
from shardrec.train.config import TrainConfig
from shardrec.train.ranks import Place

__all__ = ["Source"]

_SYNTHETIC_ROWS = 2_400_000
_SYNTHETIC_HOLDOUT_ROWS = 100_000


class Source:
    """One rank's batches of a run's rows.

    Args:
        config: which rows, and how many.
        place: the rank.

    Raises:
        DataError, ConfigError: if the file cannot be opened or the options do not fit it.
    """

    def __init__(self, config: TrainConfig, place: Place) -> None:
        self._place = place
        self._batch_size = config.batch_size
        self._samples = config.samples
        self._holdout_samples = config.holdout_samples
        self._data = _open(config)
        self._skipped: Mapping[str, int] = {}

    @property
    def schema(self) -> ClickSchema:
        """Features and table sizes."""
        return self._data.schema

    @property
    def description(self) -> str:
        """The data in words."""
        return self._data.describe()

    @property
    def train_rows(self) -> int | None:
        """Rows of an epoch, over all ranks; None where only reading would tell."""
        return self._data.train_rows

    @property
    def steps(self) -> int | None:
        """Steps of an epoch, or None."""
        return None if self.train_rows is None else -(-self.train_rows // self._rows_of_a_step)

    @property
    def _rows_of_a_step(self) -> int:
        return self._batch_size * self._place.world_size

    def train_batches(self) -> Iterator[ClickBatch]:
        """This rank's batches of an epoch, as many as every other rank has."""
        batches = self._data.train_batches(self._place.rank, self._place.world_size, self._batch_size)
        return self._first_rows(batches, self._samples)

    def sampled(self, count: int) -> list[KeyedJaggedTensor]:
        """The ids of rank 0's first training batches, which are the same for every rank that asks."""
        batches = self._data.train_batches(0, self._place.world_size, self._batch_size)
        return [batch.sparse for batch in islice(batches, count)]

    def holdout_batches(self, limit: int | None = None) -> Iterator[ClickBatch]:
        """This rank's batches of the held-out rows, or of the first ``limit`` of them, to whole batches."""
        batches = self._data.holdout_batches(self._place.rank, self._place.world_size, self._batch_size)
        return self._first_rows(batches, limit or self._holdout_samples)

    def best_metrics(self) -> ClickMetrics | None:
        """The best that any model can have on the held-out rows; None for data whose optimum nobody knows."""
        return self._data.best_metrics().holdout if isinstance(self._data, SyntheticClickData) else None

    @property
    def skipped(self) -> Mapping[str, int]:
        """Broken rows that were left out, by reason, in the pass that met the most: passes may end early."""
        return self._skipped

    def _first_rows(self, batches: Iterator[ClickBatch], limit: int | None) -> Iterator[ClickBatch]:
        yield from batches if limit is None else islice(batches, -(-limit // self._rows_of_a_step))
        if isinstance(self._data, FileClickData):
            self._skipped = max(self._skipped, self._data.skipped, key=lambda counts: sum(counts.values()))


def _open(config: TrainConfig) -> FileClickData | SyntheticClickData:
    schema = criteo_schema(max_embeddings=config.max_embeddings)
    if not config.is_synthetic:
        on_bad_row = "raise" if config.on_bad_row == "error" else config.on_bad_row
        return open_click_data(config.data, schema=schema, holdout=config.holdout, on_bad_row=on_bad_row)
    return open_click_data(
        SyntheticConfig(
            rows=config.samples or _SYNTHETIC_ROWS,
            holdout_rows=config.holdout_samples or _SYNTHETIC_HOLDOUT_ROWS,
            seed=config.seed,
            schema=schema,
        )
    )
