"""Which ranks each operation of a model with replicas is among: those of a replica, those of a shard, or all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardrec
from shardrec.replicas import Replicas
from tests.models import click_model
from tests.modules.clicks import CONFIGS, ROWS, mixed_plan
from tests.modules.replicated import Steps, click_loss, replicated
from tests.ranks import ranks
from tests.scopes import Scopes

REPLICA, SHARD, ALL = {"replica"}, {"shard"}, {"all"}
IDS = {"header": REPLICA, "payload": REPLICA}
FORWARD = {**IDS, "output": REPLICA}
TRAINED = {
    **FORWARD,
    "header": {"replica", "all"},  # the ranks agree that the forward went well
    "gradient": REPLICA,
    "gradient all-reduce": ALL,
    "buffer broadcast": ALL,
}
AVERAGED = {"averaging of the replicas' tables": SHARD}

Walk = Callable[[Any], object]


def _loss(run: Any) -> Any:
    return click_loss(run.model, *run.batch)


def _trained(run: Any) -> None:
    _loss(run).backward()


def _scaled(run: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(run.model.dense_parameters(), lr=0.1)
    scaler.scale(_loss(run)).backward()
    scaler.step(optimizer)


def _evaluated(run: Any) -> None:
    run.model.eval()
    with torch.no_grad():
        _loss(run)


def _watched(run: Any) -> None:
    with shardrec.detect_anomaly(run.model):
        _trained(run)


def _accumulated(run: Any) -> None:
    with run.model.no_sync():
        _trained(run)


def _copied_state(run: Any) -> None:
    run.model.load_state_dict(run.model.state_dict())


WALKS: dict[str, tuple[Walk, dict[str, set[str]]]] = {
    "training": (_trained, TRAINED),
    "GradScaler": (_scaled, {**TRAINED, "look for infinite gradients": ALL}),
    "no_sync": (_accumulated, {name: scope for name, scope in TRAINED.items() if name != "gradient all-reduce"}),
    "detect_anomaly": (_watched, {**TRAINED, "error message": {"replica", "all"}}),
    "evaluation": (_evaluated, {**FORWARD, "buffer broadcast": REPLICA}),
    "sync_replicas": (lambda run: run.model.sync_replicas(), {**AVERAGED, "buffer broadcast": ALL}),
    "state_dict": (_copied_state, {}),
    "bad_ids": (lambda run: run.model.bad_ids(), {}),
    "save": (
        lambda run: shardrec.save_checkpoint(run.folder / "saved", run.model),
        {**AVERAGED, "buffer broadcast": ALL, "save": ALL},
    ),
    "load": (lambda run: shardrec.load_checkpoint(run.folder / "before", run.model), {"load": ALL}),
    "publish": (
        lambda run: shardrec.Publisher(run.model, run.folder / "published").publish(),
        {**AVERAGED, "buffer broadcast": ALL},  # a thread writes
    ),
}


class _Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model: nn.Module = click_model(CONFIGS)
        model.register_buffer("seen", torch.zeros(1))
        self.model = replicated(
            model, mixed_plan(2), replicas=Replicas(2, sync_every=9), transport="group", update="step"
        )
        steps = Steps(ROWS)
        bags, dense, labels = steps.draw()
        self.batch = dense[steps.mine], bags[dist.get_rank()], labels[steps.mine]


def test_each_feature_is_among_the_ranks_that_it_is_about(tmp_path: Path) -> None:
    def rank_main() -> dict[str, Any]:
        run = _Run(tmp_path)
        shardrec.save_checkpoint(tmp_path / "before", run.model)
        replica, place = divmod(dist.get_rank(), 2)
        scopes = {"replica": [2 * replica, 2 * replica + 1], "shard": [place, place + 2], "all": range(4)}
        seen = {}
        for name, (walk, _) in WALKS.items():
            run.model.train()
            with Scopes(scopes) as recorded:
                walk(run)
            seen[name] = recorded.of
        return seen

    for seen in ranks(4, rank_main):
        assert seen == {name: expected for name, (_, expected) in WALKS.items()}


def test_the_recorder_tells_another_scope() -> None:
    """Of a replica in place of all, and the other way round."""

    def rank_main() -> None:
        run = _Run(Path())
        context = run.model.context
        replica = dist.get_rank() // 2
        with Scopes({"replica": [2 * replica, 2 * replica + 1], "all": range(4)}) as recorded:
            context.headers.all_gather_text("")
            context.everyone.all_gather_text("")
        assert recorded.of == {"error message": {"replica", "all"}}

    ranks(4, rank_main)
