"""Two processes that stay, in which the functions of TorchRec's multi-process tests run as ranks."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import torch.distributed as dist
from torchrec.test_utils import get_free_port

__all__ = ["RankProcesses"]

_AFTER_A_FAILURE_S = 15.0
"""How long the other rank may take to fail, too."""


class RankProcesses:
    """Processes that are started once, because each imports torch and TorchRec.

    Args:
        prepare: called first in each process.
        arguments: of ``prepare``.
    """

    def __init__(self, prepare: Callable[..., None], *arguments: Any) -> None:
        self._prepare, self._arguments = prepare, arguments
        self._ranks: list[tuple[Any, Any]] = []

    def run(self, function: Callable[..., object], kwargs: Mapping[str, Any], world_size: int, limit_s: float) -> str:
        """Run a function with ``rank`` and ``world_size`` on so many ranks; what failed, or ""."""
        context = get_context("spawn")
        while len(self._ranks) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._prepare, self._arguments), daemon=True)
            process.start()
            self._ranks.append((process, ours))
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port()), "GLOO_DEVICE_TRANSPORT": "TCP"}
        for rank in range(world_size):
            self._ranks[rank][1].send((function, {**kwargs, "rank": rank, "world_size": world_size}, environment))
        end, replies = time.monotonic() + limit_s, dict[int, str]()
        while len(replies) < world_size and time.monotonic() < end:
            for rank in set(range(world_size)) - replies.keys():
                if self._ranks[rank][1].poll(0.02):
                    try:
                        replies[rank] = self._ranks[rank][1].recv()
                    except EOFError:
                        replies[rank] = "the process died"
                    if replies[rank]:
                        end = min(end, time.monotonic() + _AFTER_A_FAILURE_S)
        failures = [f"rank {rank}: {text}" for rank, text in replies.items() if text]
        if len(replies) < world_size or "the process died" in replies.values():
            self.stop()
            failures = failures or [f"rank(s) {set(range(world_size)) - replies.keys()} hang"]
        return "\n".join(failures)

    def stop(self) -> None:
        """End the processes."""
        while self._ranks:
            process, _ = self._ranks.pop()
            process.kill()
            process.join()


def _serve(pipe: Any, prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    prepare(*arguments)
    while True:
        function, kwargs, environment = pipe.recv()
        os.environ.update(environment)
        try:
            function(**kwargs)
            pipe.send("")
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            with suppress(Exception):
                dist.destroy_process_group()
