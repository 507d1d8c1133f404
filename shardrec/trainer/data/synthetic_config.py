"""``SyntheticConfig``: size, seed and difficulty of generated click data."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardrec import ConfigError
from shardrec.trainer.data.schema import ClickSchema, criteo_schema

__all__ = ["SyntheticConfig"]


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Criteo-shaped data with Zipf-distributed categories and a planted click model of known optimum.

    The defaults make a problem in which a DLRM with embeddings of 16 numbers comes within 0.01 of the best possible
    AUC in one pass over about 1.5 million fresh rows. The model itself is described in ``planted.py``.

    Attributes:
        rows: training rows in one pass.
        holdout_rows: held-out rows, drawn from an independent stream.
        seed: chooses the planted weights and every row, from 0 to ``2**64 - 1``.
        schema: columns and table sizes; the default is Criteo Kaggle's, hashed to at most 20 000 rows a table.
        exponent: of the Zipf law of every categorical feature; larger means fewer ids in use.
        click_rate: mean click probability.
        logit_std: standard deviation of the true logit; larger means clicks that are easier to predict.
        dense_share: share of the logit's variance that comes from the dense features.
        interaction_share: share that comes from pairs of categorical features.
        pairs: number of interacting pairs.
        common: frequency from which a category has its full weight; rarer ones carry less in proportion.

    Raises:
        ConfigError: a value out of range; all the faults are in one message.
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
