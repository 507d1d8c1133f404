"""Elastic replicas: those that are left go on when one dies, and one that joins takes their state."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import ConfigError, PeerError, PlanError
from shardrec.ids import DynamicIds
from shardrec.modules import shard
from shardrec.replicas import Replicas
from shardrec.replicas.elastic import Broken
from shardrec.replicas.elastic_model import ElasticModel
from tests.cuda_ranks import DEVICES, WORLDS, cuda_ranks
from tests.models import click_model
from tests.modules.clicks import CONFIGS, assert_dense_equal, assert_tables_equal, dense_parameters, mixed_plan
from tests.ranks import RankDied, ranks
from tests.replicas.replica import Replica, assert_alike, batch_of, groups_of, loss_of, values_of, wait_for


def dying(owner: Any, method: str, moment: int) -> None:
    """From now on, this rank ends before call number ``moment`` of a method."""
    real, count = getattr(owner, method), iter(range(1000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count) == moment:
            os._exit(9)
        return real(*args, **kwargs)

    setattr(owner, method, call)


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


def _have_asked(model: ElasticModel, requests: int) -> bool:
    return model._group._watch.requests >= requests


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
        # Who comes, and how many have asked to join then: this one too, and the one with other options twice.
        comes = {2: ("1", 2), 4: ("3", 3), 6: ("2", 5)} if number == 0 else {}
        while model.steps < 10:
            if model.steps in comes:
                who, requests = comes[model.steps]
                mark.set(f"come {who}", "")
                wait_for(partial(_have_asked, model, requests))
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
