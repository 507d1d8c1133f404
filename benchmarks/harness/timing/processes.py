"""Where measurements run: in processes forked for each, or in turn in the ranks that a launcher started."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.harness.timing.environment import MALLOC, template_environment
from shardrec.errors import PeerError, ShardrecError

if TYPE_CHECKING:
    from shardrec.launch.ranks import Place

__all__ = ["FreshProcesses", "KeptProcesses", "MeasurementError", "Processes", "serve"]

_START_S = 180.0
_MARGIN_S = 30.0


class MeasurementError(ShardrecError):
    """A measurement that failed on its ranks; the message is that of the rank where the trouble began."""


class Processes(Protocol):
    """Runs a task on ranks.

    Attributes:
        read_files: the ranks can read what this process writes, and should, for their own malloc is measured.
    """

    read_files: bool

    def run(self, task: str, options: Mapping[str, Any], *, ranks: int, malloc: str) -> Any:
        """Call a function on each rank and return what it returned on rank 0.

        Args:
            task: ``module:function``, called with the options and a :class:`~shardrec.launch.ranks.Place`.
            options: JSON-compatible.
            ranks: how many.
            malloc: a key of :data:`~benchmarks.harness.timing.environment.MALLOC`.

        Raises:
            MeasurementError: if the function raised on any rank.
        """


class FreshProcesses:
    """New processes for each task, forked from a template (``template.py``) for each malloc setting.

    Args:
        threads: of each rank.
        timeout: seconds that a task may take.
    """

    read_files = True

    def __init__(self, *, threads: int, timeout: float = 300.0) -> None:
        self._threads = threads
        self._timeout = timeout
        self._templates: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> FreshProcesses:
        return self

    def __exit__(self, *unused: object) -> None:
        for template in self._templates.values():
            template.kill()
            template.wait()
        self._templates.clear()

    def run(self, task: str, options: Mapping[str, Any], *, ranks: int, malloc: str) -> Any:
        """See :class:`Processes`."""
        template = self._template(malloc)
        with tempfile.TemporaryDirectory(prefix="shardrec-bench-") as scratch:
            request = {
                "ranks": ranks,
                "scratch": scratch,
                "task": task,
                "options": options,
                "threads": self._threads,
                "timeout": self._timeout,
            }
            assert template.stdin is not None, "it was opened as a pipe"
            try:
                template.stdin.write(json.dumps(request) + "\n")
                template.stdin.flush()
                codes = json.loads(_line(template, self._timeout + _MARGIN_S))
            except (OSError, ValueError) as error:
                self._templates.pop(malloc).kill()
                raise PeerError(f"the process that starts the ranks is gone: {error}; run it with --debug") from error
            if any(codes):
                raise _failure(Path(scratch), codes, self._timeout)
            return json.loads(Path(scratch, "result.json").read_text(encoding="utf-8"))

    def _template(self, malloc: str) -> subprocess.Popen[str]:
        if malloc not in self._templates:
            template = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.harness.timing.template"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env=template_environment(MALLOC[malloc]),
            )
            self._templates[malloc] = template
            if _line(template, _START_S).strip() != "ready":
                self._templates.pop(malloc).kill()
                raise PeerError("the process that starts the ranks could not start; its own message is above")
        return self._templates[malloc]


def _line(process: subprocess.Popen[str], seconds: float) -> str:
    """The next line that a process writes, or "" when it has ended or does not write in time."""
    assert process.stdout is not None, "it was opened as a pipe"
    readable, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if readable else ""


def _failure(scratch: Path, codes: list[int], seconds: float) -> MeasurementError:
    """What went wrong first."""
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(scratch.glob("*.error.json"))]
    if not notes:
        ended = ", ".join(f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code)
        return MeasurementError(f"{ended} and said nothing, within {seconds:.0f} s")
    own = [note for note in notes if note["kind"] != PeerError.__name__]
    first = min(own or notes, key=lambda note: note["at"])
    return MeasurementError(f"{first['kind']}: {first['message']}")


class KeptProcesses:
    """The ranks of a process group that is there already: for CUDA, whose memory is not malloc's, and under a launcher.

    Rank 0 has this object; the others :func:`serve`.

    Args:
        place: this rank.
    """

    read_files = False

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> KeptProcesses:
        return self

    def __exit__(self, *unused: object) -> None:
        with contextlib.suppress(RuntimeError):
            _broadcast(None, self._place)

    def run(self, task: str, options: Mapping[str, Any], *, ranks: int, malloc: str) -> Any:
        """See :class:`Processes`; the number of ranks and malloc are the launcher's."""
        if malloc != "default":
            raise MeasurementError(f"malloc {malloc!r} needs processes of its own: leave it out, or the launcher")
        if ranks != self._place.world_size:
            raise MeasurementError(f"the case is for {ranks} ranks and the launcher started {self._place.world_size}")
        _broadcast((task, dict(options)), self._place)
        return _call(task, options, self._place)


def serve(place: Place) -> None:
    """On the ranks other than 0: do what rank 0 asks for, until it is done."""
    while True:
        request = _broadcast(None, place)
        if request is None:
            return
        with contextlib.suppress(MeasurementError):  # rank 0 tells it; the trouble of a case is that of all its ranks
            task, options = request
            _call(task, options, place)


def _call(task: str, options: Mapping[str, Any], place: Place) -> Any:
    import gc
    import importlib

    import torch

    module, _, name = task.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(options, place)
    except Exception as error:
        raise MeasurementError(f"{type(error).__name__}: {error}") from error
    finally:
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()


def _broadcast(value: Any, place: Place) -> Any:
    import torch.distributed as dist

    values = [value]
    if place.world_size > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]
