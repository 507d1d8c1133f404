"""Gradients of the dense part are means over the ranks in each executor, also where a loss is of tables alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardrec
from shardrec.layout import ShardingPlan, Topology
from shardrec.modules import shard
from tests.collective_counts import CountCollectives
from tests.executors import executed
from tests.modules.parts import (
    EmbeddingsAlone,
    Scorer,
    dense_of,
    features_of,
    plan_of,
)
from tests.ranks import ranks


def other_executors(executor: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plan = plan_of(world_size)
    plan = ShardingPlan(topology=plan.topology, tables=plan.tables[:2])
    model, reference = shard(Scorer(), plan), Scorer()
    run: Any = model
    if executor == "live":
        run = shardrec.script(model)
    elif executor != "eager":
        torch._dynamo.reset()
        shardrec.annotate_for_dynamo(model, mode=executor)
        run = torch.compile(model, backend="aot_eager", dynamic=True)
    optimizers = [
        torch.optim.AdamW([*one.left.parameters(), *one.right.parameters()], lr=0.1) for one in (model, reference)
    ]
    for step, scales in enumerate([(1.0, -1.0), (2.0, 1.0), (-1.0, 1.0)]):
        run(features_of(step, rank), scales[rank % 2]).backward()
        losses = [reference(features_of(step, other), scales[other % 2]) for other in range(world_size)]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, one), other in zip(dense_of(model).items(), dense_of(reference).values(), strict=True):
            torch.testing.assert_close(one, other, msg=f"step {step}: {name}")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "executor",
    # A compiler takes seconds in each rank; below, traced models have losses that one rank alone uses.
    ["eager", "live", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("boundary", "traced"))],
)
def test_no_executor_needs_a_wrapper(executor: str) -> None:
    ranks(2, other_executors, executor, timeout=120)


def embeddings_alone(executor: str, fused: bool) -> list[int]:
    rank = dist.get_rank()
    plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=plan_of(2).tables[:1])
    model, reference = shard(EmbeddingsAlone(fused), plan), EmbeddingsAlone(fused)
    run, counts = executed(model, executor), []
    for step, uses in enumerate([(True, False), (False, False), (False, True), (True, True)]):
        with CountCollectives() as counted:
            run(features_of(step, rank), uses[rank]).backward()
        counts.append(counted["all_reduce"])
        losses = [reference(features_of(step, other), uses[other]) for other in range(2)]
        torch.stack(losses).mean().backward()
        for name in ("weight", "bias"):
            gradient, expected = getattr(model.top, name).grad, getattr(reference.top, name).grad
            assert (gradient is None) == (expected is None), f"step {step}: {name}"
            if expected is not None:
                torch.testing.assert_close(gradient, expected, msg=f"step {step}: {name}")
        model.zero_grad()
        reference.zero_grad()
    if not fused and executor == "eager":
        loss = run(features_of(0, rank), False)
        with CountCollectives() as counted:
            torch.autograd.grad(loss, [*model.bags.parameters()])  # type: ignore[union-attr]
        assert counted["all_reduce"] == 0, "nothing is accumulated"
    return counts


@pytest.mark.parametrize(
    ("executor", "fused"), [("eager", True), ("eager", False), ("live script", False), ("traced", True)]
)
def test_a_loss_of_embeddings_alone_on_one_rank(executor: str, fused: bool) -> None:
    counts = ranks(2, embeddings_alone, executor, fused)
    assert counts == [[1, 1, 1, 1]] * 2
