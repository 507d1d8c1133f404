"""Starting a training run, and starting it again."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shardrec import ConfigError, PeerError
from shardrec.launch import RunStopped, check_extra, launched_rank, run_on_ranks, spawn_alone
from shardrec.trainer.console import working
from shardrec.trainer.run.config import CHECKPOINTS, TrainConfig


def train(config: TrainConfig, *, resume: bool = False, debug: bool = False) -> None:
    """Run ``config``; with ``nproc`` above 1, on that number of new processes.

    Under torchrun (``RANK`` and ``WORLD_SIZE`` are set) every rank calls this and is one rank of the run.

    Ranks that this function starts are started again when one has died, was stopped or did not join in time, and
    continue from the last checkpoint: ``max_restarts`` times without a new one. Errors of options or data would come
    back, and are raised immediately.

    Args:
        config: the run.
        resume: continue from the last checkpoint in ``out``, or begin without one. Implied if torchrun
            restarts the run, and for elastic replicas, which share the folder.
        debug: keep the ranks' tracebacks.

    Raises:
        ConfigError: without ``resume`` also if ``out`` holds checkpoints, with it if ``out`` does not exist.
        VersionError: if the packages of the extra ``train`` are not installed.
        ShardrecError: if the run failed; of several ranks' errors, the first that is not about another rank.
        RunStopped: if SIGTERM or Ctrl-C ended the run after it had saved. A KeyboardInterrupt.
        KeyboardInterrupt: if they ended it without a save. Its text says which checkpoint is there.
    """
    check_extra("train")
    resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 or config.ranks.replicas is not None
    _check_out(config, resume)
    config = config.changed(out=config.output.out or _new_folder())  # of several ranks' the first one's holds
    restarts, nproc, timeout = 0, config.ranks.nproc, config.ranks.timeout
    _announce(nproc)
    while True:
        options, saved = {**config.to_mapping(), "resume": resume}, _saved(config)
        try:
            run_on_ranks(_train_rank, options, nproc=nproc, timeout=timeout, debug=debug, start=spawn_alone)
            return
        except PeerError as error:
            restarts = restarts + 1 if _saved(config) == saved else 1
            if launched_rank() is not None or nproc == 1 or restarts > config.allowed_restarts:
                raise
            again = f"starting the ranks again, {restarts} of {config.allowed_restarts} times without a new checkpoint"
            print(f"shardrec: {error}\nshardrec: {again}", file=sys.stderr, flush=True)
        except RunStopped:
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_what_is_saved(config)) from None
        resume = True


def predict(
    run: str,
    data: str,
    out: str,
    *,
    keys: Sequence[str] | None = (),
    top: int | None = None,
    exclude_seen: bool = False,
    on_bad_row: str | None = None,
    nproc: int = 1,
    device: str = "cpu",
    debug: bool = False,
) -> dict[str, Any] | None:
    """Write a run's scores of all rows of some files as Parquet, in their order. Called again, continue.

    With ``top`` the rows need no item, and get lists ``items`` and ``scores`` of the best items, the best first.

    Args:
        run: folder of results of :func:`train`.
        data: files with the run's features. Labels need not be there.
        out: folder, or URL of one.
        keys: columns of the files to write beside the scores. None for that of the groups, if the run's rows have any.
        top: how many of the best items to write for each row.
        exclude_seen: leave out the items that a row has in the features that share the item's table.
        on_bad_row: "error" or "skip". None for the run's own setting.
        nproc: ranks to start. Under torchrun, its ranks are joined.
        device: "cpu" or "cuda".
        debug: keep the ranks' tracebacks.

    Returns:
        The manifest, on rank 0.

    Raises:
        ConfigError: if the folder holds something else, or the checkpoint, the files or the options have changed; with
            ``top`` for a model that does not rank all items.
        DataError: for a file or a row that cannot be read; on every rank.
    """
    check_extra("train")
    options = {
        "run": run,
        "data": data,
        "out": out,
        "keys": None if keys is None else list(dict.fromkeys(keys)),
        "top": top,
        "exclude_seen": exclude_seen,
        "on_bad_row": on_bad_row,
        "device": device,
    }
    return run_on_ranks(_predict_rank, options, nproc=nproc, debug=debug)


def _predict_rank(options: dict[str, Any]) -> dict[str, Any] | None:
    from shardrec.trainer.run.scores import predict_rank  # with torch, which the program that starts the ranks lacks

    return predict_rank(options)


def _announce(nproc: int) -> None:
    """Say within a second what takes several: the start of ranks, and the import of torch."""
    if launched_rank() is not None:
        return
    cores = len(os.sched_getaffinity(0))
    if nproc > cores:
        shared = f"{nproc} ranks (--nproc) share {cores} core{'s' * (cores > 1)} and slow each other down"
        print(f"shardrec: warning: {shared}. Give --nproc {cores} for speed", file=sys.stderr, flush=True)
    if nproc > 1 and sys.stderr.isatty():
        print(f"starting {nproc} ranks", file=sys.stderr, flush=True)
    if nproc == 1:
        with working("loading torch"):
            from shardrec.trainer.run.session import run_rank  # noqa: F401  # the run imports it next


def _what_is_saved(config: TrainConfig) -> str:
    saved = [
        name for name in _saved(config) if Path(str(config.output.out), CHECKPOINTS, name, "manifest.json").exists()
    ]
    if not saved:
        return "nothing is saved: give --checkpoint-every to save during a run"
    return f"{saved[-1]} is saved. Continue with --out {config.output.out} --resume"


def _check_out(config: TrainConfig, resume: bool) -> None:
    if resume and config.output.out is None:
        raise ConfigError("resume (--resume) is for a run that has a folder: name it (--out)")
    if not resume and _saved(config):
        raise ConfigError(
            f"out (--out) is {config.output.out!r}, which holds the checkpoints of a run: continue it (--resume), or "
            "give another folder"
        )


def _saved(config: TrainConfig) -> list[str]:
    """The names of the run's checkpoints, without a look into them."""
    out = config.output.out
    return [] if out is None else sorted(path.name for path in Path(out, CHECKPOINTS).glob("step-*"))


def _new_folder() -> str:
    name = f"runs/{datetime.now():%Y%m%d-%H%M%S}"
    return name if not Path(name).exists() else f"{name}-{os.getpid()}"


def _train_rank(options: dict[str, Any]) -> None:
    from shardrec.trainer.run.session import run_rank  # with torch, which the launcher does without

    resume = options.pop("resume")
    run_rank(TrainConfig(**options), resume=resume)
