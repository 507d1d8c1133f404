"""What ranks do in tests of the launcher."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def hold(options: dict[str, Any]) -> None:
    """Say who one is, and stay; rank 1 stopped."""
    Path(options["folder"], os.environ["RANK"]).write_text(str(os.getpid()), encoding="utf-8")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(120)
