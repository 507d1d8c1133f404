"""The process that fresh ranks are forked from: it has imported what they need, and does nothing else.

::

    FreshProcesses ── a line of JSON ──► template ── fork ──► rank 0 … rank W-1 ── <scratch>/result.json
                   ◄── exit codes ──────          ◄── exit ──

A rank starts in a tenth of a second instead of ten, with the memory allocator in the state in which the imports leave
it, the same each time. The variables that malloc reads at a program's start are this process's, so there is a template
for each setting of them. The process has one thread and never computes, which is what makes forking it sound.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from shardrec.launch.quiet import quiet_libraries

__all__ = ["main"]

_IMPORTS = (
    "benchmarks.harness.timing.probe",
    "benchmarks.harness.timing.rank",
    "benchmarks.harness.timing.sides.dense",
    "benchmarks.harness.timing.sides.kernels",
    "benchmarks.harness.timing.sides.plain",
    "benchmarks.harness.timing.sides.sharded",
    "shardrec.modules",
    "shardrec.planner.torchrec_plan",
    "torchrec.distributed.model_parallel",
)
_TIMEOUT = timedelta(minutes=2)
_DEATH_SIGNAL = 1  # of prctl
_GRACE_S = 3.0


def main() -> None:
    """Answer requests on stdin, one a line, until there are no more."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run that started this process ends it, and the ranks with it
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print does not get among the answers
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    with quiet_libraries():
        for name in _IMPORTS:
            importlib.import_module(name)
    gc.collect()
    print("ready", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_run(request)), file=answers)


def _run(request: dict[str, Any]) -> list[int]:
    """Fork the ranks and wait for them; returns their exit codes, or minus the signal that ended one."""
    sys.stdout.flush()
    sys.stderr.flush()
    running: dict[int, int] = {}
    for rank in range(request["ranks"]):
        child = os.fork()
        if child == 0:
            _be_rank(rank, request)
        running[child] = rank
    codes = [0] * request["ranks"]
    deadline = time.monotonic() + request["timeout"]
    while running:
        left = deadline - time.monotonic()
        if left <= 0 or signal.sigtimedwait([signal.SIGCHLD], left) is None:
            _kill(running)
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                codes[running.pop(child)] = code
                if code:
                    # The others wait for a rank that is gone; their own account may still come.
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
    return codes


def _kill(running: dict[int, int]) -> None:
    for child in running:
        os.kill(child, signal.SIGKILL)
    for child in running:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


def _be_rank(rank: int, request: dict[str, Any]) -> NoReturn:
    """In the new process: do the task, leave a result or a note about what went wrong, and exit."""
    code = 1
    scratch = Path(request["scratch"])
    try:
        _end_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        warnings.simplefilter("ignore")
        with quiet_libraries():
            result = _do_task(rank, request, scratch)
        if rank == 0:
            (scratch / "result.json").write_text(json.dumps(result), encoding="utf-8")
        code = 0
    except BaseException as error:
        note = {"kind": type(error).__name__, "message": str(error), "trace": traceback.format_exc(), "at": time.time()}
        (scratch / f"{rank}.error.json").write_text(json.dumps(note), encoding="utf-8")
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


def _do_task(rank: int, request: dict[str, Any], scratch: Path) -> object:
    import torch
    import torch.distributed as dist

    from shardrec.launch.ranks import Place

    size = request["ranks"]
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)):
        os.environ[name] = str(value)
    torch.set_num_threads(request["threads"])
    place = Place(rank=rank, world_size=size, device=torch.device("cpu"), threads=request["threads"])
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=size, timeout=_TIMEOUT)
    module, _, name = request["task"].partition(":")
    result: object = getattr(importlib.import_module(module), name)(request["options"], place)
    # A rank that leaves right after a collective closes connections that its peers still read from.
    dist.barrier()
    dist.destroy_process_group()
    return result


def _end_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends; elsewhere than on Linux, nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
