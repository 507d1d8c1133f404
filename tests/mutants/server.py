"""A pytest session that has collected the tests, and runs some of them for each mutant in a fork of itself.

A mutant then costs the time of its tests, not that of imports. The package's functions are changed in the fork, and in
the ranks that it starts; a program that a test starts reads the changed file. Orders are lines of JSON, {"path": of the
changed file, "source": changed, "tests": names, "timeout": seconds}; the answer is [0, 1 or null (too long), name of
the test that failed].
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.patch import patch, serve_changed


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Serve until there are no orders."""
    items = {item.nodeid: item for item in session.items}
    read, write = map(int, os.environ["SHARDREC_MUTANTS"].split(","))
    with os.fdopen(read) as orders, os.fdopen(write, "w") as answers:
        for line in orders:
            order = json.loads(line)
            chosen = [items[test] for test in order["tests"] if test in items]
            answers.write(json.dumps(_forked(session, chosen, order)) + "\n")
            answers.flush()
    return True


def _forked(session: pytest.Session, items: list[pytest.Item], order: dict[str, Any]) -> tuple[int | None, str]:
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.setsid()
            code = _run(session, items, order, write)
        finally:
            os._exit(code)
    os.close(write)
    code = _wait(process, time.monotonic() + order["timeout"])
    _end_ranks()
    with os.fdopen(read, "rb") as running:
        names = running.read().decode().split("\n")
    return code, names[-1] if code != 0 else ""


def _run(session: pytest.Session, items: list[pytest.Item], order: dict[str, Any], running: int) -> int:
    """In the fork."""
    from tests.ranks import BARE, POOL

    gc.unfreeze()
    patch(order["path"], order["source"])
    POOL._owner = BARE._owner = os.getpid()
    assert POOL._template is not None
    template = POOL._template
    template._server.ensure_running = lambda: None  # type: ignore[method-assign]  # it runs, and is no child of this
    template.close = lambda: None  # type: ignore[method-assign]
    start = template.start
    template.start = lambda _, *args, **kwargs: start(  # type: ignore[method-assign]
        partial(serve_changed, order["path"], order["source"]), *args, **kwargs
    )
    for item, following in zip(items, [*items[1:], None], strict=True):
        os.write(running, f"\n{item.nodeid}".encode())
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
    return 0


def _wait(process: int, end: float) -> int | None:
    """A process's exit code, 0 or 1; None if it had to be killed."""
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return int(status != 0)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _end_ranks() -> None:
    """Those that a fork has left behind; the process that they are forked from has no other children."""
    from tests.ranks import POOL

    template = POOL.prepare()._server._forkserver_pid  # type: ignore[attr-defined]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == template:
                os.kill(int(stat.parent.name), signal.SIGKILL)
