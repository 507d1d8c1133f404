"""Elastic replicas: those that are left go on when one dies, and one that joins takes their state."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.checkpoint import Checkpoints
from shardrec.errors import ConfigError, PeerError, PlanError
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from shardrec.replicas import Replicas
from shardrec.replicas.elastic import Broken
from shardrec.replicas.elastic_model import ElasticModel
from tests.batches import Bags, joined, random_bags
from tests.cuda_ranks import DEVICES, WORLDS, cuda_ranks
from tests.models import apply_optimizer_in_backward, click_model
from tests.modules.clicks import CONFIGS, ROWS, assert_dense_equal, assert_tables_equal, dense_parameters, mixed_plan
from tests.ranks import RankDied, ranks

PATIENCE_S = 0.7
SIZE = 3


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def batch_of(step: int, replica: int, rank: int = 0) -> tuple[Tensor, Bags, Tensor]:
    seed = 100 * step + 10 * replica + rank
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(SIZE, 3, generator=generator)
    labels = torch.rand(SIZE, generator=generator).round()
    return dense, random_bags(Random(seed), ROWS, SIZE, shuffled=False), labels


def loss_of(model: nn.Module, parts: list[tuple[Tensor, Bags, Tensor]]) -> Tensor:
    dense, bags, labels = zip(*parts, strict=True)
    device = next(model.parameters()).device
    features = (joined(list(bags)) if len(bags) > 1 else bags[0]).kjt().to(device)
    logits = model(torch.cat(dense).to(device), features)
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.cat(labels).to(device))


def groups_of(size: int) -> list[Any]:
    return [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]


class Replica:
    """A replica of some ranks of the pool, trained by Adam (dense part) beside its tables' optimizer."""

    def __init__(
        self,
        address: str,
        size: int = 1,
        *,
        seed: int = 0,
        optimizer: str = "sgd",
        device: str = "cpu",
        groups: list[Any] | None = None,
        **options: Any,
    ) -> None:
        groups = groups or groups_of(size)
        self.number, self.rank = divmod(dist.get_rank(), size)
        elastic = Replicas(**{"count": 2, "elastic": address, "patience_s": PATIENCE_S, **options})
        made = shard(
            click_model(CONFIGS, optimizer=optimizer, seed=seed),
            mixed_plan(size),
            replicas=elastic,
            group=groups[self.number],
            device=device,
        )
        assert isinstance(made, ElasticModel)
        self.model = made
        self.dense = torch.optim.Adam(dense_parameters(made), lr=0.05)

    def step(self) -> float:
        loss = loss_of(self.model, [batch_of(self.model.steps, self.number, self.rank)])
        loss.backward()
        self.dense.step()
        self.dense.zero_grad()
        return loss.item()

    def state(self) -> list[Tensor]:
        """All that replicas have alike after an averaging."""
        adam = [value for entry in self.dense.state.values() for value in entry.values()]
        return [one.detach().clone() for one in (*self.model._tensors(), *self.model._states(), *adam)]


def values_of(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def assert_alike(states: list[list[Tensor]]) -> None:
    for state in states[1:]:
        assert all(torch.equal(one, other) for one, other in zip(states[0], state, strict=True))


def dying(owner: Any, method: str, moment: int) -> None:
    """From now on, this rank ends before call number ``moment`` of a method."""
    real, count = getattr(owner, method), iter(range(1000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count) == moment:
            os._exit(9)
        return real(*args, **kwargs)

    setattr(owner, method, call)


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_the_others_go_on_and_one_that_joins_has_their_state(store: Any) -> None:
    """With SGD and an averaging in each step, replicas are the unsharded model on the batches that were there."""

    def rank_main(address: str) -> Any:
        replica = Replica(address, seed=dist.get_rank() // 2)
        model, mark = replica.model, dist.distributed_c10d._get_default_store()
        if replica.number == 2:
            wait_for(lambda: mark.check(["come"]))
        model.join(replica.dense)
        first, there = model.steps, []
        while model.steps < 8:
            if replica.number == 1 and model.steps == 3:
                loss_of(model, [batch_of(3, 1)])  # its tables have been averaged then
                os._exit(9)
            replica.step()
            if replica.number == 0 and model.steps == 5:
                mark.set("come", "")
                wait_for(lambda: model._group._watch.requests > model._group._handled)
            there.append(model.replicas)
        model.sync_replicas()
        if replica.number == 0:
            reference = click_model(CONFIGS)
            adam = torch.optim.Adam(dense_parameters(reference), lr=0.05)
            for step, count in enumerate(there):
                others = [0] if count == 1 else [0, 1] if step < 3 else [0, 2]
                loss_of(reference, [batch_of(step, number) for number in others]).backward()
                adam.step()
                adam.zero_grad()
            assert_tables_equal(model.module, reference, "tables")
            assert_dense_equal(model, reference, "dense")
        return first, there, replica.state()

    outcomes = ranks(3, rank_main, f"127.0.0.1:{store.port}", expect_death={1}, timeout=25.0)
    assert isinstance(outcomes.pop(1), RankDied)
    (first, there, state), (_, late, taken) = values_of(outcomes)
    assert (first, there, late) == (0, [2, 2, 2, 1, 1, 1, 2, 2], [2, 2])
    assert_alike([state, taken])


def come_back(address: str, device: str) -> None:
    """The second replica goes after three steps, as one does whose process has ended, and joins anew for the last."""
    store, number, groups = dist.distributed_c10d._get_default_store(), dist.get_rank(), groups_of(1)
    options: Any = {"groups": groups, "device": device, "patience_s": 4.0}  # code is loaded in the first step
    replica, there = Replica(address, **options), list[int]()
    replica.model.join(replica.dense)
    while replica.model.steps < 8:
        replica.step()
        there.append(replica.model.replicas)
        if number == 1 and replica.model.steps == 3:
            replica.model.begin()  # in which the tables are averaged
            del replica
            gc.collect()
            wait_for(lambda: store.check(["alone"]))
            replica = Replica(address, seed=1, **options)
            replica.model.join(replica.dense)
        if number == 0 and replica.model.steps == 5:
            store.set("alone", "")
            group = replica.model._group
            wait_for(partial(lambda group: group._watch.requests > group._handled, group))
    replica.model.sync_replicas()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, [one.cpu() for one in replica.state()], group=dist.new_group(backend="gloo"))
    assert_alike(states)
    assert there == ([2, 2, 2, 1, 1, 1, 2, 2] if number == 0 else [2] * 5), there
    if number == 0:
        reference = click_model(CONFIGS)
        adam = torch.optim.Adam(dense_parameters(reference), lr=0.05)
        for step, count in enumerate(there):
            loss_of(reference, [batch_of(step, number) for number in range(count)]).backward()
            adam.step()
            adam.zero_grad()
        assert_tables_equal(replica.model.module, reference, "tables", atol=1e-4)
        assert_dense_equal(replica.model, reference, "dense", atol=1e-4)


@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("world_size", WORLDS[1:])
def test_on_cuda_one_that_comes_back_has_the_other_s_state(world_size: int, store: Any) -> None:
    cuda_ranks(world_size, come_back, f"127.0.0.1:{store.port}", "cuda")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("method", "moment"),
    [
        ("meet", 1),  # between two steps, for the first time
        ("_sum", 0),  # of the first averaging of gradients: before its header
        ("_sum", 1),  # after its header
        ("average_tables", 0),
        ("_make_column", 1),
    ],
)
def test_one_that_dies_anywhere(method: str, moment: int, store: Any) -> None:
    """The other goes on with its own batches; one that joins afterwards has its state."""

    def rank_main(address: str) -> Any:
        replica = Replica(address, optimizer="adagrad", sync_every=2)
        model, mark = replica.model, dist.distributed_c10d._get_default_store()
        if replica.number == 2:
            wait_for(lambda: mark.check(["come"]))
        if replica.number == 1:
            dying(model._group, method, moment)
        model.join(replica.dense)
        while model.steps < 12:
            if replica.number == 0 and model.steps == 4:
                mark.set("come", "")
                wait_for(lambda: model._group._watch.requests > model._group._handled)
            replica.step()
        model.sync_replicas()
        return replica.state()

    outcomes = ranks(3, rank_main, f"127.0.0.1:{store.port}", expect_death={1}, timeout=60.0)
    assert isinstance(outcomes.pop(1), RankDied)
    assert_alike(values_of(outcomes))


@pytest.mark.some(1)
@pytest.mark.parametrize("method", ["average_gradients", "average_tables"])
def test_one_that_has_failed_where_the_other_has_not(method: str, store: Any) -> None:
    """It is behind: it takes the other's state, and adds no gradients to the step in which the other is."""

    def rank_main(address: str) -> Any:
        replica = Replica(address, optimizer="adagrad")
        model = replica.model
        model.join(replica.dense)
        cut = next(table for name, table in model.named_parameters() if "movies" in name)
        if replica.number == 1:
            real, count = getattr(model._group, method), iter(range(100))

            def failing(*given: Any) -> Any:
                result = real(*given)
                if next(count) == 3:
                    cut.grad = torch.full_like(cut, 1e9)  # as of a table that an ordinary optimizer trains
                    raise Broken
                return result

            setattr(model._group, method, failing)
        weights = []
        average = model._group.average_gradients

        def weighed(*given: Any) -> Any:
            weights.append(given[2])
            return average(*given)

        model._group.average_gradients = weighed  # type: ignore[method-assign]
        while model.steps < 8:
            replica.step()
        model.sync_replicas()
        assert cut.grad is None, "that of the step that was lost"
        return weights, replica.state()

    (all_ones, state), (weights, other) = ranks(2, rank_main, f"127.0.0.1:{store.port}", timeout=60.0)
    assert set(all_ones) == {1.0}
    assert weights.count(0.0) == (method == "average_gradients")
    assert_alike([state, other])


def test_replicas_that_do_not_do_the_same(store: Any) -> None:
    """A parameter that only one trains counts as zero in the other. Another operation raises an error in both, where
    gloo would end the process that gets more than it waits for."""

    def rank_main(address: str) -> Any:
        replica = Replica(address, sync_every=5)
        model = replica.model
        send, sent = model._send, list[int]()

        def send_late(place: int) -> None:
            sent.append(place)
            time.sleep(0.3)
            send(place)

        model._send = send_late  # type: ignore[method-assign]
        bias = dense_parameters(model)[0].requires_grad_(replica.number == 0)
        model.join(replica.dense)
        assert len(sent) < 2, "a sender may take its time"
        before = bias.detach().clone()
        replica.step()
        assert not torch.equal(bias, before)
        alike = [one.detach().clone() for one in dense_parameters(model)]
        with pytest.raises(ConfigError, match=r"averages \d+ elements of .*, and another replica something else"):
            model.sync_replicas() if replica.number else replica.step()
        return alike

    assert_alike(ranks(2, rank_main, f"127.0.0.1:{store.port}"))


def test_replicas_of_two_ranks(store: Any) -> None:
    """The second joins the first. When a rank of it dies, its other rank raises PeerError, and the first goes on."""

    def rank_main(address: str) -> Any:
        replica = Replica(address, size=2, count=1, seed=dist.get_rank() // 2)
        model, mark = replica.model, dist.distributed_c10d._get_default_store()
        if replica.number == 1:
            wait_for(lambda: mark.check(["come"]))
        model.join(replica.dense)
        there = []
        while model.steps < 9:
            if dist.get_rank() == 0 and model.steps == 3:
                mark.set("come", "")
                wait_for(lambda: model._group._watch.requests > model._group._handled)
            if model.steps == 7 and replica.number == 1:
                outputs = loss_of(model, [batch_of(7, 1, replica.rank)])
                model._group.tried(lambda: None)  # the tables have been averaged in both ranks
                if replica.rank == 1:
                    os._exit(9)
                with pytest.raises(PeerError):
                    outputs.backward()
                mark.set("told", "")
                os._exit(9)
            replica.step()
            there.append(model.replicas)
        model.sync_replicas()
        reference = click_model(CONFIGS)
        adam = torch.optim.Adam(dense_parameters(reference), lr=0.05)
        for step, count in enumerate(there):
            loss_of(
                reference, [batch_of(step, number, rank) for number in range(count) for rank in range(2)]
            ).backward()
            adam.step()
            adam.zero_grad()
        assert_tables_equal(model.module, reference, "tables")
        assert_dense_equal(model, reference, "dense")
        assert mark.check(["told"])
        return there

    outcomes = ranks(4, rank_main, f"127.0.0.1:{store.port}", expect_death={2, 3}, timeout=60.0)
    assert values_of(outcomes[:2]) == [[1, 1, 1, 1, 2, 2, 2, 1, 1]] * 2


class Factors(nn.Module):
    """A model of tables alone: the scores of pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=6, embedding_dim=4, feature_names=[name])
            for name in ("user", "item")
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": 0.1})

    def forward(self, pairs: Tensor) -> Tensor:
        pooled = self.bags(KeyedJaggedTensor(["user", "item"], pairs.flatten(), lengths=torch.ones(6).int()))
        return (pooled["user"] * pooled["item"]).sum(dim=1)


def pairs_of(step: int, rank: int) -> Tensor:
    return torch.randint(6, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("size", [1, 2])
def test_tables_alone_count_steps(size: int, store: Any) -> None:
    """Also on a rank without a table, and in no_sync, which ends no step."""

    def rank_main(address: str) -> list[int]:
        layouts = (cuts.table_wise("bags.user", 6, 4, rank=0), cuts.table_wise("bags.item", 6, 4, rank=0))
        plan = ShardingPlan(topology=Topology(ranks_per_host=size), tables=layouts)
        group = groups_of(size)[dist.get_rank() // size]
        model = shard(Factors(), plan, replicas=Replicas(2, elastic=address, patience_s=PATIENCE_S), group=group)
        assert isinstance(model, ElasticModel)
        model.join()
        counts = []
        for step in range(3):
            model(pairs_of(step, dist.get_rank())).square().mean().backward()
            counts.append(model.steps)
        with model.no_sync():
            model(pairs_of(0, 0)).mean().mul(0).backward()
        counts.append(model.steps)
        model.sync_replicas()
        reference = Factors()
        for step in range(3):
            losses = [reference(pairs_of(step, rank)).square().mean() for rank in range(2 * size)]
            torch.stack(losses).mean().backward()
        assert_tables_equal(model.module, reference, "tables")
        return counts

    assert ranks(2 * size, rank_main, f"127.0.0.1:{store.port}") == [[1, 2, 3, 3]] * (2 * size)


def test_a_step_in_which_only_tables_train(store: Any) -> None:
    """A dense part that is frozen has no gradient to average."""

    def rank_main(address: str) -> int:
        replica = Replica(address, count=1)
        for parameter in dense_parameters(replica.model):
            parameter.requires_grad_(False)
        replica.model.join(replica.dense)
        replica.step()
        return replica.model.steps

    assert ranks(1, rank_main, f"127.0.0.1:{store.port}") == [1]


def test_the_store_may_go_while_it_is_not_needed() -> None:
    def rank_main() -> None:
        store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        replica = Replica(f"127.0.0.1:{store.port}", count=1)
        replica.model.join(replica.dense)
        replica.step()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(ConfigError, match=r"GradScaler .* elastic replicas are jobs of their own"):
            scaler.unscale_(replica.dense)
        del store
        replica.step()
        with pytest.raises(PeerError, match=r"the replicas' store at 127\.0\.0\.1:\d+ does not answer"):
            replica.model.join(replica.dense)

    ranks(1, rank_main)


def test_joins_that_fail() -> None:
    """Of one that dies while it receives, one with other options, and one that comes when all are gone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank_main(address: str) -> Any:
        number, mark = dist.get_rank(), dist.distributed_c10d._get_default_store()
        replica = Replica(address, count=1, seed=number, sync_every=7 if number == 3 else 1)
        model = replica.model
        if number:
            wait_for(lambda: mark.check([f"come {number}"]))
        if number == 1:
            dying(model._group, "copy", 2)
        if number == 3:
            with pytest.raises(
                ConfigError,
                match=r"this replica has plan .* sync_every=7, .*, and replica \d has plan .* sync_every=1, ",
            ):
                model.join(replica.dense)
            options = replace(model._options, sync_every=1)
            late = shard(click_model(CONFIGS, optimizer="sgd"), mixed_plan(1), replicas=options, group=model.group)
            assert isinstance(late, ElasticModel)
            with pytest.raises(ConfigError, match=r"; join\(\), and replica \d has .* SGD; join\(Adam\):"):
                late.join()
            wait_for(lambda: mark.check(["gone"]))
            with pytest.raises(PeerError, match=r"replicas \[\d, \d\] of generation \d are gone, and no other has"):
                late.join(replica.dense)
            late._group._store.set("ended", "")
            with pytest.raises(PeerError, match=r"the run at 127\.0\.0\.1:\d+ has ended: there is nothing to join"):
                late.join(replica.dense)
            return "told"
        with pytest.raises(ConfigError, match=r"call model\.join"):
            replica.step()
        model.join(replica.dense)
        comes = {2: "1", 4: "3", 6: "2"} if number == 0 else {}
        while model.steps < 10:
            if model.steps in comes:
                mark.set(f"come {comes[model.steps]}", "")
                wait_for(lambda: model._group._watch.requests > model._group._handled)
            replica.step()
        mark.set("gone" if number == 2 else "left", "")
        os._exit(9)

    outcomes = ranks(4, rank_main, f"127.0.0.1:{store.port}", expect_death={0, 1, 2}, timeout=60.0)
    assert outcomes[3] == "told", outcomes[3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"elastic": "nowhere"}, "elastic='nowhere'. Give the address of a TCPStore as 'host:port'"),
        ({"elastic": "host:1", "patience_s": 0}, "patience_s=0. Give a number of seconds above 0"),
        ({"elastic": "host:1"}, "call torch.distributed.init_process_group"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shard(click_model(CONFIGS), mixed_plan(1), replicas=Replicas(2, **options))


def test_dynamic_ids_do_not_fit_one_replica_that_others_may_join(store: Any) -> None:
    def rank_main(address: str) -> None:
        replicas = Replicas(1, elastic=address)
        with pytest.raises(PlanError, match="with dynamic_ids: each copy of a table would give its rows to other"):
            shard(click_model(CONFIGS), mixed_plan(1), replicas=replicas, dynamic_ids={"movies": DynamicIds()})

    ranks(1, rank_main, f"127.0.0.1:{store.port}")


def test_the_end_of_a_run(store: Any) -> None:
    """One fails in the last averaging, which the others complete: it has the last step, and makes none after it. The
    first dies where it saves: the next one saves."""

    def rank_main(address: str) -> Any:
        rank, mark = dist.get_rank(), dist.distributed_c10d._get_default_store()
        wait_for(lambda: not rank or mark.check([f"made {rank - 1}"]))
        replica = Replica(address, count=3, optimizer="adagrad", sync_every=2)
        mark.set(f"made {rank}", "")
        model = replica.model
        assert model.phase == "new"
        model.join(replica.dense)
        average, count = model._group.average_gradients, iter(range(100))

        def failing(*given: Any) -> Any:
            result = average(*given)
            if next(count) == 2 and rank == 2:
                raise Broken
            return result

        model._group.average_gradients = failing  # type: ignore[method-assign]
        steps = 0
        while model.steps < 3:
            replica.step()
            steps += 1
        finished = []

        def finish() -> None:
            if rank == 0:
                os._exit(9)
            finished.append(model.place)

        model.end(finish)
        assert (steps, model.steps, model.phase) == (3, 3, "ended")
        return finished, replica.state()

    outcomes = ranks(3, rank_main, f"127.0.0.1:{store.port}", expect_death={0}, timeout=60.0)
    assert isinstance(outcomes.pop(0), RankDied)
    (finished, state), (none, other) = values_of(outcomes)
    assert (finished, none) == ([0], [])
    assert_alike([state, other])


class Both(nn.Module):
    """The bags, and an ordinary embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = click_model(CONFIGS, optimizer="sgd")
        self.bias = nn.Embedding(9, 1, sparse=True)

    def forward(self, dense: Tensor, bags: Any) -> Tensor:
        logits: Tensor = self.clicks(dense, bags) + self.bias(torch.arange(len(dense)) * 2).squeeze(1)
        return logits


def test_sparse_gradients_and_optimizers_of_the_dense_part(store: Any, tmp_path: Path) -> None:
    """SparseAdam gets the means as sparse gradients, also where a replica adds none. The optimizers in backward may be
    given. A model that has loaded a checkpoint is at its step."""

    def rank_main(address: str) -> None:
        rank = dist.get_rank()
        alone = [dist.new_group([one]) for one in range(2)][rank]
        torch.manual_seed(0)
        reference, module = Both(), Both()
        module.load_state_dict(reference.state_dict())
        in_backward = module.clicks.top.bias
        apply_optimizer_in_backward(torch.optim.SGD, [in_backward], {"lr": 0.1})
        replicas = Replicas(2, elastic=address, patience_s=PATIENCE_S)
        model: Any = shard(module, mixed_plan(1, "clicks.sparse"), replicas=replicas, group=alone)
        model.bias.weight.requires_grad_(rank == 0)
        sparse = torch.optim.SparseAdam([model.bias.weight], lr=0.1)
        checkpoints = Checkpoints(tmp_path / str(rank))
        checkpoints.save(7, model, sparse)
        checkpoints.load_last(model, sparse)
        model.join(sparse, *in_backward._in_backward_optimizers)
        assert model.steps == 7
        loss_of(model, [batch_of(0, rank)]).backward()
        assert model.bias.weight.grad.is_sparse
        sparse.step()
        (loss_of(reference, [batch_of(0, 0)]) / 2).backward()
        torch.optim.SparseAdam([reference.bias.weight], lr=0.1).step()
        assert torch.allclose(model.bias.weight, reference.bias.weight)
        assert (model.steps, sparse.state[model.bias.weight]["step"]) == (8, 1)

    ranks(2, rank_main, f"127.0.0.1:{store.port}")
