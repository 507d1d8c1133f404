"""Whole runs, small ones: what they write, that they learn, and that ranks and plans do not change what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardrec.errors import AnomalyError, ConfigError, PlanError
from shardrec.layout import ShardingPlan
from shardrec.trainer.run import TrainConfig, load_config
from shardrec.trainer.run.report import RunReport
from tests.ranks import raises_on_all, ranks
from tests.trainer.run.broken_off import FEW_TABLES

TINY = TrainConfig(
    samples=24_000,
    holdout_samples=8_000,
    max_embeddings=100,
    embedding_dim=8,
    dense_layers=(16,),
    over_layers=(32,),
    batch_size=512,
    evaluations=3,
    threads=1,
)


def run(config: TrainConfig, **changes: Any) -> RunReport:
    """Train on this process's rank; the report is rank 0's."""
    from shardrec.trainer.run.session import run_rank

    report = run_rank(config.changed(**changes))
    assert report is not None
    return report


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunReport]:
    folder = tmp_path_factory.mktemp("run")
    with (
        mock.patch("shardrec.trainer.data.schema.CRITEO_CARDINALITIES", FEW_TABLES),
        mock.patch("shardrec.trainer.data.synthetic._EXPECTATION_ROWS", 50_000),
    ):
        return folder, run(TINY, out=str(folder))


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as training, as do rows to say what is best; `trained`, which is made before, has both."""
    monkeypatch.setattr("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch())
    monkeypatch.setattr("shardrec.trainer.data.synthetic._EXPECTATION_ROWS", 1_000)
    monkeypatch.setattr("shardrec.trainer.data.schema.CRITEO_CARDINALITIES", FEW_TABLES)


def test_learns(trained: tuple[Path, RunReport]) -> None:
    _, report = trained
    assert report.samples == 24_000
    assert report.steps == 47
    assert report.final.auc > 0.7
    assert report.final.normalized_entropy < 0.95
    assert report.optimum is not None
    assert report.gap == report.optimum.auc - report.final.auc > 0
    first, *_, last = report.curve
    assert first.samples < last.samples == 24_000
    assert first.logloss > last.logloss
    # The same held-out rows: the last point is the final result.
    assert (last.auc, last.rows) == (report.final.auc, 8_000)


def test_writes_its_results(trained: tuple[Path, RunReport]) -> None:
    folder, report = trained
    names = {path.name for path in folder.iterdir()}
    assert names == {"plan.json", "metrics.json", "curve.png", "config.yaml", "checkpoints", "tensorboard"}
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["final"]["auc"] == report.final.auc
    assert metrics["optimum"]["auc"] > 0.75
    assert len(metrics["curve"]) == 3
    assert load_config(folder / "config.yaml") == TINY.changed(out=str(folder), global_batch_size=512)
    assert len(ShardingPlan.load(folder / "plan.json").tables) == 6


def test_shows_plan_optimum_progress_and_gap(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = run(TINY, samples=2_000, out=str(tmp_path))
    shown, errors = capfd.readouterr()
    assert "Sharding plan: 6 tables on 1 rank" in shown
    assert "best possible on the held-out rows: AUC 0." in shown
    assert "2,000 samples  held out: AUC" in shown
    assert shown.splitlines()[-1].startswith(f"AUC {report.final.auc:.4f}, best possible 0.")
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert errors == ""


def test_same_config_same_result(trained: tuple[Path, RunReport], tmp_path: Path) -> None:
    assert run(TINY, out=str(tmp_path), checkpoint="none").final == trained[1].final
    assert not (tmp_path / "checkpoints").exists()


def test_the_checkpoint_gives_the_trained_model_back(trained: tuple[Path, RunReport]) -> None:
    import torch

    import shardrec
    from shardrec.launch.ranks import RankInfo
    from shardrec.trainer.data import criteo_schema
    from shardrec.trainer.run.held_out import evaluate
    from shardrec.trainer.run.model import build_model, fuse_optimizer
    from shardrec.trainer.run.source import Source

    folder, report = trained
    model = build_model(TINY, criteo_schema(max_embeddings=TINY.data.max_embeddings))
    fuse_optimizer(model, TINY)
    sharded = shardrec.shard(model, ShardingPlan.load(folder / "plan.json"))
    loaded = shardrec.Checkpoints(folder / "checkpoints").load_last(sharded)
    assert loaded is not None
    assert (loaded.step, loaded.extra["samples"]) == (report.steps, 24_000)
    cpu = torch.device("cpu")
    source = Source(TINY, RankInfo(rank=0, world_size=1, device=cpu, threads=1))
    assert evaluate(sharded, source.holdout_batches(), cpu).auc == pytest.approx(report.final.auc, abs=1e-9)


@pytest.mark.parametrize("good", [0, 100])
def test_batches_of_broken_rows_are_no_sample(tmp_path: Path, good: int) -> None:
    import torch

    from shardrec.errors import DataError
    from shardrec.launch.ranks import RankInfo
    from shardrec.trainer.run.source import Source

    (tmp_path / "rows.csv").write_text("click,shop\n" + "x,1\n" * 400 + "1,1\n" * good, encoding="utf-8")
    spec = "label: click\nfeatures: [{name: shop, kind: id, rows: 10}]\n"
    (tmp_path / "spec.yaml").write_text(spec, encoding="utf-8")
    config = TrainConfig(
        data=str(tmp_path / "rows.csv"),
        features=str(tmp_path / "spec.yaml"),
        global_batch_size=16,
        valid=str(tmp_path / "rows.csv"),
        on_bad_row="skip",
    )
    for rank in range(2):
        source = Source(config, RankInfo(rank=rank, world_size=2, device=torch.device("cpu"), threads=1))
        if good:
            assert [sample.stride() for sample in source.sampled(2)] == [8, 8]
        else:
            with pytest.raises(DataError, match=r"rows.csv: no row could be read \(400 bad label\): check that"):
                source.sampled(2)


def test_two_ranks_learn_what_one_does(trained: tuple[Path, RunReport], tmp_path: Path) -> None:
    def train(config: TrainConfig, out: str) -> float | None:
        from shardrec.trainer.data import schema, synthetic
        from shardrec.trainer.run import session

        # For this process only: it has neither the picture nor the rows to say what is best.
        with (
            mock.patch.object(session, "write_curve", lambda report, path: path.touch()),
            mock.patch.object(synthetic, "_EXPECTATION_ROWS", 1_000),
            mock.patch.object(schema, "CRITEO_CARDINALITIES", FEW_TABLES),
        ):
            report = session.run_rank(config.changed(out=out))
        return None if report is None else report.final.auc

    halves = TINY.changed(batch_size=TINY.learning.batch_size // 2, constraint=("t_*=row_wise",))
    one, other = ranks(2, train, halves, str(tmp_path))
    assert other is None
    assert one == pytest.approx(trained[1].final.auc, abs=2e-3)
    plan = ShardingPlan.load(tmp_path / "plan.json")
    assert {table.cut for table in plan.tables} == {"row_wise"}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"model": "dcn"},
        {"embedding_optimizer": "adam", "embedding_lr": 0.01, "optimizer": "adagrad"},
        {"embedding_optimizer": "adagrad", "optimizer": "sgd", "decay": 0.0},
        {"embedding_optimizer": "sgd", "embedding_lr": 1.0},
        {"epochs": 2, "samples": 1_500},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_other_models_and_optimizers(tmp_path: Path, changes: dict[str, Any]) -> None:
    small = {"samples": 3_000, "holdout_samples": 2_000, "evaluations": 1}
    report = run(TINY, **{**small, **changes}, out=str(tmp_path), checkpoint="none")
    assert report.samples == 3_000
    assert 0.4 < report.final.auc < 0.9


def test_a_plan_from_a_file(trained: tuple[Path, RunReport], tmp_path: Path) -> None:
    plan = str(trained[0] / "plan.json")
    report = run(TINY, plan=plan, samples=1_000, out=str(tmp_path), checkpoint="none")
    assert report.steps == 2
    with pytest.raises(PlanError, match="in the model and"):
        run(TINY, plan=plan, max_embeddings=50, out=str(tmp_path))
    with pytest.raises(ConfigError, match=r"plan \(--plan\) is .*No such file"):
        run(TINY, plan=str(tmp_path / "none.json"), out=str(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"out \(--out\) is .*Give a folder to write to"):
        run(TINY, samples=600, out=str(tmp_path / "file"))
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    raises_on_all(2, ConfigError, "Give a folder to write to", run, TINY, samples=600, out=str(tmp_path / "run"))


def test_a_constraint_for_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown table 'u_\*'"):
        run(TINY, constraint=("u_*=row_wise",), out=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dense", "full"])
def test_a_compiled_run_learns_the_same(mode: str, trained: tuple[Path, RunReport], tmp_path: Path) -> None:
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    report = run(TINY, out=str(tmp_path), compile=mode)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert report.final.auc == pytest.approx(trained[1].final.auc, abs=2e-3)
    torch._dynamo.reset()


def test_an_anomaly_ends_the_run_with_the_tables_name(tmp_path: Path) -> None:
    diverging = {"embedding_optimizer": "sgd", "embedding_lr": 1e38, "out": str(tmp_path)}
    with pytest.raises(AnomalyError, match=r"table '\S*t_cat_\d+'"):
        run(TINY, detect_anomaly="on", **diverging)
    with pytest.raises(ConfigError, match=r"detect_anomaly .* is 'on', which cannot look into one graph of compile"):
        TINY.changed(detect_anomaly="on", compile="full")
