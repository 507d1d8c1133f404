"""`--elastic`: replicas of a run, each a command of its own, that die and come back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import ConfigError
from shardrec.train import TrainConfig
from tests.ranks import RankDied, ranks
from tests.train.broken_off import SMALL

STEPS, DIES, JOINS = 24, 5, 9
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def replica(config: TrainConfig, port: int, *, before_batch: Callable[[Any, Any, Any], None]) -> dict[str, Any]:
    """Train as a replica of one rank, in the place of this rank of the pool.

    Args:
        config: of the run.
        port: of the store.
        before_batch: is called with the run, the model and a client of the store before each batch is read.

    Returns: The ids and the places of its batches by step, what it has said, and the sums of its weights.
    """
    from shardrec.train import session
    from shardrec.train.dealing import DealtParts
    from shardrec.train.display import Announcer

    dist.destroy_process_group()
    for name in LAUNCHER:
        os.environ.pop(name, None)
    mark = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    batches: dict[int, list[float]] = {}
    lines: list[str] = []
    runs: list[Any] = []
    following = DealtParts.__next__

    def next_part(parts: Any) -> Any:
        runs[:] = [parts._run]
        before_batch(parts._run, parts._model, mark)
        part = following(parts)
        batches[parts._run.progress.steps] = part.batch.dense.sum(1).tolist()
        return part

    with (
        mock.patch.object(DealtParts, "__next__", next_part),
        mock.patch.object(session, "write_curve", lambda report, path: path.write_bytes(b"")),
        mock.patch("shardrec.data.synthetic._EXPECTATION_ROWS", 1_000),
        mock.patch.object(Announcer, "say", lambda self, text: lines.append(text)),
    ):
        report = session.run_rank(config, resume=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the pool to leave
    tables = [float(one.detach().double().sum()) for run in runs for one in run.model.parameters()]
    points = [point.samples for run in runs for point in run.progress.curve]
    return {"batches": batches, "lines": lines, "sums": tables, "points": points, "wrote": report is not None}


def test_replicas_come_and_go(store: Any, tmp_path: Path) -> None:
    """Three: one dies, one joins later. The rows of each step are those of the run, on the replicas that are there."""
    config = SMALL.changed(
        elastic=f"127.0.0.1:{store.port}", replicas=2, batch_size=32, out=str(tmp_path), checkpoint_every="6"
    )

    def rank_main(config: TrainConfig, port: int) -> dict[str, Any]:
        number = dist.get_rank()
        if number == 2:
            mark = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            wait_for(lambda: mark.check(["come"]))

        def before_batch(run: Any, model: Any, mark: Any) -> None:
            steps = run.progress.steps
            if number == 1 and steps == DIES:
                os._exit(9)
            if number == 0 and steps == JOINS and not mark.check(["come"]):
                mark.set("come", "")
                wait_for(lambda: model._group._watch.requests > model._group._handled)

        outcome = replica(config, port, before_batch=before_batch)
        if number == 0:
            wait_for(lambda: dist.PrefixStore("shardrec/", mark_of(port)).check(["ended"]))
            again = replica(config, port, before_batch=before_batch)
            assert again["batches"] == {}
            outcome["again"] = again["lines"][-1]
        return outcome

    def mark_of(port: int) -> Any:
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    outcomes = ranks(3, rank_main, config, store.port, expect_death={1}, timeout=25.0)
    print(outcomes)
