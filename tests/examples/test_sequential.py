"""The example of sequences: runs on walks, and from a raw file to recommendations by the command line."""

from __future__ import annotations

import itertools
import json
import queue
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from werkzeug.test import Client

from shardrec.trainer.cli import main
from shardrec.trainer.data.interactions import Columns, read_interactions
from shardrec.trainer.data.sequences import write_sequences
from shardrec.trainer.run import RunFolder, TrainConfig, load_config
from shardrec.trainer.run.endpoint import open_server
from tests.campaign.results import differences
from tests.ranks import ranks
from tests.trainer.run.broken_off import broken_off
from tests.trainer.run.servers import stop

FOLDER = Path(__file__).parents[2] / "examples" / "sequential"


def prepare(path: Path, out: Path, **options: Any) -> None:
    write_sequences(read_interactions(str(path), Columns()), out, **options)


def test_a_run_ranks_all_items(tmp_path: Path, walks: Path) -> None:
    """Of files with a clicked row for each user only; as ``eval`` does afterwards, and of the candidates' files."""
    prepare(walks / "all.csv", tmp_path, users=100, candidates=0)
    options: dict[str, Any] = {"epochs": 4, "ranking": "catalogue", "monitor": "ndcg", "out": str(tmp_path / "run")}
    ranks(2, broken_off, of_walks(tmp_path, **options))
    run = RunFolder(tmp_path / "run")
    final = run.metrics["final"]
    assert (final["rows"], final["click_rate"]) == (100, 1 / 60)
    assert final["hit_rate@10"] > 0.5  # of a constant: 10 of 60
    assert final["recall@10"] == final["hit_rate@10"]
    assert run.evaluate()[0].to_mapping() == pytest.approx(final, abs=1e-6)
    sampled, _ = run.evaluate(str(walks / "test.parquet"), ranking="rows")
    assert sampled.rows == 3100
    again, _ = run.evaluate(str(walks / "test.parquet"), ranking="catalogue")
    assert again.to_mapping() == pytest.approx(final, abs=1e-6)


def rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


def features(found: list[list[int]], items: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["history", "item"],
        torch.tensor([*itertools.chain(*found), *items], dtype=torch.int64),
        lengths=torch.tensor([*map(len, found), *[1] * len(items)]),
    )


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Walks in three steps out of four to the next of 60 items that are equally popular, and else to any."""
    folder = tmp_path_factory.mktemp("walks")
    draws = np.random.default_rng(0)
    sequences = {}
    for user in range(1, 602):
        items = [int(draws.integers(60))]
        for _ in range(int(draws.integers(4, 12))):
            items.append((items[-1] + 1) % 60 if draws.random() < 0.75 else int(draws.integers(60)))
        sequences[user] = [item + 1 for item in items]
    lines = (f"{user},m{item:02}\n" for user, items in sequences.items() for item in items)
    (folder / "all.csv").write_text("user,item\n" + "".join(lines), encoding="utf-8")
    prepare(folder / "all.csv", folder, users=100, candidates=30)
    return folder


def of_walks(walks: Path, **options: Any) -> TrainConfig:
    """The example's run on the walks: 601 rows in steps of 50, of whose last one a rank of two has no row."""
    flags = {name: str(walks / f"{name}.parquet") for name in ("valid", "test")}
    flags |= {"data": str(walks / "train.parquet"), "features": str(walks / "features.yaml")}
    sizes = {"global_batch_size": 50, "evaluations": 1, "lr": 0.005, "embedding_lr": 0.02}
    return load_config(FOLDER / "run.yaml", {**flags, **sizes, **options})


@pytest.mark.parametrize("model", ["sasrec", pytest.param("hstu", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_by_its_files_learns_and_serves(walks: Path, tmp_path: Path, model: str) -> None:
    assert ranks(2, broken_off, of_walks(walks, model=model, epochs=6, out=str(tmp_path)))[0][-1] == 6 * 13
    run = RunFolder(tmp_path)
    final = run.metrics["final"]
    assert final["hit_rate@10"] > 0.7  # of a constant: 10 of 31
    metrics, _ = run.evaluate(str(walks / "test.parquet"))
    assert metrics.to_mapping() == pytest.approx(final, abs=1e-6)
    found, items = [[5, 6, 7], [5, 6, 7], [9]], [8, 20, 10]
    batch = features(found, items)
    expected = run.model()(torch.ones(3, 1), batch).detach()
    served = torch.jit.load(run.export("script", tmp_path / "games.pt"))
    torch.testing.assert_close(served(batch.values(), batch.lengths(), torch.ones(3, 1)), expected)
    asked = [
        {"history": [f"m{row:02}" for row in history], "item": f"m{item:02}"}
        for history, item in zip(found, items, strict=True)
    ]
    answer = Client(run.endpoint()).post("/predict", json={"rows": asked}).get_json()
    assert answer["scores"] == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_random_items(walks: Path, tmp_path: Path) -> None:
    whole, parts = (
        of_walks(walks, epochs=2, checkpoint_every="4", out=str(tmp_path / name)) for name in ("whole", "parts")
    )
    ranks(2, broken_off, whole)
    assert ranks(2, broken_off, parts, cut_after=18)[1][-1] == 18
    assert ranks(2, broken_off, parts, resume=True)[1] == list(range(17, 27))
    assert differences(tmp_path / "parts", tmp_path / "whole") == []


def test_from_a_raw_file_to_recommendations_in_six_commands(
    walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The README's: sequences, train, eval, recommend, serve, and a request; the next item of a walk is found."""
    monkeypatch.chdir(tmp_path)
    servers: queue.Queue[Any] = queue.Queue()

    def opened(*arguments: Any) -> Any:
        servers.put(open_server(*arguments))
        return servers.queue[-1]

    monkeypatch.setattr("shardrec.trainer.run.endpoint.open_server", opened)
    monkeypatch.setattr("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch())

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["shardrec", *arguments])
        with pytest.raises(SystemExit, match="0"):
            main()
        return capfd.readouterr().out

    told = run("sequences", str(walks / "all.csv"), "--out", "walks", "--users", "200", "--candidates", "20")
    assert (
        "601 users with 60 items, from the columns user (user), item (item); in the order of the files, without --time"
        in told
    )
    run("sequences", str(walks / "all.csv"), "--out", "all", "--candidates", "0")
    assert [load_config(f"{folder}/run.yaml").output.ranking for folder in ("walks", "all")] == ["rows", "catalogue"]
    fast = ["--epochs", "15", "--lr", "0.01", "--embedding-lr", "0.02", "--evaluations", "1", "--threads", "1"]
    fast += ["--model-arg", "dim=32", "--model-arg", "negatives=64"]
    run("train", "walks/run.yaml", "--out", "run", *fast)
    assert json.loads(Path("run/metrics.json").read_text(encoding="utf-8"))["final"]["hit_rate@10"] > 0.7
    for ranking in ("catalogue", "unseen"):
        metrics = json.loads(run("eval", "run", "--ranking", ranking, "--json"))
        assert metrics["hit_rate@10"] > 0.6  # of a constant: 10 of 60
    run("recommend", "run", "--data", "walks/users.parquet", "--top", "5", "--out", "next.parquet", "--exclude-seen")
    users, found = rows(tmp_path / "walks" / "users.parquet"), rows(tmp_path / "next.parquet")
    steps = [
        (f"m{int(user['history'][-1][1:]) % 60 + 1:02}", user, row) for user, row in zip(users, found, strict=True)
    ]
    steps = [(item, user, row) for item, user, row in steps if item not in user["history"]]
    assert np.mean([item in row["items"] for item, _, row in steps]) > 0.6
    serving = threading.Thread(target=run, args=("serve", "run", "--port", "0"))
    serving.start()
    server = servers.get(timeout=60)
    try:
        address = f"http://127.0.0.1:{server.effective_port}"
        example = json.load(urllib.request.urlopen(address, timeout=60))["recommend"]["example"]
        assert {*example["rows"][0]} == {"history"}
        assert {*example["rows"][0]["history"]} <= {item for user in users for item in user["history"]}
        body = {"rows": [{"history": users[0]["history"]}], "top": 5, "exclude_seen": True}
        request = urllib.request.Request(f"{address}/recommend", json.dumps(body).encode())
        answer = json.load(urllib.request.urlopen(request, timeout=60))["recommendations"]
        assert answer[0]["items"] == found[0]["items"]
    finally:
        stop(server, serving)
