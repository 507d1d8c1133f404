"""Two trainers with two servers against the same model sharded by collectives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.rpc import EmbeddingServer, RpcWorld
from shardrec.rpc.messages import answer_calls
from shardrec.serve import quantize
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks
from tests.rpc.direct import served
from tests.rpc.jobs import batch, in_job, make_model, make_plan, train

STEPS = 50
FUSED = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def _whole(folder: Path, optimizer: str) -> dict[str, Tensor]:
    """Weights, states and step counts of a checkpoint, on one rank."""
    model = shardrec.shard(make_model(optimizer))
    shardrec.load_checkpoint(folder, model)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for collection in (model.bags, model.sequences):
        for name, fused in collection.fused_optimizers().items():
            for state in fused.states:
                (part,) = collection.fused_state(name, state).values()
                found[f"{name}.{state}"] = part.clone()
        found |= {f"{name}.steps": torch.tensor(count) for name, count in collection.step_counts().items()}
    return found


@pytest.mark.some(1, of="updates as by collectives")
@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [("rowwise_adagrad", 10), *(pytest.param(one, STEPS, marks=pytest.mark.slow) for one in FUSED)],
)
def test_staleness_0_equals_collectives(optimizer: str, steps: int, tmp_path: Path) -> None:
    plan = make_plan()

    def by_collectives() -> list[float]:
        model = shardrec.shard(make_model(optimizer), plan)
        losses = train(model, dist.get_rank(), range(steps))
        shardrec.save_checkpoint(tmp_path / "collectives", model)
        return losses

    def trainer(world: RpcWorld, rank: int, group: Any) -> list[float]:
        model = shardrec.shard(make_model(optimizer), plan, servers=shardrec.Servers(world.servers), group=group)
        losses = train(model, rank, range(steps // 2))
        shardrec.save_checkpoint(tmp_path / "half", model)
        shardrec.load_checkpoint(tmp_path / "half", model)
        losses += train(model, rank, range(steps // 2, steps))
        shardrec.save_checkpoint(tmp_path / "servers", model)
        return losses

    def with_servers() -> Any:
        servers = lambda rank: EmbeddingServer(make_model(optimizer), plan, rank)  # noqa: E731
        return in_job(str(tmp_path / "store"), trainer, servers, polls=False)

    expected = ranks(2, by_collectives)
    found = ranks(4, with_servers)[:2]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-6)
    wanted, got = _whole(tmp_path / "collectives", optimizer), _whole(tmp_path / "servers", optimizer)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def _train_at_step(model: Any, rank: int) -> list[float]:
    """Losses of steps of two batches each, scaled; the third's gradients are dropped, the fourth's are infinite."""
    dense, tables = torch.optim.SGD(model.dense_parameters(), 0.1), model.fused_optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for step in range(6):
        for micro in range(2):
            loss = (model(batch(rank, 2 * step + micro)) - 1.0).square().sum() / 12
            losses.append(float(loss.detach()))
            scaler.scale(loss * (torch.inf if (step, micro, rank) == (3, 1, 1) else 1.0)).backward()
        if step != 2:
            scaler.step(dense)
            scaler.step(tables)
            scaler.update()
        model.zero_grad()
    return losses


@pytest.mark.some(1, of="updates as by collectives")
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", pytest.param("adam", marks=pytest.mark.slow)])
def test_updates_at_the_step_equal_those_by_collectives(optimizer: str, tmp_path: Path) -> None:
    plan = make_plan()

    def by_collectives() -> list[float]:
        model = shardrec.shard(make_model(optimizer), plan, update="step")
        losses = _train_at_step(model, dist.get_rank())
        shardrec.save_checkpoint(tmp_path / "collectives", model)
        return losses

    def trainer(world: RpcWorld, rank: int, group: Any) -> list[float]:
        servers = shardrec.Servers(world.servers)
        model = shardrec.shard(make_model(optimizer), plan, servers=servers, group=group, update="step")
        losses = _train_at_step(model, rank)
        assert [one["updates"] for one in model.server_statistics()] == [4, 4]
        with pytest.raises(ConfigError, match="takes no RemoteModel"):
            shardrec.clip_grad_norm_(model, 1.0)
        with pytest.raises(ConfigError, match="staleness=1"):
            late = shardrec.Servers(world.servers, staleness=1)
            shardrec.shard(make_model(optimizer), plan, servers=late, group=group, update="step")
        shardrec.save_checkpoint(tmp_path / "servers", model)
        return losses

    def with_servers() -> Any:
        servers = lambda rank: EmbeddingServer(make_model(optimizer), plan, rank)  # noqa: E731
        return in_job(str(tmp_path / "store"), trainer, servers, polls=False)

    expected = ranks(2, by_collectives)
    found = ranks(4, with_servers)[:2]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    wanted, got = _whole(tmp_path / "collectives", optimizer), _whole(tmp_path / "servers", optimizer)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if name.endswith(".steps") and optimizer != "adam":
            continue  # a kernel does not count steps that its rule does not need
        torch.testing.assert_close(
            got[name], value, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "executor",
    # A compiler takes seconds in each rank; tests/compile has it beside collectives, and what differs is not traced.
    ["scripted", pytest.param("compiled", marks=pytest.mark.slow)],
)
def test_scripted_and_compiled_trainers_equal_the_eager_one(executor: str, tmp_path: Path) -> None:
    plan = make_plan()

    def trainer(world: RpcWorld, rank: int, group: Any) -> list[list[float]]:
        found = []
        for way in ("eager", executor):
            model = shardrec.shard(make_model("sgd"), plan, servers=shardrec.Servers(world.servers), group=group)
            called: Any = model
            if way == "scripted":
                called = shardrec.script(model)
            if way == "compiled":
                called = torch.compile(model, backend="eager", dynamic=True)
            losses = []
            for step in range(2):
                loss = (called(batch(0, step)) - 1.0).square().sum() / 6
                loss.backward()
                losses.append(float(loss.detach()))
            found.append(losses)
        with pytest.raises(ConfigError, match=r"tables are on 2 embedding server\(s\)"):
            quantize(model)
        return found

    def run() -> Any:
        servers = lambda rank: EmbeddingServer(make_model("sgd"), plan, rank)  # noqa: E731
        return in_job(str(tmp_path / "store"), trainer, servers, trainers=1, polls=False)

    eager, other = ranks(3, run)[0]
    assert eager == other
    assert eager[0] != eager[1]


def test_staleness_1_sees_all_updates_but_the_last(tmp_path: Path) -> None:
    plan = make_plan()

    def trainer(world: RpcWorld, rank: int, group: Any) -> list[tuple[int, int]]:
        model = shardrec.shard(
            make_model("sgd"), plan, servers=shardrec.Servers(world.servers, staleness=1), group=group
        )
        found = []
        for step in range(6):
            model(batch(0, step)).sum().backward()
            waiting = model._collectives._pushed
            found.append((len(waiting), model.server_statistics()[0]["updates"]))
        model.flush()
        found.append((len(waiting), model.server_statistics()[0]["updates"]))
        return found

    def run() -> Any:
        servers = lambda rank: EmbeddingServer(make_model("sgd"), plan, rank)  # noqa: E731
        return in_job(str(tmp_path / "store"), trainer, servers, trainers=1, polls=False)

    *found, last = ranks(3, run)[0]
    assert last == (0, 6)
    assert all(waiting == 1 for waiting, _ in found)
    assert all(step <= done <= step + 1 for step, (_, done) in enumerate(found))


def test_with_a_staleness_a_lookup_does_not_wait_for_the_update_before(tmp_path: Path) -> None:
    """Here the servers begin the first update when they have answered the second lookup."""
    plan = make_plan()
    cut = (*(table for table in plan.tables if not table.replicated), cuts.table_wise("bags.small", 5, 4, rank=0))
    plan = replace(plan, tables=cut)  # trainers update a replicated table themselves

    def server(rank: int) -> EmbeddingServer:
        late = EmbeddingServer(make_model("sgd"), plan, rank)
        answered, second = count(1), threading.Event()

        def answer(method: str, arguments: Sequence[Any]) -> Any:
            if method == "update":
                assert second.wait(60.0)
            answer = late._answer(method, arguments)
            if method == "lookup":
                answer.wait()
                if next(answered) == 2:
                    second.set()
            return answer

        answer_calls(answer)
        return late

    def trainer(world: RpcWorld, rank: int, group: Any) -> list[Tensor]:
        model = shardrec.shard(
            make_model("sgd"), plan, servers=shardrec.Servers(world.servers, staleness=1), group=group
        )
        outputs = []
        for _ in range(2):
            outputs.append(model(batch(0, 0)))
            outputs[-1].sum().backward()
        model.flush()
        outputs.append(model(batch(0, 0)))
        assert model.server_statistics()[0]["requests"] == len(outputs)
        return [output.detach() for output in outputs]

    def run() -> Any:
        return in_job(str(tmp_path / "store"), trainer, server, trainers=1, polls=False)

    first, second, third = ranks(3, run)[0]
    assert torch.equal(first, second)
    assert not torch.equal(second, third)


class _Fails(torch.autograd.Function):
    """Its first backward raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.backwards = 0
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.backwards += 1
        if ctx.backwards == 1:
            raise ValueError("on purpose")
        return gradient


class _Bags(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["a"])
        self.bags = EmbeddingBagCollection(tables=[config])
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": 1.0})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.bags(features).values()
        return pooled


@pytest.mark.parametrize("scripted", [False, True])
def test_the_second_backward_of_a_graph_updates_after_one_that_raised(scripted: bool) -> None:
    plan = ShardingPlan(tables=(cuts.table_wise("bags.t", 8, 4, rank=0),), topology=Topology())
    features = KeyedJaggedTensor(keys=["a"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with served(_Bags, plan) as (model, _):
        program = shardrec.script(model) if scripted else model
        before = model(features).detach().clone()
        late = _Fails.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]
        loss = program(features).sum() + late.sum()  # whose gradient is sent before the other one raises
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward(retain_graph=True)
        loss.backward()
        torch.testing.assert_close(model(features).detach(), before - 1)
