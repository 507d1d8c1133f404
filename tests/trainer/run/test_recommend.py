"""``shardrec recommend`` and ``POST /recommend``: raw ids in and out, the same as the model's logits of every item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from werkzeug.test import Client

import shardrec
from shardrec.errors import ConfigError, DataError
from shardrec.trainer.data import Feature, FeatureSpec, batch_of_request, request_example
from shardrec.trainer.data.example import values_of_file
from shardrec.trainer.run import RunFolder, TrainConfig, predict
from shardrec.trainer.run.endpoint import Endpoint
from shardrec.trainer.run.model import build_model
from shardrec.trainer.run.recommend import Recommender
from tests.ranks import ranks

ITEMS = [*"abcdefghijklmnopqrstuvwxyz"]
LONGEST = 3
SEQUENCES = FeatureSpec(
    group="user",
    features=(
        Feature(name="history", kind="sequence", share="item", max_length=LONGEST),
        Feature(name="item", kind="id", vocabulary=tuple(ITEMS)),
    ),
)
NUMBERED = FeatureSpec(
    features=(
        Feature(name="user", kind="id", rows=9, ids="number"),
        Feature(name="history", kind="multi_hot", share="item"),
        Feature(name="item", kind="id", rows=27, ids="number"),
        Feature(name="age", kind="dense"),
    ),
)
SMALL: dict[str, dict[str, Any]] = {
    "sasrec": {"dim": 8, "max_length": LONGEST},
    "hstu": {"dim": 8, "max_length": LONGEST},
    "two_tower": {"hidden": [8], "columns": 4},
    "lightgcn": {"dim": 8},
}


def recommender(name: str, folder: Path) -> tuple[Any, FeatureSpec, list[dict[str, Any]], list[Any]]:
    """A model with first values, its spec, rows to recommend for, and the items' ids."""
    draws, arguments, ids = np.random.default_rng(0), SMALL[name], ITEMS if name != "lightgcn" else [*range(1, 27)]
    spec = NUMBERED if name == "lightgcn" else SEQUENCES
    lists = [draws.choice(ids, size, replace=False).tolist() for size in (5, 0, 2, 26, 1, 4, 3, 25)]
    if name == "lightgcn":
        graph = {"user": [*range(1, 9)], "history": lists}
        pq.write_table(pa.table(graph), folder / "graph.parquet")
        arguments = {**arguments, "graph": str(folder / "graph.parquet"), "prior": 0.1}
    torch.manual_seed(0)
    model = shardrec.shard(build_model(TrainConfig(model=name, model_args=arguments), spec.schema_))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    extra = [{"user": user, "age": 0.5} if name == "lightgcn" else {} for user in range(1, 9)]
    return model.eval(), spec, [{**more, "history": items} for more, items in zip(extra, lists, strict=True)], ids


@pytest.mark.parametrize("name", [*SMALL])
def test_a_request_gets_the_items_with_the_highest_logits(name: str, tmp_path: Path) -> None:
    model, spec, rows, ids = recommender(name, tmp_path)
    found = Recommender(model, spec, torch.device("cpu"))
    found.catalogue.look_up()
    for exclude in (False, True):
        answers = found.answer(rows, 6, exclude_seen=exclude)
        assert len(answers) == len(rows)
        for row, answer in zip(rows, answers, strict=True):
            batch = batch_of_request([{**row, "item": item} for item in ids], spec)
            logits = dict(zip(ids, model(batch.dense, batch.sparse).tolist(), strict=True))
            left = [item for item in ids if not (exclude and item in row["history"])]
            assert len(answer["items"]) == len({*answer["items"]}) == min(6, len(left))
            assert {*answer["items"]} <= {*left}
            assert answer["scores"] == sorted(answer["scores"], reverse=True)
            expected = sorted((logits[item] for item in left), reverse=True)[:6]
            assert answer["scores"] == pytest.approx(expected, abs=1e-5)
            assert answer["scores"] == pytest.approx([logits[item] for item in answer["items"]], abs=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on sequences, and users to recommend items to."""
    from shardrec.trainer.data.interactions import Columns, read_interactions
    from shardrec.trainer.data.sequences import write_sequences
    from shardrec.trainer.run.session import run_rank

    folder, draws = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    lines = [f"u{draws.integers(90)}::{500 + draws.integers(40) ** 2 // 40}" for _ in range(1500)]
    (folder / "raw.dat").write_text("\n".join(lines) + "\n", encoding="utf-8")
    interactions = read_interactions(str(folder / "raw.dat"), Columns(header=False))
    write_sequences(interactions, folder / "data", candidates=5, longest=4)
    config = TrainConfig(
        data=str(folder / "data" / "train.parquet"),
        features=str(folder / "data" / "features.yaml"),
        model="sasrec",
        model_args={"dim": 8, "max_length": 4},
        loss="model",
        batch_size=32,
        threads=1,
        out=str(folder / "out"),
    )
    with mock.patch("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch()):
        run_rank(config)
    return folder


def recommended(run: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    """With small parts."""
    with (
        mock.patch("shardrec.trainer.run.scores._ROWS", 16),
        mock.patch("shardrec.trainer.run.scores._PART_BATCHES", 2),
    ):
        predict(str(run / "out"), str(run / "data" / "users.parquet"), str(out), **{"keys": None, **options})
    assert json.loads((out / "_manifest.json").read_text())["rows"] == pq.read_table(out).num_rows
    return list(pq.read_table(out).to_pylist())


@pytest.mark.some(1)
@pytest.mark.parametrize("count", [2, 4])
def test_files_on_any_ranks_have_what_a_request_gets(run: Path, tmp_path: Path, count: int) -> None:
    users = pq.read_table(run / "data" / "users.parquet").to_pylist()
    folder = RunFolder(run / "out")
    client = Client(folder.endpoint())
    for exclude in (True, False):
        found = recommended(run, tmp_path / f"of one {exclude}", top=4, exclude_seen=exclude)
        assert [row["user"] for row in found] == [user["user"] for user in users]
        if exclude:
            assert not any({*row["items"]} & {*user["history"]} for row, user in zip(found, users, strict=True))
            assert max(len(user["history"]) for user in users) > 4  # more than the model sees
        body = {"rows": [{"history": user["history"]} for user in users], "top": 4, "exclude_seen": exclude}
        answers = client.post("/recommend", json=body).get_json()["recommendations"]
        assert [row["items"] for row in found] == [answer["items"] for answer in answers]
        assert all(type(item) is int and item >= 500 for row in found for item in row["items"])
        np.testing.assert_allclose(
            [row["scores"] for row in found], [answer["scores"] for answer in answers], rtol=1e-4
        )
        ranks(count, recommended, run, tmp_path / f"of {count} {exclude}", top=4, exclude_seen=exclude)
        again = pq.read_table(tmp_path / f"of {count} {exclude}").to_pylist()
        assert [(row["user"], row["items"]) for row in again] == [(row["user"], row["items"]) for row in found]


def test_the_example_has_values_of_the_data(run: Path) -> None:
    client = Client(RunFolder(run / "out").endpoint())
    described = client.get("/").get_json()
    history = pq.read_table(run / "data" / "train.parquet")["history"].to_pylist()
    row, body = described["recommend"]["example"]["rows"][0], described["recommend"]["example"]
    assert [*row] == ["history"]
    assert row["history"] in history
    answer = client.post(described["recommend"]["path"], json=body)
    assert (answer.status_code, len(answer.get_json()["recommendations"][0]["items"])) == (200, body["top"])
    example = described["predict"]["example"]["rows"][0]
    assert example["history"] == row["history"]
    assert client.post("/predict", json=described["predict"]["example"]).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"rows": [{"history": [501]}], "top": 0}, '"top" is 0: give a number from 1 to'),
        ({"rows": [{"history": [501]}], "top": True}, '"top" is True'),
        ({"rows": [{"history": [501]}], "exclude_seen": 1}, '"exclude_seen" is 1: give true or false'),
        ({"rows": [{"history": [501], "item": 501}]}, "row 0: field 'item' is no feature: the features are history"),
        ({"rows": [{}]}, "row 0: field 'history' is missing"),
        ({"rows": []}, "give a list of at least one object"),
        ({"top": 3}, 'the single field "rows", a list, and may have "exclude_seen", and may have "top"'),
    ],
)
def test_requests_that_are_refused(run: Path, body: dict[str, Any], words: str) -> None:
    answer = Client(RunFolder(run / "out").endpoint()).post("/recommend", json=body)
    assert answer.status_code == 400
    assert words in answer.get_json()["error"]


def test_what_cannot_be_recommended(run: Path, tmp_path: Path) -> None:
    model, _, _, _ = recommender("two_tower", tmp_path)
    hashed = FeatureSpec(
        features=(Feature(name="history", kind="multi_hot", rows=9), Feature(name="item", kind="id", rows=27))
    )
    with pytest.raises(ConfigError, match="feature 'item' has ids: hash: train with vocabulary: from_data"):
        Recommender(model, hashed, torch.device("cpu"))
    apart = FeatureSpec(features=(hashed.features[0], SEQUENCES.features[1]))
    with pytest.raises(ConfigError, match=r"seen items .* are those of a feature with share: item"):
        Recommender(model, apart, torch.device("cpu")).check_seen()
    answer = Client(Endpoint(torch.nn.Identity(), SEQUENCES, {})).post("/recommend", json={"rows": [{}]})
    assert (answer.status_code, answer.get_json()["error"][:42]) == (
        400,
        "a recommendation needs a model with a vect",
    )
    with pytest.raises(DataError, match="column 'who' is missing: leave it out of the keys"):
        recommended(run, tmp_path / "x", keys=["who"])
    recommended(run, tmp_path / "y", top=3)
    with pytest.raises(
        ConfigError, match=r"holds scores that differ in top: give another folder. There it is 3, here 4"
    ):
        recommended(run, tmp_path / "y", top=4)


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.npz"])
def test_values_of_files_are_taken_as_requests(tmp_path: Path, name: str) -> None:
    spec = FeatureSpec(
        label={"column": "stars", "above": 2},  # type: ignore[arg-type]  # as a file has it
        features=(
            Feature(name="who", column="user", kind="id", rows=9),
            Feature(name="price", kind="dense"),
            Feature(name="genres", kind="multi_hot", rows=5, separator=";"),
        ),
    )
    columns: dict[str, Any] = {"user": ["", "ann"], "price": [1.5, 2.5], "genres": ["a;b", "c;d"], "stars": [1, 3]}
    if name.endswith(".parquet"):
        columns["genres"] = [text.split(";") for text in columns["genres"]]
        columns["user"] = [None, "ann"]
        pq.write_table(pa.table(columns), tmp_path / name)
    elif name.endswith(".npz"):
        np.savez(tmp_path / name, **columns)
    else:
        rows = zip(*columns.values(), strict=True)
        text = "\n".join(",".join(map(str, row)) for row in [(*columns,), *rows])
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    values = values_of_file(str(tmp_path / name), spec)
    assert values["genres"] == ["c", "d"]
    assert (values["who"], values["price"]) == ("ann", 2.5)
    assert batch_of_request([request_example(spec, values)], spec).size == 1
    assert values_of_file(str(tmp_path / "none"), spec) == {}
