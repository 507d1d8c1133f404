"""Options of learning: what they do to a run, that ranks share it, and that a broken-off run resumes to the bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardrec.checkpoint.manifest import read_manifest
from shardrec.errors import ConfigError
from shardrec.lookup.row_optimizers import RowOptimizer
from shardrec.trainer.data import CRITEO_CARDINALITIES, write_criteo_tsv
from shardrec.trainer.run import RunFolder, TrainConfig
from shardrec.trainer.run.loop import Schedule, step_parts
from tests.campaign.results import differences
from tests.checkpoint.whole import contents
from tests.ranks import ranks
from tests.trainer.run.broken_off import SMALL, broken_off


def trained(config: TrainConfig, out: Path) -> dict[str, Tensor]:
    """What a run learns on this process's rank: the float32 tensors of its last checkpoint."""
    broken_off(config.changed(out=str(out)))
    return learned(out)


def learned(out: Path) -> dict[str, Tensor]:
    last = max((out / "checkpoints").iterdir())
    floats = [name for name, saved in read_manifest(last).tensors.items() if saved.dtype == "F32"]
    values = contents(last)
    return {name: values[name].view(torch.float32) for name in floats if not name.startswith("rank")}


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = 1e-5) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.allclose(value, theirs[name], rtol=1e-4, atol=atol), name


# ---------------------------------------------------------------------------------------------------------- accumulate


@pytest.mark.some(1)
@pytest.mark.parametrize("size", [1, 2])
def test_the_batches_of_a_step_are_one_batch(size: int, tmp_path: Path) -> None:
    """Also the last step, of two batches with 64 and 28 rows, and with clipping, which sees the sum alone."""

    def train(config: TrainConfig) -> list[int]:
        steps: list[int] = broken_off(config)
        return steps

    config = SMALL.changed(samples=1_500 - 4 * 64, embedding_optimizer="sgd", optimizer="sgd", clip=0.05, lr=0.5)
    one = config.changed(global_batch_size=256, out=str(tmp_path / "one"))
    parts = config.changed(global_batch_size=64, accumulate=4, out=str(tmp_path / "parts"))
    assert ranks(size, train, one) == ranks(size, train, parts) == [[1, 2, 3, 4, 5]] * size
    assert_close(learned(tmp_path / "parts"), learned(tmp_path / "one"))
    mine, theirs = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("parts", "one"))
    for point, other in zip(mine["curve"], theirs["curve"], strict=True):
        assert point["samples"] == other["samples"]
        assert point["logloss"] == pytest.approx(other["logloss"], abs=1e-5)


def test_weights_of_a_step_are_its_rows() -> None:
    class Rows:
        def __init__(self, size: int) -> None:
            self.size = size

    parts = list(step_parts(iter([Rows(4), Rows(4), Rows(2), Rows(3), Rows(1)]), 3))  # type: ignore[list-item]
    assert [part.ends for part in parts] == [False, False, True, False, True]
    assert [part.weight / 3 for part in parts] == pytest.approx([0.4, 0.4, 0.2, 0.75, 0.25])
    assert [part.weight for part in step_parts(iter([Rows(0), Rows(0)]), 2)] == [0, 0]  # type: ignore[list-item]


# ------------------------------------------------------------------------------------------------------ learning rates


@pytest.mark.some(2)
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("rows", ["generated", "of a file"])
def test_both_optimizers_learn_at_the_schedules_rates(
    update: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run of one epoch, as its optimizers get them, from the first step to the last."""
    rates: dict[str, list[float]] = {"dense": [], "tables": []}
    dense_step, table_step = torch.optim.Adam.step, RowOptimizer.step

    def of_dense(self: torch.optim.Adam, *arguments: Any) -> Any:
        rates["dense"].append(self.param_groups[0]["lr"])
        return dense_step(self, *arguments)

    def of_tables(self: RowOptimizer, *arguments: Any) -> None:
        rates["tables"].append(self.lr)
        table_step(self, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", of_dense)
    monkeypatch.setattr(RowOptimizer, "step", of_tables)
    config = SMALL.changed(samples=640, warmup=3, schedule="cosine", decay=0.5, lr=0.02, checkpoint="none")
    if update == "step":
        config = config.changed(clip=10.0)
    if rows == "of a file":
        write_criteo_tsv(tmp_path / "rows.tsv", 640, seed=1)
        config = config.changed(data=str(tmp_path / "rows.tsv"), samples=None, holdout_samples=None, batch_size=59)
    steps = len(broken_off(config.changed(out=str(tmp_path / "out"))))
    assert steps == 10
    schedule = Schedule(total_steps=steps, evaluations=1, warmup=3, shape="cosine", decay=0.5)
    expected = [schedule.rate(step) for step in range(steps)]
    assert expected[0] == pytest.approx(1 / 3)
    assert 0 < expected[-1] < 0.1
    assert rates["dense"] == pytest.approx([0.02 * rate for rate in expected])
    assert rates["tables"] == pytest.approx([0.01 * rate for rate in expected])
    curve = json.loads((tmp_path / "out" / "metrics.json").read_text())["curve"]
    assert len(curve) == 3  # spread over the steps, which are counted before the first


# --------------------------------------------------------------------------------------------- weight decay, precision


@pytest.mark.some(1)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_weight_decay_moves_weights_by_rate_and_penalty_beside_their_gradient(update: str, tmp_path: Path) -> None:
    """In one step of plain gradient descent; of a table, the rows that were looked up."""
    config = SMALL.changed(
        samples=64, optimizer="sgd", embedding_optimizer="sgd", schedule="constant", lr=0.5, embedding_lr=0.25
    )
    if update == "step":
        config = config.changed(clip=1e6)
    first = trained(config.changed(lr=1e-30, embedding_lr=1e-30), tmp_path / "first")
    plain = trained(config, tmp_path / "plain")
    norms = json.loads((tmp_path / "plain" / "metrics.json").read_text())["curve"][-1]["grad_norms"]
    assert norms.keys() == ({"dense", "tables"} if update == "step" else set())
    assert all(norm > 0 for norm in norms.values())
    decayed = trained(config.changed(weight_decay=0.1, embedding_weight_decay=0.2), tmp_path / "decayed")
    moved = 0
    for name, value in decayed.items():
        difference, expected = value - plain[name], -0.5 * 0.1 * first[name]
        if ".t_cat_" in name:
            looked_up = plain[name] != first[name]
            expected = torch.where(looked_up, -0.25 * 0.2 * first[name], 0.0)
            moved += int(looked_up.sum())
        torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-6)
    assert moved > 100


def test_bf16_trains_the_dense_layers_close_to_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardrec.trainer.run import losses

    dtypes: list[torch.dtype] = []
    loss = losses.click_loss

    def seen(logits: Tensor, labels: Tensor) -> Tensor:
        dtypes.append(logits.dtype)
        return loss(logits, labels)

    monkeypatch.setattr(losses, "click_loss", seen)
    half = trained(SMALL.changed(precision="bf16"), tmp_path / "bf16")
    assert set(dtypes) == {torch.bfloat16}
    whole = trained(SMALL, tmp_path / "fp32")
    assert dtypes[-1] is torch.float32
    assert any(not torch.equal(value, whole[name]) for name, value in half.items())
    assert_close(half, whole, atol=0.05)
    mine, theirs = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("bf16", "fp32"))
    for point, other in zip(mine["curve"], theirs["curve"], strict=True):
        assert point["logloss"] == pytest.approx(other["logloss"], rel=0.01)
        assert point["train_loss"] == pytest.approx(other["train_loss"], rel=0.01)


# --------------------------------------------------------------------------------------------------------- best weights

overfit = partial(broken_off, cardinalities=CRITEO_CARDINALITIES)

OVERFITTING = SMALL.changed(
    samples=640,
    epochs=4,
    decay=0.0,
    embedding_optimizer="adam",
    embedding_lr=0.05,
    evaluations=8,
    keep_checkpoints=1,
    checkpoint="best",
)


@pytest.mark.some(1)
@pytest.mark.parametrize("monitor", ["logloss", "auc"])
def test_the_best_weights_are_kept_and_tested(monitor: str, tmp_path: Path) -> None:
    config = OVERFITTING.changed(monitor=monitor, out=str(tmp_path), ema=0.5 if monitor == "auc" else None)
    overfit(config)
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    curve, final_step = metrics["curve"], metrics["training"]["final_step"]
    best = (max if monitor == "auc" else min)(curve, key=lambda point: point[monitor])
    assert curve.index(best) < len(curve) - 1, "the run overfits"
    assert final_step == 5 * (curve.index(best) + 1)
    assert metrics["final"][monitor] == best[monitor]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{step:012}" for step in (final_step, 40)]
    assert RunFolder(tmp_path).evaluate()[0].to_mapping()[monitor] == pytest.approx(best[monitor], abs=1e-7)


@pytest.mark.some(1)
@pytest.mark.parametrize(("monitor", "name"), [(None, "logloss"), ("ne", "normalized_entropy"), ("auc", "auc")])
def test_patience_goes_by_the_metric_that_is_monitored(monitor: str | None, name: str, tmp_path: Path) -> None:
    steps = overfit(OVERFITTING.changed(patience=1, monitor=monitor, out=str(tmp_path), checkpoint="none"))
    curve = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))["curve"]
    worths = [point[name] if monitor == "auc" else -point[name] for point in curve]
    assert len(steps) == (30 if monitor == "auc" else 10)
    assert worths[:-1] == sorted(worths[:-1])
    assert worths[-1] <= worths[-2]


def one_label(folder: Path) -> TrainConfig:
    """A run on files, whose held-out rows are none of them clicked."""
    for name, rows in (("train", [(row % 7, row % 3 == 0) for row in range(300)]), ("valid", [(1, False)] * 40)):
        lines = [f"{user},{int(clicked)}\n" for user, clicked in rows]
        (folder / f"{name}.csv").write_text("".join(["user,label\n", *lines]), encoding="utf-8")
    spec = "label: label\ngroup: user\nfeatures:\n  - {name: user, kind: id, rows: 9}\n"
    (folder / "spec.yaml").write_text(spec, encoding="utf-8")
    files = {"data": "train.csv", "valid": "valid.csv", "features": "spec.yaml", "out": "run"}
    return SMALL.changed(**{name: str(folder / file) for name, file in files.items()})


def test_held_out_rows_with_one_label(tmp_path: Path) -> None:
    config = one_label(tmp_path).changed(checkpoint="best", patience=9)
    assert broken_off(config) == [1, 2, 3, 4, 5]
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    assert {(point["auc"], point["normalized_entropy"], point["gauc"]) for point in metrics["curve"]} == {(None,) * 3}
    assert metrics["training"]["final_step"] in [1, 2, 3, 4, 5]
    assert (metrics["final"]["auc"], metrics["final"]["click_rate"]) == (None, 0)
    evaluated, _ = RunFolder(tmp_path / "run").evaluate()
    assert evaluated.to_mapping() == pytest.approx(metrics["final"])


@pytest.mark.parametrize(("monitor", "changes"), [("ne", {"patience": 9}), ("gauc", {"checkpoint": "best"})])
def test_a_monitor_that_the_held_out_rows_lack(monitor: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compare points by .* \(--monitor\), and the 40 held-out rows lack it"):
        broken_off(one_label(tmp_path).changed(monitor=monitor, **changes))
    assert not [*(tmp_path / "run" / "checkpoints").glob("*")], "before the first step"


def test_no_held_out_rows(tmp_path: Path) -> None:
    config = one_label(tmp_path)
    (tmp_path / "valid.csv").write_text("user,label\n", encoding="utf-8")
    assert broken_off(config) == [1, 2, 3, 4, 5]
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    assert {metrics["final"][name] for name in ("auc", "logloss", "click_rate")} == {None}
    assert metrics["final"]["rows"] == 0
    assert RunFolder(tmp_path / "run").evaluate()[0].to_mapping() == metrics["final"]
    with pytest.raises(ConfigError, match="and the 0 held-out rows lack it"):
        broken_off(config.changed(checkpoint="best", out=str(tmp_path / "best")))


@pytest.mark.slow
def test_a_run_that_is_broken_off_after_its_best_point_goes_on_from_there(tmp_path: Path) -> None:
    """The best checkpoint is one to resume from, so that the run cannot go on from before it."""
    config = OVERFITTING.changed(checkpoint_every="8")
    whole, broken = (config.changed(out=str(tmp_path / name)) for name in ("whole", "broken"))
    overfit(whole)
    best = json.loads((tmp_path / "whole" / "metrics.json").read_text())["training"]["final_step"]
    assert best % 8
    for cut, first in ((best + 1, best + 1), (best + 10, (best + 10) // 8 * 8 + 1)):
        overfit(broken, resume=True, cut_after=cut)
        assert overfit(broken, resume=True, cut_after=cut)[0] == first
    overfit(broken, resume=True)
    assert differences(tmp_path / "broken", tmp_path / "whole") == []
    again = config.changed(out=str(tmp_path / "broken"), checkpoint="last")
    assert overfit(again, resume=True) == []
    assert json.loads((tmp_path / "broken" / "metrics.json").read_text())["training"]["final_step"] == 40


def test_a_run_whose_best_point_was_before_it_kept_any_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OVERFITTING.changed(out=str(tmp_path), checkpoint="last", checkpoint_every="7")
    overfit(config, cut_after=36)
    overfit(config.changed(checkpoint="best"), resume=True)
    assert "the best point lacks a checkpoint: the final metrics are of the last" in capsys.readouterr().out
    assert json.loads((tmp_path / "metrics.json").read_text())["training"]["final_step"] == 40


def test_a_metric_of_groups_needs_groups(tmp_path: Path) -> None:
    for monitor in ("gauc", "ndcg"):
        with pytest.raises(ConfigError, match=rf"monitor \(--monitor\) is '{monitor}', a metric of rows in groups"):
            broken_off(SMALL.changed(monitor=monitor, out=str(tmp_path)))


# ----------------------------------------------------------------------------------------------------------- to the bit

RECIPE: dict[str, Any] = {
    "accumulate": 3,
    "clip": 0.05,
    "warmup": 4,
    "schedule": "cosine",
    "decay": 0.8,
    "weight_decay": 1e-3,
    "embedding_weight_decay": 1e-3,
    "precision": "bf16",
    "ema": 0.8,
}


@pytest.mark.some(1)
@pytest.mark.parametrize("size", [1, 2])
def test_a_recipe_that_is_broken_off_goes_on_as_if_nothing_had_happened(size: int, tmp_path: Path) -> None:
    def train(config: TrainConfig, resume: bool = False, cut_after: int | None = None) -> list[int]:
        steps: list[int] = broken_off(config, resume=resume, cut_after=cut_after)
        return steps

    config = SMALL.changed(samples=1_300, epochs=2, checkpoint_every="2", pipeline=2, global_batch_size=64, **RECIPE)
    whole, broken = (config.changed(out=str(tmp_path / name)) for name in ("whole", "broken"))
    assert ranks(size, train, whole)[0] == list(range(1, 15))
    ranks(size, train, broken, cut_after=9)
    assert ranks(size, train, broken, resume=True)[0] == list(range(9, 15))
    assert differences(tmp_path / "broken", tmp_path / "whole") == []


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_recipe(before: int, after: int, tmp_path: Path) -> None:
    """The averages of tables cut by rows and by columns, and of the dense part, among what is loaded."""

    def train(config: TrainConfig, cut_after: int | None = None) -> None:
        broken_off(config, resume=True, cut_after=cut_after)

    config = SMALL.changed(
        global_batch_size=64,
        checkpoint_every="2",
        constraint=("t_cat_1*=row_wise", "t_cat_2=column_wise", "t_cat_3=data_parallel"),
        **{**RECIPE, "precision": "fp32"},
    )
    whole, broken = (config.changed(out=str(tmp_path / name)) for name in ("whole", "broken"))
    ranks(1, train, whole)
    ranks(before, train, broken, cut_after=5)
    ranks(after, train, broken)
    mine, theirs = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("broken", "whole"))
    assert mine["final"]["logloss"] == pytest.approx(theirs["final"]["logloss"], abs=1e-4)
    assert [point["samples"] for point in mine["curve"]] == [point["samples"] for point in theirs["curve"]]
    for point, other in zip(mine["curve"], theirs["curve"], strict=True):
        assert point["grad_norms"] == pytest.approx(other["grad_norms"], rel=1e-3)


# ---------------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.some(1)
@pytest.mark.parametrize("field", ["optimizer", "embedding_optimizer"])
def test_every_optimizer_that_can_be_named_trains(field: str, tmp_path: Path) -> None:
    choices = TrainConfig.options()[field].choices
    assert "adamw" in choices
    seen: list[dict[str, Tensor]] = []
    for choice in choices:
        config = SMALL.changed(samples=128, weight_decay=0.1, embedding_weight_decay=0.1, **{field: choice})
        made = trained(config, tmp_path / choice)
        assert all(bool(value.isfinite().all()) for value in made.values())
        weights = {name: value for name, value in made.items() if name.startswith("model.")}
        assert not any(all(torch.equal(value, other[name]) for name, value in weights.items()) for other in seen)
        seen.append(weights)
