"""Servers in this process: what they merge, refuse and give up."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import BusyError, ConfigError, InputError, PeerError, PlanError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.pending import as_lazy
from shardrec.rpc import EmbeddingServer
from shardrec.rpc.messages import completed, failure, unwrapped
from tests.batches import random_bags
from tests.models import collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan, randoms
from tests.rpc.direct import DirectServers, served
from tests.rpc.jobs import BAGS, batch, make_model, make_plan, train

FUSED = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


class Bags(nn.Module):
    """A collection by itself, with an output to train."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: Any) -> torch.Tensor:
        values: torch.Tensor = self.bags(features).values()
        return values


@given(rng=randoms())
@settings(max_examples=10, deadline=None)
def test_any_plan_gives_what_one_rank_gives(rng: Random) -> None:
    weighted = rng.random() < 0.3
    configs = random_configs(rng, weighted=weighted)
    optimizer = rng.choice(FUSED)
    plan = random_plan(rng, table_sizes(configs, "bags"), Topology(ranks_per_host=rng.randint(1, 3)))

    def make() -> Bags:
        return Bags(collection(configs, weighted=weighted, optimizers=optimizer))

    local = shardrec.shard(make(), on_bad_id="wrap")
    with served(make, plan, on_bad_id="wrap") as (remote, _):
        for step in range(3):
            features = random_bags(rng, feature_rows(configs), rng.randrange(5), weighted=weighted, extra=["x"]).kjt()
            expected, found = local(features), remote(features)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            scale = torch.randn(expected.size(1), generator=torch.Generator().manual_seed(step))
            (expected * scale).sum().backward()
            (found * scale).sum().backward()
        wanted, got = local.state_dict(), remote.state_dict()
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-5)


def _asked(servers: DirectServers, model: Any, step: int) -> list[Any]:
    """The arguments of the lookup on each server that a forward makes."""
    found: dict[int, Any] = {}
    call = servers.call

    def note(server: int, method: str, *arguments: Any) -> Any:
        if method == "lookup":
            found[server] = arguments[0]
        return call(server, method, *arguments)

    servers.call = note  # type: ignore[method-assign]
    with torch.no_grad():
        model(batch(0, step))
    servers.call = call  # type: ignore[method-assign]
    return [found[server] for server in sorted(found)]


def _busy(server: EmbeddingServer) -> tuple[Any, threading.Event]:
    """Keep the server's thread busy until the event is set."""
    hold, begun = threading.Event(), threading.Event()
    held = server._queue.submit(lambda: (begun.set(), hold.wait()))
    assert begun.wait(10)
    return held, hold


def test_requests_that_wait_are_one_lookup_per_collection() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        server = servers.local[0]
        requests = [_asked(servers, model, step)[0] for step in range(8)]
        alone = [unwrapped(server.lookup(one).wait(), "s") for one in requests]
        before = server.describe()
        held, hold = _busy(server)
        futures = [server.lookup(one) for one in requests]
        assert not any(one.done() for one in futures)
        hold.set()
        held.wait()
        merged = [unwrapped(one.wait(), "s") for one in futures]
        after = server.describe()
    assert after["requests"] - before["requests"] == 8
    assert after["lookups"] - before["lookups"] == 2  # one for each collection
    for one, other in zip(alone, merged, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_rows_are_float32_whatever_a_program_has_as_default() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        server, request = servers.local[0], _asked(servers, model, 0)[0]
        expected = unwrapped(server.lookup(request).wait(), "s")
        torch.set_default_dtype(torch.float64)
        try:
            rows = unwrapped(server.lookup(request).wait(), "s")
            nothing = unwrapped(server.lookup([]).wait(), "s")
        finally:
            torch.set_default_dtype(torch.float32)
    assert rows.dtype is nothing.dtype is torch.float32 and torch.equal(rows, expected)


def test_a_window_waits_for_a_whole_batch() -> None:
    options = {"window_s": 30.0, "max_requests": 2}
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        request = _asked(servers, model, 0)[0]
    server = EmbeddingServer(make_model("sgd"), make_plan(), 0, **options)  # type: ignore[arg-type]
    first = server.lookup(request)
    assert not first.done()
    second = server.lookup(request)
    assert torch.equal(unwrapped(first.wait(), "s"), unwrapped(second.wait(), "s"))
    assert server.describe()["lookups"] == 2
    server.close()


def test_a_full_queue_refuses_and_does_nothing() -> None:
    with served(lambda: make_model("sgd"), make_plan(), options={"capacity": 3}) as (model, servers):
        server = servers.local[0]
        request = _asked(servers, model, 0)[0]
        held, hold = _busy(server)
        waiting = [server.lookup(request) for _ in range(3)]
        with pytest.raises(BusyError, match="3 requests, which is its capacity"):
            unwrapped(server.lookup(request).wait(), "server0")
        hold.set()
        held.wait()
        for one in waiting:
            unwrapped(one.wait(), "server0")
        unwrapped(server.lookup(request).wait(), "server0")


def test_updates_that_wait_for_other_trainers_are_bounded() -> None:
    with served(lambda: make_model("sgd"), make_plan(), options={"capacity": 2}) as (model, servers):
        server, request = servers.local[0], _asked(servers, model, 0)[0]
        gradient = torch.ones_like(unwrapped(server.lookup(request).wait(), "s"))
        waiting = [server.update((1, number), (0, 2), 5.0, [0.1], request, gradient) for number in (1, 2)]
        with pytest.raises(BusyError, match="2 updates wait for their other trainers"):
            unwrapped(server.update((1, 3), (0, 2), 5.0, [0.1], request, gradient).wait(), "server0")
        for number in (1, 2):
            waiting.append(server.update((1, number), (1, 2), 5.0, [0.1], request, gradient))
        assert [unwrapped(one.wait(), "s") for one in waiting] == [0, 0, 0, 0]


def test_what_waits_when_a_server_ends_is_answered() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        server, request = servers.local[0], _asked(servers, model, 0)[0]
        _, hold = _busy(server)
        waiting = server.lookup(request)
        pushes = [server.update((1, 1), (0, 2), 30.0, [0.1], request, torch.zeros(1))]
        threading.Timer(0.05, hold.set).start()
        server.close()
        with pytest.raises(BusyError, match="ending"):
            unwrapped(waiting.wait(), "server0")
        pushes.append(server.update((1, 1), (1, 2), 30.0, [0.1], request, torch.zeros(1)))
        for late in (server.lookup(request), *pushes):
            with pytest.raises(BusyError, match="closed"):
                unwrapped(late.wait(), "server0")


def test_an_update_waits_for_all_trainers_and_is_given_up_without_them() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        server, request = servers.local[0], _asked(servers, model, 0)[0]
        rows = unwrapped(server.lookup(request).wait(), "s")
        before = {name: value.clone() for name, value in server.model.named_parameters()}

        def pushed(key: int, trainer: int, wait_s: float) -> Any:
            return server.update((1, key), (trainer, 2), wait_s, [0.1], request, torch.ones_like(rows))

        lost = pushed(1, 0, 0.01)
        with pytest.raises(PeerError, match=r"only the gradients of trainer\(s\) 0 have come"):
            unwrapped(lost.wait(), "server0")
        assert all(torch.equal(before[name], value) for name, value in server.model.named_parameters())
        first = pushed(2, 0, 30.0)
        with pytest.raises(InputError, match="has pushed update 2 already"):
            unwrapped(pushed(2, 0, 30.0).wait(), "server0")
        assert not first.done()
        second = pushed(2, 1, 30.0)
        assert unwrapped(first.wait(), "s") == unwrapped(second.wait(), "s") == 0
        assert server.describe()["updates"] == 1


def test_a_push_that_is_refused_leaves_the_server_answering() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        server, request = servers.local[0], _asked(servers, model, 0)[0]
        gradient = torch.ones_like(unwrapped(server.lookup(request).wait(), "s"))
        with pytest.raises(InputError, match=r"trainer 2 of 2 pushes update 1, which is one of 2 trainers"):
            unwrapped(server.update((1, 1), (2, 2), 0.01, [0.1], request, gradient).wait(), "server0")
        for _ in range(3):
            unwrapped(server.lookup(request).wait(), "server0")
        pushes = [server.update((1, 1), (trainer, 2), 5.0, [0.1], request, gradient) for trainer in range(2)]
        assert [unwrapped(push.wait(), "server0") for push in pushes] == [0, 0]


def test_updates_are_made_in_the_order_in_which_they_were_pushed() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        server, request = servers.local[0], _asked(servers, model, 0)[0]
        gradient = torch.ones_like(unwrapped(server.lookup(request).wait(), "s"))

        def pushed(number: int, trainer: int) -> Any:
            return server.update((1, number), (trainer, 2), 30.0, [0.1], request, gradient)

        made: list[int] = []
        update = server._update
        server._update = lambda pushed: (made.append(pushed.key[1]), update(pushed))[1]  # type: ignore[method-assign]
        first = [pushed(1, 0), pushed(1, 1)]
        later = [pushed(3, 0), pushed(3, 1), pushed(2, 0)]
        for one in first:
            one.wait()
        assert not any(one.done() for one in later)
        later.append(pushed(2, 1))
        for one in later:
            assert unwrapped(one.wait(), "s") == 0
        assert made == [1, 2, 3]


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        ("text", "list of parts"),
        ([1], "a part is"),
        ([(9, [1], torch.zeros(1, dtype=torch.int32))], "collection 9"),
        ([(True, [1], torch.zeros(1, dtype=torch.int32))], "collection True"),
        ([(0, [1, 0, -1], torch.zeros(1, dtype=torch.int32))], "counts"),
        ([(0, [1, 0, 1], torch.zeros(4))], "flat int32"),
        ([(0, [1, 0, 1], torch.zeros(3, dtype=torch.int32))], "do not fit"),
        ([(0, [2**62, 0, 1], torch.zeros(3, dtype=torch.int32))], "do not fit"),
    ],
)
def test_what_is_no_request_is_refused(request_: Any, match: str) -> None:
    server = EmbeddingServer(make_model("sgd"), make_plan(), 0)
    with pytest.raises(InputError, match=match):
        unwrapped(server.lookup(request_).wait(), "server0")
    server.close()


@given(rng=randoms())
def test_spoiled_requests_are_refused_or_looked_up_inside_the_tables(rng: Random) -> None:
    """All weights are 1, so that what is looked up inside the tables is a number of rows."""
    servers, requests = _SPOILED
    request = [(n, list(header), words.clone()) for n, header, words in rng.choice(requests)]
    _, header, words = rng.choice(request)
    if words.numel() and rng.random() < 0.7:
        words[rng.randrange(words.numel())] = rng.choice([-1, 0, 1, 7, 39, 10**6, 2**31 - 1, -(2**31)])
    else:
        header[rng.randrange(len(header))] += rng.choice([-1, 1, 3])
    server = servers.local[0]
    try:
        sums = unwrapped(server.lookup(request).wait(), "s")
    except InputError:
        return
    most = sum(words.numel() for _, _, words in request)
    assert all(float(one) in range(most + 1) for one in sums.tolist())


@pytest.fixture(scope="module", autouse=True)
def _spoil() -> Any:
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        for weight in servers.local[0].model.parameters():
            weight.detach().fill_(1.0)
        globals()["_SPOILED"] = (servers, [_asked(servers, model, step)[0] for step in range(4)])
        yield


_SPOILED: Any = None


def test_a_wrong_gradient_changes_nothing() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        server, request = servers.local[0], _asked(servers, model, 0)[0]
        before = {name: value.clone() for name, value in server.model.named_parameters()}
        for gradient in (torch.ones(3), torch.ones(3, dtype=torch.float64), "text"):
            with pytest.raises(InputError, match="gradient"):
                answer = server.update((1, 1), (0, 1), 1.0, [0.1], request, gradient)  # type: ignore[arg-type]
                unwrapped(answer.wait(), "server0")
        assert all(torch.equal(before[name], value) for name, value in server.model.named_parameters())


def test_what_servers_cannot_train_is_said_in_backward() -> None:
    with served(lambda: make_model("sgd"), make_plan(), options={"read_only": True}) as (model, _):
        loss = model(batch(0, 0)).sum()
        with pytest.raises(ConfigError, match="read-only"):
            loss.backward()

    def dense() -> nn.Module:
        return Bags(collection(random_configs(Random(0)), optimizers="none"))

    sizes = table_sizes(random_configs(Random(0)), "bags")
    plan = ShardingPlan(
        topology=Topology(), tables=tuple(cuts.table_wise(name, *size, rank=0) for name, size in sizes.items())
    )
    features = random_bags(Random(1), feature_rows(random_configs(Random(0))), 3).kjt()
    with served(dense, plan) as (model, _):
        assert model(features).size(0) == 3
        with pytest.raises(ConfigError, match="lacks an optimizer that a server could run"):
            model(features).sum().backward()


def test_replicas_are_not_trained() -> None:
    """An update goes to one server, so that of two replicas only one would have it."""
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        servers.names = (("server0", "other"), ("server1",))
        loss = model(batch(0, 0)).sum()
        with pytest.raises(ConfigError, match=r"one of the replicas server0, other alone. .* one name for each"):
            loss.backward()
        assert [server.describe()["updates"] for server in servers.local] == [0, 0]


def test_a_checkpoint_is_loaded_after_updates_that_failed(tmp_path: Path) -> None:
    """With a staleness several are under way, and the others would fail the load and wait for those that were lost."""
    with served(lambda: make_model("sgd"), make_plan()) as (model, servers):
        model._collectives.staleness = 2
        train(model, 0, range(1))
        model.flush()
        shardrec.save_checkpoint(tmp_path / "saved", model)
        saved = model.state_dict()
        call = servers.call

        def lost(server: int, method: str, *arguments: Any) -> Any:
            if method == "update":
                gone = as_lazy(completed(failure(PeerError("gone"))))
                return gone.then(lambda answer: unwrapped(answer, "s"))
            return call(server, method, *arguments)

        servers.call = lost  # type: ignore[method-assign]
        with pytest.raises(PeerError, match="gone"):
            train(model, 0, range(1, 4))
        servers.call = call  # type: ignore[method-assign]
        shardrec.load_checkpoint(tmp_path / "saved", model)
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
        train(model, 0, range(1, 2))
        model.flush()
        assert [server.describe()["updates"] for server in servers.local] == [2, 2]


def test_bad_input_is_the_trainers_error() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (model, _):
        features = batch(0, 0)
        features.values()[0] = 10**6
        with pytest.raises(InputError, match=r"feature 'u' of table 'bags.user': id 1000000 in sample"):
            model(features)
        train(model, 0, range(1, 3))


class TwoBags(nn.Module):
    """A collection without weights, and one with."""

    def __init__(self) -> None:
        super().__init__()
        configs = {each.name: each for each in BAGS}
        self.plain = EmbeddingBagCollection(tables=[configs["wide"]])
        self.weighted = EmbeddingBagCollection(tables=[configs["small"]], is_weighted=True)

    def forward(self, plain: KeyedJaggedTensor, weighted: KeyedJaggedTensor) -> torch.Tensor:
        plain_rows, weighted_rows = self.plain(plain), self.weighted(weighted)
        return torch.cat([plain_rows.values(), weighted_rows.values()], dim=1)


def test_a_lookup_that_was_refused_leaves_nothing_for_the_next() -> None:
    plan = ShardingPlan(
        topology=Topology(),
        tables=(cuts.table_wise("plain.wide", 11, 16, rank=0), cuts.table_wise("weighted.small", 5, 4, rank=0)),
    )

    def features(key: str, ids: list[int], weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
        lengths = torch.ones(len(ids), dtype=torch.int32)
        return KeyedJaggedTensor(keys=[key], values=torch.tensor(ids), lengths=lengths, weights=weights)

    torch.manual_seed(0)
    local = TwoBags()
    with served(lambda: copy.deepcopy(local), plan, options={"read_only": True}) as (model, _):
        with pytest.raises(ConfigError, match=r"'weighted\.small' have weights that take a gradient"):
            model(features("w", [1, 2]), features("i", [3, 4], torch.ones(2, requires_grad=True)))
        batches = features("w", [5, 6, 7]), features("i", [0, 1, 2], torch.ones(3))
        assert torch.equal(model(*batches), local(*batches))


def test_a_table_that_a_server_does_not_own_is_an_error() -> None:
    with served(lambda: make_model("sgd"), make_plan()) as (_, servers):
        with pytest.raises(ConfigError, match=r"table 'bags.item' has no shard on server 0"):
            servers.call(0, "read", "bags.item", "").wait()
        assert servers.call(1, "read", "bags.item", "").wait()[0][0] == [0, 23, 0, 4]
        with pytest.raises(ConfigError, match=r"'bags\.nothing'"):
            servers.call(1, "read", "bags.nothing", "").wait()


def test_model_and_servers_must_fit() -> None:
    plan = make_plan()
    with served(lambda: make_model("sgd"), plan) as (_, servers):
        from unittest import mock

        with mock.patch("shardrec.rpc.remote_model.Connections", lambda _: servers):
            with pytest.raises(ConfigError, match="server 'server0' has optimizers"):
                shardrec.shard(make_model("adam"), plan, servers=shardrec.Servers(["server0", "server1"]))
            other = ShardingPlan(topology=Topology(ranks_per_host=3), tables=plan.tables)
            with pytest.raises(PlanError, match="for 3 ranks and there are 2 servers"):
                shardrec.shard(make_model("sgd"), other, servers=shardrec.Servers(["server0", "server1"]))
            with pytest.raises(ConfigError, match="staleness=-1"):
                shardrec.shard(make_model("sgd"), plan, servers=shardrec.Servers(["server0", "server1"], staleness=-1))
    with pytest.raises(PlanError, match="server 2 is asked for"):
        EmbeddingServer(make_model("sgd"), plan, 2)
    with pytest.raises(ConfigError, match="capacity=0"):
        EmbeddingServer(make_model("sgd"), plan, 0, capacity=0)
    with pytest.raises(ConfigError, match="go with none of"):
        shardrec.shard(make_model("sgd"), plan, servers=shardrec.Servers(["server0", "server1"]), transport="group")


def test_state_dicts_go_both_ways() -> None:
    local = make_model("sgd")
    with served(lambda: make_model("sgd", "meta"), make_plan()) as (model, _):
        model.load_state_dict(local.state_dict())
        found = model.state_dict()
        assert found.keys() == local.state_dict().keys()
        for name, value in local.state_dict().items():
            assert torch.equal(found[name], value), name
        with pytest.raises(RuntimeError, match=r"bags\.user"):
            model.load_state_dict(local.state_dict() | {"bags.embedding_bags.user.weight": torch.zeros(3, 3)})
