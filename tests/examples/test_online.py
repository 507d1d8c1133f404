"""The online example: its clicks drift, and its servers follow."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from examples.online.clicks import Clicks
from examples.online.columns import SPEC
from examples.online.main import run
from shardrec.trainer.data import area_under_roc, load_spec, open_click_data


def test_the_model_of_the_clicks_turns_into_another(tmp_path: Path) -> None:
    clicks, features = Clicks(4_000), tmp_path / "features.yaml"
    features.write_text(SPEC, encoding="utf-8")
    first = clicks.write(tmp_path / "again.parquet", 3, 0.0)
    for angle, least, most in ((0.0, 0.85, 0.95), (math.pi / 4, 0.75, 0.85), (math.pi / 2, 0.45, 0.65)):
        probabilities = clicks.write(tmp_path / "rows.parquet", 3, angle)
        data = open_click_data(tmp_path / "rows.parquet", load_spec(features), holdout=0.0)
        (batch,) = data.train_batches(0, 1, 4_000)
        assert least < area_under_roc(batch.labels, first) < most
        assert area_under_roc(batch.labels, probabilities) > 0.8
    assert (tmp_path / "again.parquet").read_bytes() != (tmp_path / "rows.parquet").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deltas_serve_what_the_trainer_has(tmp_path: Path) -> None:
    means = run(tmp_path / "online", seconds=30, export_s=15)
    assert means["frozen"] < means["full exports"] < means["deltas"]
    assert abs(means["trainer"] - means["deltas"]) < 0.005
    assert (tmp_path / "online" / "online.png").is_file()
