"""Processor time of a search that has two things done at once now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import thread_time
from typing import TypeVar

__all__ = ["AT_ONCE", "Clock"]

AT_ONCE = 2
"""Things that a search does at once, each in a thread of its own."""

T = TypeVar("T")


class Clock:
    """Counts the processor time of this thread; of things done at once, that of the one which takes longest.

    So on a busy machine a search takes longer, and is no worse: it is what would have passed on an idle one.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._here.offset = -thread_time()

    def passed(self) -> float:
        """Seconds since the clock was made; asked in the thread in which it was, or in one of :meth:`together`."""
        return thread_time() + float(self._here.offset)

    def uncounted(self, task: Callable[[], object]) -> None:
        """Call something whose time does not count."""
        begin = thread_time()
        task()
        self._here.offset -= thread_time() - begin

    def together(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """What tasks return, each called in a thread of its own, the first in this one.

        An error of one is raised when all have ended. It pays where they do not hold the interpreter's lock: solvers
        of programmes do not, nor do compiled functions.
        """
        if len(tasks) < 2:
            return [task() for task in tasks]
        begin = self.passed()

        def timed(task: Callable[[], T]) -> tuple[T, float]:
            self._here.offset = begin - thread_time()
            return task(), self.passed()

        with ThreadPoolExecutor(len(tasks) - 1) as pool:
            others = [pool.submit(timed, task) for task in tasks[1:]]
            first = tasks[0]()
            results = [other.result() for other in others]
        self._here.offset += max(0.0, max(passed for _, passed in results) - self.passed())
        return [first, *(result for result, _ in results)]
