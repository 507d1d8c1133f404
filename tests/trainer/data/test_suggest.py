"""Specs proposed from columns: kinds, labels, what is left out; and every proposal can be trained on as it is."""

from __future__ import annotations

import gzip
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrec.errors import ConfigError, DataError
from shardrec.trainer.data import FileClickData, load_spec
from shardrec.trainer.data.encode import encode
from shardrec.trainer.data.spec import parse_spec
from shardrec.trainer.data.suggest import suggest
from shardrec.trainer.run.config import load_config_text
from shardrec.trainer.run.model import build_model
from shardrec.trainer.run.suggest_run import suggest_run
from tests.trainer.data.raw import vocabularies

ROWS = 2000


def columns(seed: int = 0) -> dict[str, Any]:
    draws = np.random.default_rng(seed)
    film = draws.integers(1, 400, ROWS)
    return {
        "Row No.": [f"r{number}" for number in range(ROWS)],
        "Was Clicked?": draws.integers(0, 2, ROWS),
        "user.id": draws.integers(10**6, 10**9, 300)[draws.integers(0, 300, ROWS)],
        "hash": draws.integers(0, 2**63, 300)[draws.integers(0, 300, ROWS)],
        "film": film,
        "films seen last": [" ".join(map(str, draws.integers(1, 400, draws.integers(0, 8)))) for _ in range(ROWS)],
        "Genres": [", ".join(draws.choice(["drama", "comedy", "war"], 2, replace=False)) for _ in range(ROWS)],
        "price": np.round(draws.lognormal(3, 2, ROWS), 2),
        "age": draws.integers(18, 80, ROWS),
        "views": (draws.pareto(1, ROWS) * 100).astype(int),
        "day": [f"2025-03-{day:02}" for day in draws.integers(1, 28, ROWS)],
        "site": ["here"] * ROWS,
    }


def written(path: Path, data: dict[str, Any], delimiter: str = ",", header: bool = True) -> Path:
    lines = [delimiter.join(data)] if header else []
    lines += [
        delimiter.join(f'"{v}"' if delimiter in str(v) else str(v) for v in row)
        for row in zip(*data.values(), strict=True)
    ]
    text = "\n".join(lines).encode() + b"\n"
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["data.csv", "data.tsv", "data.txt.gz", "data.parquet"])
def test_columns_of_every_kind(tmp_path: Path, name: str) -> None:
    data, path = columns(), tmp_path / name
    delimiter = {"data.csv": ",", "data.tsv": "\t", "data.txt.gz": ";"}.get(name, "")
    if delimiter:
        written(path, data, delimiter)
    else:
        pq.write_table(pa.table(data), path)
    text = suggest(str(path)).text
    proposed = yaml.safe_load(text)
    assert proposed["label"] == "Was Clicked?"
    assert proposed.get("delimiter") == (";" if delimiter == ";" else None)
    features = {feature.pop("name"): feature for feature in proposed["features"]}
    counted = {"vocabulary": "from_data", "min_count": 2}
    assert features["user_id"] == {"column": "user.id", "kind": "id", **counted}
    assert features["film"] == features["hash"] == {"kind": "id", **counted}
    sequence = {"column": "films seen last", "kind": "sequence", "separator": " ", "max_length": 50, "share": "film"}
    assert features["films_seen_last"] == sequence
    assert features["Genres"] == {"kind": "multi_hot", **counted, "dim": 8, "separator": ", "}
    assert features["age"] == {"kind": "id", **counted, "dim": 8}
    assert [features[key]["kind"] for key in ("price", "views")] == ["dense", "dense"]
    assert [features[key].get("transform") for key in ("price", "views")] == ["log", "log"]
    assert features["day"]["kind"] == ("id" if name.endswith("parquet") else "dense"), "texts of Parquet are texts"
    assert "# left out: Row No.: almost each row has a value of its own" in text
    assert "# left out: site: it has no two values" in text
    raw = parse_spec(text, "proposal")
    spec = raw.with_vocabularies(vocabularies([path], raw))
    batch = next(iter(FileClickData([path], spec, holdout=0).train_batches(0, 1, ROWS)))
    assert batch.size == ROWS
    assert batch.sparse.keys() == [*spec.schema_.sparse_names]
    dense = batch.dense[:, [one.name for one in spec.dense].index("price")]
    assert abs(float(dense.mean())) < 0.01
    assert abs(float(dense.std()) - 1) < 0.01


@pytest.mark.parametrize(
    ("column", "values", "label"),
    [
        ("stars", [1.0, 2.0, 3.0, 4.0, 5.0], {"column": "stars", "above": 2.5}),
        ("y", [-1, 1], {"column": "y", "above": 0.0}),
        ("whatever", [0, 1], "whatever"),
    ],
)
def test_labels(tmp_path: Path, column: str, values: list[float], label: Any) -> None:
    path = written(tmp_path / "a.csv", {"who": [f"u{n % 7}" for n in range(100)], column: (values * 50)[:100]})
    assert yaml.safe_load(suggest(str(path)).text)["label"] == label


def test_missing_values_are_counted(tmp_path: Path) -> None:
    data = {"click": [0, 1] * 50, "age": [*range(18, 28)] * 10, "country": ["DE", "FR", "NA", "PL"] * 25}
    lines = suggest(str(written(tmp_path / "a.csv", data))).text.splitlines()
    assert [line.partition("# ")[2] for line in lines[-2:]] == [
        "10 values",
        "3 values, 25 missing (null, empty or a word of missing:)",
    ]


def test_files_without_a_header_and_of_libsvm(tmp_path: Path) -> None:
    path = written(tmp_path / "u.data", {"a": [0, 1] * 60, "b": [*range(1, 61)] * 2, "c": [0, 1] * 60}, header=False)
    with pytest.raises(DataError, match="no column is clearly the label: name one"):
        suggest(str(path))
    proposed = yaml.safe_load(suggest(str(path), label="column_3").text)
    assert proposed["columns"] == ["column_1", "column_2", "column_3"]
    assert proposed["label"] == "column_3"
    path = tmp_path / "a.libsvm"
    path.write_text("".join(f"{n % 2} {n % 9 + 1}:1 {n % 5 + 9}:1\n" for n in range(100)))  # 9 is in both places
    proposed = yaml.safe_load(suggest(str(path)).text)
    assert proposed["features"][0] == {
        "name": "ids",
        "kind": "multi_hot",
        "vocabulary": "from_data",
        "min_count": 2,
        "dim": 8,
    }


def test_ids_of_disjoint_ranges_are_fields(tmp_path: Path) -> None:
    """In any order of the ranges; the same batches as those of a column for each field."""
    path = tmp_path / "a.libfm"
    draws = np.random.default_rng(0)
    fields = {"field_1": draws.integers(50, 70, ROWS), "field_2": draws.integers(0, 9, ROWS)}
    labels = draws.integers(0, 2, ROWS)
    lines = zip(labels, *fields.values(), strict=True)
    path.write_text("".join(f"{label} {first}:1 {second}:1\n" for label, first, second in lines))
    (tmp_path / "fields.yaml").write_text(suggest(str(path)).text, encoding="utf-8")
    proposed = yaml.safe_load((tmp_path / "fields.yaml").read_text(encoding="utf-8"))
    assert [feature["between"] for feature in proposed["features"]] == [[50, 139], [0, 50]]
    pq.write_table(pa.table({"label": labels, **fields}), tmp_path / "a.parquet")
    for feature in proposed["features"]:
        del feature["between"], feature["column"]
    (tmp_path / "columns.yaml").write_text(yaml.safe_dump(proposed), encoding="utf-8")
    batches = []
    for name, source in (("fields", path), ("columns", tmp_path / "a.parquet")):
        spec = load_spec(tmp_path / f"{name}.yaml")
        spec = spec.with_vocabularies(vocabularies([source], spec))
        batches.append(
            [*FileClickData([source], spec, holdout=0).train_batches(epoch=0, rank=0, world_size=1, batch_size=100)]
        )
    for found, expected in zip(*batches, strict=True):
        assert found.sparse.keys() == expected.sparse.keys() == ["field_1", "field_2"]
        assert found.sparse.values().tolist() == expected.sparse.values().tolist()
        assert found.labels.tolist() == expected.labels.tolist()


def test_ids_between_are_those_of_a_list() -> None:
    features = [
        {"name": "low", "kind": "id", "column": "ids", "between": [0, 10], "rows": 10, "ids": "number"},
        {"name": "high", "kind": "multi_hot", "column": "ids", "between": [10, 30], "rows": 30, "ids": "number"},
    ]
    spec = parse_spec(yaml.safe_dump({"label": "label", "features": features}), "a spec")
    ids = [["3", "12", "11"], [], ["29"], None, ["4", "5", "30"]]
    rows = encode(pa.table({"label": [1] * 5, "ids": pa.array(ids, pa.list_(pa.string()))}), spec).rows
    assert rows.lengths.tolist() == [[1, 2], [1, 0], [1, 1], [1, 0], [2, 0]]
    assert rows.ids.tolist() == [3, 12, 11, 0, 0, 29, 0, 4, 5]
    with pytest.raises(ConfigError, match="between is"):
        parse_spec(yaml.safe_dump({"features": [{**features[0], "between": [5, 5]}]}), "a spec")


CLICKS = [0, 1] * 300
RATINGS = [1, 2, 3, 4, 5, 5] * 100
WORDS = [f"w{number % 40}" for number in range(600)]
HISTORIES = [[f"w{(number + k) % 40}" for k in range(3)] for number in range(600)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"click": CLICKS, "site": WORDS}, {"model": "deepfm", "loss": "bce", "embedding_optimizer": "adam"}),
        ({"rating": RATINGS, "film": WORDS}, {"model": "deepfm", "loss": "bce", "monitor": "auc"}),
        ({"click": CLICKS, "history": HISTORIES, "film": WORDS}, {"model": "din", "loss": "bce"}),
        ({"click": [1] * 600, "history": HISTORIES, "film": WORDS}, {"model": "sasrec", "ranking": "catalogue"}),
        ({"click": [1] * 600, "user": WORDS[::-1], "film": WORDS}, {"model": "two_tower", "loss": "model"}),
    ],
)
def test_options_follow_the_data(tmp_path: Path, data: dict[str, Any], expected: dict[str, object]) -> None:
    """Each model can be made of them, with a comment on each line; held-out files beside the first are named."""
    for name in ("train", "test"):
        pq.write_table(pa.table(data), tmp_path / f"{name}.parquet")
    suggestion = suggest(str(tmp_path / "train.parquet"))
    text = suggest_run(suggestion, str(tmp_path / "train.parquet"), tmp_path / "features.yaml")
    assert all("  # " in line for line in text.splitlines())
    options = load_config_text(text, tmp_path / "run.yaml")
    mapping = options.to_mapping()
    assert {name: mapping[name] for name in expected} == expected
    assert (options.data.test, options.data.valid) == (str(tmp_path / "test.parquet"), None)
    values = {feature.name: [f"{n}" for n in range(50)] for feature in suggestion.spec.uncounted}
    build_model(options, suggestion.spec.with_vocabularies(values).schema_)


def test_more_rows_take_larger_batches_and_fewer_passes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": CLICKS, "site": WORDS}), tmp_path / "a.parquet")
    suggestion = suggest(str(tmp_path / "a.parquet"))
    options = [
        load_config_text(suggest_run(replace(suggestion, rows=rows), "a", tmp_path / "f"), tmp_path)
        for rows in (600, 100_000, 2_000_000, 50_000_000)
    ]
    sizes = [config.learning.global_batch_size for config in options]
    assert sizes == [64, 1024, 4096, 4096]
    assert [config.data.epochs for config in options] == [12, 12, 3, 1]
    assert [config.learning.embedding_weight_decay > 0 for config in options] == [True, True, False, False]


def test_rows_of_text_are_estimated_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.csv", "b.csv"):
        written(tmp_path / name, {"click": CLICKS, "site": WORDS})
    for size in (1 << 20, 1 << 10):
        monkeypatch.setattr("shardrec.trainer.data.suggest._MAX_BYTES", size)
        assert 1100 <= suggest(str(tmp_path / "*.csv")).rows <= 1300


@pytest.mark.parametrize(
    ("text", "label", "words"),
    [
        ("a,a\n1,2\n", None, "different names of columns"),
        ("1::2::3\n", None, "one character between them"),
        ("a,click\nx,0\ny,1\n", "clicks", "no column 'clicks'"),
        ("a,click\nx,0\ny,1\n", "a", "has the texts 'x' and 'y': write 0 and 1"),
        ("a,click\nx,0\ny,1\nz,1\n", "a", "has no two numbers"),
        ("price,click\n0.5,0\n1.5,1\n", None, "no column but the label has categories"),
    ],
)
def test_what_cannot_be_proposed(tmp_path: Path, text: str, label: str | None, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        suggest(str(tmp_path / "a.csv"), label)


_names = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"], exclude_characters='",'), min_size=1)


def test_a_column_without_a_value_twice_has_a_vocabulary(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", {"label": [0, 1] * 10, "city": [f"city {number}" for number in range(20)]})
    (tmp_path / "features.yaml").write_text(suggest(str(path), "label").text, encoding="utf-8")
    raw = load_spec(tmp_path / "features.yaml")
    assert len(vocabularies([path], raw)["city"]) == 20


def test_sequences_of_clicked_items(tmp_path: Path) -> None:
    """Whole numbers by the name of a thing are ids, and all labels may be 1."""
    rng = random.Random(0)
    items = [80 * rng.randrange(250) for _ in range(600)]
    rows = {"user": [*range(300)] * 2, "history": [items[n : n + 3] for n in range(600)], "item": items}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({**rows, "item_price": items, "label": [1] * 600}), path)
    raw = parse_spec(suggest(str(path)).text, "proposed")
    kinds = {feature.name: (feature.kind, feature.share) for feature in raw.features}
    assert kinds == {
        "user": ("id", None),
        "history": ("sequence", "item"),
        "item": ("id", None),
        "item_price": ("dense", None),
    }
    assert raw.label is not None
    assert raw.label.column == "label"


@settings(deadline=None, max_examples=10)
@given(data=st.data(), names=st.lists(_names.map(str.strip).filter(bool), min_size=1, max_size=4, unique=True))
def test_any_names_and_values_make_a_spec(
    tmp_path_factory: pytest.TempPathFactory, data: Any, names: list[str]
) -> None:
    """It is read again as it was meant: the same columns, and every row."""
    table: dict[str, list[Any]] = {"label": [0, 1] * 10}
    for name in names:
        if name != "label":
            values = st.one_of(
                st.integers(-5, 5), st.integers(0, 10**12), st.sampled_from(["a b", "no", "1|2", "~", "#x"])
            )
            table[name] = data.draw(st.lists(values, min_size=20, max_size=20))
    table |= {"kind": ["x", "y"] * 10}
    path = written(tmp_path_factory.mktemp("any") / "a.csv", table)
    (path.parent / "features.yaml").write_text(suggest(str(path), "label").text, encoding="utf-8")
    raw = load_spec(path.parent / "features.yaml")
    assert {*raw.sources} <= {*table}
    spec = raw.with_vocabularies(vocabularies([path], raw))
    assert sum(batch.size for batch in FileClickData([path], spec, holdout=0).train_batches(0, 1, 50)) == 20


def test_a_label_of_two_texts_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"clicked": ["yes", "no"] * 300, "site": WORDS}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'clicked' has the texts 'yes' and 'no': write 0 and 1"):
        suggest(str(tmp_path / "a.parquet"))
