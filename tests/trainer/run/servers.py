"""Servers of a test."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any


def stop(server: Any, thread: threading.Thread) -> None:
    """End a server that ``thread`` runs: its loop ends with its last socket."""
    with suppress(OSError):  # the loop was awake already, and has closed its trigger by the time this wakes it
        server.trigger.pull_trigger(lambda: server.asyncore.close_all(server._map))
    thread.join()
    server.task_dispatcher.shutdown()
