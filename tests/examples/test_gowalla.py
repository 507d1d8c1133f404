"""The Gowalla example: what it refuses, its metrics by hand, and that its recipe learns."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.gowalla import main as gowalla
from examples.gowalla.data import Dataset, Interactions, read_dataset
from examples.gowalla.evaluate import Metrics, recall_and_ndcg, top_items
from examples.gowalla.main import Settings, Trainer
from shardrec.errors import ConfigError, DataError
from tests.ranks import ranks

TINY = Settings(epochs=8, users_per_batch=40, num_negatives=30, dim=16, cut="row_wise", eval_every=8)


def interactions(rows: Sequence[Sequence[int]], num_items: int) -> Interactions:
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    items = torch.tensor([item for row in rows for item in row], dtype=torch.int64)
    return Interactions(offsets=offsets, items=items, num_items=num_items)


def towns(users: int = 121, count: int = 10, places: int = 16) -> Dataset:
    """Users visit places of their own town only: half of them in train, a quarter in test."""
    generator = torch.Generator().manual_seed(1)
    train, test = [], []
    for user in range(users):
        order = (torch.randperm(places, generator=generator) + places * (user % count)).tolist()
        train.append(order[: places // 2])
        test.append(order[places // 2 : 3 * places // 4])
    return Dataset(train=interactions(train, count * places), test=interactions(test, count * places))


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
        read_dataset(tmp_path)


def test_metrics_by_hand() -> None:
    """Three items of four found at places 1 and 3, and one of one at place 2, of two that count."""
    test = interactions([[5, 6, 7, 8], [1]], 10)
    recall, ndcg = recall_and_ndcg(torch.tensor([[7, 0, 5], [0, 1, 2]]), test, torch.tensor([0, 1]))
    assert recall.tolist() == [0.5, 1.0]
    best = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert ndcg.tolist() == pytest.approx([(1 + 0.5) / best, 1 / math.log2(3)])
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    top = top_items(scores, interactions([[0], [], [3, 2]], 4), torch.tensor([0, 2]), k=2)
    assert top.tolist() == [[1, 2], [1, 0]], "items of train come last"


def test_two_ranks_learn_and_agree() -> None:
    def learn() -> tuple[Metrics, int]:
        trainer = Trainer(towns(), TINY, rank=dist.get_rank(), world_size=2)
        samples = sum(positives for _ in range(TINY.epochs) for _, positives in trainer.steps())
        return trainer.evaluate(), samples

    (first, first_samples), (second, second_samples) = ranks(2, learn)
    assert first == second
    assert first.users == 121
    assert first.recall > 0.9
    assert first_samples + second_samples == 121 * 8 * TINY.epochs


def write(folder: Path, dataset: Dataset) -> None:
    folder.mkdir()
    for half in ("train", "test"):
        rows: Interactions = getattr(dataset, half)
        items = rows.items.split(rows.counts().tolist())
        lines = "".join(" ".join(map(str, [user, *of.tolist()])) + "\n" for user, of in enumerate(items))
        (folder / f"{half}.txt.xz").write_bytes(lzma.compress(lines.encode()))


@pytest.mark.parametrize("servers", [[], pytest.param(["--servers", "2", "--staleness", "2"], marks=pytest.mark.slow)])
def test_a_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write(tmp_path / "gowalla_m1", towns())
    out = tmp_path / "run" / "metrics.json"
    small = ["--users-per-batch", "40", "--num-negatives", "30", "--dim", "16", "--epochs", "8", "--eval-every", "5"]
    gowalla.main(["--data", str(tmp_path), "--out", str(out), *small, *servers])
    report = json.loads(out.read_text())
    assert report["settings"]["dim"] == 16
    assert [record["epoch"] for record in report["evaluations"]] == [5, 8]
    assert report["evaluations"][-1]["recall"] > 0.9
    (tmp_path / "gowalla_m1" / "test.txt.xz").unlink()
    assert read_dataset(tmp_path / "gowalla_m1", validate=0.25).test.num_users == 121, "test is not read"


@pytest.mark.parametrize(("name", "value"), [("servers", -1), ("staleness", 2), ("lr", 0.0), ("validate", 1.0)])
def test_settings_are_checked(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{name} is"):
        Settings(**{name: value})  # type: ignore[arg-type]
