"""``PlantedModel``: rows whose true click probability is known. ``SyntheticConfig``: their size and difficulty.

A row has Zipf-distributed categories and log-normal counts, all independent. Its label is a coin toss with

    p = sigmoid( bias + sum_d weight_d * x_d + sum_f weight_f[id_f] + sum_{(f, g)} <factor_f[id_f], factor_g[id_g]> )

The last sum goes over a few disjoint pairs of features of some tens of categories each. Its terms are those of a
factorization machine (Rendle, 2010), which the dot products of a DLRM can express. The factors have mean zero, so
that neither feature of a pair predicts its term alone. No predictor has, in expectation, a better AUC, logloss or
normalized entropy than p itself, which is what makes the optimum known.

How fast a model can get there is decided by the rare categories, since a weight is learned from the rows that show
it. Real data has the same tail; to make the optimum reachable within a couple of million rows, the planted weight of
a category shrinks with its frequency q: its standard deviation is multiplied by ``min(1, q / common)``. (Then a
constant per feature is taken off, which makes the mean 0 and which any model's bias takes up.)

Legend: N rows, D dense features, F sparse features, P pairs, K = 2 factors, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from shardrec import ConfigError
from shardrec.trainer.data.preprocess import transform_dense
from shardrec.trainer.data.schema import ClickSchema, criteo_schema
from shardrec.trainer.data.zipf import AliasTables, zipf_probabilities

_QUANTILES = 4096  # values a dense feature can take; 12 bits of a uniform number choose one
_FACTORS = 2
_CHUNK = 8192  # rows made at once: small enough for the working set to stay in cache


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Criteo-shaped data with Zipf-distributed categories and a planted click model of known optimum.

    The defaults make a problem in which a DLRM with embeddings of 16 numbers comes within 0.01 of the best possible
    AUC in one pass over about 1.5 million fresh rows. The model itself is described in ``planted.py``.

    Attributes:
        rows: training rows in one pass.
        holdout_rows: held-out rows, drawn from an independent stream.
        seed: chooses the planted weights and every row, from 0 to ``2**64 - 1``.
        schema: columns and table sizes. The default is Criteo Kaggle's, hashed to at most 20 000 rows a table.
        exponent: of the Zipf law of every categorical feature. Larger means fewer ids in use.
        click_rate: mean click probability.
        logit_std: standard deviation of the true logit. Larger means clicks that are easier to predict.
        dense_share: share of the logit's variance that comes from the dense features.
        interaction_share: share that comes from pairs of categorical features.
        pairs: number of interacting pairs.
        common: frequency from which a category has its full weight. Rarer ones carry less in proportion.

    Raises:
        ConfigError: a value out of range. All the faults are in one message.
    """

    rows: int = 4_000_000
    holdout_rows: int = 200_000
    seed: int = 0
    schema: ClickSchema = field(default_factory=lambda: criteo_schema(max_embeddings=20_000))
    exponent: float = 1.15
    click_rate: float = 0.25
    logit_std: float = 1.5
    dense_share: float = 0.2
    interaction_share: float = 0.12
    pairs: int = 3
    common: float = 0.005

    def __post_init__(self) -> None:
        checks = [
            ("rows", self.rows >= 1, "at least 1"),
            ("holdout_rows", self.holdout_rows >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**64, "from 0 to 2**64 - 1"),
            ("exponent", 0 <= self.exponent <= 10, "from 0 to 10"),
            ("click_rate", 0 < self.click_rate < 1, "between 0 and 1"),
            ("logit_std", 0 <= self.logit_std <= 10, "from 0 to 10"),
            ("dense_share", 0 <= self.dense_share <= 1, "from 0 to 1"),
            ("interaction_share", 0 <= self.interaction_share <= 1 - self.dense_share, "from 0 to 1 - dense_share"),
            (
                "pairs",
                0 <= 2 * self.pairs <= len(self.schema.sparse_names),
                f"from 0 to half of the {len(self.schema.sparse_names)} sparse features",
            ),
            ("common", 0 < self.common <= 1, "above 0 and at most 1"),
        ]
        faults = [f"{name} is {getattr(self, name)}: give a value {valid}" for name, good, valid in checks if not good]
        if faults:
            raise ConfigError("SyntheticConfig: " + "; ".join(faults))


class RandomStream(IntEnum):
    """Independent sources of random numbers under one seed."""

    TRAIN = 0
    HOLDOUT = 1
    EXPECTATION = 2  # the large fixed sample behind expected metrics
    MODEL = 3  # the planted weights


@dataclass(frozen=True, kw_only=True, eq=False)
class PlantedRows:
    """N rows with their true click probabilities.

    Attributes:
        quantiles: int64 (N, D), the index of each dense value in the model's ``dense_raw`` and ``dense_input``.
        ids: int64 (N, F), rows of the embedding tables; 0 is a missing category.
        probabilities: float64 (N,), true click probabilities.
        labels: float32 (N,), drawn from them.
    """

    quantiles: NDArray[np.int64]
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    labels: NDArray[np.float32]


class PlantedModel:
    """Makes rows and knows their click probabilities. Row i of a stream depends on the configuration and i only.

    Args:
        config: sizes, strengths and seed.
        task: number of the click model over the same features. Each number draws other weights.

    Attributes:
        dense_raw: int64 (D, Q), the counts that a dense feature takes, with equal probability.
        dense_missing: bool (D, Q), which of them are missing values.
        dense_input: float32 (D, Q), the same after :func:`~shardrec.trainer.data.transform_dense`.
    """

    def __init__(self, config: SyntheticConfig, task: int = 0) -> None:
        schema = config.schema
        self.num_dense, self.num_sparse = len(schema.dense_names), len(schema.sparse_names)
        # One row takes a whole number of Philox blocks (4 words of 64 bits = 8 uniforms), so that a stream can be
        # entered at any row: D + F uniforms for the features, 1 for the label.
        self._blocks_per_row = -(-(self.num_dense + self.num_sparse + 1) // 8)
        self._seed = config.seed
        rng = np.random.Generator(np.random.Philox(key=_key(config.seed, RandomStream.MODEL)))
        self.dense_raw, self.dense_missing = _dense_values(self.num_dense, rng)
        self.dense_input = transform_dense(self.dense_raw.astype(np.float64), self.dense_missing)
        frequencies = [_category_frequencies(size, config.exponent, rng) for size in schema.num_embeddings]
        self._tables = AliasTables(frequencies)
        if task:
            rng = np.random.Generator(
                np.random.Philox(key=_key(config.seed, RandomStream.MODEL), counter=[0, task, 0, 0])
            )
        variance = config.logit_std**2
        pairs_share = config.interaction_share if config.pairs else 0.0
        dense_share = config.dense_share if self.num_dense else 0.0
        self._dense_score = _dense_scores(self.dense_input, variance * dense_share, rng)
        self._weight = _category_weights(frequencies, config.common, variance * (1.0 - dense_share - pairs_share), rng)
        self._paired = _paired_features(schema.num_embeddings, config.pairs)
        self._factor, self._factor_offsets = _category_factors(
            [frequencies[feature] for feature in self._paired], config.common, variance * pairs_share, rng
        )
        self._bias = 0.0
        self._bias = self._find_bias(config.click_rate)

    def rows(self, stream: RandomStream, start: int, stop: int) -> PlantedRows:
        """Rows ``start`` to ``stop`` (not included) of one stream."""
        edges = [*range(start, stop, _CHUNK), stop] if stop > start else [start, start]
        parts = [self._chunk(stream, first, last) for first, last in pairwise(edges)]
        if len(parts) == 1:
            return parts[0]
        names = ("quantiles", "ids", "probabilities", "labels")
        return PlantedRows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def probabilities(self, stream: RandomStream, start: int, stop: int) -> NDArray[np.float64]:
        """True click probabilities, float64 (N,), of rows ``start`` to ``stop``. Holds no other column in memory."""
        edges = range(start, stop, _CHUNK)
        return np.concatenate([self._chunk(stream, e, min(e + _CHUNK, stop)).probabilities for e in edges])

    def dense(self, quantiles: NDArray[np.int64]) -> NDArray[np.float32]:
        """Model inputs, float32 (N, D), of quantile indices (N, D)."""
        places = quantiles + np.arange(self.num_dense) * _QUANTILES
        return np.asarray(self.dense_input.reshape(-1)[places], dtype=np.float32)

    def _chunk(self, stream: RandomStream, start: int, stop: int) -> PlantedRows:
        count = stop - start
        generator = np.random.Philox(key=_key(self._seed, stream))
        generator.advance(start * self._blocks_per_row)
        words = generator.random_raw(count * self._blocks_per_row * 4)
        uniform = np.asarray(words, dtype="<u8").view("<u4").reshape(count, self._blocks_per_row * 8)
        quantiles = (uniform[:, : self.num_dense] >> np.uint32(20)).astype(np.int64)
        ids = self._tables.draw(uniform[:, self.num_dense : self.num_dense + self.num_sparse])
        probabilities = 1.0 / (1.0 + np.exp(-self._logits(quantiles, ids)))
        toss = uniform[:, -1] * 2.0**-32
        return PlantedRows(
            quantiles=quantiles,
            ids=ids,
            probabilities=probabilities,
            labels=(toss < probabilities).astype(np.float32),
        )

    def _logits(self, quantiles: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        logits = np.full(len(ids), self._bias)
        logits += self._weight[ids + self._tables.offsets].sum(axis=1)
        if self.num_dense:
            logits += self._dense_score.reshape(-1)[quantiles + np.arange(self.num_dense) * _QUANTILES].sum(axis=1)
        if len(self._paired):
            factors = self._factor[ids[:, self._paired] + self._factor_offsets]  # (N, 2P, K), partners side by side
            logits += (factors[:, 0::2] * factors[:, 1::2]).sum(axis=(1, 2))
        return logits

    def _find_bias(self, click_rate: float) -> float:
        """The bias for which the click rate of a fixed sample of 65 536 rows is ``click_rate``, by bisection."""
        draws = self.rows(RandomStream.EXPECTATION, 0, 65_536)
        logits = self._logits(draws.quantiles, draws.ids)
        low, high = -50.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            rate = float((1.0 / (1.0 + np.exp(-(logits + middle)))).mean())
            low, high = (middle, high) if rate < click_rate else (low, middle)
        return (low + high) / 2


def _key(seed: int, stream: RandomStream) -> NDArray[np.uint64]:
    return np.array([seed, int(stream)], dtype=np.uint64)


def _dense_values(count: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Counts (D, Q) and which are missing: log-normal, with 0 to 45 % missing. Every fourth feature reaches -1."""
    raw = np.zeros((count, _QUANTILES), dtype=np.int64)
    missing = np.zeros((count, _QUANTILES), dtype=np.bool_)
    for feature in range(count):
        centre, spread = rng.uniform(0.0, 5.0), rng.uniform(0.8, 1.8)
        absent = int(_QUANTILES * rng.choice([0.0, 0.05, 0.2, 0.45]))
        present = _QUANTILES - absent
        missing[feature, :absent] = True
        raw[feature, absent:] = np.floor(np.exp(centre + spread * _normal_levels(present))) - (feature % 4 == 1)
    return raw, missing


@lru_cache
def _normal_levels(count: int) -> NDArray[np.float64]:
    """Values of the standard normal distribution with equal probability, (count,)."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((j + 0.5) / count) for j in range(count)])


def _category_frequencies(size: int, exponent: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Probability per row of a table, (size,): 0 to 40 % missing in row 0, the rest Zipf in shuffled order.

    Shuffled, because ids that come from hashing real categories are: popular rows lie all over the table.
    """
    absent = float(rng.choice([0.0, 0.03, 0.4], p=[0.6, 0.2, 0.2]))
    frequencies = np.empty(size)
    frequencies[0] = absent
    frequencies[1:] = rng.permutation(zipf_probabilities(size - 1, exponent)) * (1.0 - absent)
    return frequencies


def _dense_scores(values: NDArray[np.float32], variance: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """What each dense value (D, Q) adds to the logit: linear in the model's input, total variance ``variance``."""
    if not len(values):
        return np.zeros(values.shape)
    centred = values - values.mean(axis=1, keepdims=True, dtype=np.float64)
    scores = centred / centred.std(axis=1, keepdims=True) * rng.standard_normal((len(values), 1))
    return np.asarray(scores * np.sqrt(variance / scores.var(axis=1).sum()), dtype=np.float64)


def _shrunk_normal(
    frequencies: NDArray[np.float64], common: float, width: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Normal numbers (n, width) that shrink with rarity, with mean 0 under the frequencies."""
    scale = np.minimum(1.0, frequencies / common)[:, None]
    values = rng.standard_normal((len(frequencies), width)) * scale
    return np.asarray(values - frequencies @ values, dtype=np.float64)


def _category_weights(
    frequencies: list[NDArray[np.float64]], common: float, variance: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """What each category adds to the logit, all tables in one array. Total variance ``variance``."""
    weights = [_shrunk_normal(q, common, 1, rng)[:, 0] for q in frequencies]
    total = sum(float(q @ w**2) for q, w in zip(frequencies, weights, strict=True))
    return np.concatenate(weights) * (np.sqrt(variance / total) if total > 0 else 0.0)


def _paired_features(sizes: Sequence[int], pairs: int) -> NDArray[np.int64]:
    """The 2P features nearest to 30 categories, partners side by side: few enough to be seen often in any pairing."""
    order = sorted(range(len(sizes)), key=lambda feature: (abs(np.log(sizes[feature] / 30.0)), feature))
    return np.array(order[: 2 * pairs], dtype=np.int64)


def _category_factors(
    frequencies: Sequence[NDArray[np.float64]], common: float, variance: float, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Factors (rows of the 2P paired tables, K) and each table's first row in them.

    Every pair's dot product has the variance ``variance / P``, so that no pair takes much longer to learn than others.
    """
    tables: list[NDArray[np.float64]] = []
    for left, right in zip(frequencies[0::2], frequencies[1::2], strict=True):
        pair = [_shrunk_normal(q, common, _FACTORS, rng) for q in (left, right)]
        spreads = [(q[:, None] * v).T @ v for q, v in zip((left, right), pair, strict=True)]  # covariances (K, K)
        # Independent with mean 0: Var <a, b> = trace(cov_a cov_b)
        spread = float((spreads[0] * spreads[1]).sum())
        scale = (variance / (len(frequencies) // 2) / spread) ** 0.25 if spread > 0 else 0.0
        tables += [values * scale for values in pair]
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    return np.concatenate([*tables, np.zeros((0, _FACTORS))]), np.cumsum(sizes) - sizes
