from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.trainer.data import area_under_roc, click_metrics

rows = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=30).filter(
    lambda each: len({label for label, _ in each}) == 2
)


@given(rows=rows)
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[bool, int]]) -> None:
    clicked = [score for label, score in rows if label]
    others = [score for label, score in rows if not label]
    in_order = sum((a > b) + (a == b) / 2 for a in clicked for b in others)
    auc = area_under_roc([label for label, _ in rows], [score for _, score in rows])
    assert math.isclose(auc, in_order / (len(clicked) * len(others)))


def test_soft_labels_count_as_that_share_of_a_click() -> None:
    scores = [0.1, 0.3, 0.3, 0.9]
    soft = area_under_roc([0.25, 0.5, 0.0, 1.0], scores)
    hard = area_under_roc([1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1], np.repeat(scores, 4))
    assert math.isclose(soft, hard)


def test_logloss_and_normalized_entropy_by_hand() -> None:
    metrics = click_metrics([1, 0, 0, 0], [0.5, 0.25, 0.25, 0.5])
    assert math.isclose(metrics.logloss, -(2 * math.log(0.5) + 2 * math.log(0.75)) / 4)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert math.isclose(metrics.normalized_entropy, metrics.logloss / entropy)
    assert (metrics.click_rate, metrics.rows) == (0.25, 4)


def test_constant_prediction_has_entropy_one_and_auc_one_half() -> None:
    metrics = click_metrics([1, 0, 0, 0], [0.25] * 4)
    assert math.isclose(metrics.normalized_entropy, 1.0)
    assert metrics.auc == 0.5


def test_standard_error_matches_repeated_draws() -> None:
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(200):
        probability = 1 / (1 + np.exp(-rng.normal(-1, 1.5, 500)))
        draws.append(click_metrics(rng.random(500) < probability, probability))
    spread = float(np.std([each.auc for each in draws]))
    assert math.isclose(spread, draws[0].auc_stderr, rel_tol=0.3)


@pytest.mark.parametrize("label", [0, 1])
def test_rows_with_one_label_have_a_logloss_alone(label: int) -> None:
    metrics = click_metrics([label] * 3, [0.5] * 3)
    assert (metrics.logloss, metrics.click_rate, metrics.rows) == (pytest.approx(math.log(2)), label, 3)
    assert all(math.isnan(value) for value in (metrics.auc, metrics.normalized_entropy, metrics.auc_stderr))
    undefined = {name for name, value in metrics.to_mapping().items() if value is None}
    assert undefined == {"auc", "normalized_entropy", "auc_stderr"}
    with pytest.raises(ConfigError, match=f"all 3 labels are {label}: an AUC needs clicked and other rows"):
        area_under_roc([label] * 3, [0.5] * 3)


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([0, 1], [0.1], "labels has 2 values and scores 1"),
        ([0, 2], [0.1, 0.2], "values from 0 to 1"),
        ([0, 1], [0.1, math.nan], "1 of 2 scores are not numbers"),
    ],
)
def test_faults(labels: list[float], scores: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        click_metrics(labels, scores)
