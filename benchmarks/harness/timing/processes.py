"""Where measurements run: in processes forked for each, or in turn in the ranks that a launcher started."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.harness.template import RankTemplate
from benchmarks.harness.timing.environment import MALLOC, template_environment
from shardrec.errors import ShardrecError
from shardrec.launch.run import on_new_ranks

if TYPE_CHECKING:
    from shardrec.launch.ranks import RankInfo

__all__ = ["FreshProcesses", "KeptProcesses", "MeasurementError", "Processes", "serve"]

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
_COLLECTIVE_S = 120.0


class MeasurementError(ShardrecError):
    """A measurement that failed on a rank that stays."""


class Processes(Protocol):
    """Runs a task on ranks.

    Attributes:
        read_files: the ranks can read what this process writes, and should, for their own malloc is measured.
    """

    read_files: bool

    def run(self, task: str, options: Mapping[str, Any], *, ranks: int, malloc: str) -> Any:
        """Call a function on each rank and return what it returned on rank 0.

        Args:
            task: ``module:function``, called with the options and a :class:`~shardrec.launch.ranks.RankInfo`.
            options: JSON-compatible.
            ranks: how many.
            malloc: a key of :data:`~benchmarks.harness.timing.environment.MALLOC`.

        Raises:
            ShardrecError: if the function raised on any rank.
        """


class FreshProcesses:
    """New processes for each task, forked from a template for each malloc setting.

    A rank starts with the memory allocator in the state in which the imports leave it, the same each time. Malloc read
    its variables when the template started.

    Args:
        threads: per rank.
        timeout: seconds that a task may take.
        debug: keep the ranks' tracebacks.
    """

    read_files = True

    def __init__(self, *, threads: int, timeout: float = 300.0, debug: bool = False) -> None:
        self._threads = threads
        self._timeout = timeout
        self._debug = debug
        self._templates: dict[str, RankTemplate] = {}

    def __enter__(self) -> FreshProcesses:
        return self

    def __exit__(self, *unused: object) -> None:
        for template in self._templates.values():
            template.close()
        self._templates.clear()

    def run(self, task: str, options: Mapping[str, Any], *, ranks: int, malloc: str) -> Any:
        """See :class:`Processes`."""
        if malloc not in self._templates:
            self._templates[malloc] = RankTemplate(_IMPORTS, template_environment(MALLOC[malloc]))
        return on_new_ranks(
            _do_task,
            task,
            dict(options),
            nproc=ranks,
            threads=self._threads,
            timeout=_COLLECTIVE_S,
            debug=self._debug,
            limit=self._timeout,
            start=self._templates[malloc].start,
        )


class KeptProcesses:
    """The ranks of a process group that is there already: for CUDA, whose memory is not malloc's, and under a launcher.

    Rank 0 has this object. The others :func:`serve`.

    Args:
        rank_info: this rank.
    """

    read_files = False

    def __init__(self, rank_info: RankInfo) -> None:
        self._place = rank_info

    def __enter__(self) -> KeptProcesses:
        return self

    def __exit__(self, *unused: object) -> None:
        with contextlib.suppress(RuntimeError):
            _broadcast(None, self._place)

    def run(self, task: str, options: Mapping[str, Any], *, ranks: int, malloc: str) -> Any:
        """See :class:`Processes`. The number of ranks and malloc are the launcher's."""
        if malloc != "default":
            raise MeasurementError(f"malloc {malloc!r} needs processes of its own: leave it out, or the launcher")
        if ranks != self._place.world_size:
            raise MeasurementError(f"the case is for {ranks} ranks and the launcher started {self._place.world_size}")
        _broadcast((task, dict(options)), self._place)
        return _call(task, options, self._place)


def serve(rank_info: RankInfo) -> None:
    """On the ranks other than 0: do what rank 0 asks for, until it is done."""
    while True:
        request = _broadcast(None, rank_info)
        if request is None:
            return
        with contextlib.suppress(MeasurementError):  # rank 0 tells it. The trouble of a case is that of all its ranks
            task, options = request
            _call(task, options, rank_info)


def _do_task(rank_info: RankInfo, task: str, options: Mapping[str, Any]) -> Any:
    module, _, name = task.partition(":")
    return getattr(importlib.import_module(module), name)(options, rank_info)


def _call(task: str, options: Mapping[str, Any], rank_info: RankInfo) -> Any:
    import gc

    import torch

    try:
        return _do_task(rank_info, task, options)
    except Exception as error:
        raise MeasurementError(f"{type(error).__name__}: {error}") from error
    finally:
        gc.collect()
        if rank_info.device.type == "cuda":
            torch.cuda.empty_cache()


def _broadcast(value: Any, rank_info: RankInfo) -> Any:
    import torch.distributed as dist

    values = [value]
    if rank_info.world_size > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]
