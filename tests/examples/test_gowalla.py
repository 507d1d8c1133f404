"""The Gowalla example: what it refuses, its files against a naive reading, and its options on few users."""

from __future__ import annotations

import lzma
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from examples.gowalla.prepare import main, prepare
from shardrec.errors import DataError
from shardrec.trainer.run import RunFolder, load_config
from tests.ranks import ranks
from tests.trainer.run.broken_off import broken_off

CONFIG = Path(__file__).parents[2] / "examples" / "gowalla" / "run.yaml"
TOWNS, PLACES = 10, 16

Sets = dict[int, list[int]]


def towns(users: int = 121) -> tuple[Sets, Sets]:
    """Users visit places of their own town only: half of them in train, a quarter in test."""
    train, test, rng = {}, {}, Random(1)
    for user in range(users):
        order = rng.sample(range(PLACES * (user % TOWNS), PLACES * (user % TOWNS + 1)), PLACES)
        train[user], test[user] = order[: PLACES // 2], order[PLACES // 2 : 3 * PLACES // 4]
    return train, test


def write(folder: Path, *halves: Sets) -> Path:
    for name, half in zip(("train", "test"), halves, strict=True):
        lines = "".join(f"{' '.join(map(str, [user, *items]))}\n" for user, items in half.items())
        (folder / f"{name}.txt.xz").write_bytes(lzma.compress(lines.encode()))
    return folder


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ("0 1\n1 2 x\n", "0 3\n", r"train\.txt:2: field 3 is 'x'"),
        ("0 1\n", "0 3\n1 ٣\n", r"test\.txt:2: field 2"),
        ("0 1\n", f"0 {2**31}\n", r"test\.txt:1: field 2 is 2147483648"),
        ("0 1\n0 2\n", "0 3\n", r"train\.txt:2: user 0 has a line already"),
        ("0 1 2 1\n", "0 3\n", r"train\.txt:1: item 1 stands twice"),
        ("0 1 2\n", "0 3 2\n", r"user 0 has item 2 in train\.txt and in test\.txt"),
        ("0\n", "0 3\n", r"train\.txt has no interactions"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, train: str, test: str, message: str) -> None:
    (tmp_path / "train.txt").write_text(train, encoding="utf-8")
    (tmp_path / "test.txt").write_text(test, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, tmp_path / "out")


def test_files_hold_the_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of users in no order, in one half only, or without items."""
    train, test = {7: [3, 1], 2: [5], 4: []}, {2: [1, 0], 9: [6], 7: []}
    rows = prepare(write(tmp_path, train, test), tmp_path)
    assert rows == {"fit": rows["fit"], "valid": rows["valid"], "train": 2, "test": 3}
    columns = ["user", "history", "item", "label"]
    files = {name: pq.read_table(tmp_path / f"{name}.parquet", columns=columns).to_pylist() for name in rows}
    assert [[*row.values()] for row in files["train"]] == [[3, [6], 6, 1], [8, [4, 2], 2, 1]]
    assert [[*row.values()] for row in files["test"]] == [[3, [6], 2, 1], [3, [6], 1, 1], [10, [], 7, 1]]
    fitted = {row["user"]: row["history"] for row in files["fit"]}
    assert sorted(sum(fitted.values(), [row["item"] for row in files["valid"]])) == [2, 4, 6]
    assert all(row["history"] == fitted.get(row["user"], []) for row in files["valid"])
    assert "rows: 11" in (tmp_path / "features.yaml").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["--data", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert "has neither train.txt.xz nor train.txt" in capsys.readouterr().err


def test_a_run_by_its_files_learns(tmp_path: Path) -> None:
    """Each user's four places among the eight that are left of the town, of 160; and ``eval`` finds the same."""
    config, files = load_config(CONFIG), tmp_path / "data"
    prepare(write(tmp_path, *towns()), files)
    # Ranks run in another folder than this test's.
    paths = {name: str(files / Path(str(config.to_mapping()[name])).name) for name in ("data", "valid", "features")}
    arguments = {**config.model.args, "graph": paths["data"], "dim": 16, "negatives": 30}
    sizes = {"global_batch_size": 80, "epochs": 8, "top_k": 8}
    small = {**paths, "model_args": arguments, **sizes, "out": str(tmp_path / "run")}
    ranks(2, broken_off, load_config(CONFIG, small))
    run = RunFolder(tmp_path / "run")
    final = run.metrics["final"]
    assert (final["rows"], final["groups"]) == (484, 121)
    assert final["recall@8"] > 0.9
    assert run.evaluate()[0].to_mapping() == pytest.approx(final, abs=1e-6)
    among_all, _ = run.evaluate(ranking="catalogue")
    assert among_all.to_mapping()["recall@8"] < 0.9, "places of train are among the first"
