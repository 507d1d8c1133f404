"""Vocabularies counted in the rows to train on, tables that features share, and what a spec says of both."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from shardrec.errors import ConfigError
from shardrec.exchange import agree
from shardrec.launch.ranks import RankInfo
from shardrec.trainer.data import FileClickData, load_spec
from shardrec.trainer.data.request import batch_of_request
from shardrec.trainer.data.spec import parse_spec
from shardrec.trainer.data.tables import read_blocks
from shardrec.trainer.run import TrainConfig, source
from shardrec.trainer.run.source import decided_spec
from tests.ranks import ranks
from tests.trainer.data.raw import vocabularies

SPEC = """
label: click
features:
  - {name: film, kind: id, vocabulary: from_data, min_count: 2, dim: 12}
  - {name: seen, kind: sequence, share: film, max_length: 2}
  - {name: shop, kind: id, vocabulary: from_data}
"""


def data(path: Path) -> Path:
    films = ["f1", "f2", None, "f1", "f3"]
    seen = [["f4", "f2"], [], None, ["f5"], ["f4", "f3", "f1"]]
    table = {"click": [0, 1, 0, 1, 0], "film": films, "seen": seen, "shop": [7, 7, 8, None, 7]}
    pq.write_table(pa.table(table), path)
    return path


def test_values_of_all_features_of_a_table_count(tmp_path: Path) -> None:
    path, raw = data(tmp_path / "a.parquet"), parse_spec(SPEC, "spec")
    counted = vocabularies([path], raw)
    assert counted == {"film": ["f1", "f2", "f3", "f4"], "shop": ["7", "8"]}
    spec = raw.with_vocabularies(counted)
    assert spec.schema_.num_embeddings == (5, 5, 3)
    assert spec.schema_.dims == (12, 12, None)
    assert spec.schema_.tables == ("t_film", "t_film", "t_shop")
    files = FileClickData([path], spec, holdout=0)
    assert "0 dense and 3 sparse features, 8 embedding rows, the largest table 5" in files.describe()
    batch = next(iter(files.train_batches(0, 1, 5)))
    assert batch.sparse["film"].values().tolist() == [1, 2, 0, 1, 3]
    assert batch.sparse["seen"].values().tolist() == [4, 2, 0, 3, 1]
    asked = batch_of_request([{"film": "f2", "seen": ["f4", "f9"], "shop": 8}], spec)
    assert asked.sparse.values().tolist() == [2, 4, 0, 2]


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
def test_texts_that_are_not_utf8_are_no_values(tmp_path: Path, kind: pa.DataType) -> None:
    path, shops = tmp_path / "a.parquet", pa.array([b"a", b"\xff", None])
    pq.write_table(pa.table({"click": [0, 1, 0], "shop": shops.view(kind)}), path)
    raw = parse_spec("label: click\nfeatures: [{name: shop, kind: id, vocabulary: from_data}]", "spec")
    assert vocabularies([path], raw) == {"shop": ["a"]}


@pytest.mark.parametrize("group", ["", "group: shop\n"])
def test_held_out_rows_do_not_count(tmp_path: Path, group: str) -> None:
    count = 400
    shops = [number // 2 for number in range(count)]
    pq.write_table(pa.table({"click": [0, 1] * (count // 2), "shop": shops}), tmp_path / "a.parquet")
    paths = [tmp_path / "a.parquet"] * 2
    features = "features: [{name: shop, kind: id, vocabulary: from_data}]"
    raw = parse_spec(f"label: click\n{group}{features}", "spec")
    counted = vocabularies(paths, raw, holdout=0.3)
    spec = raw.with_vocabularies(counted)
    files = FileClickData(paths, spec, holdout=0.3)
    trained = [id for batch in files.train_batches(0, 1, 64) for id in batch.sparse.values().tolist()]
    assert {*trained} == {*range(1, len(counted["shop"]) + 1)}, "each has a row that is trained, and only these"
    if group:
        assert all(not batch.sparse.values().any() for batch in files.holdout_batches(0, 1, 64))


def test_a_vocabulary_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "features.yaml").write_text(SPEC)
    spec = load_spec(tmp_path / "features.yaml")
    assert [feature.name for feature in spec.uncounted] == ["film", "shop"]
    with pytest.raises(ConfigError, match="feature 'film' has a vocabulary from data, which has not been counted"):
        spec.schema_  # noqa: B018  # a property that raises
    kept = tmp_path / "vocabularies.json"
    kept.write_text(json.dumps({"film": ["b", "a"], "shop": ["1"]}))
    assert load_spec(tmp_path / "features.yaml").schema_.num_embeddings == (3, 3, 2)
    kept.write_text(json.dumps({"film": ["b", "a"]}))
    with pytest.raises(ConfigError, match="no value of feature 'shop' is in the vocabulary"):
        load_spec(tmp_path / "features.yaml")
    kept.write_text("[]")
    with pytest.raises(ConfigError, match="has no lists of values by feature"):
        load_spec(tmp_path / "features.yaml")


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ("{name: b, kind: id, share: nobody}", "shares the table of 'nobody', and no feature of that name has a table"),
        ("{name: b, kind: id, share: a, rows: 9}", "rows is that of the feature whose table it shares"),
        ("{name: b, kind: id, share: a, dim: 9}", "dim is that of the feature whose table it shares"),
        ("{name: b, kind: id, share: b}", "shares the table of 'b'"),
        ("{name: b, kind: dense, share: a}", "a dense feature has no share"),
        ("{name: b, kind: dense, dim: 4}", "a dense feature has no dim"),
        ("{name: b, kind: id, rows: 9, min_count: 2}", "min_count is for vocabulary: from_data"),
        ("{name: b, kind: id, vocabulary: []}", "the vocabulary is empty"),
        ("{name: b.c, kind: id, rows: 9}", "a feature's name cannot have a '.': give another one, and column:"),
        ("{name: b, kind: id, rows: 9, dim: 0}", "greater than or equal to 1"),
    ],
)
def test_faults_of_a_spec(feature: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_spec(f"features: [{{name: a, kind: id, rows: 5}}, {feature}]", "spec")
    with pytest.raises(ConfigError, match="spec has no label and features"):
        parse_spec("", "spec")


@pytest.mark.parametrize(("world_size", "group"), [(2, "group: shop\n"), (4, "")])
def test_ranks_count_a_share_of_the_rows_each(tmp_path: Path, world_size: int, group: str) -> None:
    draws = np.random.default_rng(0)
    for name, rows in (("a", 90), ("b", 7), ("c", 31)):
        shops, films = draws.integers(5, size=rows), draws.integers(40, size=rows)
        table = {"click": shops % 2, "film": [f"f{film}" for film in films], "shop": shops}
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet", row_group_size=10)
    paths = [str(tmp_path / f"{name}.parquet") for name in "abc"]
    spec = parse_spec(
        SPEC.replace("  - {name: seen, kind: sequence, share: film, max_length: 2}\n", "") + group, "spec"
    )

    def counted_on_rank() -> tuple[dict[str, list[str]], list[int]]:
        rank_info = RankInfo(
            rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"), threads=1
        )
        rows = []

        def read(*args: Any, **options: Any) -> Iterator[Any]:
            for block in read_blocks(*args, **options):
                rows.append(block.stop - block.first)
                yield block

        with mock.patch("shardrec.trainer.data.vocabulary.read_blocks", read):
            config = TrainConfig(data=str(tmp_path / "*.parquet"), features="spec", holdout=0.3)
            decided = decided_spec(config, spec, rank_info, tmp_path)
            return {feature.name: [*feature.values] for feature in decided.sparse if feature.share is None}, rows

    alone = vocabularies(paths, spec, holdout=0.3)
    assert alone["film"] and alone["shop"]
    counted = ranks(world_size, counted_on_rank)
    assert [vocabularies for vocabularies, _ in counted] == [alone] * world_size
    assert max(sum(rows) for _, rows in counted) < 2 * 128 / world_size
    assert sum(sum(rows) for _, rows in counted) == 128, "each row is decoded on one rank"


def test_ranks_that_have_counted_their_share_hear_of_those_that_count() -> None:
    """One of two ranks may have a single large file: the other waits for it longer than a rank may be silent."""

    def counted_on_rank() -> list[int]:
        rank_info = RankInfo(rank=dist.get_rank(), world_size=2, device=torch.device("cpu"), threads=1, timeout=0.01)
        gathered, signs, alive = agree.all_gather, [], threading.Event()

        def heard(value: Any, ranks: RankInfo, what: str) -> list[Any]:
            signs.append(value)
            if len(signs) == 3:
                alive.set()
            return gathered(value, ranks, what)

        def count(number: int) -> int:
            assert number or alive.wait(5)
            return number + 7

        with mock.patch.object(agree, "all_gather", heard):
            return source.on_ranks(rank_info, count, [0, 1])

    assert ranks(2, counted_on_rank) == [[7, 8]] * 2
