"""A function on ranks: this process alone, the ranks that torchrun started, or new ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from shardrec.errors import ConfigError
from shardrec.launch.processes import RankProcesses, Run, Start, spawn
from shardrec.launch.quiet import environment_for_torch, quiet_libraries

__all__ = ["launched_rank", "on_new_ranks", "run_on_ranks"]


def run_on_ranks(
    run: Run, options: Mapping[str, Any], *, nproc: int, timeout: float = 300.0, debug: bool = False
) -> Any:
    """Call ``run(options)`` on each rank: those of the launcher that started this process, else ``nproc`` new
    processes.

    Args:
        run: what a rank does.
        options: that can be pickled.
        nproc: ranks to start; 1 for this process by itself.
        timeout: seconds for which a new process may be stopped (SIGSTOP) before it counts as dead.
        debug: keep the ranks' tracebacks.

    Returns:
        What ``run`` returned on this rank, or, if ranks were started for it, on rank 0; it must be possible to pickle.

    Raises:
        ShardrecError: what went wrong; of several ranks' errors the first that is not about another rank.
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
    return RankProcesses(quiet, dict(options), nproc=nproc, timeout=timeout, debug=debug).result()


def on_new_ranks(
    work: Callable[..., Any],
    *arguments: object,
    nproc: int,
    device: str = "cpu",
    threads: int | None = 1,
    timeout: float = 300.0,
    debug: bool = False,
    limit: float = float("inf"),
    start: Start = spawn,
) -> Any:
    """Call ``work(place, *arguments)`` on ``nproc`` new ranks of this host, in a process group, also if it is one.

    Args:
        work: a function of a module.
        arguments: that can be pickled.
        nproc: ranks to start.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (gloo and NCCL), a device for each rank.
        threads: of each rank; None for an even share of the cores.
        timeout: seconds that a rank waits for the others.
        debug: keep the ranks' tracebacks.
        limit: seconds that the ranks may run.
        start: starts the process of a rank; one that forks is for the CPU alone.

    Returns:
        What ``work`` returned on rank 0; it must be possible to pickle.

    Raises:
        ShardrecError: what went wrong; of several ranks' errors the first that is not about another rank.
    """
    options = {"work": work, "arguments": arguments, "device": device, "threads": threads, "timeout": timeout}
    quiet = functools.partial(_run_quietly, _joined_rank, debug)
    ranks = RankProcesses(quiet, options, nproc=nproc, timeout=timeout, debug=debug, limit=limit, start=start)
    return ranks.result()


def launched_rank() -> tuple[int, int] | None:
    """(rank, world size) if a launcher such as torchrun started this process, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _run_quietly(run: Run, debug: bool, options: dict[str, Any]) -> Any:
    """``run(options)`` with libraries that match and, without ``debug``, say nothing."""
    from shardrec._versions import check_versions

    with environment_for_torch(quiet=not debug), quiet_libraries(quiet=not debug):
        check_versions()
        return run(options)


def _joined_rank(options: dict[str, Any]) -> Any:
    from shardrec.launch.ranks import joined_run  # which imports torch

    with joined_run(options["device"], options["threads"], timeout=options["timeout"], alone=True) as rank_info:
        return options["work"](rank_info, *options["arguments"])
