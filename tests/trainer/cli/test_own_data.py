"""``shardrec train`` on columns that it has not seen, with a spec alone; and what is done with the run afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardrec import native
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan
from shardrec.serve import load_package
from shardrec.trainer.cli import main
from shardrec.trainer.data import batch_of_request, click_metrics, request_example
from shardrec.trainer.run.endpoint import open_server
from shardrec.trainer.run.runs import RunFolder
from tests.ranks import ranks
from tests.trainer.cli.command import Run
from tests.trainer.run.servers import stop

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


@pytest.mark.slow
def test_texts_lists_and_weights_train_by_a_spec_alone(run: Run) -> None:
    files = ("--data", "day_[01].parquet", "--test", "day_2.parquet")
    code, shown, errors = run("train", *files, *FLAGS, "--epochs", "3", "--shuffle", "500", "--out", "runs/a")
    assert (code, errors) == (0, ""), errors
    assert "1,000 test rows" in shown
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
    assert code == 2
    assert re.search(r"'--to': .*'onnx' is not one of", errors)

    code, shown, _ = run("inspect", "runs/a")
    assert code == 0
    assert f"{metrics['final']['auc']:.4f}" in shown
    code, shown, _ = run("inspect", "a.pt")
    assert code == 0
    assert all(words in shown for words in ("a model in TorchScript", "user, genre, history, tags", "int8", "0 of 1"))
    code, shown, _ = run("inspect", "runs/a/plan.json")
    assert (code, "ranks: " in shown) == (0, True)
    saved = next(Path("runs/a/checkpoints").glob("step-*"))
    code, shown, _ = run("inspect", str(saved))
    assert (code, "every byte as it was written" in shown) == (0, True)
    shutil.copytree(saved, "damaged")
    data = next(Path("damaged").glob("data-*/*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    code, _, errors = run("inspect", "damaged")
    assert (code, "is damaged: bytes 0 to" in errors) == (1, True)

    # Over HTTP the rows of the file have the predictions that its metrics are of.
    rows = pq.read_table("day_2.parquet").to_pylist()
    asked = [
        {
            "user": row["who"],
            "genre": row["genre"],
            "history": row["history"],
            "tags": dict(zip(row["tags"], row["scores"], strict=True)),
            "price": row["price"],
        }
        for row in rows
    ]
    with served(Path("runs/a")) as ask:
        code, answer = ask("/")
        assert code == 200
        assert answer["model"]["auc"] == f"{metrics['final']['auc']:.4f}"
        assert ask("/predict", answer["predict"]["example"])[0] == 200
        code, answer = ask("/predict", {"rows": asked})
        assert code == 200
        found = click_metrics([row["stars"] > 2.5 for row in rows], answer["probabilities"])
        assert found.auc == pytest.approx(metrics["final"]["auc"], abs=1e-6)
        assert found.logloss == pytest.approx(metrics["final"]["logloss"], abs=1e-6)
        code, answer = ask("/predict", {"rows": [{**asked[0], "price": "dear"}]})
        assert (code, answer["error"][:42]) == (400, "row 0: field 'price': value 'dear' is not ")
        assert ask("/predict", {"row": []})[0] == 400
        assert ask("/predict")[0] == 405
        assert ask("/else") == (404, {"error": "/else does not exist: GET / lists the paths"})


DYNAMIC = """
label: {column: stars, above: 2.5}
features:
  - {name: user, column: who, kind: id, rows: 60, dynamic_ids: {}}
  - {name: shop, kind: id, rows: 20, dynamic_ids: {evict: lru, admit_after: 2, fallback_rows: 1}}
  - {name: genre, kind: id, vocabulary: [games, news]}
"""


def write_shops() -> None:
    """A column of 64-bit ids that drift, and a spec with dynamic ids."""
    rng = np.random.default_rng(1)
    shops = rng.integers(-(2**63), 2**63 - 1, 400)
    for day in range(3):
        table = pq.read_table(f"day_{day}.parquet")
        shop = pa.array([int(one) for one in shops[(rng.zipf(1.3, 1000) + day) % 400]])
        pq.write_table(table.append_column("shop", shop), f"day_{day}.parquet")
    Path("dynamic.yaml").write_text(DYNAMIC, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")
def test_dynamic_ids_go_on_on_more_ranks(run: Run) -> None:
    """And are evaluated on one rank, as they were on two."""
    write_shops()
    Path("dynamic.yaml").write_text(DYNAMIC.replace(", fallback_rows: 1", ""), encoding="utf-8")
    flags = ("--data", "day_[01].parquet", "--test", "day_2.parquet", "--features", "dynamic.yaml", "--epochs", "2")
    flags += (*FLAGS[2:], "--threads", "1", "--checkpoint-every", "40", "--out", "runs/more")
    code, _, errors = run("train", *flags)
    assert (code, errors) == (0, ""), errors
    before = json.loads(Path("runs/more/metrics.json").read_text(encoding="utf-8"))
    (_, last) = sorted(Path("runs/more/checkpoints").iterdir())
    shutil.rmtree(last)
    code, shown, errors = run("train", *flags, "--nproc", "2", "--constraint", "t_shop=row_wise", "--resume")
    assert code == 0, errors
    assert "lack room for" in errors  # blocks of 10 rows do not get 10 of the 20 ids each
    assert "continuing from the checkpoint of step 40" in shown
    after = json.loads(Path("runs/more/metrics.json").read_text(encoding="utf-8"))
    for name in ("t_user", "t_shop"):
        table = f"sparse_arch.embedding_bag_collection.{name}"
        one, two = (metrics["curve"][-1]["ids"][table] for metrics in (before, after))
        assert (one["lookups"], one["rows"]) == (two["lookups"], two["rows"])
    code, shown, errors = run("eval", "runs/more", "--json")
    assert code == 0, errors
    assert json.loads(shown)["auc"] == pytest.approx(after["final"]["auc"], abs=1e-6)


@pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")
@pytest.mark.slow
def test_dynamic_ids_train_resume_and_serve(run: Run) -> None:
    """Texts and 64-bit numbers are given rows as they come; nothing of it is lost between the commands.

    The weights are averaged, so that what they are evaluated and served from has the rows' ids, too.
    """
    write_shops()
    flags = ("--data", "day_[01].parquet", "--test", "day_2.parquet", "--features", "dynamic.yaml", "--epochs", "2")
    flags += (*FLAGS[2:], "--threads", "1", "--checkpoint-every", "20", "--ema", "0.9")
    code, shown, errors = run("train", *flags, "--out", "runs/whole")
    assert (code, errors) == (0, ""), errors
    assert "ids of sparse_arch.embedding_bag_collection.t_shop: " in shown
    metrics = json.loads(Path("runs/whole/metrics.json").read_text(encoding="utf-8"))
    assert metrics["final"]["auc"] > 0.7
    last = metrics["curve"][-1]["ids"]
    user, shop = (last[f"sparse_arch.embedding_bag_collection.t_{name}"] for name in ("user", "shop"))
    assert (user["used"], user["inserts"], user["evictions"], user["fallbacks"]) == (40, 40, 0, 0)
    assert shop["lookups"] == user["lookups"] == metrics["training"]["samples"]
    assert (shop["rows"], shop["used"]) == (19, 19)
    assert shop["evictions"] == shop["inserts"] - 19 > 0
    assert shop["fallbacks"] >= shop["collisions"] > 0
    board = EventAccumulator("runs/whole/tensorboard").Reload()
    path = "ids/sparse_arch.embedding_bag_collection.t_shop"
    assert [one.value for one in board.Scalars(f"{path}/evictions")][-1] == shop["evictions"]
    assert board.Scalars(f"{path}/load")[-1].value == 1

    # From an earlier checkpoint the run goes on with its ids and counts.
    shutil.copytree("runs/whole", "runs/again")
    shutil.rmtree(max(Path("runs/again/checkpoints").iterdir()))
    code, shown, errors = run("train", *flags, "--out", "runs/again", "--resume")
    assert (code, errors) == (0, ""), errors
    again = json.loads(Path("runs/again/metrics.json").read_text(encoding="utf-8"))
    assert "continuing from the checkpoint" in shown
    assert (again["final"], again["curve"][-1]["ids"]) == (metrics["final"], last)

    code, shown, errors = run("eval", "runs/whole", "--json")
    assert code == 0, errors
    assert json.loads(shown)["auc"] == pytest.approx(metrics["final"]["auc"], abs=1e-6)
    rows = pq.read_table("day_2.parquet").to_pylist()
    asked = [{"user": row["who"], "shop": row["shop"], "genre": row["genre"]} for row in rows]
    asked[0] = {"user": "nobody", "shop": None, "genre": None}
    spec = RunFolder(Path("runs/whole")).spec
    with served(Path("runs/whole")) as ask:
        code, answer = ask("/predict", {"rows": asked})
    assert code == 200
    code, _, errors = run("export", "runs/whole", "ids.pt", "--to", "script")
    assert code == 0, errors
    batch = batch_of_request(asked, spec)
    assert batch.sparse["shop"].values()[1:].tolist() == [row["shop"] for row in rows[1:]]
    logits = torch.jit.load("ids.pt")(batch.sparse.values(), batch.sparse.lengths(), batch.dense)
    found = torch.sigmoid(logits).view(-1)
    torch.testing.assert_close(found, torch.tensor(answer["probabilities"]), rtol=1e-5, atol=1e-6)
    assert len(set(found.tolist())) > 100


@contextmanager
def served(run: Path) -> Iterator[Callable[..., tuple[int, Any]]]:
    """The run behind HTTP on a free port: a function from a path and, for a POST, JSON to status and JSON."""
    server = open_server(RunFolder(run).endpoint(), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()

    def ask(path: str, content: Any = None) -> tuple[int, Any]:
        data = None if content is None else json.dumps(content).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.effective_port}{path}", data, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    try:
        yield ask
    finally:
        stop(server, thread)


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot be listened on .*in use.*: give another port"):
            open_server(lambda environ, start: [], "127.0.0.1", taken.getsockname()[1])
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_two_ranks_train_on_own_columns(run: Run) -> None:
    """As one does, with a model of one's own; and rows that cannot be read are left out, then and in eval."""
    table = pq.read_table("day_0.parquet")
    broken = table.set_column(table.schema.get_field_index("price"), "price", pa.array([float("inf")] + [1.0] * 999))
    pq.write_table(broken, "broken.parquet")
    flags = ("--data", "day_[12].parquet", "--test", "day_0.parquet", *FLAGS, "--epochs", "2", "--threads", "1")
    flags += ("--model", "own_models:Sums", "--constraint", "user=row_wise", "--out", "runs/2")

    def train(folder: Path) -> None:
        """On the ranks of a launcher."""
        os.chdir(folder)
        sys.argv = ["shardrec", "train", *flags]
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0

    ranks(2, train, Path.cwd())
    assert json.loads(Path("runs/2/metrics.json").read_text(encoding="utf-8"))["final"]["auc"] > 0.6
    plan = {table.name: table.cut for table in ShardingPlan.load(Path("runs/2/plan.json")).tables}
    assert plan["bags.user"] == "row_wise"
    code, _, errors = run("eval", "runs/2", "--data", "broken.parquet")
    assert code == 1
    assert "broken.parquet:1: field 'price': value inf" in errors
    assert "--on-bad-row skip" in errors
    code, shown, errors = run("eval", "runs/2", "--data", "broken.parquet", "--on-bad-row", "skip", "--json")
    assert (code, errors) == (0, "left out 1 row: bad number\n")
    assert json.loads(shown)["rows"] == 999
    code, _, errors = run("eval", "runs/2", "--on-bad-row", "drop")
    assert code == 2
    assert re.search(r"'--on-bad-row': .*'drop' is not one of", errors)


@pytest.mark.slow
def test_a_run_as_a_package(run: Run) -> None:
    code, _, errors = run("train", "--data", "day_0.parquet", *FLAGS, "--out", "runs/p")
    assert code == 0, errors
    code, _, errors = run("export", "runs/p", "p.pt2", "--to", "aoti")
    assert code == 0, errors
    package = load_package("p.pt2")
    batch = batch_of_request([request_example(RunFolder(Path("runs/p")).spec)] * 3, RunFolder(Path("runs/p")).spec)
    given = {"values": batch.sparse.values(), "lengths": batch.sparse.lengths(), "weights": batch.sparse.weights()}
    logits = package(*(given.get(one.name, batch.dense) for one in package.tensors))
    expected = RunFolder(Path("runs/p")).model()(batch.dense, batch.sparse)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5, check_stride=False)


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
    samples = metrics["curve"][-1]["samples"]
    assert f"ended after {samples:,} of 40,000 samples: no better logloss in 1 point (--patience)" in shown
    for data, warned in (("day_[0].parquet", True), ("day_1.parquet", False)):
        code, _, errors = run("eval", "runs/own", "--data", data)
        assert (code, "the run was trained on day_0.parquet" in errors) == (0, warned), errors
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
    assert "features" not in shown, "each has a copy of one spec"
    assert "samples trained on" in shown, "not the option's name"
    with Path("runs/other/features.yaml").open("a", encoding="utf-8") as spec:
        spec.write("# another\n")
    assert "runs/other/features.yaml" in run("compare", "runs/own", "runs/other")[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--model", "own_models:Nothing"),
            "model (--model) is 'own_models:Nothing': module 'own_models' has no attribute",
        ),
        (("--model", "nowhere:Model"), "model (--model) is 'nowhere:Model': No module named 'nowhere'"),
        (("--model", "mlp"), "model (--model) is 'mlp': give one of dlrm, dcn, dnn,"),
        (("--data", "night_*.parquet"), "no data file is named night_*.parquet"),
        (("--features", "nowhere.yaml"), "features (--features) is nowhere.yaml, which cannot be read"),
        (("--data", "synthetic"), "features (--features) is for files, and data (--data) is 'synthetic'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(run: Run, flags: tuple[str, ...], words: str) -> None:
    code, _, errors = run("train", "--data", "day_0.parquet", "--features", "features.yaml", *flags, "--out", "runs/x")
    assert code == 1
    assert words in errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("dim: 4, rows: 500", "feature 'user' has dim 4, and 6 columns there, in model (--model) 'own_models:Sums'"),
        ("share: history", "feature 'history' has share, and its table there is 'history', the other's 'user'"),
    ],
)
def test_a_model_that_does_not_follow_the_spec(run: Run, changes: str, words: str) -> None:
    Path("other.yaml").write_text(SPEC.replace("rows: 500", changes), encoding="utf-8")
    given = ("--data", "day_0.parquet", "--features", "other.yaml", "--model", "own_models:Sums", "--out", "runs/x")
    code, _, errors = run("train", *given)
    assert code == 1
    assert words in errors


def test_a_folder_without_a_run(run: Run) -> None:
    code, _, errors = run("eval", "nowhere")
    assert code == 1
    assert "nowhere holds no run: it has no config.yaml" in errors
    code, _, errors = run("inspect", "nowhere")
    assert code == 1
    assert "nowhere does not exist: a run has a config.yaml, a checkpoint a manifest.json" in errors
    Path("other.pt").write_bytes(b"text")
    code, _, errors = run("inspect", "other.pt")
    assert code == 1
    assert "other.pt is not a complete result of shardrec" in errors


def test_a_proposed_spec_trains_resumes_and_serves(run: Run) -> None:
    """From columns to predictions without a spec by hand; the vocabularies are the run's own."""
    code, text, err = run("inspect", "day_*.parquet", "--suggest")
    assert code == 0, err
    assert "label: {column: stars, above: " in text
    assert "- {name: who, kind: id, vocabulary: from_data, min_count: 2" in text
    Path("proposed.yaml").write_text(text, encoding="utf-8")
    given = ("--data", "day_*.parquet", "--features", "proposed.yaml", "--model", "deepfm", "--batch-size", "256")
    code, _, err = run("train", *given, "--checkpoint-every", "3", "--out", "run")
    assert code == 0, err
    vocabularies = json.loads(Path("run/vocabularies.json").read_text(encoding="utf-8"))
    assert len(vocabularies["who"]) > 30
    assert RunFolder(Path("run")).spec.schema_.num_embeddings[0] == len(vocabularies["who"]) + 1
    shutil.rmtree("run/checkpoints")
    # Another order, and so another row for each value: what goes on must take the run's, and not count again.
    vocabularies["who"].reverse()
    Path("run/vocabularies.json").write_text(json.dumps(vocabularies), encoding="utf-8")
    code, _, err = run("train", *given, "--checkpoint-every", "3", "--out", "run", "--resume")
    assert code == 0, err
    assert json.loads(Path("run/vocabularies.json").read_text(encoding="utf-8")) == vocabularies
    Path("proposed.yaml").unlink()
    folder = RunFolder(Path("run"))
    rows = [request_example(folder.spec) | {"who": who} for who in (vocabularies["who"][0], "stranger")]
    ids = batch_of_request(rows, folder.spec).sparse["who"].values().tolist()
    assert ids == [1, 0]
    code, out, err = run("eval", "run", "--json")
    assert code == 0, err
    final = json.loads(Path("run/metrics.json").read_text(encoding="utf-8"))["final"]
    assert abs(json.loads(out)["auc"] - final["auc"]) < 1e-4
