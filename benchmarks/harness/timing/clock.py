"""Timing steps: the processor's clock, or events on a CUDA stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

__all__ = ["WARM_UP_S", "time_steps", "warm_up"]

WARM_UP_S = 0.5
"""On CUDA, before the clock runs: a device that was idle raises its clock rate meanwhile."""


def warm_up(step: Callable[[Any], object], inputs: Sequence[Any], device: torch.device) -> None:
    """Steps on each of the inputs; on CUDA, where no other rank takes part, again until the device is warm."""
    end = perf_counter() + WARM_UP_S
    while True:
        for one in inputs:
            step(one)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if device.type != "cuda" or perf_counter() > end:
            return


def time_steps(step: Callable[[Any], object], inputs: Sequence[Any], device: torch.device) -> list[float]:
    """Milliseconds of ``step(one)`` for each of the inputs, one after the other without a pause.

    On CUDA each step lies between two events of the current stream. The stream is waited for once, at the end, so that
    the host may run ahead as it does in training.
    """
    if device.type == "cuda":
        return _on_stream(step, inputs)
    found = []
    before = perf_counter()
    for one in inputs:
        step(one)
        now = perf_counter()
        found.append((now - before) * 1e3)
        before = now
    return found


def _on_stream(step: Callable[[Any], object], inputs: Sequence[Any]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(inputs) + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for one, event in zip(inputs, events[1:], strict=True):
        step(one)
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(events)]
