"""Fresh ranks for each task, forked from a template."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.timing.environment import MALLOC, template_environment
from benchmarks.harness.timing.processes import FreshProcesses
from shardrec.errors import PeerError
from shardrec.launch.ranks import RankInfo


@pytest.fixture(scope="module")
def processes() -> Iterator[FreshProcesses]:
    with FreshProcesses(threads=1, timeout=20.0) as made:
        yield made


def task(name: str) -> str:
    """A function of this module, which the ranks import from its file: tests are no package."""
    return f"{__name__}:{name}"


def look_around(options: Mapping[str, Any], rank_info: RankInfo) -> dict[str, Any]:
    total = torch.tensor([float(rank_info.rank + 1)])
    dist.all_reduce(total)
    return {
        "options": dict(options),
        "sum": total.item(),
        "ranks": [rank_info.rank, rank_info.world_size],
        "threads": torch.get_num_threads(),
        "malloc": {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "SHARDREC_KEEP"))},
        "pid": os.getpid(),
    }


def fail_on_one(options: Mapping[str, Any], rank_info: RankInfo) -> None:
    if rank_info.rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def die(options: Mapping[str, Any], rank_info: RankInfo) -> None:
    os._exit(7)


class TestFreshProcesses:
    @pytest.mark.slow
    def test_new_ranks_for_each_task(self, processes: FreshProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = (
            processes.run(task("look_around"), {"number": number}, ranks=2, malloc="default") for number in (1, 2)
        )
        assert (first["options"], second["options"]) == ({"number": 1}, {"number": 2})
        assert first["pid"] != second["pid"]
        assert (first["sum"], first["ranks"], first["threads"], first["malloc"]) == (3.0, [0, 2], 1, {})

    @pytest.mark.slow
    def test_the_first_trouble_is_told_and_the_next_task_runs(self, processes: FreshProcesses) -> None:
        with pytest.raises(PeerError, match="rank 1 failed with ValueError: rank 1 has had enough"):
            processes.run(task("fail_on_one"), {}, ranks=2, malloc="default")
        with pytest.raises(PeerError, match="rank 0 ended with exit code 7 and said nothing"):
            processes.run(task("die"), {}, ranks=1, malloc="default")
        assert processes.run(task("look_around"), {}, ranks=1, malloc="default")["sum"] == 1.0


def test_malloc_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    monkeypatch.setenv("SHARDREC_TRANSPORT", "group")
    default, keep = (template_environment(MALLOC[name]) for name in ("default", "keep"))
    assert not {"MALLOC_ARENA_MAX", "SHARDREC_TRANSPORT"} & default.keys()
    assert set(keep) - set(default) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}
    assert template_environment(MALLOC["alone"])["SHARDREC_KEEP_MEMORY"] == "0"
    assert default["OMP_NUM_THREADS"] == "1"
