"""Imported last by the process that ranks are forked from: its memory is theirs."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

_threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
# Where there is a GPU, importing fbgemm-gpu starts a thread of its driver, which ranks on the CPU do not use.
_threads = [name for name in _threads if not name.startswith("cuda")]
if len(_threads) != 1:
    raise RuntimeError(
        f"threads {_threads} run after the imports of the fork server (Python knows of {threading.enumerate()}). Ranks "
        "are forked from it, and would have copies of locks that are never released: start them at first use, not at "
        "import"
    )
# Collected once here and never looked at again: collections in a rank stay cheap and do not copy shared pages.
gc.collect()
gc.freeze()
gc.enable()
