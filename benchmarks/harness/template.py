"""A process that ranks are forked from, for the harness and the tests, which start ranks often.

::

    launcher ── "fork one" ──► template ── fork ──► rank 0 … rank W-1
             ◄── pid, exit code ──────          ◄── exit ──

The template is a fork server of multiprocessing that has imported what the ranks need: they start in milliseconds,
share the memory of the imports, and find malloc in the state in which these leave it, each time the same. It has one
thread and never computes, which is what makes forking it sound. ``preloaded.py`` checks it. Its socket is a file in
multiprocessing's temporary folder, which a launcher that is killed leaves behind. A spawned rank leaves nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any, Self

from shardrec.errors import ConfigError, PeerError

__all__ = ["ONE_THREAD", "RankTemplate"]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""While the template imports: threads that a library starts would not survive the fork."""

_HERE = "benchmarks.harness"


class RankTemplate:
    """A process to fork ranks from, started when it is first needed. For the CPU: CUDA's state does not survive a fork.

    Not thread-safe.

    Args:
        modules: that it imports. Some that are not there are left out.
        environment: all of its variables, and the ranks', at first. Default: this process's at the start.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._server = _Server()
        self._server.set_forkserver_preload([f"{_HERE}.preloading", *modules, f"{_HERE}.preloaded"])
        self._environment = environment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Start importing in the background."""
        own = dict(os.environ)
        variables = own if self._environment is None else self._environment
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        os.environ.clear()
        os.environ.update({**variables, **ONE_THREAD, "PYTHONPATH": path})
        try:
            self._server.ensure_running()
        except OSError as error:
            raise ConfigError(
                f"no socket for the process that ranks are forked from in {tempfile.gettempdir()} ({error}): set "
                "TMPDIR to a folder of a short name that can be written to"
            ) from error
        finally:
            os.environ.clear()
            os.environ.update(own)

    def start(self, target: Callable[..., None], *args: Any, name: str | None = None) -> BaseProcess:
        """Fork a rank, which calls ``target(*args)``.

        Args:
            target: a function of a module.
            args: that can be pickled; also pipes and sockets.
            name: of the process.

        Raises:
            PeerError: the template could not import what it was to.
        """
        self.prepare()
        process = multiprocessing.get_context("forkserver").Process(target=_forked, args=(target, *args), name=name)
        # The context would use the one server that multiprocessing has, but each template has other imports.
        connect = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = self._server.connect_to_new_process
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise PeerError(
                "the process that ranks are forked from ended in its imports: its stderr says why"
            ) from error
        finally:
            forkserver.connect_to_new_process = connect
        return process

    def close(self) -> None:
        """End it, and all ranks that were forked from it. A later `start` starts another."""
        self._server.stop()


class _Server(forkserver.ForkServer):
    def stop(self) -> None:
        self._stop()  # type: ignore[attr-defined]


def _forked(target: Callable[..., None], *args: Any) -> None:
    """In a new rank: let the template end, and its ranks with it, when no other process holds its pipe's other end."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)  # the usual one, as in a process that was not forked
    target(*args)
