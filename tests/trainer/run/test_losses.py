"""Losses over groups, against one group at a time; and runs that learn by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from shardrec.errors import ConfigError
from shardrec.trainer.run import RunFolder, TrainConfig
from shardrec.trainer.run.losses import pairwise_loss, softmax_loss
from tests.ranks import ranks
from tests.trainer.run.broken_off import FEW_TABLES

batches = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=12)


def tensors(rows: list[tuple[int, bool]]) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(len(rows))) * 30
    labels = torch.tensor([float(label) for _, label in rows])
    return logits.requires_grad_(), labels, torch.tensor([group for group, _ in rows], dtype=torch.int64)


@given(rows=batches)
def test_softmax_is_that_of_each_group(rows: list[tuple[int, bool]]) -> None:
    logits, labels, groups = tensors(rows)
    expected = []
    for group in set(groups.tolist()):
        own = groups == group
        if labels[own].sum():
            expected.append(-(log_softmax(logits[own, 0], 0) * labels[own]).sum() / labels[own].sum())
    total = torch.stack(expected).mean() if expected else 0 * logits.sum()
    found = softmax_loss(logits, labels, groups)
    torch.testing.assert_close(found, total)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, retain_graph=True), torch.autograd.grad(total, logits), rtol=1e-4, atol=1e-6
    )


@given(rows=batches)
def test_a_pair_is_inside_a_group(rows: list[tuple[int, bool]]) -> None:
    """With at most one other row in each group there is nothing to draw."""
    seen: set[int] = set()
    kept = [row for row in rows if row[1] or not (row[0] in seen or seen.add(row[0]))]  # type: ignore[func-returns-value]
    logits, labels, groups = tensors(kept)
    pairs = [
        softplus(logits[other, 0] - logits[clicked, 0])
        for clicked in range(len(kept))
        for other in range(len(kept))
        if kept[clicked][1] and not kept[other][1] and kept[clicked][0] == kept[other][0]
    ]
    total = torch.stack(pairs).mean() if pairs else 0 * logits.sum()
    found = pairwise_loss(logits, labels, groups)
    torch.testing.assert_close(found, total)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, retain_graph=True), torch.autograd.grad(total, logits), rtol=1e-4, atol=1e-6
    )


def test_others_are_drawn_evenly() -> None:
    torch.manual_seed(0)
    count = 3000
    groups, labels = torch.arange(4).repeat(count), torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(count)
    groups = torch.arange(count).repeat_interleave(4)
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(count)
    expected = softplus(torch.tensor([1.0, 2.0, 3.0])).mean()
    torch.testing.assert_close(pairwise_loss(logits, labels, groups), expected, rtol=0.03, atol=0)


SPEC = """
group: session
features:
  - {name: item, kind: id, rows: 50, ids: number}
  - {name: tag, kind: id, rows: 5, ids: number}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions of six items, of which the better one of two is clicked; sessions differ in how much they click."""
    folder = tmp_path_factory.mktemp("sessions")
    rng = np.random.default_rng(0)
    sessions, size = 1500, 6
    item = rng.integers(1, 50, sessions * size)
    bias = np.repeat(rng.normal(size=sessions) * 3, size)
    clicked = rng.random(len(item)) < 1 / (1 + np.exp(-(item - 25) / 4 - bias))
    table = pa.table(
        {
            "session": [f"s{number}" for number in np.repeat(np.arange(sessions), size)],
            "item": item,
            "tag": item % 5,
            "label": clicked.astype(np.int64),
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    (folder / "features.yaml").write_text(SPEC, encoding="utf-8")
    return folder


@pytest.mark.some(1)
@pytest.mark.parametrize("loss", ["softmax", "pairwise"])
def test_a_run_learns_the_order(files: Path, tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardrec.trainer.run.runs import RunFolder
    from shardrec.trainer.run.session import run_rank

    monkeypatch.setattr("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch())
    config = TrainConfig(
        data=str(files / "rows.parquet"),
        features=str(files / "features.yaml"),
        loss=loss,
        shuffle=2000,
        batch_size=240,
        embedding_dim=4,
        dense_layers=(4,),
        over_layers=(8,),
        epochs=4,
        evaluations=3,
        top_k=2,
        threads=1,
        out=str(tmp_path),
    )
    report = run_rank(config)
    assert report is not None
    ranking = report.final.ranking
    assert ranking is not None
    assert ranking.gauc is not None
    assert ranking.gauc > 0.75
    assert ranking.k == 2
    final = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))["final"]
    assert final["ndcg@2"] == ranking.ndcg
    metrics, _ = RunFolder(tmp_path).evaluate()
    assert metrics.to_mapping() == pytest.approx(report.final.to_mapping(), abs=1e-6)


def test_a_loss_over_groups_wants_groups(files: Path, tmp_path: Path) -> None:
    from shardrec.launch.ranks import RankInfo
    from shardrec.trainer.run.source import Source

    with pytest.raises(ConfigError, match=r"loss \(--loss\) is 'softmax', .* no features \(--features\) name one"):
        TrainConfig(loss="softmax")
    spec = tmp_path / "features.yaml"
    spec.write_text(SPEC.replace("group: session", ""), encoding="utf-8")
    config = TrainConfig(loss="pairwise", data=str(files / "rows.parquet"), features=str(spec))
    with pytest.raises(ConfigError, match="names none: add group: COLUMN"):
        Source(config, RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1))


def test_groups_stay_whole(files: Path) -> None:
    """In the held-out part, and where rows are shuffled with their groups."""
    from shardrec.trainer.data import load_spec, open_click_data

    spec = load_spec(files / "features.yaml")
    data = open_click_data(files / "rows.parquet", spec, holdout=0.2, shuffle=600, keep_groups=True)
    train = torch.cat([batch.groups for batch in data.train_batches(0, 1, 256) if batch.groups is not None])
    held = torch.cat([batch.groups for batch in data.holdout_batches(0, 1, 256) if batch.groups is not None])
    assert not set(train.tolist()) & set(held.tolist())
    assert 0.1 < len(held) / (len(train) + len(held)) < 0.3
    runs = 1 + int((train[1:] != train[:-1]).sum())
    assert runs <= len(train) / 6 + 2 * (len(train) // 600 + 1)
    assert not torch.equal(train, torch.cat([b.groups for b in data.train_batches(0, 1, 256, epoch=1)]))


OWN = """
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.trainer.run.losses import click_loss


class Clicks(nn.Module):
    def __init__(self, schema):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=4, num_embeddings=rows, feature_names=[name])
            for name, rows in zip(schema.sparse_names, schema.num_embeddings)
        ]
        self.tables = EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(4 * len(tables) + len(schema.dense_names), 1)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(torch.cat([dense, self.tables(sparse).values()], 1))


class Own(Clicks):
    def loss(self, dense, sparse, labels):
        # Not by way of forward, as a loss over other things than the rows' logits.
        return click_loss(self.over(torch.cat([dense, self.tables(sparse).values()], 1)), labels)


class Rows(Clicks):
    def loss(self, dense, sparse, labels):
        return self(dense, sparse).view(-1) - labels


class Number(Clicks):
    def loss(self, dense, sparse, labels):
        return float(labels.sum())


class Detached(Clicks):
    def loss(self, dense, sparse, labels):
        return labels.mean()


class OfLogits(Clicks):
    def __init__(self, schema):
        super().__init__(schema)
        self.loss = nn.BCEWithLogitsLoss()
"""

OWN_RUN = TrainConfig(
    samples=2_100, epochs=2, holdout_samples=1_000, max_embeddings=60, batch_size=128, evaluations=2, threads=1
)


@pytest.fixture(scope="module")
def own_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "own_losses.py").write_text(OWN, encoding="utf-8")
    return folder


def own_run(config: TrainConfig, folder: str) -> Any:
    """The final metrics of a run on this process's rank, with the models in a folder."""
    import sys
    from unittest import mock

    from shardrec.trainer.data import schema, synthetic
    from shardrec.trainer.run import session

    with (
        mock.patch.object(sys, "path", [*sys.path, folder]),
        mock.patch.object(session, "write_curve", lambda report, path: path.touch()),
        mock.patch.object(synthetic, "_EXPECTATION_ROWS", 1_000),
        mock.patch.object(schema, "CRITEO_CARDINALITIES", FEW_TABLES),
    ):
        report = session.run_rank(config)
    return report and report.final


@pytest.mark.some(1)
@pytest.mark.parametrize("pipeline", [0, 2])
def test_a_models_own_loss_runs_inside_of_its_forward(pipeline: int, own_models: Path, tmp_path: Path) -> None:
    """On two ranks, the last of an epoch's batches uneven: gradients are averaged as those of another loss are."""
    of_rows = OWN_RUN.changed(model="own_losses:Clicks", out=str(tmp_path / "rows"))
    expected, _ = ranks(2, own_run, of_rows, str(own_models))
    own = OWN_RUN.changed(model="own_losses:Own", loss="model", pipeline=pipeline, out=str(tmp_path / "own"))
    assert ranks(2, own_run, own, str(own_models))[0] == expected
    assert expected.auc > 0.55


@pytest.mark.usefixtures("few_tables")
def test_a_run_with_an_own_loss_is_evaluated_by_its_logits(
    own_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(own_models)
    config = OWN_RUN.changed(loss="model", model="own_losses:Own", epochs=1, out=str(tmp_path / "run"))
    final = own_run(config, str(own_models))
    run = RunFolder(tmp_path / "run")
    assert run.evaluate()[0].to_mapping() == pytest.approx(final.to_mapping(), abs=1e-6)
    assert type(run.model().module).__name__ == "Own"
    assert run.export("script", tmp_path / "own.pt").stat().st_size > 0


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Clicks", r"'own_losses:Clicks' has no method loss: give it a method loss\(dense, sparse, labels\)"),
        ("OfLogits", r"has loss\(input, target\): give it a method loss\(dense, sparse, labels\)"),
        ("Rows", r"returns a Tensor of shape \(128,\), dtype torch.float32: return a scalar"),
        ("Number", r"returns a float: return a scalar"),
        ("Detached", r"returns a Tensor of shape \(\), dtype torch.float32 that needs no gradient: return a scalar"),
    ],
)
def test_own_losses_that_are_none(own_models: Path, tmp_path: Path, model: str, message: str) -> None:
    config = OWN_RUN.changed(loss="model", model=f"own_losses:{model}", out=str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        own_run(config, str(own_models))


def test_a_built_in_model_without_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss .* is 'model' and model \(--model\) 'dlrm' has no method loss"):
        own_run(OWN_RUN.changed(loss="model", out=str(tmp_path)), "")
