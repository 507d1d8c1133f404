"""Reports: the numbers in the table and in metrics.json, and that a picture is drawn."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from shardrec.launch.ranks import RankInfo
from shardrec.trainer.data import ClickMetrics, RankingMetrics
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.display import Announcer, duration
from shardrec.trainer.run.report import (
    CurvePoint,
    RunReport,
    environment,
    metrics_table,
    summary_line,
    write_curve,
    write_metrics,
)

FINAL = ClickMetrics(auc=0.8012, logloss=0.44, normalized_entropy=0.79, click_rate=0.25, rows=1000, auc_stderr=0.01)
BEST = dataclasses.replace(FINAL, auc=0.8051, logloss=0.43, normalized_entropy=0.77)


def report(optimum: ClickMetrics | None = BEST, points: int = 3) -> RunReport:
    curve = [
        CurvePoint(
            samples=1000 * n,
            seconds=0.5 * n,
            train_loss=None if n == 1 else 0.7 / n,
            auc=0.7 + 0.03 * n,
            logloss=0.5,
            normalized_entropy=0.9,
            rows=1000,
        )
        for n in range(1, points + 1)
    ]
    return RunReport(
        config=TrainConfig().to_mapping(),
        environment=environment(world_size=2, threads=1),
        source="generated rows",
        curve=curve,
        final=FINAL,
        optimum=optimum,
        samples=3000,
        steps=3,
        final_step=3,
        seconds=1.5,
        skipped={},
    )


def text(of: object) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(of)
    return captured.get()


def test_summary() -> None:
    assert summary_line(report()) == "AUC 0.8012, best possible 0.8051, gap 0.0039"
    assert summary_line(report(None)) == "AUC 0.8012, normalized entropy 0.7900, logloss 0.4400"


def test_table_has_the_optimum_only_where_it_is_known() -> None:
    shown = text(metrics_table(report()))
    assert [word in shown for word in ("best possible", "0.8012", "0.0039", "0.0200")] == [True] * 4
    assert "best possible" not in text(metrics_table(report(None)))


def test_logits_that_rank_have_no_metrics_of_probabilities(tmp_path: Path) -> None:
    ranking = RankingMetrics(gauc=0.91, ndcg=0.54, recall=0.74, hit_rate=0.74, k=10, groups=100)
    for loss, said in (("bce", True), ("softmax", False), ("model", False)):
        config = TrainConfig().to_mapping() | {"loss": loss}
        made = dataclasses.replace(report(None), config=config, final=dataclasses.replace(FINAL, ranking=ranking))
        shown = text(metrics_table(made))
        assert [word in shown for word in ("logloss", "normalized entropy")] == [said] * 2
        assert [word in shown for word in ("0.8012", "0.9100", "NDCG@10", "0.5400", "hit rate@10")] == [True] * 5
    write_curve(made, tmp_path / "curve.png")


def test_undefined_metrics_are_shown_as_such(tmp_path: Path) -> None:
    undefined = dataclasses.replace(FINAL, auc=math.nan, normalized_entropy=math.nan, auc_stderr=math.nan)
    made = dataclasses.replace(report(), final=undefined, optimum=undefined)
    made = dataclasses.replace(made, curve=[dataclasses.replace(point, auc=None) for point in made.curve])
    assert text(metrics_table(made)).count("undefined") == 6
    assert summary_line(made) == "AUC undefined, best possible undefined, gap undefined"
    write_metrics(made, tmp_path / "metrics.json")
    read = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert [read["final"]["auc"], read["optimum"]["normalized_entropy"], read["auc_gap"]] == [None] * 3
    write_curve(made, tmp_path / "curve.png")


def test_metrics_json(tmp_path: Path) -> None:
    write_metrics(report(), tmp_path / "metrics.json")
    read = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert read["final"]["auc"] == 0.8012
    assert abs(read["auc_gap"] - 0.0039) < 1e-12
    assert read["training"]["samples_per_second"] == 2000
    assert [point["samples"] for point in read["curve"]] == [1000, 2000, 3000]
    assert read["environment"]["ranks"] == 2
    assert read["environment"]["packages"]["torch"].startswith("2.")
    assert TrainConfig(**read["config"]) == TrainConfig()


def test_curve_is_a_picture_with_and_without_an_optimum(tmp_path: Path) -> None:
    sizes = []
    for name, drawn in (("a", report()), ("b", report(None, points=1))):
        path = tmp_path / f"{name}.png"
        with patch.object(Figure, "suptitle") as title:
            write_curve(drawn, path)
        assert title.call_args[0][0].startswith("held-out rows: AUC 0.8012, ")
        assert path.read_bytes().startswith(b"\x89PNG")
        sizes.append(path.stat().st_size)
    assert len(set(sizes)) == 2


@pytest.fixture
def undrawn() -> Iterator[None]:
    """What a figure would show is all that is looked at."""
    with patch.object(FigureCanvasAgg, "print_figure"):
        yield


@pytest.mark.usefixtures("undrawn")
def test_the_final_rows_are_named(tmp_path: Path) -> None:
    made = report(None)
    tested = dataclasses.replace(made, config={**made.config, "test": "test.csv"})
    assert "┃ test rows" in text(metrics_table(tested))
    with patch.object(Figure, "suptitle") as title:
        write_curve(tested, tmp_path / "curve.png")
    title.assert_called_once_with("test rows: AUC 0.8012, normalized entropy 0.7900, logloss 0.4400")
    of_feed = dataclasses.replace(made, config={**made.config, "data": "feed:rows"})
    with patch.object(Axes, "plot", autospec=True, side_effect=Axes.plot) as plot:
        write_curve(of_feed, tmp_path / "curve.png")
    assert {call.kwargs["label"] for call in plot.call_args_list} == {"training", "before training"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("loss", "title"), [("bce", "Logloss"), ("softmax", "softmax loss")])
def test_the_curve_is_of_the_loss(tmp_path: Path, loss: str, title: str) -> None:
    made = report()
    made = dataclasses.replace(made, config={**made.config, "loss": loss})
    with patch.object(Axes, "set", autospec=True, side_effect=Axes.set) as titles:
        write_curve(made, tmp_path / "curve.png")
    assert titles.call_args_list[0].kwargs["title"] == title


@pytest.mark.parametrize(("compiled", "said"), [("off", False), ("dense", True)])
def test_a_wait_for_the_compiler_is_said(compiled: str, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    rank_info = RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1)
    Announcer().run(TrainConfig(compile=compiled), rank_info, 64)
    assert ("torch.compile compiles in the first steps" in capsys.readouterr().out) == said


def test_duration() -> None:
    assert [duration(s) for s in (0.2, 59.6, 75.2, 3599.4, 3725)] == ["0:00", "1:00", "1:15", "59:59", "1:02:05"]


def test_worse_than_a_constant_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for entropy, said in ((0.999, False), (1.04, True)):
        final = dataclasses.replace(FINAL, normalized_entropy=entropy)
        Announcer().results(dataclasses.replace(report(), final=final), Path("runs/a"))
        shown = capsys.readouterr().out
        assert "normalized entropy │" in shown, "the table"
        assert ("normalized entropy 1.0400 is above 1" in shown) == said
        assert shown.splitlines()[-1].startswith("AUC 0.8012")


@pytest.mark.parametrize(("last", "said"), [(0.497, False), (0.5, False), (0.51, True)])
def test_a_curve_that_turns_up_is_said(last: float, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    made = report()
    worse = dataclasses.replace(made.curve[-1], samples=3000, logloss=last, normalized_entropy=0.95)
    Announcer().results(dataclasses.replace(made, curve=[*made.curve[:-1], worse]), Path("run"))
    shown = capsys.readouterr().out
    expected = "normalized entropy was 0.9000 after 1,000 samples and 0.9500 at the end: the model overfits. Give "
    assert (expected in shown) == said


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({}, ". Give --checkpoint best, for the weights of the best point; or --patience, to end sooner"),
        ({"patience": 2, "epochs": 9}, ". Give --checkpoint best, for the weights of the best point"),
        ({"checkpoint": "best"}, ". The final metrics are from step 2. Give --patience, to end sooner"),
        ({"checkpoint": "best", "patience": 1}, "from step 2. Give --embedding-weight-decay 1e-05"),
        (
            {"checkpoint": "best", "patience": 1, "embedding_weight_decay": 1e-4},
            "from step 2. Give --embedding-weight-decay 0.001",
        ),
        ({"checkpoint": "best", "epochs": 2}, "step 2. Give --patience, to end sooner; or fewer --epochs"),
    ],
)
def test_advice_is_what_was_not_given(
    given: dict[str, object], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = report()
    worse = dataclasses.replace(made.curve[-1], logloss=0.6)
    config = TrainConfig().changed(**given).to_mapping()
    overfitted = dataclasses.replace(made, curve=[*made.curve[:-1], worse], config=config, final_step=2)
    Announcer().results(overfitted, Path("run"))
    assert f"{advice}\n" in capsys.readouterr().out
