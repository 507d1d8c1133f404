"""Activation checkpointing: the state that is restored for a recomputation.

::

    forward     no graph is kept, only the stage's inputs, the random state and autocast       is_checkpointing()
    backward    the forward once more, with that state, and its graph is gone through          is_recomputing()

[Note: random numbers of stages on the CPU]
torch has one generator for all threads of the CPU. Stages that run on threads would draw from it in any order, and a
recomputation could not repeat its numbers. So each stage has its own stream of random numbers: a dispatch mode sets the
generator to the stage's state for the operators that draw. Their streams begin from one draw of the generator in each
step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Modes:
    """The caller's modes, which belong to a thread, for the threads that work for it and for recomputations.

    Args:
        device_types: autocast is meant for these.
    """

    def __init__(self, device_types: set[str]) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(device_types)
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have them on this thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


_GENERATOR = threading.Lock()
"""Held while another stream's state is in the CPU's generator."""


class RandomStream(TorchDispatchMode):
    """Random numbers on the CPU, drawn on a thread where this mode is active, come from a separate stream."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = torch.Generator().manual_seed(seed).get_state()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
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


class RandomState:
    """Where a stage's random numbers are when it is made.

    Args:
        device: they are drawn from its generator, if it is a CUDA device.
        stream: of those on the CPU. None: torch's generator.
    """

    def __init__(self, device: torch.device, stream: RandomStream | None) -> None:
        self._device = device
        self._stream = stream
        self._cpu = torch.get_rng_state() if stream is None else stream.state
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers again inside, and restore the generator afterwards."""
        before = RandomState(self._device, self._stream)
        self._put()
        try:
            yield
        finally:
            before._put()

    def _put(self) -> None:
        if self._stream is None:
            torch.set_rng_state(self._cpu)
        else:
            self._stream.state = self._cpu
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
