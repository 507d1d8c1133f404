"""Starting a run: in this process, as one of torchrun's ranks, or on ranks of its own.

::

    shardrec train --nproc 2
      └─ elastic agent (torch.distributed.launcher), rendezvous on a free local port
           ├─ rank 0 ── run_rank ──► shows, writes
           └─ rank 1 ── run_rank ──► fails: writes <scratch>/1.json, exits with 1
                                       └─ the agent ends the others; the first cause is raised here, once

The agent's own account of a failure is a page of log lines around a traceback per rank. It is kept quiet: what went
wrong is read from the ranks' notes instead, and raised in the launching process as the error that it was on the rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardrec import errors
from shardrec.errors import ConfigError, PeerError, ShardrecError
from shardrec.train.config import TrainConfig
from shardrec.train.quiet import environment_for_torch, quiet_libraries

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["Run", "first_cause", "launched_rank", "run_on_ranks", "train"]

Run = Callable[[dict[str, Any]], Any]
"""What a rank does, given the options: a function of a module, for new processes find it by its name."""

_GRACE_S = 5


def train(config: TrainConfig, *, debug: bool = False) -> None:
    """Run ``config``; with ``nproc`` above 1, on so many new processes.

    Under torchrun (``RANK`` and ``WORLD_SIZE`` are set) every rank calls this and is one rank of the run.

    Args:
        config: the run.
        debug: keep the launcher's log and the ranks' tracebacks.

    Raises:
        ShardrecError: what went wrong; of several ranks' errors the first that is not about another rank.
        KeyboardInterrupt: the run was stopped by Ctrl-C or a signal to end.
    """
    config = dataclasses.replace(config, out=config.out or _new_folder())  # of several ranks' the first one's holds
    run_on_ranks(_train_rank, config.to_mapping(), nproc=config.nproc, debug=debug)


def run_on_ranks(run: Run, options: Mapping[str, Any], *, nproc: int, debug: bool = False) -> Any:
    """Call ``run(options)`` on each rank: those of the launcher that started this process, else ``nproc`` of our own.

    Args:
        run: what a rank does.
        options: that can be pickled.
        nproc: ranks to start; 1 for this process by itself.
        debug: keep the launcher's log and the ranks' tracebacks.

    Returns:
        What ``run`` returned on this rank, or, if ranks were started for it, on rank 0; it must be possible to pickle.

    Raises:
        ShardrecError: what went wrong; of several ranks' errors the first that is not about another rank.
        KeyboardInterrupt: the run was stopped by Ctrl-C or a signal to end.
    """
    launched = launched_rank()
    if launched is not None:
        _check_nproc(nproc, launched[1])
    if launched is not None or nproc == 1:
        return _run_here(run, dict(options), debug)
    return _run_on_new_ranks(run, dict(options), nproc, debug)


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


def _train_rank(options: dict[str, Any]) -> None:
    from shardrec.train.session import run_rank

    run_rank(TrainConfig(**options))


def _run_here(run: Run, options: dict[str, Any], debug: bool) -> Any:
    from shardrec._versions import check_versions

    with environment_for_torch(quiet=not debug), quiet_libraries(quiet=not debug):
        check_versions()
        return run(options)


def _run_on_new_ranks(run: Run, options: dict[str, Any], nproc: int, debug: bool) -> Any:
    with environment_for_torch(quiet=not debug), tempfile.TemporaryDirectory(prefix="shardrec-") as scratch:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="spawn",
            shutdown_timeout=_GRACE_S,
        )
        try:
            with _quiet_launcher(debug):
                returned: dict[int, Any] = elastic_launch(launch, _rank_main)(run, options, scratch, debug)
                return returned[0]
        except ChildFailedError as failed:
            raise first_cause(Path(scratch), failed, debug) from (failed if debug else None)
        except SignalException as stopped:
            raise KeyboardInterrupt from stopped


@contextlib.contextmanager
def _quiet_launcher(debug: bool) -> Iterator[None]:
    """Keeps back the agent's log, and afterwards puts back the signal handlers that it replaced."""
    replaced = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handled = {number: signal.getsignal(number) for number in replaced}
    disabled = logging.root.manager.disable
    if not debug:
        # elastic's modules each have a logger with a level and a handler of its own; this goes over all of them.
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in handled.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------------ on the ranks


def _rank_main(run: Run, options: dict[str, Any], scratch: str, debug: bool) -> Any:
    """What each new process runs: the run, and in the end a note about what went wrong. Returns rank 0's result."""
    rank = int(os.environ["RANK"])
    # Rank 0 has a terminal to put in order; the others may go at once, even out of the middle of a collective.
    if rank != 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        result = _run_here(run, options, debug)
        return result if rank == 0 else None
    except Exception as error:
        _leave_note(Path(scratch), rank, error)
        if debug:
            raise
        raise SystemExit(1) from None


def _leave_note(scratch: Path, rank: int, error: Exception) -> None:
    note = {
        "rank": rank,
        "time": time.time(),
        "kind": type(error).__name__,
        "message": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }
    partial = scratch / f"{rank}.partial"
    partial.write_text(json.dumps(note), encoding="utf-8")
    partial.rename(scratch / f"{rank}.json")  # the launcher never reads half a note


# -------------------------------------------------------------------------------------------------- what went wrong


def first_cause(scratch: Path, failed: ChildFailedError, debug: bool = False) -> ShardrecError:
    """The error behind a failed run: the first on any rank that is not about another rank.

    Args:
        scratch: holds the ranks' notes.
        failed: the agent's account, for ranks that were ended before they could leave one.
        debug: add the rank's traceback.
    """
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in scratch.glob("*.json")]
    killed = [(rank, failure) for rank, failure in failed.failures.items() if failure.exitcode < 0]
    # A rank that was ended from outside leaves no note, and then all the notes are about it.
    own = [note for note in notes if note["kind"] != PeerError.__name__]
    if killed and not own:
        rank, failure = min(killed, key=lambda item: item[1].timestamp)
        name = signal.Signals(-failure.exitcode).name
        hint = "; the system ends the largest process when memory runs out: use smaller tables or batches" * (
            name == "SIGKILL"
        )
        return PeerError(f"rank {rank} was ended by {name}{hint}")
    if not notes:
        rank, failure = min(failed.failures.items(), key=lambda item: item[1].timestamp)
        return PeerError(f"rank {rank} ended with exit code {failure.exitcode} and said nothing: run it with --debug")
    # A rank whose own data was bad says more than the others, who know it from that rank.
    note = min(own or notes, key=lambda note: (note["kind"] == errors.InputError.__name__, note["time"], note["rank"]))
    trace = f"\n\n{note['trace']}" if debug else ""
    if note["kind"] in errors.__all__:
        kind: type[ShardrecError] = getattr(errors, note["kind"])
        return kind(note["message"] + trace)
    told = f"rank {note['rank']} failed with {note['kind']}: {note['message']}"
    return PeerError(told + (trace or "\nRun it with --debug for the traceback"))
