"""`--elastic`: replicas of a run, each a command of its own, that die and come back."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import ConfigError
from shardrec.launch.ranks import RankInfo
from shardrec.layout import ShardingPlan, Topology
from shardrec.trainer.run import TrainConfig, folder, session
from shardrec.trainer.run.folder import locked
from shardrec.trainer.run.source import Source
from tests.ranks import RankDied, ranks
from tests.trainer.run.broken_off import FEW_TABLES, SMALL

DIES, JOINS = 5, 9
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def keys_of(batch: Any) -> list[float]:
    """Of a batch's rows, numbers that tell them apart."""
    return batch.dense.double().pow(2).sum(1).tolist()  # type: ignore[no-any-return]


def replica(config: TrainConfig, before_batch: Callable[[Any, Any], None]) -> dict[str, Any]:
    """Train as a replica of one rank, in the place of this rank of the pool.

    Args:
        config: of the run.
        before_batch: is called with the run and the model before each batch is read.

    Returns: The keys of its rows by step, what it has said, the sums of its weights, the samples of its points, and
        whether it has written the results.
    """
    from shardrec.trainer.run.display import Announcer
    from shardrec.trainer.run.prefetch import DealtParts

    if dist.is_initialized():
        dist.destroy_process_group()
    for name in LAUNCHER:
        os.environ.pop(name, None)
    batches: dict[int, list[float]] = {}
    lines: list[str] = []
    runs: list[Any] = []
    following = DealtParts.__next__

    def next_part(parts: Any) -> Any:
        runs[:] = [parts._run]
        before_batch(parts._run, parts._model)
        part = following(parts)
        batches[parts._run.progress.steps] = keys_of(part.batch)
        return part

    with (
        mock.patch.object(DealtParts, "__next__", next_part),
        mock.patch.object(session, "write_curve", lambda report, path: path.write_bytes(b"")),
        mock.patch("shardrec.trainer.data.synthetic._EXPECTATION_ROWS", 1_000),
        mock.patch("shardrec.trainer.data.schema.CRITEO_CARDINALITIES", FEW_TABLES),
        mock.patch.object(Announcer, "say", lambda self, text: lines.append(text)),
    ):
        report = session.run_rank(config, resume=True)
    tables = [float(one.detach().double().sum()) for run in runs for one in run.model.parameters()]
    points = [point.samples for run in runs for point in run.progress.curve]
    return {"batches": batches, "lines": lines, "sums": tables, "samples": points, "wrote": report is not None}


@pytest.mark.usefixtures("few_tables")
def test_replicas_come_and_go(store: Any, tmp_path: Path) -> None:
    """One of two dies, another one joins. The rows of each step are those of the run, on the replicas that are there;
    the first one saves and writes, and one that is started after the end has nothing to do."""
    config = SMALL.changed(
        elastic=f"127.0.0.1:{store.port}", replicas=2, batch_size=32, out=str(tmp_path), checkpoint_every="6"
    )

    def rank_main(config: TrainConfig, port: int) -> dict[str, Any]:
        number = dist.get_rank()
        mark = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        if number == 2:
            wait_for(lambda: mark.check(["come"]))

        def before_batch(run: Any, model: Any) -> None:
            steps = run.progress.steps
            if number == 1 and steps == DIES:
                os._exit(9)
            if number == 0 and steps == JOINS:
                mark.set("come", "")
                wait_for(lambda: model._group._watch.requests > model._group._handled)

        outcome = replica(config, before_batch)
        if number == 2:
            wait_for(lambda: mark.check(["shardrec//ended"]))
            late = replica(config, before_batch)
            assert not late["batches"]
            outcome["late"] = late["lines"]
        return outcome

    outcomes = ranks(3, rank_main, config, store.port, expect_death={1}, timeout=240.0)
    assert isinstance(outcomes[1], RankDied)
    first, late = outcomes[0], outcomes[2]
    assert isinstance(first, dict), first
    assert isinstance(late, dict), late
    alone = RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1)
    whole = [keys_of(batch) for batch in Source(SMALL, alone).train_batches()]
    assert list(first["batches"]) == [*range(len(whole))]
    assert list(late["batches"]) == [*range(JOINS + 1, len(whole))]
    for step, keys in enumerate(whole):
        if step < DIES:
            assert len(first["batches"][step]) == 32
            assert not Counter(first["batches"][step]) - Counter(keys)
        else:
            assert Counter(first["batches"][step] + late["batches"].get(step, [])) == Counter(keys)
            assert len(first["batches"][step]) == (len(keys) if step <= JOINS else len(keys) // 2)
    assert first["sums"] == late["sums"]
    assert first["samples"] == late["samples"] == [512, 1024, 1500]
    assert late["late"][-1] == f"the run at {config.to_mapping()['elastic']} has ended: there is nothing to join"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000000000018",
        "step-000000000024",
    ]
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert (metrics["training"]["steps"], metrics["training"]["samples"]) == (24, 1500)
    assert first["wrote"] and not late["wrote"]


def test_one_that_differs_from_those_that_live_changes_nothing(store: Any, tmp_path: Path) -> None:
    elastic = f"127.0.0.1:{store.port}"
    config = SMALL.changed(elastic=elastic, replicas=2, global_batch_size=64, out=str(tmp_path))
    ShardingPlan(topology=Topology(ranks_per_host=2), tables={}).save(tmp_path / "plan.json")
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with locked(tmp_path, 0.0, "shared"):  # as one that trains
        for options, words in (
            ({"sync_every": 3}, r"sync_every \(--sync-every\) is 3 and the run in .* was started with 1: leave it out"),
            ({"constraint": ("t_*=row_wise",)}, r"constraint \(--constraint\) is"),
            ({"elastic": f"{elastic}/other"}, "elastic"),
            ({"elastic": None, "replicas": 1}, "another run writes to it"),
            ({}, r"the replicas of the run in .* have 2 rank\(s\) each, and this one 1: start 2"),
        ):
            with pytest.raises(ConfigError, match=words), mock.patch.object(folder, "_LOCK_S", 0.0):
                session.run_rank(config.changed(**options), resume=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_rows_of_a_step_do_not_depend_on_the_replicas_there() -> None:
    alone = RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1)
    source = Source(SMALL.changed(global_batch_size=65), alone)
    thirds = [source.train_batches(replica=number, replicas=3) for number in range(3)]
    sizes = [sum(batch.size for batch in batches) for batches in zip(*thirds, strict=True)]
    assert [source.step_rows(step) for step in range(source.steps)] == sizes
    assert sum(sizes) == source.train_rows == 1500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 2}, r"replicas \(--replicas\) is 2, without elastic \(--elastic\): give both"),
        ({"elastic": "host:1"}, r"replicas \(--replicas\) is 1: it should be greater than or equal to 2"),
        ({"elastic": "host:1", "replicas": 2}, r"out \(--out\) is left out: name the folder that all replicas"),
        ({"elastic": "host:1", "replicas": 2, "clip": 1.0}, r"clip \(--clip\) is 1.0, which does not go with replicas"),
        ({"elastic": "host:1", "replicas": 2, "data": "feed:rows"}, "would not see its files"),
        ({"elastic": "host:1", "replicas": 2, "checkpoint": "best"}, "which each replica would decide: give 'last'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**options)
