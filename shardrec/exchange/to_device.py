"""Copies of host numbers to the device without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def staged(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` (n,) as a tensor on ``device``, for which the host does not wait.

    ``torch.tensor(values, device="cuda")`` copies from pageable memory, and so waits until the device has finished all
    earlier work. It is right for constants that are kept, which are then ready for every stream. This function is for
    the numbers of one step, on the current stream. TorchScript also compiles it.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on ``device``, for which the host does not wait either."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
