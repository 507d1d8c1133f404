"""Ranks on CUDA devices, where there are some."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardrec.launch.ranks import SHARE_DEVICES, RankInfo
from shardrec.launch.run import on_new_ranks

DEVICES = torch.cuda.device_count()
WORLDS = [
    1,
    pytest.param(
        2,
        marks=pytest.mark.skipif(
            DEVICES < 2 and os.environ.get(SHARE_DEVICES) != "1",
            reason=f"needs two CUDA devices, or one that ranks may share ({SHARE_DEVICES}=1)",
        ),
    ),
]


def on_a_rank(rank_info: RankInfo, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    fn(*args)


def cuda_ranks(world_size: int, fn: Callable[..., None], *args: Any) -> None:
    """Call a module-level function on each rank, in processes of their own: CUDA does not survive a fork."""
    on_new_ranks(on_a_rank, fn, args, nproc=world_size, device="cuda", debug=True)
