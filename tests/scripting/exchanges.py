"""Exchanges in TorchScript, which reads their source; for the ranks, which import them by name."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["swap_and_wait", "swap_in_forks"]


@torch.jit.script
def swap_and_wait(values: Tensor, sizes: list[int], group: str) -> Tensor:
    """A part of ``sizes`` to each rank."""
    pending = torch.ops._c10d_functional.all_to_all_single(values, sizes, sizes, group)
    return torch.ops._c10d_functional.wait_tensor(pending)


@torch.jit.script
def wait_for(pending: Tensor) -> Tensor:
    """By itself, so that a fork can call it."""
    return torch.ops._c10d_functional.wait_tensor(pending)


@torch.jit.script
def swap_in_forks(values: Tensor, sizes: list[int], group: str, count: int) -> list[Tensor]:
    """``count`` exchanges issued in order, and waited for on other threads in any."""
    forks: list[torch.jit.Future[Tensor]] = []
    for number in range(count):
        pending = torch.ops._c10d_functional.all_to_all_single(values * number, sizes, sizes, group)
        forks.append(torch.jit.fork(wait_for, pending))
    found: list[Tensor] = []
    for fork in forks:
        found.append(torch.jit.wait(fork))
    return found
