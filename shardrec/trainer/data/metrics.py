"""Metrics of predicted click probabilities: area under the ROC curve, logloss, normalized entropy."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardrec import ConfigError
from shardrec.trainer.data.ranking import RankingMetrics, check_scores, ranking_metrics


@dataclass(frozen=True, kw_only=True)
class ClickMetrics:
    """Metrics of one set of rows.

    Attributes:
        auc: probability that a random clicked row is ranked above a random other one (ties count one half). NaN, as
            ``normalized_entropy`` and ``auc_stderr``, if all rows or none were clicked. Without rows all are NaN.
        logloss: mean cross entropy, in nats per row.
        normalized_entropy: logloss over the cross entropy of always predicting the click rate ("Practical Lessons
            from Predicting Clicks on Ads at Facebook", He et al., 2014). Below 1 is better than that.
        click_rate: share of clicked rows.
        rows: number of rows.
        auc_stderr: standard error of ``auc`` for this number of rows (Hanley and McNeil, 1982).
        ranking: of the order of the rows in each group. None for rows without groups.
    """

    auc: float
    logloss: float
    normalized_entropy: float
    click_rate: float
    rows: int
    auc_stderr: float
    ranking: RankingMetrics | None = None

    def to_mapping(self) -> dict[str, float | int | None]:
        """The metrics by their names, those of a ranking too (``ndcg@10``), None for NaN. JSON-compatible."""
        mapping = {name: None if value != value else value for name, value in dataclasses.asdict(self).items()}
        ranking = mapping.pop("ranking")
        if ranking is not None:
            k = ranking.pop("k")
            at_k = ("ndcg", "recall", "hit_rate")
            mapping |= {f"{name}@{k}" if name in at_k else name: value for name, value in ranking.items()}
        return mapping


def click_metrics(
    labels: ArrayLike, probabilities: ArrayLike, groups: ArrayLike | None = None, *, k: int = 10
) -> ClickMetrics:
    """Scores predicted probabilities.

    Args:
        labels: (N,) 0 or 1; or the true click probabilities, for the value to expect over random labels.
        probabilities: (N,) predictions, from 0 to 1.
        groups: (N,) integers, the same for rows that are ranked against each other. None for no ranking metrics.
        k: places at the top of each group that these count.

    Returns:
        The metrics, computed in float64.

    Raises:
        ConfigError: shapes that differ, labels out of 0 to 1, a probability that is not a number.
    """
    target = np.asarray(labels, dtype=np.float64).reshape(-1)
    predicted = np.asarray(probabilities, dtype=np.float64).reshape(-1)
    if not target.size and not predicted.size:
        none = math.nan
        return ClickMetrics(auc=none, logloss=none, normalized_entropy=none, click_rate=none, rows=0, auc_stderr=none)
    _check(target, predicted)
    rate = float(target.mean())
    has_both = 0 < rate < 1
    auc = area_under_roc(target, predicted) if has_both else math.nan
    logloss = _cross_entropy(target, predicted)
    return ClickMetrics(
        auc=auc,
        logloss=logloss,
        normalized_entropy=logloss / _cross_entropy(np.array([rate]), np.array([rate])) if has_both else math.nan,
        click_rate=rate,
        rows=target.size,
        auc_stderr=_auc_stderr(auc, rate * target.size, (1 - rate) * target.size) if has_both else math.nan,
        ranking=None if groups is None else ranking_metrics(target, predicted, groups, k),
    )


def area_under_roc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve, by one sort.

    Args:
        labels: (N,) 0 or 1. A value between counts as that share of a click and the rest of a non-click.
        scores: (N,), any monotone function of the predicted probability.

    Returns:
        The area, from 0 to 1. Ties count one half.

    Raises:
        ConfigError: shapes that differ, labels out of 0 to 1 or of one kind only, a score that is not a number.
    """
    target = np.asarray(labels, dtype=np.float64).reshape(-1)
    score = np.asarray(scores).reshape(-1)
    _check(target, score)
    if target.sum() in (0, target.size):
        raise ConfigError(f"all {target.size} labels are {target[0]:g}: an AUC needs clicked and other rows")
    order = np.argsort(score, kind="stable")
    target, score = target[order], score[order]
    start = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])  # first row per group of equal scores
    clicks = np.add.reduceat(target, start)
    others = np.add.reduceat(1.0 - target, start)
    below = np.cumsum(others) - others
    return float((clicks * (below + others / 2)).sum() / (clicks.sum() * others.sum()))


def _check(target: NDArray[np.float64], score: NDArray[np.generic]) -> None:
    if target.shape != score.shape:
        raise ConfigError(f"labels has {target.size} values and scores {score.size}: give one score per label")
    if target.size == 0 or not (target.min() >= 0 and target.max() <= 1):
        raise ConfigError("labels must be a non-empty array of values from 0 to 1")
    check_scores(score)


def _cross_entropy(target: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    clipped = np.clip(predicted, 1e-12, 1 - 1e-12)
    return float(-(target * np.log(clipped) + (1 - target) * np.log1p(-clipped)).mean())


def _auc_stderr(auc: float, clicks: float, others: float) -> float:
    both_above = auc / (2 - auc)
    both_below = 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + (clicks - 1) * (both_above - auc**2) + (others - 1) * (both_below - auc**2)
    return float(np.sqrt(max(variance, 0.0) / (clicks * others)))
