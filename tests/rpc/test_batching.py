"""The queue of a server: each request is answered, whenever it comes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from shardrec.rpc.batching import WorkQueue

LATE = "late"


class Meeting(threading.Condition):
    """A lock that the thread :data:`LATE` enters while the queue's thread works."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.works, self.left = (threading.Event() for _ in range(3))

    def __enter__(self) -> Any:
        if threading.current_thread().name == LATE:
            self.arrived.set()
            self.works.wait()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if threading.current_thread().name == LATE:
            self.left.set()


def test_work_that_comes_while_the_thread_begins_is_answered() -> None:
    """Such work was put among that of the round before: its answer never came, or the thread ended."""
    meeting = Meeting()
    queue = WorkQueue(lambda requests: [torch.zeros(0)] * len(requests), capacity=1, window_s=0.0, max_requests=1)
    queue.close()
    queue._changed, queue._is_closed = meeting, False
    queue._thread = threading.Thread(target=queue._serve, daemon=True)
    queue._thread.start()

    def first() -> int:
        meeting.works.set()
        meeting.left.wait()
        return 1

    answers: list[Any] = []
    late = threading.Thread(target=lambda: answers.append(queue.submit(lambda: 2)), name=LATE)
    late.start()
    meeting.arrived.wait()
    assert queue.submit(first).wait() == (True, 1)
    late.join()
    assert answers[0].wait() == (True, 2)
    queue.close()
