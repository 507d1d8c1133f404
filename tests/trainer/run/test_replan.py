"""`--replan`: the plan of a run follows its data, and neither what is learned nor a run that goes on depends on it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from shardrec.checkpoint.manifest import read_manifest
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.trainer.data import CRITEO_CARDINALITIES, criteo_schema
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.display import Display
from tests.campaign.results import differences
from tests.ranks import ranks
from tests.trainer.run.broken_off import SMALL, broken_off

ON_ONE = "on_one.json"
REPLANNED = SMALL.changed(batch_size=32, replan=7, pipeline=2)


def on_one_rank(config: TrainConfig, folder: Path) -> str:
    """A plan that has all the tables on one rank, as a file."""
    schema = criteo_schema(max_embeddings=config.data.max_embeddings)
    tables = tuple(
        cuts.table_wise(f"sparse_arch.embedding_bag_collection.{table}", rows, config.model.embedding_dim, rank=0)
        for table, rows in zip(schema.tables, schema.num_embeddings, strict=True)
    )
    ShardingPlan(topology=Topology(ranks_per_host=2), tables=tables).save(folder / ON_ONE)
    return str(folder / ON_ONE)


def said_in(config: TrainConfig, *, fails: int = 0, **options: Any) -> list[str]:
    """What a run says of its plan; of a planner that fails at first."""
    from shardrec.checkpoint import replan
    from shardrec.trainer.run.display import Announcer

    lines: list[str] = []
    plan, failures = replan.paying_plan, iter(range(fails))

    def paying_plan(*args: Any, **kwargs: Any) -> Any:
        if next(failures, None) is not None:
            raise MemoryError("no memory left")
        return plan(*args, **kwargs)

    with (
        mock.patch.object(Announcer, "say", lambda self, text: lines.append(text)),
        mock.patch.object(replan, "paying_plan", paying_plan),
    ):
        broken_off(config, cardinalities=CRITEO_CARDINALITIES, **options)
    return [line for line in lines if line.startswith(("step", "since", "warning"))]


def curve(folder: Path) -> list[float]:
    points = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["curve"]
    return [point["logloss"] for point in points]


def test_the_plan_of_a_run_follows_its_data(tmp_path: Path) -> None:
    """Once, at the second time, for the first time the planner fails; beside a run whose plan is fixed."""
    config = REPLANNED.changed(plan=on_one_rank(REPLANNED, tmp_path))
    follows, fixed = (config.changed(out=str(tmp_path / name)) for name in ("follows", "fixed"))
    of_ranks = ranks(2, said_in, follows, fails=1)
    warning, moved, won = of_ranks[0]
    assert warning == "warning: the plan stays (rank 0: MemoryError: no memory left)"
    assert moved.startswith("step 14: moved ") and "predicted to take" in moved
    assert won.startswith("since the plan has changed, a step takes ")
    assert len(of_ranks[1]) == 3, "all ranks decide alike"
    assert ranks(2, said_in, fixed.changed(replan=None)) == [[], []]
    plans = [ShardingPlan.load(tmp_path / name / "plan.json") for name in ("follows", "fixed")]
    assert plans[1] == ShardingPlan.load(tmp_path / ON_ONE) != plans[0]
    assert curve(tmp_path / "follows") == pytest.approx(curve(tmp_path / "fixed"), rel=1e-5)
    (events,) = (tmp_path / "follows" / "tensorboard").iterdir()
    assert b"replan/moved_bytes" in events.read_bytes()


@pytest.mark.slow
def test_a_run_goes_on_under_the_plan_of_its_checkpoint(tmp_path: Path) -> None:
    config = REPLANNED.changed(plan=on_one_rank(REPLANNED, tmp_path), checkpoint_every="8")
    whole, broken = (config.changed(out=str(tmp_path / name)) for name in ("whole", "broken"))
    (moved, _), _ = ranks(2, said_in, whole)
    assert moved.startswith("step 7: moved ")
    ranks(2, said_in, broken, cut_after=13)
    assert ranks(2, said_in, broken, resume=True, cut_after=18) == [[], []], "nothing is to be moved"
    ranks(2, said_in, broken.changed(replan=None), resume=True)
    assert differences(tmp_path / "broken", tmp_path / "whole") == ["metrics.json differs"], "in the option"
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


def test_ordinary_steps_and_the_last_one_do_nothing_but_keep_batches() -> None:
    from shardrec.trainer.run.replan import Replanner

    progress = SimpleNamespace(steps=0, seconds=0.0, seconds_now=lambda: 0.0)
    run: Any = SimpleNamespace(progress=progress, announcer=SimpleNamespace(say=None), model=None)
    replanner = Replanner(run, 10, Display(), last_step=20)
    features: Any = object()
    for step in range(11, 21):
        progress.steps = step
        replanner.saw(features)
        replanner.after_step()


def test_what_watches_one_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replan \(--replan\) is 5 and detect_anomaly"):
        TrainConfig(replan=5, detect_anomaly="on")


@pytest.mark.slow
def test_the_checkpoint_of_the_best_point_has_the_plan_of_its_step(tmp_path: Path) -> None:
    """Where a point and a change of the plan fall on one step; a run that goes on from it has that plan."""
    config = REPLANNED.changed(plan=on_one_rank(REPLANNED, tmp_path), replan=8, checkpoint="best", out=str(tmp_path))
    ranks(2, said_in, config, cut_after=8)
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert ShardingPlan.from_json(read_manifest(saved).plan) != ShardingPlan.load(tmp_path / ON_ONE)
