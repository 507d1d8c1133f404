"""Run a function on ranks: on this process alone, on the ranks that torchrun started, or on new ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shardrec._versions import check_versions
from shardrec.errors import ConfigError
from shardrec.launch.processes import RankProcesses, Start, spawn
from shardrec.launch.quiet import environment_for_torch, quiet_libraries

T = TypeVar("T")


def run_on_ranks(
    run: Callable[[dict[str, Any]], T],
    options: Mapping[str, Any],
    *,
    nproc: int,
    timeout: float = 300.0,
    debug: bool = False,
    start: Start = spawn,
) -> T:
    """Call ``run(options)`` on each rank of the launcher that started this process, else on ``nproc`` new ranks.

    Args:
        run: the function that each rank calls.
        options: the argument of ``run``. Must be picklable.
        nproc: number of ranks to start; 1 runs in this process.
        timeout: seconds for which a new process may be stopped (SIGSTOP) before it counts as dead.
        debug: keep the ranks' tracebacks.
        start: starts the process of a rank.

    Returns:
        What ``run`` returned on this rank, or on rank 0 if new ranks were started. It must then be picklable.

    Raises:
        ShardrecError: the first error of any rank that is not about another rank.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM.
    """
    launched = launched_rank()
    if launched is not None and nproc not in (1, launched[1]):
        raise ConfigError(
            f"nproc (--nproc) is {nproc} and a launcher has already started {launched[1]} ranks: leave nproc out "
            "under torchrun"
        )
    if launched is not None or nproc == 1:
        return _run_quietly(run, debug, dict(options))
    quiet = functools.partial(_run_quietly, run, debug)
    return RankProcesses(quiet, dict(options), nproc=nproc, timeout=timeout, debug=debug, start=start).result()


def on_new_ranks(
    work: Callable[..., T],
    *arguments: object,
    nproc: int,
    device: str = "cpu",
    threads: int | None = 1,
    timeout: float = 300.0,
    debug: bool = False,
    limit: float = float("inf"),
    start: Start = spawn,
) -> T:
    """Call ``work(rank_info, *arguments)`` on ``nproc`` new ranks of this host, which always have a process group.

    Args:
        work: a module's function. Its first argument is the :class:`~shardrec.launch.ranks.RankInfo`.
        arguments: further arguments. Must be picklable.
        nproc: number of ranks to start.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (gloo and NCCL, one device per rank).
        threads: torch's threads per rank. None for an even share of the cores.
        timeout: seconds that a rank waits for the others.
        debug: keep the ranks' tracebacks.
        limit: seconds after which ranks that still run are killed.
        start: starts the process of a rank. One that forks works on the CPU only.

    Returns:
        What ``work`` returned on rank 0. It must be picklable.

    Raises:
        ShardrecError: the first error of any rank that is not about another rank.
    """
    options = {"arguments": arguments, "device": device, "threads": threads, "timeout": timeout}
    quiet = functools.partial(_run_quietly, functools.partial(_joined_rank, work), debug)
    ranks = RankProcesses(quiet, options, nproc=nproc, timeout=timeout, debug=debug, limit=limit, start=start)
    return ranks.result()


def launched_rank() -> tuple[int, int] | None:
    """(rank, world size) if a launcher such as torchrun started this process, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _run_quietly(run: Callable[[dict[str, Any]], T], debug: bool, options: dict[str, Any]) -> T:
    """Check the libraries' versions, then call ``run(options)``. Hide the libraries' warnings unless ``debug``."""
    with environment_for_torch(quiet=not debug), quiet_libraries(quiet=not debug):
        check_versions()
        return run(options)


def _joined_rank(work: Callable[..., T], options: dict[str, Any]) -> T:
    from shardrec.launch.ranks import joined_run  # which imports torch

    with joined_run(options["device"], options["threads"], timeout=options["timeout"], alone=True) as rank_info:
        return work(rank_info, *options["arguments"])
