"""One embedding server as a process: its model, its shards from the last checkpoint, and calls until the job ends."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import nn

from shardrec.checkpoint import Checkpoints, load_checkpoint
from shardrec.checkpoint.manifest import MANIFEST, read_manifest
from shardrec.errors import ConfigError, PeerError
from shardrec.launch.processes import RankProcesses
from shardrec.layout import ShardingPlan
from shardrec.rpc.server import EmbeddingServer
from shardrec.rpc.world import RpcWorld


def open_store(url: str, timeout_s: float = 300.0) -> dist.Store:
    """The store by which the processes of a job find each other.

    Args:
        url: ``file:///path`` of a file that is not there before the job, or ``tcp://host:port`` of a
            ``torch.distributed.TCPStore`` that a process hosts which outlives the servers.
        timeout_s: seconds to wait for the host.

    Raises:
        ConfigError: for another address.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"the store is {url!r} ({error}). Give file:///path or tcp://host:port") from error
    if parts.scheme == "file" and parts.path and not parts.netloc:
        return dist.FileStore(parts.path, -1)
    if parts.scheme == "tcp" and host and port:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    raise ConfigError(f"the store is {url!r}. Give file:///path or tcp://host:port")


def named_function(name: str) -> Callable[[], nn.Module]:
    """A function by ``"package.module:function"``.

    Raises:
        ConfigError: if no server has that name.
    """
    module, _, attribute = name.partition(":")
    try:
        function: Callable[[], nn.Module] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is not a function that makes the model ({error}). Give package.module:function"
        ) from error
    if not callable(function):
        raise ConfigError(f"{name!r} is a {type(function).__name__} and no function. Give package.module:function")
    return function


def load_server(
    model: nn.Module, rank: int, *, plan: ShardingPlan | None, checkpoint: Path | None, **options: Any
) -> EmbeddingServer:
    """A server with its shards from a checkpoint.

    Args:
        model: has the tables to serve.
        rank: of the server in the plan.
        plan: of the tables. Default: the checkpoint's.
        checkpoint: a folder that ``save_checkpoint`` wrote, or a folder of :class:`shardrec.Checkpoints`, where the
            last good one is loaded. One without any leaves the model's values.
        options: of :class:`EmbeddingServer`.

    Raises:
        ConfigError: if there is neither a plan nor a checkpoint.
        CheckpointError: if there are checkpoints and none is good.
    """
    several = None if checkpoint is None or (checkpoint / MANIFEST).exists() else Checkpoints(checkpoint)
    if plan is None:
        paths = [] if checkpoint is None else [checkpoint] if several is None else list(several.paths().values())
        if not paths:
            raise ConfigError(f"there is neither a plan nor a checkpoint in {checkpoint}. Give the plan of the tables")
        plan = ShardingPlan.from_json(read_manifest(paths[-1]).plan)
    server = EmbeddingServer(model, plan, rank, **options)
    if several is not None:
        several.load_last(server.model)
    elif checkpoint is not None:
        load_checkpoint(checkpoint, server.model)
    return server


def serve(
    server: EmbeddingServer, store: dist.Store, *, trainers: int, servers: Sequence[str], name: str, **options: Any
) -> None:
    """Answer calls until a trainer ends the job.

    Args:
        server: of this process.
        store: of the job.
        trainers: number of trainers.
        servers: names of all servers.
        name: of this one.
        options: of :class:`RpcWorld`.
    """
    try:
        RpcWorld(store, trainers=trainers, servers=list(servers), name=name, **options).serve()
    finally:
        server.close()


def supervise(
    run: Callable[[dict[str, Any]], object], options: dict[str, Any], *, restarts: int, debug: bool = False
) -> None:
    """Call ``run(options)`` in a new process, and again if a signal or a crash has ended that process.

    Args:
        run: a function of a module.
        options: its argument, which can be pickled.
        restarts: times to start it again.
        debug: keep tracebacks.

    Raises:
        PeerError: if it was ended once more.
        ShardrecError: what ``run`` raised.
    """
    while True:
        try:
            RankProcesses(run, options, nproc=1, timeout=float("inf"), debug=debug).result()
            return
        except PeerError as error:
            if not error.ranks or not restarts:  # it has ended by itself, or too often
                raise
            restarts -= 1
            print(f"{error}. It is started again, from the last checkpoint", file=sys.stderr)
