"""Starting a run: in this process, as one of torchrun's ranks, or on ranks of its own; and starting it again."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from shardrec.errors import ConfigError, PeerError
from shardrec.train.config import CHECKPOINTS, TrainConfig
from shardrec.train.processes import RankProcesses, Run
from shardrec.train.quiet import environment_for_torch, quiet_libraries

__all__ = ["launched_rank", "run_on_ranks", "train"]


def train(config: TrainConfig, *, resume: bool = False, debug: bool = False) -> None:
    """Run ``config``; with ``nproc`` above 1, on so many new processes.

    Under torchrun (``RANK`` and ``WORLD_SIZE`` are set) every rank calls this and is one rank of the run.

    Ranks that this function starts are started again when one has died, was stopped or did not come in time, and go on
    from the last checkpoint: ``max_restarts`` times without a new one. Errors of options or data would come back, and
    are raised at once.

    Args:
        config: the run.
        resume: go on from the last checkpoint in ``config.out``, or begin if there is none. Implied by a restart of
            torchrun's.
        debug: keep the ranks' tracebacks.

    Raises:
        ConfigError: without ``resume`` also if ``config.out`` holds checkpoints, with it if there is no ``config.out``.
        ShardrecError: what went wrong; of several ranks' errors the first that is not about another rank.
        RunStopped: SIGTERM or Ctrl-C ended the run after it had saved; a KeyboardInterrupt.
        KeyboardInterrupt: they ended it without.
    """
    resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    _check_out(config, resume)
    config = dataclasses.replace(config, out=config.out or _new_folder())  # of several ranks' the first one's holds
    restarts = 0
    while True:
        options, saved = {**config.to_mapping(), "resume": resume}, _saved(config)
        try:
            run_on_ranks(_train_rank, options, nproc=config.nproc, timeout=config.timeout, debug=debug)
            return
        except PeerError as error:
            restarts = restarts + 1 if _saved(config) == saved else 1
            if launched_rank() is not None or config.nproc == 1 or restarts > config.allowed_restarts:
                raise
            again = f"starting the ranks again, {restarts} of {config.allowed_restarts} times without a new checkpoint"
            print(f"shardrec: {error}\nshardrec: {again}", file=sys.stderr, flush=True)
        resume = True


def _check_out(config: TrainConfig, resume: bool) -> None:
    if resume and config.out is None:
        raise ConfigError("resume (--resume) is for a run that has a folder: name it (--out)")
    if not resume and _saved(config):
        raise ConfigError(
            f"out (--out) is {config.out!r}, which holds the checkpoints of a run: go on with it (--resume), or give "
            "another folder"
        )


def _saved(config: TrainConfig) -> list[str]:
    """The names of the run's checkpoints, without a look into them."""
    return [] if config.out is None else sorted(path.name for path in Path(config.out, CHECKPOINTS).glob("step-*"))


def run_on_ranks(
    run: Run, options: Mapping[str, Any], *, nproc: int, timeout: float = 300.0, debug: bool = False
) -> Any:
    """Call ``run(options)`` on each rank: those of the launcher that started this process, else ``nproc`` of our own.

    Args:
        run: what a rank does.
        options: that can be pickled.
        nproc: ranks to start; 1 for this process by itself.
        timeout: seconds for which a rank of our own may be stopped (SIGSTOP) before it is taken for dead.
        debug: keep the ranks' tracebacks.

    Returns:
        What ``run`` returned on this rank, or, if ranks were started for it, on rank 0; it must be possible to pickle.

    Raises:
        ShardrecError: what went wrong; of several ranks' errors the first that is not about another rank.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM.
    """
    launched = launched_rank()
    if launched is not None:
        _check_nproc(nproc, launched[1])
    if launched is not None or nproc == 1:
        return _run_quietly(run, debug, dict(options))
    quiet = functools.partial(_run_quietly, run, debug)
    return RankProcesses(quiet, dict(options), nproc=nproc, timeout=timeout, debug=debug).result()


def launched_rank() -> tuple[int, int] | None:
    """(rank, world size) if a launcher such as torchrun started this process, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _check_nproc(nproc: int, world_size: int) -> None:
    if nproc not in (1, world_size):
        raise ConfigError(
            f"nproc (--nproc) is {nproc} and a launcher has already started {world_size} ranks: leave nproc out "
            "under torchrun"
        )


def _new_folder() -> str:
    name = f"runs/{datetime.now():%Y%m%d-%H%M%S}"
    return name if not Path(name).exists() else f"{name}-{os.getpid()}"


def _run_quietly(run: Run, debug: bool, options: dict[str, Any]) -> Any:
    """``run(options)`` with libraries that match and, without ``debug``, say nothing."""
    from shardrec._versions import check_versions

    with environment_for_torch(quiet=not debug), quiet_libraries(quiet=not debug):
        check_versions()
        return run(options)


def _train_rank(options: dict[str, Any]) -> None:
    from shardrec.train.session import run_rank

    resume = options.pop("resume")
    run_rank(TrainConfig(**options), resume=resume)
