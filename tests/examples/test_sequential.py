"""The example of sequences: its files against a naive reading, and runs from the command line."""

from __future__ import annotations

import itertools
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from werkzeug.test import Client

from examples.sequential.prepare import main, prepare
from shardrec.errors import DataError
from shardrec.trainer.data import load_spec
from shardrec.trainer.run import RunFolder, TrainConfig, load_config
from tests.campaign.results import differences
from tests.ranks import ranks
from tests.trainer.run.broken_off import broken_off

FOLDER = Path(__file__).parents[2] / "examples" / "sequential"

ITEMS = 40


def write(path: Path, sequences: dict[int, list[int]], *, together: bool = False) -> Path:
    """A line for each item, or for each user."""
    lines = (
        f"{user} {' '.join(map(str, of_line))}\n"
        for user, items in sequences.items()
        for of_line in ([items] if together else [[item] for item in items])
    )
    path.write_bytes(lzma.compress("".join(lines).encode()))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    together=st.booleans(),
    unseen=st.booleans(),
)
def test_the_split(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int, together: bool, unseen: bool
) -> None:
    draws = np.random.default_rng(seed)
    drawn = {user: draws.integers(0, 90, size).tolist() for user, size in enumerate([3, *lengths], 7)}
    drawn[3] = [*range(100, 190)]  # so that there is something that nobody else has
    folder = tmp_path_factory.mktemp("games")
    path = write(folder / "all.txt.xz", drawn, together=together)
    counts = prepare(path, folder, users=4, candidates=5, unseen=unseen, seed=seed)
    ids = sorted({item for items in drawn.values() for item in items})
    assert (folder / "items.txt").read_text(encoding="utf-8").split() == [*map(str, ids)]
    sequences = {str(user): [1 + ids.index(item) for item in items] for user, items in drawn.items()}
    most = len(ids)
    assert {*load_spec(folder / "features.yaml").schema_.num_embeddings} == {most + 1}
    train = {user: items if len(items) < 3 else items[:-2] for user, items in sequences.items()}
    found = {row["user"]: (row["history"], row["item"], row["label"]) for row in rows(folder / "train.parquet")}
    assert found == {user: (items[:-1][-50:], items[-1], 1) for user, items in train.items() if len(items) > 1}
    assert counts["train"] == len(found)
    users = {}
    for name, ahead in (("valid", 2), ("test", 1)):
        ranked = rows(folder / f"{name}.parquet")
        assert counts[name] == len(ranked)
        users[name] = [row["user"] for row in ranked[::6]]
        for start, user in zip(range(0, len(ranked), 6), users[name], strict=True):
            group = ranked[start : start + 6]
            assert [row["label"] for row in group] == [1, 0, 0, 0, 0, 0]
            assert {row["user"] for row in group} == {user}
            assert all(row["history"] == sequences[user][:-ahead][-50:] for row in group)
            assert group[0]["item"] == sequences[user][-ahead]
            assert not {row["item"] for row in group[1:]} & set((sequences if unseen else train)[user])
            assert all(1 <= row["item"] <= most for row in group)
    eligible = {user for user, items in sequences.items() if len(items) >= 3}
    assert users["valid"] == users["test"]
    assert len(set(users["valid"])) == min(4, len(eligible))
    assert set(users["valid"]) <= eligible


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"1 2\n1\n", "all.txt:2: a user without an item: give a file of lines 'user item item ...'"),
        (b"\n", "no interactions"),
        (b"\xff\xfe", "cannot be read"),
        (b"a x y\na z\nb x\n", "no user with two training items"),
        (b"1 2\n1 3\n", "no user with three items"),
        (b"1 1\n1 2\n1 3\n1 2\n1 3\n", "a user has 3 items of 3"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "all.txt").write_bytes(text)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "all.txt", tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        prepare(tmp_path / "none.txt", tmp_path)


@given(seed=st.integers(0, 99), unseen=st.booleans(), popular=st.booleans(), candidates=st.integers(0, 3))
def test_the_split_by_time(
    tmp_path_factory: pytest.TempPathFactory, seed: int, unseen: bool, popular: bool, candidates: int
) -> None:
    draws, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("timed")
    events = [(int(draws.integers(1, 9)), int(draws.integers(1, 40)), int(draws.integers(60))) for _ in range(200)]
    lines = "".join(f"{user},{item},{time}\n" for user, item, time in events)
    (folder / "all.csv").write_text(lines, encoding="utf-8")
    path = folder / "all.csv"
    prepare(path, folder, by_time=True, unseen=unseen, popular=popular, candidates=candidates, seed=seed)
    ids = sorted({item for _, item, _ in events})
    cuts = [*np.quantile([time for _, _, time in events], [0.8, 0.9]), math.inf]
    of_user: dict[str, list[tuple[int, int]]] = {}
    for number, item, time in sorted(events, key=lambda event: event[2]):
        of_user.setdefault(str(number), []).append((1 + ids.index(item), time))
    train = {user: [item for item, time in pairs if time < cuts[0]] for user, pairs in of_user.items()}
    found = {row["user"]: [*row["history"], row["item"]] for row in rows(folder / "train.parquet")}
    assert found == {user: items[-51:] for user, items in train.items() if len(items) > 1}
    for name, begin, end in (("valid", *cuts[:2]), ("test", *cuts[1:])):
        ranked = rows(folder / f"{name}.parquet")
        assert [row["label"] for row in ranked] == [1, *[0] * candidates] * (len(ranked) // (1 + candidates))
        expected = {}
        for user, pairs in of_user.items():
            before = [item for item, time in pairs if time < begin]
            after = [item for item, time in pairs if begin <= time < end]
            if before and after:
                expected[user] = (before[-50:], after[0])
        assert {row["user"]: (row["history"], row["item"]) for row in ranked if row["label"]} == expected
        others = [(row["user"], row["item"]) for row in ranked if not row["label"]]
        known = {user: {item for item, _ in pairs} for user, pairs in of_user.items()} if unseen else train
        assert not any(item in known[user] for user, item in others)
        if popular:
            assert {item for _, item in others} <= {item for items in train.values() for item in items}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"1 2\n", "all.txt:1: 1 fields after the user: --split time takes 'user item time'"),
        (b"1 2 noon\n", "all.txt:1: 2 fields after the user"),
        (b"1 2 5\n1 3 5\n", "no user with items before and in the valid part"),
    ],
)
def test_files_without_times(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "all.txt").write_bytes(text)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "all.txt", tmp_path, by_time=True)


def test_a_run_ranks_all_items(tmp_path: Path, walks: Path) -> None:
    """Of files with a clicked row for each user only; as ``eval`` does afterwards, and of the candidates' files."""
    prepare(walks / "all.txt.xz", tmp_path, users=100, candidates=0)
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


def test_the_command_ends_with_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    (tmp_path / "all.csv").write_text("ann,x,y,z,w\nbob,z,x\nbob,w,y,v\n", encoding="utf-8")
    main(["--data", str(tmp_path / "all.csv"), "--out", str(out), "--candidates", "1"])
    assert [row["user"] for row in rows(out / "train.parquet")] == ["ann", "bob"]
    for flags, message in (
        (["--data", str(tmp_path)], "Is a directory"),
        (["--users", "0"], "--users is 0"),
        (["--candidates", "-1"], "--candidates is -1"),
    ):
        with pytest.raises(SystemExit):
            main(flags)
        assert message in capfd.readouterr().err


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
    prepare(write(folder / "all.txt.xz", sequences), folder, users=100, candidates=30)
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
    asked = [{"history": history, "item": item} for history, item in zip(found, items, strict=True)]
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
