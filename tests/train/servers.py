"""Servers of a test."""

from __future__ import annotations

import threading
from typing import Any


def stop(server: Any, thread: threading.Thread) -> None:
    """End a server that ``thread`` runs: its loop ends with its last socket."""
    server.trigger.pull_trigger(lambda: server.asyncore.close_all(server._map))
    thread.join()
    server.task_dispatcher.shutdown()
