"""Rows drawn for a feature spec of each kind, and their files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from shardrec.trainer.data import Feature, FeatureSpec, Label

SPECS = FeatureSpec(
    label=Label(column="stars", above=2.5),
    features=(
        Feature(name="user", column="who", kind="id", rows=1000),
        Feature(name="country", kind="id", vocabulary=("de", "fr", "1")),
        Feature(name="age", kind="id", boundaries=(18, 30.5)),
        Feature(name="code", kind="id", rows=50, ids="number"),
        Feature(name="tags", kind="weighted", rows=97, weights="scores"),
        Feature(name="history", kind="sequence", rows=97, max_length=2),
        Feature(name="price", kind="dense", transform="log"),
        Feature(name="size", kind="dense", mean=2.0, std=4.0),
    ),
)


texts = st.text("abz09é|", max_size=4).map(lambda text: text.replace("|", ""))


some = st.lists(texts.filter(bool), max_size=4)


rows_of = st.lists(
    st.fixed_dictionaries(
        {
            "stars": st.sampled_from([1.0, 2.5, 2.75, 5.0]),
            "who": texts,
            "country": st.sampled_from(["de", "fr", "1", "xx", ""]),
            "age": st.none() | st.sampled_from([0.0, 17.9, 18.0, 30.5, 99.0]),
            "code": st.none() | st.integers(0, 49),
            "tags": some,
            "history": some,
            "price": st.none() | st.floats(-5, 1e6, width=32),
            "size": st.none() | st.floats(-9, 9, width=32),
        }
    ),
    min_size=1,
    max_size=12,
)


def score(tag: str) -> float:
    return len(tag) / 4


def save(folder: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    if kind == "parquet":
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        columns["tags"] = [row["tags"] or None for row in rows]
        columns["history"] = [row["history"] or None for row in rows]
        columns["scores"] = [[score(tag) for tag in row["tags"]] or None for row in rows]
        types = {"age": pa.float64(), "code": pa.int64(), "price": pa.float64(), "size": pa.float64()}
        types |= {"tags": pa.list_(pa.string()), "history": pa.list_(pa.string()), "scores": pa.list_(pa.float64())}
        path = folder / "rows.parquet"
        pq.write_table(pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()}), path)
        return path
    path = folder / f"rows.{kind}"
    with path.open("w", encoding="utf-8", newline="") as file:
        names = [*rows[0], "scores", "unused"]
        writer = csv.writer(file, delimiter="," if kind == "csv" else "\t")
        writer.writerow(names)
        for row in rows:
            joined = {**row, "tags": "|".join(row["tags"]), "history": "|".join(row["history"]), "unused": 'a "b", c'}
            joined["scores"] = "|".join(str(score(tag)) for tag in row["tags"])
            writer.writerow(["" if joined[name] is None else joined[name] for name in names])
    return path
