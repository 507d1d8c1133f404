"""Metrics of a ranking, against torchmetrics and one group at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_normalized_dcg, retrieval_recall

from shardrec.errors import ConfigError
from shardrec.trainer.data import area_under_roc, ranking_metrics

groups_of = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=6).filter(
    lambda groups: any(map(any, groups))
)


@given(groups=groups_of, k=st.integers(1, 8), seed=st.integers(0, 99))
def test_of_different_scores_as_torchmetrics(groups: list[list[bool]], k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = np.concatenate(groups)
    keys = np.repeat(rng.choice(1000, len(groups), replace=False) - 500, [len(group) for group in groups])
    scores = rng.permutation(len(labels)).astype(np.float32)
    shuffled = rng.permutation(len(labels))
    found = ranking_metrics(labels[shuffled], scores[shuffled], keys[shuffled], k)

    expected = []
    areas: list[tuple[float, int]] = []
    for key in np.unique(keys):
        own_labels, own_scores = labels[keys == key], scores[keys == key]
        if not own_labels.any():
            continue
        pair = torch.from_numpy(own_scores), torch.from_numpy(own_labels.astype(np.int64))
        top = min(k, len(own_labels))
        expected.append(
            [float(one(*pair, top_k=top)) for one in (retrieval_normalized_dcg, retrieval_recall, retrieval_hit_rate)]
        )
        if not own_labels.all():
            areas.append((area_under_roc(own_labels, own_scores), len(own_labels)))
    assert (found.groups, found.k) == (len(expected), k)
    assert [found.ndcg, found.recall, found.hit_rate] == pytest.approx(np.mean(expected, axis=0), abs=1e-6)
    if areas:
        assert found.gauc == pytest.approx(np.average([a for a, _ in areas], weights=[n for _, n in areas]))
    else:
        assert found.gauc is None


def test_equal_scores_gain_nothing() -> None:
    found = ranking_metrics([1, 0, 0, 0, 1, 1], [0.5] * 6, [7, 7, 7, 9, 9, 9], 2)
    assert (found.ndcg, found.recall, found.hit_rate) == (
        pytest.approx(0.5 / math.log2(3) / (1 + 1 / math.log2(3)) * 1),
        0.25,
        0.5,
    )
    assert found.gauc == 0.5


@pytest.mark.parametrize(
    ("labels", "scores", "groups", "words"),
    [
        ([1, 0], [0.5, 0.5], [1], "have 2, 2 and 1 values"),
        ([0, 0], [0.5, 0.5], [1, 1], "none of 2 rows was clicked"),
        ([0, 1], [0.5, math.nan], [1, 1], "1 of 2 scores are not numbers"),
    ],
)
def test_what_has_no_ranking(labels: list[int], scores: list[float], groups: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ranking_metrics(labels, scores, groups, 3)
