"""Who is gone: seen on this host, told by other hosts, or not known."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardrec.errors import ConfigError, PeerError
from shardrec.exchange import peers as module
from shardrec.exchange.flight_record import flight_record
from shardrec.exchange.peers import failed_in_a_collective, peers
from tests.ranks import RankDied, ranks


def test_what_is_no_collectives_failure_passes() -> None:
    def rank_main() -> None:
        for error in (OSError("disk full"), ValueError("bad"), RuntimeError("shape mismatch"), PeerError("told")):
            with pytest.raises(type(error)) as caught, peers(None, "save"):
                raise error
            assert caught.value is error
        with peers(None, "save"):
            dist.barrier()
        assert flight_record().entries()[-1].what == "save"
        assert flight_record().entries()[-1].ended

    ranks(2, rank_main)


def test_without_a_group_the_block_just_runs() -> None:
    with pytest.raises(RuntimeError, match="gloo/"), peers(None, "save"):
        raise RuntimeError("[gloo/transport] Timed out")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited"), True),
        (dist.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("an igloo/of ice"), False),
        (ConfigError("the gloo/backend is unknown"), False),
    ],
)
def test_which_errors_are_a_collectives(error: Exception, told: bool) -> None:
    assert failed_in_a_collective(error) is told


@pytest.mark.parametrize(
    ("state", "words"), [("T", "is stopped by a signal"), ("t", "runs"), ("S", "runs"), ("Z", "has ended")]
)
def test_a_process_that_a_profiler_looks_at_is_not_stopped(state: str, words: str) -> None:
    place = module._RankProcess(host="here", pid=7, began="long ago", record=-1)
    with patch.object(module, "_process", return_value=(state, "long ago")):
        assert place.state() == words


def test_other_hosts_tell_who_is_gone() -> None:
    """Rank 0 is alone on its host, and cannot see the processes of ranks 1 and 2."""

    def rank_main() -> str:
        rank = dist.get_rank()
        hosts = patch.object(module, "_process_host", lambda: "here" if rank == 0 else "there")
        with hosts, patch.object(module, "_LOOK_S", 20.0):  # rank 1 may take its time on a busy machine
            with peers(None, "start"):
                dist.barrier()
            if rank == 2:
                os._exit(3)
            with pytest.raises(PeerError) as caught, peers(None, "save"):
                dist.all_to_all_single(torch.empty(3), torch.ones(3))
        assert caught.value.ranks == (2,)
        assert caught.value.waited_for == "save"
        return str(caught.value)

    first, second, died = ranks(3, rank_main, expect_death={2})
    assert isinstance(died, RankDied)
    for rank, text in enumerate((first, second)):
        assert text.startswith(f"rank {rank} of 3: the save failed, because rank 2's process")
        assert "has ended" in text
    assert re.search(r"\n  rank 1: #.* start: done", first), "its note has its flight record"


def test_a_rank_of_another_host_that_does_not_answer() -> None:
    def rank_main() -> str:
        rank = dist.get_rank()
        hosts = patch.object(module, "_process_host", lambda: f"host {rank}")
        with hosts, patch.object(module, "_LOOK_S", 0.2):
            with peers(None, "start"):
                dist.barrier()
            store = dist.distributed_c10d._get_default_store()
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
            if rank == 1:
                store.wait(["given up"])
                return ""
            with pytest.raises(PeerError) as caught, peers(None, "load"):
                dist.barrier()
            store.set("given up", "")
        assert caught.value.ranks == (1,)
        return str(caught.value)

    words = r"rank 0 of 2 waited [\d.e+-]+ s for rank 1 to take part in the load \("
    assert re.search(words, ranks(2, rank_main)[0])
