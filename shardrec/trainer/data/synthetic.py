"""``SyntheticClickData``: batches from the planted model, and the best metrics that any model can reach on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from shardrec.trainer.data.click_data import ClickBatch, ClickData
from shardrec.trainer.data.metrics import ClickMetrics, click_metrics
from shardrec.trainer.data.order import BatchRequest
from shardrec.trainer.data.planted import PlantedModel, PlantedRows, RandomStream, SyntheticConfig
from shardrec.trainer.data.rows import ClickRows
from shardrec.trainer.data.schema import ClickSchema

_EXPECTATION_ROWS = 500_000

_planted = lru_cache(maxsize=4)(PlantedModel)


def _model_of(config: SyntheticConfig) -> PlantedModel:
    """The planted model, which does not depend on the numbers of rows. Made once for all of them."""
    return _planted(replace(config, rows=1, holdout_rows=1))


@dataclass(frozen=True, kw_only=True)
class BestMetrics:
    """Metrics of the true click probabilities, which no predictor beats in expectation.

    Attributes:
        holdout: on the held-out rows and the labels actually drawn: what to compare a trained model with.
        expected: the same in expectation over rows and labels, from a fixed sample of 500 000 other rows with their
            probabilities in place of labels. ``holdout`` differs from it by chance, about ``holdout.auc_stderr``.
    """

    holdout: ClickMetrics
    expected: ClickMetrics


class SyntheticClickData(ClickData):
    """Generated click data. Row i is a pure function of the configuration and i.

    Any rank makes its own rows without communication and without making the others', at any position of the stream,
    and global batches are the same for every world size that they are split over.

    Args:
        config: sizes, seed and difficulty.

    Attributes:
        config: the same.
        model: the planted model.
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.model = _model_of(config)

    @property
    def schema(self) -> ClickSchema:
        return self.config.schema

    @property
    def train_rows(self) -> int:
        """Training rows in one pass, over all ranks."""
        return self.config.rows

    def best_metrics(self) -> BestMetrics:
        """The metrics of the true probabilities. Computed once per process, in a second or two."""
        return _best_metrics(self.config)

    def describe(self) -> str:
        """Size, origin and optimum in a few lines of text."""
        config, best = self.config, self.best_metrics()
        tables = config.schema.num_embeddings
        return "\n".join(
            [
                f"synthetic clicks, seed {config.seed}: {config.rows:,} training and {config.holdout_rows:,} held-out "
                f"rows, {len(config.schema.dense_names)} dense and {len(tables)} sparse features",
                f"{sum(tables):,} embedding rows, the largest table {max(tables):,}; ids follow Zipf's law with "
                f"exponent {config.exponent:g}",
                f"best possible on the held-out rows: AUC {best.holdout.auc:.4f} (standard error "
                f"{best.holdout.auc_stderr:.4f}), logloss {best.holdout.logloss:.4f}, normalized entropy "
                f"{best.holdout.normalized_entropy:.4f}; "
                f"expected AUC {best.expected.auc:.4f}",
            ]
        )

    def clicks(self, planted: PlantedRows) -> ClickRows:
        """Planted rows as a model sees them."""
        return ClickRows(labels=planted.labels, dense=self.model.dense(planted.quantiles), ids=planted.ids.reshape(-1))

    def _batches(self, request: BatchRequest, epoch: int | None) -> Iterator[ClickBatch]:
        # Every pass has the same rows, in the same order.
        held = epoch is None
        stream = RandomStream.HOLDOUT if held else RandomStream.TRAIN
        rows = self.config.holdout_rows if held else self.config.rows
        step = request.global_size
        for first in range(request.first_batch * step, rows, step):
            count = min(step, rows - first)
            if request.wants(first // step, count):
                start, stop = request.share(count)
                yield self.clicks(self.model.rows(stream, first + start, first + stop)).to_batch(self.schema)


@lru_cache(maxsize=2)
def _best_metrics(config: SyntheticConfig) -> BestMetrics:
    holdout = _model_of(config).rows(RandomStream.HOLDOUT, 0, config.holdout_rows)
    return BestMetrics(
        holdout=click_metrics(holdout.labels, holdout.probabilities),
        expected=_expected_metrics(_model_of(config), _EXPECTATION_ROWS),
    )


@lru_cache(maxsize=2)
def _expected_metrics(model: PlantedModel, rows: int) -> ClickMetrics:
    probabilities = model.probabilities(RandomStream.EXPECTATION, 0, rows)
    return click_metrics(probabilities, probabilities)
