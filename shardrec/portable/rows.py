"""The all-to-all of float rows as operators, for TorchScript and torch.export."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["arrived_rows", "exchange_rows", "mean_gradient"]


def exchange_rows(flat: Tensor, into: list[int], out: list[int], group_name: str, anchor: Tensor) -> Tensor:
    """Issue the all-to-all of float rows, whose gradient goes the same way back, as a mean over the ranks.

    Args:
        flat: float32, the parts for each rank one after the other.
        into: elements from each rank.
        out: elements to each rank.
        group_name: of the process group.
        anchor: (0,) float32 that takes a gradient.
    """
    world_size = len(out)
    if world_size == 1:
        return flat
    if torch.is_grad_enabled():
        # A rank whose rows need no gradient still takes its part in the others' backward.
        if not flat.requires_grad:
            # Not requires_grad_(), which tracers do not have for a value.
            flat = torch.cat([flat, anchor])
        flat = mean_gradient(flat, world_size)
    pending: Tensor = torch.ops._c10d_functional_autograd.all_to_all_single(flat, into, out, group_name)
    return pending


def mean_gradient(values: Tensor, world_size: int) -> Tensor:
    """``values``, whose gradient is divided by the number of ranks (see :mod:`shardrec.exchange.output`)."""
    # On the way from a value to itself: one pass over the memory, where a sum of products takes three.
    return torch.lerp(values.detach(), values, 1.0 / world_size)


def arrived_rows(pending: Tensor, world_size: int) -> Tensor:
    """Wait for :func:`exchange_rows`."""
    if world_size == 1:
        return pending
    done: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return done
