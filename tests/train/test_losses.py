"""Losses over groups, against one group at a time; and runs that learn by them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from shardrec.errors import ConfigError
from shardrec.train import TrainConfig
from shardrec.train.losses import pairwise_loss, softmax_loss

batches = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=12)


def tensors(rows: list[tuple[int, bool]]) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(len(rows))) * 30
    labels = torch.tensor([float(label) for _, label in rows])
    return logits.requires_grad_(), labels, torch.tensor([group for group, _ in rows], dtype=torch.int64)


@given(rows=batches)
def test_softmax_is_that_of_each_group(rows: list[tuple[int, bool]]) -> None:
    logits, labels, groups = tensors(rows)
    expected = []
    for group in set(groups.tolist()):
        own = groups == group
        if labels[own].sum():
            expected.append(-(log_softmax(logits[own, 0], 0) * labels[own]).sum() / labels[own].sum())
    total = torch.stack(expected).mean() if expected else 0 * logits.sum()
    found = softmax_loss(logits, labels, groups)
    torch.testing.assert_close(found, total)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, retain_graph=True), torch.autograd.grad(total, logits), rtol=1e-4, atol=1e-6
    )


@given(rows=batches)
def test_a_pair_is_inside_a_group(rows: list[tuple[int, bool]]) -> None:
    """With at most one other row in each group there is nothing to draw."""
    seen: set[int] = set()
    kept = [row for row in rows if row[1] or not (row[0] in seen or seen.add(row[0]))]  # type: ignore[func-returns-value]
    logits, labels, groups = tensors(kept)
    pairs = [
        softplus(logits[other, 0] - logits[clicked, 0])
        for clicked in range(len(kept))
        for other in range(len(kept))
        if kept[clicked][1] and not kept[other][1] and kept[clicked][0] == kept[other][0]
    ]
    total = torch.stack(pairs).mean() if pairs else 0 * logits.sum()
    found = pairwise_loss(logits, labels, groups)
    torch.testing.assert_close(found, total)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, retain_graph=True), torch.autograd.grad(total, logits), rtol=1e-4, atol=1e-6
    )


def test_others_are_drawn_evenly() -> None:
    torch.manual_seed(0)
    count = 3000
    groups, labels = torch.arange(4).repeat(count), torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(count)
    groups = torch.arange(count).repeat_interleave(4)
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(count)
    expected = softplus(torch.tensor([1.0, 2.0, 3.0])).mean()
    torch.testing.assert_close(pairwise_loss(logits, labels, groups), expected, rtol=0.03, atol=0)


SPEC = """
group: session
features:
  - {name: item, kind: id, rows: 50, ids: number}
  - {name: tag, kind: id, rows: 5, ids: number}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions of six items, of which the better one of two is clicked; sessions differ in how much they click."""
    folder = tmp_path_factory.mktemp("sessions")
    rng = np.random.default_rng(0)
    sessions, size = 1500, 6
    item = rng.integers(1, 50, sessions * size)
    bias = np.repeat(rng.normal(size=sessions) * 3, size)
    clicked = rng.random(len(item)) < 1 / (1 + np.exp(-(item - 25) / 4 - bias))
    table = pa.table(
        {
            "session": [f"s{number}" for number in np.repeat(np.arange(sessions), size)],
            "item": item,
            "tag": item % 5,
            "label": clicked.astype(np.int64),
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    (folder / "features.yaml").write_text(SPEC, encoding="utf-8")
    return folder


@pytest.mark.parametrize("loss", ["softmax", "pairwise"])
def test_a_run_learns_the_order(files: Path, tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardrec.train.runs import RunFolder
    from shardrec.train.session import run_rank

    monkeypatch.setattr("shardrec.train.session.write_curve", lambda report, path: path.touch())
    config = TrainConfig(
        data=str(files / "rows.parquet"),
        features=str(files / "features.yaml"),
        loss=loss,
        shuffle=2000,
        batch_size=240,
        embedding_dim=4,
        dense_layers=(4,),
        over_layers=(8,),
        epochs=4,
        evaluations=3,
        top_k=2,
        threads=1,
        out=str(tmp_path),
    )
    report = run_rank(config)
    assert report is not None
    ranking = report.final.ranking
    assert ranking is not None
    assert ranking.gauc is not None
    assert ranking.gauc > 0.75
    assert ranking.k == 2
    final = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))["final"]
    assert final["ndcg@2"] == ranking.ndcg
    metrics, _ = RunFolder(tmp_path).evaluate()
    assert metrics.to_mapping() == pytest.approx(report.final.to_mapping(), abs=1e-6)


def test_a_loss_over_groups_wants_groups(files: Path, tmp_path: Path) -> None:
    from shardrec.launch.ranks import Place
    from shardrec.train.source import Source

    with pytest.raises(ConfigError, match=r"loss \(--loss\) is 'softmax', .* no features \(--features\) name one"):
        TrainConfig(loss="softmax")
    spec = tmp_path / "features.yaml"
    spec.write_text(SPEC.replace("group: session", ""), encoding="utf-8")
    config = TrainConfig(loss="pairwise", data=str(files / "rows.parquet"), features=str(spec))
    with pytest.raises(ConfigError, match="names none: add group: COLUMN"):
        Source(config, Place(rank=0, world_size=1, device=torch.device("cpu"), threads=1))


def test_groups_stay_whole(files: Path) -> None:
    """In the held-out part, and where rows are shuffled with their groups."""
    from shardrec.data import load_spec, open_click_data

    spec = load_spec(files / "features.yaml")
    data = open_click_data(files / "rows.parquet", spec, holdout=0.2, shuffle=600, keep_groups=True)
    train = torch.cat([batch.groups for batch in data.train_batches(0, 1, 256) if batch.groups is not None])
    held = torch.cat([batch.groups for batch in data.holdout_batches(0, 1, 256) if batch.groups is not None])
    assert not set(train.tolist()) & set(held.tolist())
    assert 0.1 < len(held) / (len(train) + len(held)) < 0.3
    runs = 1 + int((train[1:] != train[:-1]).sum())
    assert runs <= len(train) / 6 + 2 * (len(train) // 600 + 1)
    assert not torch.equal(train, torch.cat([b.groups for b in data.train_batches(0, 1, 256, epoch=1)]))
