"""Records which functions of the package run in each test; Python imports this file at the start of each process.

A process appends lines ``number path:function`` to the file ``hits``; the number is that of the test, in the file
``test``, and a function's name is its qualified one. Only calls are traced, not lines: that costs a part of the time.
Ranks are forked, or processes that find this folder on PYTHONPATH, so that they are recorded too.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

TRACE: list[Callable[[FrameType, str, object], None]] = []
"""What records, for the next test after one that has traced by itself."""
_FOLDER = os.environ.get("SHARDREC_RECORD")


def _start(folder: str) -> None:
    package = os.environ["SHARDREC_RECORD_PACKAGE"] + os.sep
    hits = os.open(os.path.join(folder, "hits"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(os.path.join(folder, "test"), "rb") as file:
        test = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    seen: dict[int, CodeType] = {}  # by id: a code object's own hash takes time
    others: dict[int, CodeType] = {}
    number = b""

    def trace(frame: FrameType, event: str, arg: object) -> None:
        nonlocal number
        code = frame.f_code
        if id(code) in others:
            return
        now = test[:]
        if now != number:
            number = now
            seen.clear()
        if id(code) in seen:
            return
        if not code.co_filename.startswith(package):
            others[id(code)] = code
            return
        seen[id(code)] = code
        os.write(
            hits, f"{int.from_bytes(now, 'little')} {code.co_filename[len(package) :]}:{code.co_qualname}\n".encode()
        )

    sys.settrace(trace)
    threading.settrace(trace)
    TRACE.append(trace)


if _FOLDER is not None:
    _start(_FOLDER)
