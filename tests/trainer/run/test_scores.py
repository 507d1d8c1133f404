"""``shardrec predict``: its scores beside eval's, on any ranks, interrupted and given again, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardrec.errors import ConfigError, DataError, ShardrecError
from shardrec.files import Store
from shardrec.trainer.data import click_metrics
from shardrec.trainer.data.convert import counted
from shardrec.trainer.data.tables import check_file, rows_between
from shardrec.trainer.data.urls import files_of, open_input
from shardrec.trainer.run import RunFolder, TrainConfig, predict, scores
from shardrec.trainer.run.task_metrics import predictions
from tests.ranks import raises_on_all, ranks

SPEC = """
label: {column: stars, above: 2.5}
features:
  - {name: user, kind: id, rows: 50}
  - {name: history, kind: sequence, rows: 30, max_length: 3}
  - {name: tags, kind: weighted, rows: 60, weights: scores}
  - {name: price, kind: dense, transform: log}
"""
ROWS = {"a.parquet": 700, "b.parquet": 1, "c.parquet": 900}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and files to score, in one folder."""
    from shardrec.trainer.run.session import run_rank

    folder = tmp_path_factory.mktemp("run")
    (folder / "features.yaml").write_text(SPEC, encoding="utf-8")
    (folder / "rows").mkdir()
    draws, first = np.random.default_rng(0), 0
    for name, count in ROWS.items():
        lists = [draws.integers(30, size=draws.integers(4)).tolist() for _ in range(count)]
        columns = {"number": np.arange(first, first + count), "user": draws.integers(99, size=count)}
        columns |= {"history": lists, "tags": lists, "scores": [[0.5] * len(each) for each in lists]}
        columns |= {"price": draws.random(count), "stars": columns["user"] % 5}
        columns["who"] = [f"u{user}" for user in columns["user"]]
        pq.write_table(pa.table(columns), folder / "rows" / name, row_group_size=97)
        first += count
    config = TrainConfig(
        data=str(folder / "rows"),
        features=str(folder / "features.yaml"),
        batch_size=256,
        embedding_dim=4,
        model="dnn",
        threads=1,
        out=str(folder / "out"),
    )
    with mock.patch("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch()):
        run_rank(config)
    return folder


def scored(run: Path, out: str, limit: int | None = None, **options: Any) -> dict[str, Any] | None:
    """Predict with small parts, in this process's rank; ends with an error before the part ``limit``."""
    write, written = Store.write, []

    def limited(self: Store, name: str, data: bytes) -> None:
        if name.startswith("part-"):
            if limit is not None and len(written) >= limit:
                raise KeyboardInterrupt
            written.append(name)
        write(self, name, data)

    with (
        mock.patch("shardrec.trainer.run.scores._ROWS", 64),
        mock.patch("shardrec.trainer.run.scores._PART_BATCHES", 2),
        mock.patch.object(Store, "write", limited),
    ):
        return predict(str(run / "out"), options.pop("data", str(run / "rows")), out, **options)


def table(out: str) -> pa.Table:
    return pa.concat_tables([pq.read_table(open_input(path)) for path in files_of(out)])


@pytest.fixture(scope="module")
def expected(run: Path, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    out = str(tmp_path_factory.mktemp("expected") / "scores")
    scored(run, out, keys=["number", "who"])
    return table(out)


def test_scores_are_evals(run: Path, expected: pa.Table) -> None:
    assert expected.column_names == ["number", "who", "score"]
    assert expected["number"].to_pylist() == list(range(1601))
    stars = pa.concat_tables([pq.read_table(run / "rows" / name) for name in ROWS])["stars"].to_numpy()
    metrics = click_metrics(stars > 2.5, expected["score"].to_numpy())
    evaluated = RunFolder(run / "out").evaluate(str(run / "rows"))[0]
    assert metrics.to_mapping() == pytest.approx(evaluated.to_mapping(), abs=1e-6)
    # ... and those that the endpoint gives, row by row.
    model, spec = RunFolder(run / "out").model(), RunFolder(run / "out").spec
    from shardrec.trainer.data import FileClickData

    batches = list(FileClickData(files_of(str(run / "rows")), spec, holdout=0, streams=1).train_batches(0, 1, 1000))
    logits = np.concatenate([model(batch.dense, batch.sparse).detach().numpy() for batch in batches])
    np.testing.assert_allclose(expected["score"].to_numpy(), 1 / (1 + np.exp(-logits)), atol=1e-6)


@pytest.mark.some(1)
@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_ranks_writes_the_same(run: Path, expected: pa.Table, tmp_path: Path, count: int) -> None:
    """Interrupted on other ranks, too: parts that are there stay, and the others are made."""
    out = str(tmp_path / "scores")
    with pytest.raises(KeyboardInterrupt):
        scored(run, out, 3, keys=["number", "who"])
    left = {name: os.stat(tmp_path / "scores" / name).st_ino for name in sorted(Store(out).names())}
    assert [*left] == ["_job.json", "part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    manifests = ranks(count, scored, run, out, keys=["number", "who"])
    manifest = manifests[0]
    assert manifests[1:] == [None] * (count - 1)
    assert manifest is not None
    assert (manifest["rows"], manifest["left_out"]) == (1601, 0)
    assert sum(manifest["parts"].values()) == 1601
    for name, inode in left.items():
        assert os.stat(tmp_path / "scores" / name).st_ino == inode, f"{name} was written again"
    assert json.loads((tmp_path / "scores" / "_manifest.json").read_text(encoding="utf-8")) == manifest
    result = table(out)
    assert result.drop(["score"]) == expected.drop(["score"])
    np.testing.assert_allclose(result["score"].to_numpy(), expected["score"].to_numpy(), atol=1e-6)


def test_one_rank_alone_has_no_empty_batch(run: Path, tmp_path: Path) -> None:
    """Which a model may not take: ranks that share the rows have them."""
    sizes = []

    def noted(logits: Any, size: int, *others: Any) -> Any:
        sizes.append(size)
        return predictions(logits, size, *others)

    with mock.patch("shardrec.trainer.run.scores.predictions", noted):
        scored(run, str(tmp_path / "scores"), data=str(run / "rows" / "b.parquet"))
    assert sizes == [1]


@pytest.fixture
def memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").rm("/scores", recursive=True)


@pytest.mark.some(1)
@pytest.mark.parametrize("scheme", ["memory", "file"])
@pytest.mark.usefixtures("memory")
def test_scores_at_a_url(run: Path, expected: pa.Table, tmp_path: Path, scheme: str) -> None:
    fsspec.filesystem("memory").makedirs("/scores", exist_ok=True)
    out = "memory://scores/x" if scheme == "memory" else f"file://{tmp_path}/scores"
    with pytest.raises(KeyboardInterrupt):
        scored(run, out, 2, keys=["number", "who"])
    scored(run, out, keys=["number", "who"])
    assert table(out) == expected
    assert scored(run, out, keys=["number", "who"]) == scored(run, out, keys=["number", "who"])


def test_text_files_without_labels_and_rows_that_cannot_be_read(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"k{row},{row},1|2,3,0.5,{'x' if row == 70 else row}" for row in range(150)]
    path.write_text("\n".join(["key,user,history,tags,scores,price", *lines]) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.csv:72: field 'price': value 'x' is not .*--on-bad-row skip"):
        scored(run, str(tmp_path / "a"), data=str(path), keys=["key"])
    said = r"rows.csv:72: field 'price': value 'x'"
    raises_on_all(2, ShardrecError, said, scored, run, str(tmp_path / "c"), data=str(path))
    manifest = scored(run, str(tmp_path / "a"), data=str(path), keys=["key"], on_bad_row="skip")
    assert manifest is not None
    assert manifest["on_bad_row"] == "skip"
    assert (manifest["rows"], manifest["left_out"]) == (149, 1)
    assert table(str(tmp_path / "a"))["key"].to_pylist() == [f"k{row}" for row in range(150) if row != 70]


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "scores")
    scored(run, out, keys=["number"])
    with pytest.raises(ConfigError, match="holds scores that differ in keys"):
        scored(run, out, keys=["who"])
    with pytest.raises(ConfigError, match="holds scores that differ in files"):
        scored(run, out, keys=["number"], data=str(run / "rows" / "a.parquet"))
    with pytest.raises(DataError, match="column 'nobody' is missing: leave it out of the keys"):
        scored(run, str(tmp_path / "other"), keys=["nobody"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    raises_on_all(2, ConfigError, "holds mine.txt: give an empty folder", scored, run, str(tmp_path / "full"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        scored(run, str(tmp_path / "file" / "scores"))


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["part-00001.parquet", "part-00014.parquet", "_manifest.json"])
def test_a_rank_that_cannot_write(run: Path, tmp_path: Path, name: str) -> None:
    """A part in the middle, the last one, and what names them: all ranks end with its error."""
    write = Store.write

    def full(self: Store, wanted: str, data: bytes) -> None:
        if wanted == name:
            raise ConfigError(f"no room for {wanted}")
        write(self, wanted, data)

    def predicted() -> None:
        with mock.patch.object(Store, "write", full):
            scored(run, str(tmp_path / "scores"))

    raises_on_all(2, ShardrecError, f"no room for {name}", predicted, timeout=60)


def test_a_file_that_has_shrunk(run: Path, tmp_path: Path) -> None:
    from shardrec.trainer.run.scores import _Keyed

    spec = _Keyed(keys=("number",), features=RunFolder(run / "out").spec.features)
    table, path = pq.read_table(run / "rows" / "a.parquet"), str(tmp_path / "a.parquet")
    pq.write_table(table, path, row_group_size=90)
    info = counted(check_file(path, spec), spec, tmp_path / "rows")
    blocks = list(rows_between(info, spec, [(3, 3), (5, 300), (300, 700)]))
    assert [len(block.numbers) for block in blocks] == [0, 295, 400]
    assert blocks[1].table["number"].to_pylist() == list(range(5, 300))
    pq.write_table(table.slice(0, 500), path, row_group_size=90)
    with pytest.raises(DataError, match="has changed since it was opened"):
        list(rows_between(info, spec, [(300, 700)]))


def test_keys_that_are_not_utf8() -> None:
    keys = pa.table({"number": [1, 2], "who": pa.array([b"a", b"caf\xe9"]).view(pa.string())})
    with pytest.raises(DataError, match=r"column 'who' of keys \(--keys\) has texts that are not UTF-8"):
        scores._with_results(keys, {"score": pa.array([0.0, 0.0])})
