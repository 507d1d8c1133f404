"""Requests wait in a queue, and one thread serves all waiting ones, so that no RPC thread ever blocks.

While the thread looks up, requests arrive; the next lookup is for all of them. Under load this merges requests
automatically, and an idle server answers at once. A window makes the thread wait for more requests after the first one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

from shardrec.errors import BusyError
from shardrec.rpc.messages import Answer, Part, failure

__all__ = ["Request", "RequestQueue", "complete"]


@dataclass(kw_only=True, eq=False)
class Request:
    """Something to be done by the server's thread.

    Args:
        parts: ids to look up; empty for other work.
        work: other work, which gives the answer's value; None for a lookup.
        answer: completed with the answer.
    """

    parts: Sequence[Part] = ()
    work: Callable[[], Any] | None = None
    answer: Future[Answer] = field(default_factory=Future)


def complete(future: Future[Answer], answer: Answer) -> None:
    """Complete a Future, whose callbacks send it to a caller that may be gone."""
    with suppress(RuntimeError):
        future.set_result(answer)


class RequestQueue:
    """A bounded queue and the thread that serves it.

    Args:
        look_up: answers several lookups; must not raise.
        tick: called when no request has arrived for a while; returns the seconds until the next call.
        capacity: lookups that may wait; one more is refused. Callers that submit other work bound it.
        window_s: seconds to wait for more after the first request.
        max_requests: requests of one merged lookup.
    """

    def __init__(
        self,
        look_up: Callable[[Sequence[Request]], None],
        tick: Callable[[], float],
        *,
        capacity: int,
        window_s: float,
        max_requests: int,
    ) -> None:
        self._look_up = look_up
        self._tick = tick
        self._capacity = capacity
        self._window_s = window_s
        self._max = max_requests
        self._waiting: deque[Request] = deque()
        self._work: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closed = self._woken = False
        self._thread = threading.Thread(target=self._serve, name="shardrec embedding server", daemon=True)
        self._thread.start()

    def put(self, request: Request) -> None:
        """Put a request in the queue. Raises:
        BusyError: if the queue is full, or closed; the request is as if it had not been made.
        """
        with self._changed:
            size = len(self._waiting)
            if self._closed or (request.work is None and size >= self._capacity):
                state = "is closed" if self._closed else f"has {size} requests, which is its capacity"
                raise BusyError(
                    f"the server's queue {state}; nothing was done: ask again later, raise capacity, or add servers"
                )
            (self._waiting if request.work is None else self._work).append(request)
            self._changed.notify()

    def wake(self) -> None:
        """Have ``tick`` called soon: there is something new to look after."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread; what still waits is answered with a BusyError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while True:
            pause = self._tick()
            with self._changed:
                if not (self._waiting or self._work or self._closed or self._woken):
                    self._changed.wait(pause)
                self._woken = False
                if self._closed:
                    break
                if self._waiting and self._window_s:
                    self._changed.wait_for(self._is_enough, self._window_s)
                work, self._work = self._work, deque()
                lookups = [self._waiting.popleft() for _ in range(min(self._max, len(self._waiting)))]
            # Work in the order in which it came. Lookups see what was updated before them, and possibly more.
            for request in work:
                assert request.work is not None, "what waits as work is work"
                try:
                    answer: Answer = (True, request.work())
                except Exception as error:
                    answer = failure(error)
                complete(request.answer, answer)
            if lookups:
                self._look_up(lookups)
        for request in [*self._work, *self._waiting]:  # there will be no more
            complete(request.answer, failure(BusyError("the server is ending; ask again when it is back")))

    def _is_enough(self) -> bool:
        """Whether the window need not be waited out."""
        return len(self._waiting) >= self._max or bool(self._work) or self._closed
