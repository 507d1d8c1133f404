"""Kernels written in Triton, which torch's builds for CUDA bring along: whether they can run, and their launch."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether kernels run on a device: CUDA, with Triton, which needs a C compiler the first time. Tries one, once."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        launch("shardrec.exchange.input_kernels", "clear", (1,), torch.empty(1, dtype=torch.int32, device=device))
    except Exception as error:
        warnings.warn(
            f"Triton compiles no kernel here ({error}). Torch's operators take their place, and steps of small batches "
            "take up to 1.4 times as long: install a C compiler, such as gcc",
            stacklevel=2,
        )
        return False
    return True


def launch(module: str, kernel: str, grid: tuple[int, ...], *values: Any, **constants: Any) -> None:
    """Run a kernel on the current stream.

    Args:
        module: name of the kernel's module, which is imported now: Triton is not there without CUDA, and takes a
            second to import.
        kernel: its name there.
        grid: number of programs along each axis.
        values: its arguments, in order. The first is a tensor, and the kernel runs on its device.
        constants: those that it is compiled for.
    """
    run, device = _kernel(module, kernel)[grid], values[0].device
    # Triton launches on the current device.
    if not values[0].is_cuda or device.index == torch.cuda.current_device():
        run(*values, **constants)
    else:
        with torch.cuda.device(device):
            run(*values, **constants)


@cache
def _kernel(module: str, name: str) -> Any:
    return getattr(import_module(module), name)
