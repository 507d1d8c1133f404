"""Thousands of steps of a process: its memory, file descriptors and threads stay as they are."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from random import Random

import pytest
import torch.distributed as dist

from tests.batches import random_bags
from tests.modules.both import POLICIES, ROWS, sharded_both
from tests.ranks import ranks

PAGE = os.sysconf("SC_PAGE_SIZE")


def usage() -> tuple[int, int, int]:
    """Resident bytes, open file descriptors and threads of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def steps(first: int, last: int) -> list[tuple[int, int, int]]:
    """Train on batches of changing sizes and orders of keys, through shared memory; usage at both steps."""
    model = sharded_both(POLICIES)
    seen = []
    for step in range(last):
        rng = Random(f"{step}/{dist.get_rank()}")
        unused = [f"unused {number}" for number in range(step % 5)]
        features = random_bags(rng, {**ROWS, "b": 9, "c": 9}, rng.choice([0, 1, 2, 3, 6]), extra=unused).kjt()
        sum(output.sum() for output in model(features)).backward()  # type: ignore[union-attr]
        if step + 1 in (first, last):
            seen.append(usage())
    return seen


def assert_flat(first: int, last: int, timeout: float) -> None:
    for before, after in ranks(2, steps, first, last, timeout=timeout):
        assert after[1:] == before[1:], f"file descriptors and threads: {before[1:]}, then {after[1:]}"
        grown = (after[0] - before[0]) / 2**20
        print(f"{grown:.2f} MiB from step {first} to step {last}; {after[1]} descriptors, {after[2]} threads")
        assert grown < 4, f"{grown:.1f} MiB more after {last - first} steps"


@pytest.mark.slow
def test_10_000_steps() -> None:
    assert_flat(3000, 10_000, 3000.0)
