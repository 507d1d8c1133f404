"""Requests wait in a queue, and one thread serves all waiting ones, so that no RPC thread ever blocks.

While the thread looks up, requests arrive. The next lookup is for all of them. Under load this merges requests
automatically, and an idle server answers immediately. A window makes the thread wait for more requests after the first.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.futures import Future

from shardrec.errors import BusyError
from shardrec.rpc.messages import Answer, Part, complete, failure

_T = TypeVar("_T")


class WorkQueue:
    """What waits for a server's thread, and the thread.

    Args:
        look_up: makes several lookups, and returns the rows per lookup.
        capacity: lookups that may wait. One more is refused. Callers that submit other work bound it.
        window_s: seconds to wait for more after the first lookup.
        max_requests: requests of one merged lookup.
    """

    def __init__(
        self,
        look_up: Callable[[Sequence[list[Part]]], Sequence[Tensor]],
        *,
        capacity: int,
        window_s: float,
        max_requests: int,
    ) -> None:
        self._look_up = look_up
        self._capacity = capacity
        self._window_s = window_s
        self._max = max_requests
        self._lookups: deque[tuple[list[Part], Future[Answer]]] = deque()
        self._work: deque[tuple[Callable[[], object], Future[Answer]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="shardrec embedding server", daemon=True)
        self._thread.start()

    def look_up(self, parts: list[Part]) -> Future[Answer]:
        """Look up ``parts`` soon, together with others. The answer is a BusyError if the queue is full, or closed."""
        return self._put(self._lookups, parts, Future(), self._capacity)

    def submit(self, work: Callable[[], object], answer: Future[Answer] | None = None) -> Future[Answer]:
        """Do ``work`` before the lookups that have not begun, which see what it has changed.

        Args:
            work: gives the answer's value.
            answer: default: a new Future.
        """
        return self._put(self._work, work, answer or Future(), math.inf)

    def close(self) -> None:
        """End the thread. What still waits is answered with a BusyError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _put(
        self, waiting: deque[tuple[_T, Future[Answer]]], item: _T, answer: Future[Answer], capacity: float
    ) -> Future[Answer]:
        with self._changed:
            if self._is_closed or len(waiting) >= capacity:
                state = "is closed" if self._is_closed else f"has {len(waiting)} requests, which is its capacity"
                busy = f"the server's queue {state}. Nothing was done: ask again later, raise capacity, or add servers"
                complete(answer, failure(BusyError(busy)))
            else:
                waiting.append((item, answer))
                self._changed.notify()
        return answer

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lookups or self._work or self._is_closed)
                self._changed.wait_for(self._is_enough, self._window_s)
                if self._is_closed:
                    break
                work = [self._work.popleft() for _ in range(len(self._work))]
                lookups = [self._lookups.popleft() for _ in range(min(self._max, len(self._lookups)))]
            for function, answer in work:
                try:
                    complete(answer, (True, function()))
                except Exception as error:
                    complete(answer, failure(error))
            if lookups:
                self._answer(lookups)
        for _, answer in [*self._work, *self._lookups]:  # there will be no more
            complete(answer, failure(BusyError("the server is ending. Ask again when it is back")))

    def _is_enough(self) -> bool:
        """Whether the window need not be waited out."""
        return len(self._lookups) >= self._max or bool(self._work) or self._is_closed

    def _answer(self, lookups: Sequence[tuple[list[Part], Future[Answer]]]) -> None:
        try:
            rows = self._look_up([parts for parts, _ in lookups])
        except Exception as error:
            answers = [failure(error)] * len(lookups)
        else:
            answers = [(True, of_lookup) for of_lookup in rows]
        for (_, future), answer in zip(lookups, answers, strict=True):
            complete(future, answer)
