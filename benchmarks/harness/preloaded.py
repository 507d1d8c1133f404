"""Imported last by the process that ranks are forked from: its memory is theirs."""

from __future__ import annotations

import gc
import os
import threading

if len(os.listdir("/proc/self/task")) != 1:
    raise RuntimeError(
        f"threads run after the imports of the fork server (Python knows of {threading.enumerate()}); ranks are forked "
        "from it, and would have copies of locks that are never released: start them at first use, not at import"
    )
# Collected once here and never looked at again: collections in a rank stay cheap and do not copy shared pages.
gc.collect()
gc.freeze()
gc.enable()
