"""How the ranks of a host find each other: strangers hold nobody up, and what fails is said."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import PeerError
from shardrec.exchange.shared import handshake
from tests.exchange.shared.ranks_on_hosts import shared
from tests.ranks import ranks


def visited(visit: Callable[[socket.socket], object]) -> Callable[[], tuple[socket.socket | None, str]]:
    """Listens as ever, and has a stranger connect before any peer can."""
    listen = handshake._listen

    def listen_and_visit() -> tuple[socket.socket | None, str]:
        listener, address = listen()
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(address)
        visit(stranger)
        strangers.append(stranger)
        return listener, address

    strangers: list[socket.socket] = []
    return listen_and_visit


VISITS = {
    "silent": lambda stranger: None,
    "gone": lambda stranger: stranger.close(),
    "liar": lambda stranger: stranger.send(handshake._HELLO.pack(1, bytes(16))),
    "noise": lambda stranger: stranger.send(b"hello"),
}


@pytest.mark.parametrize("kind", VISITS)
def test_a_stranger_holds_nobody_up(kind: str) -> None:
    def rank_main() -> None:
        with patch.object(handshake, "_listen", visited(VISITS[kind])), warnings.catch_warnings():
            warnings.simplefilter("error")
            collectives = shared()
        received = collectives.send([[torch.full((2,), collectives.rank)]] * 3, [2, 2, 2], "test").wait()
        assert torch.cat(received).tolist() == [0, 0, 1, 1, 2, 2]

    ranks(3, rank_main)


def test_a_rank_that_cannot_connect_is_named_and_all_take_the_process_group() -> None:
    def rank_main() -> None:
        soon = patch.object(handshake, "_CONNECT_S", 0.5)
        group = dist.group.WORLD
        assert group is not None
        secret = patch.object(handshake.secrets, "compare_digest", lambda one, two: False)
        with soon, secret, pytest.warns(RuntimeWarning, match=r"rank 0: rank\(s\) \[1\] did not connect within 0\.5 s"):
            assert handshake.connect(group, lambda: 60.0) is None

    ranks(2, rank_main)


def test_a_forked_child_does_not_hide_the_end_of_its_rank() -> None:
    """As a worker of a data loader that outlives its rank."""

    def rank_main() -> str:
        collectives = shared(timeout_s=600.0)
        store = dist.distributed_c10d._get_default_store()
        if collectives.rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            store.set("child", str(child))
            os._exit(3)
        child = int(store.get("child"))
        try:
            with pytest.raises(PeerError, match=r"rank 1's process \d+ has ended"):
                collectives.send([[torch.zeros(1)]] * 2, [1, 1], "test").wait()
        finally:
            os.kill(child, signal.SIGKILL)
        return "told"

    assert ranks(2, rank_main, expect_death={1}, timeout=40.0)[0] == "told"
