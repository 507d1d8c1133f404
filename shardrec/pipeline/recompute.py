"""Activation checkpointing: what a layer can ask, and what is put back for a recomputation.

::

    forward     no graph is kept, only the stage's inputs, the random state and autocast       is_checkpointing()
    backward    the forward once more, with that state, and its graph is gone through          is_recomputing()

[Note: random numbers of stages on the CPU]
torch has one generator for all threads of the CPU. Stages that run on threads would draw from it in any order, and a
recomputation would not find its numbers again. So each has a stream of its own: a dispatch mode puts the stage's state
into the generator for just the operators that draw. Their streams begin from one draw of the generator in each step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Modes", "RandomState", "RandomStream", "flagged", "is_checkpointing", "is_recomputing"]


class _Flags(threading.local):
    checkpointing = False
    recomputing = False


_flags = _Flags()


def is_checkpointing() -> bool:
    """Whether the forward that runs on this thread is checkpointed: it keeps no graph, and will run once more."""
    return _flags.checkpointing


def is_recomputing() -> bool:
    """Whether the forward that runs on this thread is a recomputation, for a backward.

    A layer that counts its calls, or updates a state in forward, leaves that out in a recomputation.
    """
    return _flags.recomputing


@contextmanager
def flagged(flag: Literal["checkpointing", "recomputing"]) -> Iterator[None]:
    """What layers are told inside the block."""
    before = getattr(_flags, flag)
    setattr(_flags, flag, True)
    try:
        yield
    finally:
        setattr(_flags, flag, before)


@dataclass(frozen=True, kw_only=True)
class Modes:
    """The caller's modes, which belong to a thread, for the threads that work for it and for recomputations.

    Args:
        inference: inference mode.
        autocast: per device type, whether on, and the dtype.
    """

    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def now(device_types: set[str]) -> Modes:
        """Those of the calling thread."""
        return Modes(
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(device_types)
            ),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have them on this thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


_GENERATOR = threading.Lock()
"""Held while another stream's state is in the CPU's generator."""


class RandomStream(TorchDispatchMode):
    """What is drawn on the CPU, on a thread where the mode is on, comes from a stream of its own.

    Args:
        seed: of the stream.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = torch.Generator().manual_seed(seed).get_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with _GENERATOR:
            before = torch.get_rng_state()
            torch.set_rng_state(self.state)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.state = torch.get_rng_state()
                torch.set_rng_state(before)


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """Where a stage's random numbers were.

    Args:
        stream: its stream on the CPU; None: torch's generator.
        cpu: state of the one or the other.
        device: whose generator the rest is of.
        cuda: its state, if it is a CUDA device.
    """

    stream: RandomStream | None
    cpu: Tensor
    device: torch.device
    cuda: Tensor | None

    @staticmethod
    def now(device: torch.device, stream: RandomStream | None) -> RandomState:
        """Where they are."""
        return RandomState(
            stream=stream,
            cpu=torch.get_rng_state() if stream is None else stream.state,
            device=device,
            cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def put(self) -> None:
        """Go back there."""
        if self.stream is None:
            torch.set_rng_state(self.cpu)
        else:
            self.stream.state = self.cpu
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers once more, and go on afterwards as if nothing had been drawn."""
        before = RandomState.now(self.device, self.stream)
        self.put()
        try:
            yield
        finally:
            before.put()
