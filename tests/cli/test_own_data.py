"""``shardrec train`` on columns that it has not seen, with a spec alone; and what is done with the run afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.cli.command import Run

SPEC = """
label: {column: stars, above: 2.5}
features:
  - {name: user, column: who, kind: id, rows: 500}
  - {name: genre, kind: id, vocabulary: [games, news]}
  - {name: history, kind: sequence, rows: 300, max_length: 3}
  - {name: tags, kind: weighted, rows: 60, weights: scores}
  - {name: price, kind: dense, transform: log}
"""
OWN = """
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor


class Sums(nn.Module):
    def __init__(self, schema):
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=6, feature_names=[name])
                for name, rows in zip(schema.sparse_names, schema.num_embeddings)
            ],
            is_weighted=schema.weighted,
        )
        self.top = nn.Linear(6 * len(schema.sparse_names) + len(schema.dense_names), 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([self.bags(sparse).values(), dense], dim=1)).squeeze(1)
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working directory with three files of rows, their spec, and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "features.yaml").write_text(SPEC, encoding="utf-8")
    (tmp_path / "own_models.py").write_text(OWN, encoding="utf-8")
    rng = np.random.default_rng(0)
    count = 3000
    user, liked = rng.integers(0, 40, count), rng.normal(size=40) * 2
    stars = (rng.random(count) < 1 / (1 + np.exp(-liked[user]))) * 3 + 1.0
    table = pa.table(
        {
            "who": [f"user-{number}" for number in user],
            "genre": rng.choice(["games", "news", "other"], count),
            "history": [[f"app{n}" for n in rng.integers(0, 99, rng.integers(0, 5))] for _ in range(count)],
            "tags": [["a", "b"]] * count,
            "scores": [[0.5, 2.0]] * count,
            "price": rng.lognormal(size=count),
            "stars": stars,
        }
    )
    for part in range(3):
        pq.write_table(table.slice(part * 1000, 1000), tmp_path / f"day_{part}.parquet")


FLAGS = ("--features", "features.yaml", "--batch-size", "64", "--embedding-dim", "4", "--dense-layers", "4")
FLAGS += ("--over-layers", "8", "--evaluations", "3")


def test_texts_lists_and_weights_train_by_a_spec_alone(run: Run) -> None:
    files = ("--data", "day_[01].parquet", "--test", "day_2.parquet")
    code, shown, errors = run("train", *files, *FLAGS, "--epochs", "3", "--shuffle", "500", "--out", "runs/a")
    assert (code, errors) == (0, ""), errors
    assert "1,000 held-out rows" in shown
    metrics = json.loads(Path("runs/a/metrics.json").read_text(encoding="utf-8"))
    assert metrics["final"]["auc"] > 0.7
    assert list(Path("runs/a/tensorboard").glob("events.out.tfevents.*"))
    assert Path("runs/a/features.yaml").read_text(encoding="utf-8") == SPEC

    # The run evaluates to the same by itself, on files by name, and after its spec has gone.
    Path("features.yaml").unlink()
    for flags in ((), ("--data", "day_2.parquet")):
        code, shown, errors = run("eval", "runs/a", "--json", *flags)
        assert code == 0, errors
        assert json.loads(shown)["auc"] == pytest.approx(metrics["final"]["auc"], abs=1e-6)

    code, shown, errors = run("export", "runs/a", "a.pt", "--to", "script", "--weights", "int8")
    assert code == 0, errors
    loaded = torch.jit.load("a.pt")
    lengths = torch.tensor([1, 1, 2, 2])
    logits = loaded(torch.tensor([1, 2, 3, 4, 5, 6]), lengths, torch.ones(6), torch.zeros(1, 1))
    assert logits.shape == (1, 1)
    code, shown, errors = run("export", "runs/a", "a.onnx", "--to", "onnx")
    assert code == 1
    assert "--to is 'onnx': give one of script, aoti" in errors

    code, shown, _ = run("inspect", "runs/a")
    assert code == 0
    assert f"{metrics['final']['auc']:.4f}" in shown


def test_a_model_of_ones_own_and_early_stopping(run: Run) -> None:
    flags = ("--data", "day_0.parquet", "--valid", "day_1.parquet", *FLAGS, "--epochs", "40", "--patience", "1")
    flags += ("--embedding-lr", "3", "--evaluations", "40", "--decay", "0")
    code, shown, errors = run("train", *flags, "--model", "own_models:Sums", "--out", "runs/own")
    assert (code, errors) == (0, ""), errors
    metrics = json.loads(Path("runs/own/metrics.json").read_text(encoding="utf-8"))
    losses = [point["logloss"] for point in metrics["curve"]]
    assert metrics["training"]["steps"] < 40 * 16
    assert losses[-1] >= min(losses[:-1])
    assert metrics["final"]["rows"] == 1000
    # It has ended for good.
    code, _, errors = run("train", *flags, "--model", "own_models:Sums", "--out", "runs/own", "--resume")
    assert (code, errors) == (0, ""), errors
    assert json.loads(Path("runs/own/metrics.json").read_text(encoding="utf-8"))["final"] == metrics["final"]
    shutil.copytree("runs/own", "runs/other")
    text = Path("runs/other/config.yaml").read_text(encoding="utf-8")
    Path("runs/other/config.yaml").write_text(text.replace("decay: 0.0", "decay: 0.5"), encoding="utf-8")
    code, shown, _ = run("compare", "runs/own", "runs/other")
    assert code == 0
    assert "decay" in shown
    assert "embedding_lr" not in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--model", "own_models:Nothing"),
            "model (--model) is 'own_models:Nothing': module 'own_models' has no attribute",
        ),
        (("--model", "nowhere:Model"), "model (--model) is 'nowhere:Model': No module named 'nowhere'"),
        (("--model", "mlp"), "model (--model) is 'mlp': give one of dlrm, dcn, or your own as package.module:Model"),
        (("--data", "night_*.parquet"), "no data file is named night_*.parquet"),
        (("--features", "nowhere.yaml"), "features (--features) is nowhere.yaml, which cannot be read"),
        (("--data", "synthetic"), "features (--features) is for files, and data (--data) is 'synthetic'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(run: Run, flags: tuple[str, ...], words: str) -> None:
    code, _, errors = run("train", "--data", "day_0.parquet", "--features", "features.yaml", *flags, "--out", "runs/x")
    assert code == 1
    assert words in errors


def test_a_folder_without_a_run(run: Run) -> None:
    code, _, errors = run("inspect", "nowhere")
    assert code == 1
    assert "nowhere holds no run: it has no config.yaml" in errors
