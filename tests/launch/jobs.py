"""What ranks do in tests of the launcher: apart from these, so that a rank imports no more than it needs."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from shardrec.errors import DataError, PeerError
from shardrec.launch.processes import LISTENER
from shardrec.launch.stop import RunStopped, StopRequest

__all__ = [
    "LONG_S",
    "describe",
    "dies_until",
    "end_the_launcher",
    "fail",
    "hold",
    "large",
    "meet_signal",
]

LONG_S = 120.0
"""What no test waits for: it is ended before."""


def hold(options: dict[str, Any]) -> None:
    """Say who one is, and stay; rank 1 stopped."""
    Path(options["folder"], os.environ["RANK"]).write_text(str(os.getpid()), encoding="utf-8")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(120)


def describe(options: dict[str, Any]) -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    if LISTENER not in os.environ:
        assert os.environ["RANK"] == "1"
        return {}
    listener = socket.socket(fileno=int(os.environ[LISTENER]))
    address, port = listener.getsockname()
    listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    assert (listens, port) == (1, int(os.environ["MASTER_PORT"]))
    return {name: os.environ[name] for name in names} | options | {"address": address}


def fail(options: dict[str, Any]) -> None:
    if os.environ["RANK"] == "1":
        raise DataError("rows.tsv:3: field 'label'")
    time.sleep(0.2)
    raise PeerError("rank 1 is gone")


def meet_signal(options: dict[str, Any]) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), options["signal"])
    time.sleep(LONG_S)


def end_the_launcher(options: dict[str, Any]) -> None:
    """Ask the launcher to end, as a scheduler does; the ranks save."""
    with StopRequest() as stop:
        if os.environ["RANK"] == "1":
            time.sleep(0.3)  # so that the other one is listening, too
            os.kill(os.getppid(), options["signal"])
        while not stop.made:
            time.sleep(0.01)
    raise RunStopped(7, "here")


def large(options: dict[str, Any]) -> bytes:
    return bytes(options["size"])


def dies_until(options: dict[str, Any]) -> None:
    folder = Path(options["folder"])
    lives = len(list(folder.iterdir()))
    (folder / str(lives)).touch()
    if lives < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if options["fails"]:
        raise PeerError("trainer0 did not come")
