"""Several labels of a row: their losses, metrics and gradients, alone and over ranks; and a model that learns two."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchmetrics.functional as reference
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from werkzeug.test import Client

from shardrec.errors import ConfigError, ShardrecError
from shardrec.trainer.data import ClickSchema, SyntheticConfig, Task, area_under_roc, write_parquet
from shardrec.trainer.data.order import held_out
from shardrec.trainer.data.planted import PlantedModel, RandomStream
from shardrec.trainer.run import RunFolder, TrainConfig
from shardrec.trainer.run.losses import click_loss
from shardrec.trainer.run.task_metrics import label_weights, outputs_of, predictions, task_loss, task_metrics
from tests.ranks import raises_on_all, ranks

TASKS = (
    Task(name="click", optional=True),
    Task(name="mean", kind="regression", weight=0.5, optional=True),
    Task(name="huber", kind="regression", loss="huber"),
    Task(name="count", kind="regression", loss="poisson"),
    Task(name="shelf", kind="multiclass", classes=3, optional=True),
)
OUTPUTS = 7


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, labels of which some are missing, and weights of the rows, of which some are 0."""
    draws = torch.Generator().manual_seed(seed)
    click, shelf = torch.randint(2, (rows,), generator=draws), torch.randint(3, (rows,), generator=draws)
    numbers, count = torch.randn(rows, 2, generator=draws) * 2, torch.randint(5, (rows,), generator=draws)
    labels = torch.cat([click[:, None], numbers, count[:, None], shelf[:, None]], dim=1).float()
    missing = torch.rand(rows, len(TASKS), generator=draws) < 0.3
    labels[missing & torch.tensor([task.optional for task in TASKS])] = torch.nan
    weights = torch.rand(rows, generator=draws) * torch.randint(2, (rows,), generator=draws)
    return torch.randn(rows, OUTPUTS, generator=draws, requires_grad=True), labels, weights


@given(parts=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers(0, 99), weighted=st.booleans())
def test_ranks_add_up_to_the_weighted_mean_over_all_rows(parts: list[int], seed: int, weighted: bool) -> None:
    outputs, labels, weights = drawn(sum(parts), seed)
    row_weights = weights if weighted else None
    counted = torch.ones_like(weights) if row_weights is None else row_weights
    expected = outputs.sum() * 0
    for number, (task, columns) in enumerate(
        zip(TASKS, outputs.split([task.outputs for task in TASKS], 1), strict=True)
    ):
        rows = [row for row in range(len(labels)) if not labels[row, number].isnan()]
        losses = [_loss(task, columns[row], labels[row, number]) * counted[row] for row in rows]
        if sum(float(counted[row]) for row in rows):
            expected = expected + task.weight * sum(losses) / sum(counted[row] for row in rows)
    sums = label_weights(labels, row_weights).double().sum(0)
    total = outputs.sum() * 0
    for part, rows in zip(parts, torch.arange(len(labels)).split(parts), strict=True):
        own = None if row_weights is None else row_weights[rows]
        loss = task_loss(outputs[rows], labels[rows], own, TASKS, sums / len(parts))
        assert loss.shape == () and len(rows) == part
        total = total + loss / len(parts)  # as gradients are averaged
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(
        torch.autograd.grad(total, outputs, retain_graph=True), torch.autograd.grad(expected, outputs)
    )


def _loss(task: Task, outputs: Tensor, label: Tensor) -> Tensor:
    """Of one row, by hand."""
    if task.kind == "multiclass":
        return outputs.logsumexp(0) - outputs[int(label)]
    output = outputs[0]
    if task.kind == "binary":
        return -(label * output.sigmoid().log() + (1 - label) * (1 - output.sigmoid()).log())
    if task.loss == "poisson":
        return output.exp() - label * output
    error = (output - label).abs()
    return error.square() if task.loss is None else torch.where(error < 1, error.square() / 2, error - 0.5)


def test_a_binary_task_has_the_loss_of_a_single_label() -> None:
    outputs, labels, _ = drawn(50, 0)
    label = labels[:, :1].nan_to_num(0)
    torch.testing.assert_close(
        task_loss(outputs[:, :1], label, None, TASKS[:1]), click_loss(outputs[:, :1], label[:, 0])
    )


def test_metrics_are_those_of_torchmetrics() -> None:
    outputs, labels, weights = drawn(400, 1)
    groups = torch.arange(400) % 20
    metrics = task_metrics(outputs.detach(), labels, weights, groups, TASKS, 10)
    values, there = metrics.values, ~labels.isnan()
    click = labels[there[:, 0], 0].long()
    assert values["click/auc"] == pytest.approx(float(reference.auroc(outputs[there[:, 0], 0], click, task="binary")))
    assert values["click/gauc"] is not None
    assert values["click/rows"] == int(there[:, 0].sum()) < metrics.rows == 400
    for number, name in ((1, "mean"), (2, "huber"), (3, "count")):
        rows = there[:, number]
        predicted, label = predictions(outputs, 400, TASKS, "bce")[name][rows], labels[rows, number]
        assert values[f"{name}/mse"] == pytest.approx(float(reference.mean_squared_error(predicted, label)))
        assert values[f"{name}/mae"] == pytest.approx(float(reference.mean_absolute_error(predicted, label)))
        assert values[f"{name}/r2"] == pytest.approx(float(reference.r2_score(predicted, label)), abs=1e-5)
    shelf, chosen = labels[there[:, 4], 4].long(), outputs[there[:, 4], 4:]
    accuracy = reference.accuracy(chosen, shelf, task="multiclass", num_classes=3)
    assert values["shelf/accuracy"] == pytest.approx(float(accuracy))
    sums = label_weights(labels, weights).double().sum(0)
    assert values["loss"] == pytest.approx(float(task_loss(outputs, labels, weights, TASKS, sums)))
    json.dumps(metrics.to_mapping(), allow_nan=False)


def test_large_logits_are_ranked() -> None:
    """In float32 the probabilities of all of them are 1."""
    values = task_metrics(
        torch.tensor([[18.0], [19.0]]), torch.tensor([[0.0], [1.0]]), None, None, TASKS[:1], 10
    ).values
    assert values["click/auc"] == 1
    assert values["click/logloss"] == pytest.approx(9.0, abs=1e-6)


def test_metrics_without_two_kinds_of_labels() -> None:
    outputs, labels = torch.zeros(4, OUTPUTS), torch.full((4, len(TASKS)), torch.nan)
    labels[:, 0] = labels[:, 2] = labels[:, 3] = 1
    values = task_metrics(outputs, labels, None, None, TASKS, 10).values
    assert (values["click/auc"], values["huber/r2"], values["shelf/rows"]) == (None, None, 0)
    assert values["click/logloss"] == pytest.approx(math.log(2))
    labels[:, 0] = 0
    values = task_metrics(outputs, labels, None, torch.zeros(4, dtype=torch.int64), TASKS, 10).values
    assert (values["click/auc"], values.get("click/gauc"), values["click/click_rate"]) == (None, None, 0)
    with pytest.raises(ConfigError, match="has training diverged"):
        task_metrics(outputs / 0, labels, None, None, TASKS, 10)


def test_an_output_of_other_columns() -> None:
    with pytest.raises(ConfigError, match=r"returns \(4, 1\) for 4 rows and labels need 7 columns, click \(1\)"):
        outputs_of(torch.zeros(4, 1), 4, TASKS)
    assert outputs_of(torch.zeros(4), 4, TASKS[:1]).shape == (4, 1)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_tasks(tmp_path_factory.mktemp("planted"), 6_000)[0]


def two_tasks(folder: Path, rows: int) -> tuple[Path, dict[str, float]]:
    """Rows with the labels of two click models over the same features, their spec, and the best AUCs held out."""
    schema = ClickSchema(dense_names=("a", "b"), sparse_names=("c", "d", "e", "f"), num_embeddings=(20, 20, 30, 40))
    config = SyntheticConfig(rows=rows, seed=1, schema=schema, interaction_share=0.0, pairs=0)
    write_parquet(folder / "rows.parquet", rows, 1, config=config)
    models = [PlantedModel(config, task).rows(RandomStream.TRAIN, 0, rows) for task in (0, 1)]
    np.testing.assert_array_equal(models[0].ids, models[1].ids)
    logits = [np.log(each.probabilities / (1 - each.probabilities)) for each in models]
    assert abs(np.corrcoef(*logits)[0, 1]) < 0.5
    table, number = pq.read_table(folder / "rows.parquet"), np.arange(rows)
    quarter = number // 128 % 4  # of a global batch of 512 rows: about the rows of one rank
    like = pa.array(models[1].labels, mask=quarter == 0)
    columns = {"like": like, "importance": np.array([0.1, 1, 3, 10])[quarter], "minutes": models[1].probabilities * 3}
    columns |= {"shelf": (models[0].probabilities * 3).astype(np.int64), "number": number}
    for name, column in columns.items():
        table = table.append_column(name, column if isinstance(column, pa.Array) else pa.array(column))
    pq.write_table(table, folder / "rows.parquet")
    features = [{"name": name, "kind": "dense", "transform": "log"} for name in schema.dense_names]
    features += [
        {"name": name, "kind": "id", "ids": "hexadecimal", "rows": size}
        for name, size in zip(schema.sparse_names, schema.num_embeddings, strict=True)
    ]
    labels: list[dict[str, Any]] = [{"name": "click", "column": "label"}, {"name": "like", "optional": True}]
    spec: dict[str, Any] = {"labels": labels, "features": features}
    (folder / "two.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    labels[0]["weight"] = 2.0
    labels += [{"name": "minutes", "kind": "regression", "loss": "huber"}]
    labels += [{"name": "shelf", "kind": "multiclass", "classes": 3}]
    spec["weight"] = "importance"
    (folder / "four.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    held = held_out(np.arange(rows), 0.1)
    kept = [held, held & (quarter != 0)]
    best = {
        name: area_under_roc(each.labels[rows], each.probabilities[rows])
        for name, each, rows in zip(("click", "like"), models, kept, strict=True)
    }
    return folder, best


def config_of(folder: Path, out: Path, **changes: Any) -> TrainConfig:
    options = {
        "data": str(folder / "rows.parquet"),
        "features": str(folder / "four.yaml"),
        "model": "mmoe",
        "model_args": {"experts": 2, "tower": [8]},
        "embedding_dim": 4,
        "over_layers": (16,),
        "global_batch_size": 512,
        "evaluations": 2,
        "threads": 1,
        "out": str(out),
    }
    return TrainConfig(**{**options, **changes})


def trained(config: TrainConfig) -> Any:
    from unittest import mock

    from shardrec.trainer.run.session import run_rank

    with mock.patch("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch()):
        return run_rank(config)


@pytest.mark.some(1)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("accumulate", "pipeline"), [(1, 0), (3, 2)])
def test_ranks_learn_what_one_does_of_rows_with_weights(
    planted: Path, tmp_path: Path, accumulate: int, pipeline: int, count: int
) -> None:
    """Labels are missing and weights differ by the row: a mean of the ranks' means would be another gradient."""
    settings: dict[str, Any] = {"accumulate": accumulate, "pipeline": pipeline}
    settings |= {"optimizer": "sgd", "lr": 0.05, "embedding_optimizer": "sgd", "checkpoint": "none"}
    alone = trained(config_of(planted, tmp_path / "1", **settings))
    reports = ranks(count, trained, config_of(planted, tmp_path / str(count), **settings))
    assert reports[0].final.to_mapping() == pytest.approx(alone.final.to_mapping(), abs=1e-4)
    assert [point.tasks["loss"] for point in reports[0].curve] == pytest.approx(
        [point.tasks["loss"] for point in alone.curve], abs=1e-4
    )


def test_a_run_of_four_tasks_and_what_is_done_with_it(planted: Path, tmp_path: Path) -> None:
    """The report, its picture, eval, HTTP and inspect."""
    from shardrec.trainer.run.session import run_rank

    report = run_rank(config_of(planted, tmp_path, model="ple"))
    assert report is not None
    run = RunFolder(tmp_path)
    final = run.metrics["final"]
    assert final["click/auc"] > 0.6
    assert {"like/normalized_entropy", "minutes/r2", "shelf/accuracy"} <= {*final}
    assert run.metrics["curve"][-1]["tasks"]["click/auc"] == pytest.approx(final["click/auc"], abs=1e-6)
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert run.evaluate()[0].to_mapping() == pytest.approx(final, abs=1e-6)
    assert run.summary()["shelf/accuracy"] == f"{final['shelf/accuracy']:.4f}"
    row = {"a": 1, "b": None, "c": "f", "d": "1", "e": None, "f": "a0"}
    answer = Client(run.endpoint()).post("/predict", json={"rows": [row, row]}).get_json()["predictions"]
    assert [*answer] == ["click", "like", "minutes", "shelf"]
    assert 0 < answer["click"][0] == answer["click"][1] < 1
    assert sum(answer["shelf"][1]) == pytest.approx(1)


def test_a_label_outside_its_task_ends_all_ranks(planted: Path, tmp_path: Path) -> None:
    table = pq.read_table(planted / "rows.parquet")
    shelf = table["shelf"].to_pylist()
    shelf[4321] = 3
    table = table.set_column(table.column_names.index("shelf"), "shelf", pa.array(shelf))
    pq.write_table(table, tmp_path / "rows.parquet")
    config = config_of(tmp_path, tmp_path / "run", features=str(planted / "four.yaml"))
    raises_on_all(2, ShardrecError, "rows.parquet:4322: field .shelf.: value 3 is no class", trained, config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "model"}, "name labels, which have losses of their own, and loss"),
        ({"monitor": "auc"}, "monitor .--monitor. 'auc': leave both out"),
        ({"model": "dlrm", "model_args": {}}, r"returns \(512, 1\) for 512 rows and labels need 6 columns"),
    ],
)
def test_options_that_do_not_fit(planted: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    if changes.get("loss") == "model":
        changes = {**changes, "model": "two_tower", "model_args": {"item": ["c"]}}
    with pytest.raises(ConfigError, match=words):
        trained(config_of(planted, tmp_path, **changes))


@pytest.mark.slow
def test_mmoe_learns_two_planted_click_models(tmp_path: Path) -> None:
    folder, best = two_tasks(tmp_path, 250_000)
    report = trained(
        config_of(
            folder,
            tmp_path / "run",
            features=str(folder / "two.yaml"),
            model_args={},
            embedding_dim=8,
            over_layers=(64, 32),
            global_batch_size=1024,
            lr=2e-3,
            epochs=2,
        )
    )
    for name, auc in best.items():
        assert auc - 0.005 < report.final.values[f"{name}/auc"] < auc + 0.002
