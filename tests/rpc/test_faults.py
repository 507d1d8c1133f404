"""Servers and trainers that die or do not answer, replicas, and going on from a checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

import shardrec
from shardrec.errors import ConfigError, PeerError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.rpc import EmbeddingServer, RpcWorld
from shardrec.rpc.world import _close_doors, _listening
from tests.ranks import POOL, RankDied, ranks
from tests.rpc.jobs import batch, in_job, make_model, make_plan, train
from tests.rpc.supervised import supervise


def _server(rank: int) -> EmbeddingServer:
    return EmbeddingServer(make_model("adagrad"), make_plan(), rank)


def _shard(world: RpcWorld, group: Any, *, timeout_s: float = 60.0, **options: Any) -> Any:
    servers = shardrec.Servers(world.servers, timeout_s=timeout_s)
    return shardrec.shard(make_model("adagrad"), make_plan(), servers=servers, group=group, **options)


def test_a_server_that_dies_is_named_at_once(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def server(rank: int) -> EmbeddingServer:
        if rank == 1:
            pid.write_text(str(os.getpid()))
        return _server(rank)

    def trainer(world: RpcWorld, rank: int, group: Any) -> Any:
        model = _shard(world, group, timeout_s=60.0)
        loss = model(batch(0, 0)).sum()
        os.kill(int(pid.read_text()), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(PeerError, match="server 'server1' is gone or did not answer the update") as in_backward:
            loss.backward()
        with pytest.raises(PeerError, match="server 'server1' is gone or did not answer the lookup"):
            model(batch(0, 1))["x"]
        return in_backward.value.waited_for, time.monotonic() - begin < 30

    found = ranks(3, lambda: in_job(str(tmp_path / "s"), trainer, server, trainers=1), expect_death={2})
    assert isinstance(found[2], RankDied)
    assert found[0] == ("update", True)


def test_a_server_that_does_not_answer_in_time(tmp_path: Path) -> None:
    def server(rank: int) -> EmbeddingServer:
        made = _server(rank)
        if rank == 0:
            look_up = made._queue._look_up
            made._queue._look_up = lambda requests: (time.sleep(1.0), look_up(requests))  # type: ignore[assignment]
        return made

    def trainer(world: RpcWorld, rank: int, group: Any) -> None:
        model = _shard(world, group)
        model._collectives.servers.timeout_s = 0.3
        with pytest.raises(PeerError, match=r"server 'server0' .* within 0\.3 s"):
            model(batch(0, 1)).sum()
        time.sleep(1.0)

    ranks(3, lambda: in_job(str(tmp_path / "s"), trainer, server, trainers=1, polls=False))


@pytest.mark.some(1, of="trainers are gone")
def test_a_trainer_that_vanishes(tmp_path: Path) -> None:
    gone = tmp_path / "gone"

    def trainer(world: RpcWorld, rank: int, group: Any) -> Any:
        model = _shard(world, group, dense="none", timeout_s=1.0)
        loss = model(batch(rank, 0)).sum()
        if rank == 1:
            gone.touch()
            os._exit(3)
        while not gone.exists():  # else the wait for gradients may be over before the other's forward
            time.sleep(0.01)
        with pytest.raises(PeerError, match=r"only the gradients of trainer\(s\) 0 have come"):
            loss.backward()
        world.end()
        return True

    def run() -> Any:
        try:
            return in_job(str(tmp_path / "s"), trainer, _server)
        except RuntimeError:  # the barrier at the end of a job that has lost a trainer
            return "lost"

    found = ranks(4, run, expect_death={1})
    assert found[0] == "lost"


def test_replicas_answer_in_turn_and_one_may_die(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def server(rank: int) -> EmbeddingServer:
        if rank == 1:
            pid.write_text(str(os.getpid()))
        plan = _whole_tables()
        return EmbeddingServer(make_model("sgd"), plan, 0, read_only=True)

    def trainer(world: RpcWorld, rank: int, group: Any) -> Any:
        plan = _whole_tables()
        model = shardrec.shard(make_model("sgd", "meta"), plan, servers=shardrec.Servers([world.servers]), group=group)
        local = shardrec.shard(make_model("sgd"), plan, group=group)
        local.top.load_state_dict(model.top.state_dict())
        local.bags.embedding_bags.small.weight.data.copy_(model.bags.embedding_bags.small.weight)
        with torch.no_grad():
            for step in range(4):
                torch.testing.assert_close(model(batch(0, step)), local(batch(0, step)))
            numbers = [model.server_statistics()[0]["requests"] for _ in world.servers]
            os.kill(int(pid.read_text()), signal.SIGKILL)
            for step in range(4, 9):
                torch.testing.assert_close(model(batch(0, step)), local(batch(0, step)))
        loss = model(batch(0, 0)).sum()
        with pytest.raises(ConfigError, match="read-only"):
            loss.backward()
        return numbers

    found = ranks(3, lambda: in_job(str(tmp_path / "s"), trainer, server, trainers=1), expect_death={2})
    assert found[0] == [2, 2]


def _whole_tables() -> ShardingPlan:
    tables = tuple(
        one if one.replicated else cuts.table_wise(one.name, one.num_embeddings, one.embedding_dim, rank=0)
        for one in make_plan().tables
    )
    return ShardingPlan(topology=Topology(), tables=tables)


def test_a_server_that_comes_back_when_the_job_has_ended_ends(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    store.set("shardrec/end", "1")
    RpcWorld(store, trainers=1, servers=1, name="server0", timeout_s=30.0).serve()
    with pytest.raises(PeerError, match="the job has ended"):
        RpcWorld(store, trainers=1, servers=1, name="trainer0", timeout_s=30.0).join()


def test_processes_that_do_not_come_are_named(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    with pytest.raises(PeerError, match=r"trainer0, server1 did not come within 0\.1 s"):
        RpcWorld(store, trainers=1, servers=2, name="server0", timeout_s=0.1).join()
    with pytest.raises(ConfigError, match="this process is 'server2', and the job has trainer0, server0"):
        RpcWorld(store, trainers=1, servers=1, name="server2")


def _listeners(pid: str) -> Iterator[tuple[socket.AddressFamily, Any]]:
    """Where a process listens: its TCP ports and its Unix sockets, as any user of the host sees them."""
    owned = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.exists() or one.is_symlink()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and f"socket:[{rest[5]}]" in owned:
            yield socket.AF_INET, ("127.0.0.1", int(local.partition(":")[2], 16))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        if int(flags, 16) & 0x10000 and path and f"socket:[{inode}]" in owned:
            yield socket.AF_UNIX, path[0].replace("@", "\0", 1)


def test_strangers_do_not_end_a_server(tmp_path: Path) -> None:
    """A port scanner, HTTP requests and random bytes at all that servers and trainer listen on."""
    rng = Random(0)
    messages = [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\xff" * 64, rng.randbytes(2000), b""]

    def server(rank: int) -> EmbeddingServer:
        (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
        return _server(rank)

    def trainer(world: RpcWorld, rank: int, group: Any) -> None:
        model = _shard(world, group)
        pids = [str(os.getpid()), *((tmp_path / f"pid{one}").read_text() for one in range(2))]
        train(model, 0, range(1))
        listeners = [one for pid in pids for one in _listeners(pid)]
        assert any(family == socket.AF_INET for family, _ in listeners), "the ranks' process group listens"
        for family, address in listeners:
            for message in messages:
                with suppress(OSError), socket.socket(family) as stranger:
                    stranger.settimeout(5.0)
                    stranger.connect(address)
                    stranger.sendall(message)
        train(model, 0, range(1, 3))

    ranks(3, lambda: in_job(str(tmp_path / "s"), trainer, server, trainers=1))


def test_what_another_user_has_connected_is_closed() -> None:
    address = f"\0shardrec-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as late:
            client.connect(address)
            accepted, _ = listener.accept()
            with accepted:
                _close_doors({address.encode()})
                with pytest.raises(ConnectionRefusedError):
                    late.connect(address)
                client.sendall(b"of this user")
                assert accepted.recv(100) == b"of this user"
                with mock.patch("os.getuid", lambda: os.geteuid() + 1):
                    _close_doors({address.encode()})
                assert client.recv(1) == accepted.recv(1) == b""
                descriptors = os.listdir("/proc/self/fd")
                assert address.encode() in _listening(), "until its owner closes it, which TensorPipe does"
                assert len(os.listdir("/proc/self/fd")) == len(descriptors), "looking at them leaves none open"


@pytest.mark.some(1, of="trainers are gone")
def test_a_server_whose_trainers_are_gone_ends(tmp_path: Path) -> None:
    def run() -> Any:
        name = ["trainer0", "trainer1", "server0"][dist.get_rank()]
        world = RpcWorld(dist.FileStore(str(tmp_path / "store")), trainers=2, servers=1, name=name, timeout_s=30.0)
        if name != "server0":
            world.join()
            os._exit(3)
        wait_until_over = world._wait_until_over

        def until_over() -> None:
            wait_until_over()
            world._timeout_s = 0.5  # that new trainers have

        world._wait_until_over = until_over  # type: ignore[method-assign]
        with pytest.raises(PeerError, match="trainer0, trainer1 did not come"):
            world.serve()
        return world._generation

    found = ranks(3, run, expect_death={0, 1})
    assert found[2] == 1


@pytest.mark.some(1, of="processes meet again")
def test_processes_that_are_late_for_each_other_meet_again(tmp_path: Path) -> None:
    def run() -> Any:
        name = ["trainer0", "server0"][dist.get_rank()]
        world = RpcWorld(dist.FileStore(str(tmp_path / "store")), trainers=1, servers=1, name=name, timeout_s=60.0)
        late = [RuntimeError("too late")] if name == "trainer0" else []

        def make_agent(*args: Any) -> Any:
            if late:
                raise late.pop()
            return agent(*args)

        agent = rpc.TensorPipeAgent
        patched = mock.patch("torch.distributed.rpc.TensorPipeAgent", make_agent)
        with patched, mock.patch("shardrec.rpc.world._START_S", 2.0), world.joined():
            dist.barrier()
        return world._generation

    first, second = ranks(2, run)
    assert first == second >= 1


def _killed(tmp_path: Path, *, kills: int, steps: int) -> None:
    supervisor = POOL.prepare().start(supervise, tmp_path, kills, steps)
    supervisor.join(120.0 + 20.0 * kills)
    supervisor.kill()
    supervisor.join()
    assert supervisor.exitcode == 0, (tmp_path / "log").read_text()
    lost, found = torch.load(tmp_path / "result")
    assert lost >= 1
    model = shardrec.shard(make_model("adagrad"))
    train(model, 0, range(steps))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.some(1, of="processes meet again")
def test_training_goes_on_when_a_server_is_back(tmp_path: Path) -> None:
    _killed(tmp_path, kills=1, steps=24)


@pytest.mark.slow
def test_20_kills_lose_no_update_before_the_last_checkpoint(tmp_path: Path) -> None:
    _killed(tmp_path, kills=20, steps=400)
