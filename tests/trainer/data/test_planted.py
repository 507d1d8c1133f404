from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardrec.trainer.data import ClickSchema, area_under_roc, click_metrics
from shardrec.trainer.data.planted import PlantedModel, PlantedRows, RandomStream
from tests.trainer.data.raw import SMALL_CONFIG


@pytest.fixture(scope="module")
def model() -> PlantedModel:
    return PlantedModel(SMALL_CONFIG)


@pytest.fixture(scope="module")
def rows(model: PlantedModel) -> PlantedRows:
    return model.rows(RandomStream.HOLDOUT, 0, 100_000)


def logits(rows: PlantedRows) -> NDArray[np.float64]:
    return np.asarray(np.log(rows.probabilities / (1 - rows.probabilities)))


def test_labels_are_calibrated_in_every_tenth(rows: PlantedRows) -> None:
    order = np.argsort(rows.probabilities)
    for tenth in np.array_split(order, 10):
        probabilities, clicks = rows.probabilities[tenth], rows.labels[tenth].sum()
        spread = np.sqrt((probabilities * (1 - probabilities)).sum())
        assert abs(clicks - probabilities.sum()) < 5 * spread


def test_click_rate_and_spread_are_as_configured(rows: PlantedRows) -> None:
    assert abs(rows.probabilities.mean() - SMALL_CONFIG.click_rate) < 0.01
    assert abs(logits(rows).std() - SMALL_CONFIG.logit_std) < 0.03


def test_nothing_beats_the_true_probability(rows: PlantedRows) -> None:
    best = click_metrics(rows.labels, rows.probabilities)
    rng = np.random.default_rng(0)
    for noise in (0.3, 1.0):
        off = logits(rows) + rng.normal(0, noise, len(rows.labels))
        worse = click_metrics(rows.labels, 1 / (1 + np.exp(-off)))
        assert worse.auc < best.auc
        assert worse.normalized_entropy > best.normalized_entropy
    for scale in (0.8, 1.25):  # the same order, so the same AUC, but probabilities that are off
        assert np.isclose(area_under_roc(rows.labels, logits(rows) * scale), best.auc)
        assert click_metrics(rows.labels, 1 / (1 + np.exp(-logits(rows) * scale))).logloss > best.logloss


def test_no_single_column_explains_a_pair() -> None:
    """With all of the variance in one pair, the mean logit given either id is the same, up to the sample's noise."""
    model = PlantedModel(replace(SMALL_CONFIG, dense_share=0.0, interaction_share=1.0))
    rows = model.rows(RandomStream.TRAIN, 0, 100_000)
    logit = logits(rows)
    assert abs(logit.std() - SMALL_CONFIG.logit_std) < 0.1
    for feature in range(4):
        ids = rows.ids[:, feature]
        counts = np.bincount(ids)
        means = np.bincount(ids, weights=logit) / np.maximum(counts, 1)
        explained = (counts * (means - logit.mean()) ** 2).sum() / len(logit)
        assert explained < 0.02 * logit.var()


def test_dense_part_is_linear_in_the_inputs() -> None:
    model = PlantedModel(replace(SMALL_CONFIG, dense_share=1.0, interaction_share=0.0))
    rows = model.rows(RandomStream.TRAIN, 0, 2000)
    inputs = np.column_stack([model.dense(rows.quantiles), np.ones(2000)])
    fit, *_ = np.linalg.lstsq(inputs, logits(rows), rcond=None)
    assert np.abs(inputs @ fit - logits(rows)).max() < 1e-4


def test_rare_categories_carry_little() -> None:
    """With one feature the logit is its weight: the rare ones' are all about the same."""
    schema = ClickSchema(dense_names=(), sparse_names=("a",), num_embeddings=(2000,))
    config = replace(SMALL_CONFIG, schema=schema, dense_share=0.0, interaction_share=0.0, pairs=0, common=0.01)
    rows = PlantedModel(config).rows(RandomStream.TRAIN, 0, 50_000)
    ids, first, counts = np.unique(rows.ids[:, 0], return_index=True, return_counts=True)
    weights = logits(rows)[first]
    common, rare = weights[counts > 500], weights[counts < 25]
    assert len(ids) > 1000
    assert rare.std() < 0.1 * common.std()


@settings(max_examples=25)
@given(start=st.integers(0, 10**12), cut=st.integers(0, 20))
def test_a_row_depends_on_its_number_only(model: PlantedModel, start: int, cut: int) -> None:
    whole = model.rows(RandomStream.TRAIN, start, start + 20)
    parts = [
        model.rows(RandomStream.TRAIN, start, start + cut),
        model.rows(RandomStream.TRAIN, start + cut, start + 20),
    ]
    for name in ("quantiles", "ids", "probabilities", "labels"):
        assert np.array_equal(getattr(whole, name), np.concatenate([getattr(part, name) for part in parts]))


def test_long_ranges_are_put_together_from_chunks(model: PlantedModel) -> None:
    whole = model.rows(RandomStream.TRAIN, 5, 20_005)
    part = model.rows(RandomStream.TRAIN, 12_000, 12_010)
    assert np.array_equal(whole.ids[11_995:12_005], part.ids)
    assert np.array_equal(whole.probabilities, model.probabilities(RandomStream.TRAIN, 5, 20_005))


def test_streams_and_seeds_differ(model: PlantedModel) -> None:
    ids = model.rows(RandomStream.TRAIN, 0, 50).ids
    assert not np.array_equal(ids, model.rows(RandomStream.HOLDOUT, 0, 50).ids)
    assert not np.array_equal(ids, PlantedModel(replace(SMALL_CONFIG, seed=1)).rows(RandomStream.TRAIN, 0, 50).ids)
    assert np.array_equal(ids, PlantedModel(SMALL_CONFIG).rows(RandomStream.TRAIN, 0, 50).ids)


def test_ids_follow_zipfs_law(rows: PlantedRows) -> None:
    counts = np.sort(np.bincount(rows.ids[:, 1], minlength=200)[1:])[::-1]
    expected = np.arange(1, 200) ** -SMALL_CONFIG.exponent
    expected *= counts.sum() / expected.sum()
    assert np.abs(counts[:50] - expected[:50]).max() < 5 * np.sqrt(expected[0])


def test_rows_stay_the_same(model: PlantedModel) -> None:
    """From version to version: runs are compared by what they were trained on."""
    rows = model.rows(RandomStream.TRAIN, 5, 9)
    assert rows.ids.tolist() == [[21, 0, 21, 2], [26, 0, 18, 3], [24, 195, 9, 2], [15, 0, 16, 3]]
    assert rows.labels.tolist() == [0.0, 0.0, 0.0, 1.0]
