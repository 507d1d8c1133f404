from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.trainer.data import (
    ClickBatch,
    ClickSchema,
    SyntheticClickData,
    SyntheticConfig,
    click_metrics,
    open_click_data,
)
from tests.trainer.data.raw import SMALL_CONFIG, equal


@pytest.fixture(scope="module")
def data() -> SyntheticClickData:
    return open_click_data(SMALL_CONFIG)


def joined(batches: list[ClickBatch], feature: str) -> tuple[list[float], list[float], list[int]]:
    return (
        torch.cat([batch.labels for batch in batches]).tolist(),
        torch.cat([batch.dense[:, 0] for batch in batches]).tolist(),
        torch.cat([batch.sparse[feature].values() for batch in batches]).tolist(),
    )


@settings(max_examples=25)
@given(world_size=st.integers(1, 5), batch_size=st.integers(1, 40))
def test_ranks_share_the_rows_of_one_stream(data: SyntheticClickData, world_size: int, batch_size: int) -> None:
    ranks = [list(data.train_batches(rank, world_size, batch_size)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {-(-100 // (world_size * batch_size))}
    in_order = [batch for step in zip(*ranks, strict=True) for batch in step]
    alone = list(data.train_batches(0, 1, 100))
    assert joined(in_order, "b") == joined(alone, "b")
    assert all(batch.size == batch_size for batches in ranks for batch in batches[:-1])


def test_two_sources_agree_and_can_go_on_in_the_middle(data: SyntheticClickData) -> None:
    whole = list(data.train_batches(1, 2, 8))
    again = list(open_click_data(SMALL_CONFIG).train_batches(1, 2, 8, first_batch=3))
    assert len(again) == len(whole) - 3
    assert all(equal(left, right) for left, right in zip(whole[3:], again, strict=True))


def test_drop_last(data: SyntheticClickData) -> None:
    assert [batch.size for batch in data.train_batches(0, 2, 16, drop_last=True)] == [16, 16, 16]
    assert [batch.size for batch in data.train_batches(0, 2, 16)] == [16, 16, 16, 2]


def test_holdout_rows_are_others(data: SyntheticClickData) -> None:
    held, trained = next(data.holdout_batches(0, 1, 50)), next(data.train_batches(0, 1, 50))
    assert not equal(held, trained)
    assert sum(batch.size for batch in data.holdout_batches(1, 3, 1000)) in (6666, 6667)


def test_best_metrics_are_those_of_the_held_out_labels(data: SyntheticClickData) -> None:
    best = data.best_metrics()
    labels = torch.cat([batch.labels for batch in data.holdout_batches(0, 1, 4096)])
    assert best.holdout.rows == 20_000
    assert best.holdout.click_rate == pytest.approx(labels.mean().item())
    assert abs(best.holdout.auc - best.expected.auc) < 4 * best.holdout.auc_stderr
    assert abs(best.holdout.normalized_entropy - best.expected.normalized_entropy) < 0.03
    assert data.best_metrics() is best
    assert f"AUC {best.holdout.auc:.4f}" in data.describe()


def test_a_simple_learner_gets_near_the_optimum_and_not_above() -> None:
    """Logistic regression on one-hot ids can express a model without pairs: 60 000 rows bring it close."""
    schema = ClickSchema(dense_names=("x",), sparse_names=("a", "b"), num_embeddings=(6, 12))
    data = open_click_data(
        SyntheticConfig(rows=60_000, holdout_rows=20_000, schema=schema, pairs=0, interaction_share=0.0)
    )

    def inputs(batch: ClickBatch) -> torch.Tensor:
        a, b = (torch.eye(size)[batch.sparse[name].values()] for name, size in (("a", 6), ("b", 12)))
        return torch.cat([batch.dense, a, b, torch.ones(batch.size, 1)], dim=1)

    train, held = next(data.train_batches(0, 1, 60_000)), next(data.holdout_batches(0, 1, 20_000))
    features, weights = inputs(train), torch.zeros(20)
    for _ in range(6):  # Newton's method
        p = torch.sigmoid(features @ weights)
        curvature = features.T @ (features * (p * (1 - p))[:, None]) + 1e-3 * torch.eye(20)
        weights += torch.linalg.solve(curvature, features.T @ (train.labels - p))
    best = data.best_metrics().holdout
    reached = click_metrics(held.labels, torch.sigmoid(inputs(held) @ weights))
    assert best.auc - 0.003 < reached.auc < best.auc + 0.001
    assert best.logloss - 0.001 < reached.logloss < best.logloss + 0.003


def test_all_faults_of_a_configuration_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SMALL_CONFIG, rows=0, click_rate=1.5, pairs=3)
    text = str(caught.value)
    assert "rows is 0: give a value at least 1" in text
    assert "click_rate is 1.5" in text
    assert "pairs is 3: give a value from 0 to half of the 4 sparse features" in text


@pytest.mark.parametrize(
    ("request_of", "message"),
    [((2, 2, 4), "rank is 2 of world_size 2"), ((0, 0, 4), "world_size is 0"), ((0, 1, 0), "batch_size is 0")],
)
def test_a_bad_request_is_told_at_the_call(
    data: SyntheticClickData, request_of: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        data.train_batches(*request_of)
    with pytest.raises(ConfigError, match=message):
        data.holdout_batches(*request_of)
