"""A job whose servers are killed at random moments and started again: a trainer, two servers and their supervisor.

`supervise` leaves the number of losses that the trainer saw, and its state_dict, in ``FOLDER/result``, and what the
processes wrote in ``FOLDER/log``. They are forked from one, so that a server starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

import shardrec
from shardrec.errors import PeerError
from shardrec.launch.processes import end_with_launcher
from shardrec.rpc import RpcWorld
from shardrec.rpc.server_process import load_server, serve
from tests.rpc.jobs import make_model, make_plan, train

__all__ = ["supervise"]

EVERY = 4
"""Training steps between two checkpoints."""

SERVERS = ["server0", "server1"]


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def _store(folder: Path) -> dist.FileStore:
    return dist.FileStore(str(folder / "store"), -1)


def _server(folder: Path, rank: int) -> None:
    server = load_server(make_model("adagrad"), rank, plan=make_plan(), checkpoint=folder / "checkpoints")
    serve(server, _store(folder), trainers=1, servers=SERVERS, name=SERVERS[rank], timeout_s=60.0)


def _trainer(folder: Path, steps: int) -> None:
    """Goes on from the last checkpoint whenever a server was lost."""
    world = RpcWorld(_store(folder), trainers=1, servers=SERVERS, name="trainer0", timeout_s=60.0)
    world.join()
    checkpoints = shardrec.Checkpoints(folder / "checkpoints", keep_last=2)
    model = shardrec.shard(make_model("adagrad"), make_plan(), servers=shardrec.Servers(SERVERS, timeout_s=30.0))
    checkpoints.save(0, model)  # a state_dict has no optimizer states, so that it would not take servers back
    (folder / "begun").touch()
    step, lost, saved, back, found = 0, 0, 0, False, None
    while found is None:
        try:
            if back:
                last = checkpoints.load_last(model)
                assert last is not None, "there is a checkpoint from the start"
                step, back = last.step, False
                assert step >= saved, "what was saved is not lost"
            elif step < steps:
                train(model, 0, range(step, step + 1))
                step += 1
                if step % EVERY == 0:
                    checkpoints.save(step, model)
                    saved = max(saved, step)
            elif not (folder / "killed").exists():
                model.server_statistics()  # until the last kill
                time.sleep(0.05)
            else:  # whose loss this may be the first to meet
                found = model.state_dict()
        except PeerError:
            lost, back = lost + 1, True
            world.rejoin()
    torch.save((lost, found), folder / "result")
    world.end()
    world.leave()


def supervise(folder: Path, kills: int, steps: int) -> None:
    """Start all, kill servers, and wait for the trainer. In a process without threads, which ends then."""
    end_with_launcher()
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    rng = Random(kills)
    servers = [_fork(lambda rank=rank: _server(folder, rank)) for rank in range(2)]  # type: ignore[misc]
    trainer = _fork(lambda: _trainer(folder, steps))
    try:
        left = kills
        while os.waitpid(trainer, os.WNOHANG) == (0, 0):
            time.sleep(rng.uniform(0.05, 0.5))
            if left and (folder / "begun").exists():
                victim = rng.randrange(2)
                os.kill(servers[victim], signal.SIGKILL)
                os.waitpid(servers[victim], 0)
                servers[victim] = _fork(lambda rank=victim: _server(folder, rank))  # type: ignore[misc]
                left -= 1
                if not left:
                    (folder / "killed").touch()
        if not (folder / "result").exists():
            raise SystemExit("the trainer failed")
        for pid in servers:
            os.waitpid(pid, 0)
        servers = []
    finally:
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
