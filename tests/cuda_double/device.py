"""Tensors, streams and events of the double, which belong to the mode that is on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ACTIVE",
    "CPU",
    "CUDA",
    "POISON",
    "DeviceTensor",
    "EventDouble",
    "HiddenWait",
    "Race",
    "StreamDouble",
    "inner_of",
    "is_cuda",
    "on_stream",
    "to_device",
]

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
POISON = 2**30 + 7
"""Fills what is undefined on a GPU; no table has such a row."""
ACTIVE: list[Any] = []
"""The doubles (:class:`tests.cuda_double.mode.CudaDouble`) that are on, the current one last."""


class HiddenWait(AssertionError):
    """The host would wait for the device here."""


class Race(AssertionError):
    """One stream reads what another may not have written yet."""


class StreamDouble:
    """A stream of the double: how much was issued on it, how much of that the host has waited for, and how much of the
    others it waits for itself."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.issued = self.completed = 0
        self.priority = priority
        if ACTIVE:
            ACTIVE[-1].streams.append(self)
        self.waits_for: dict[StreamDouble, int] = {}

    def record_event(self, event: EventDouble | None = None) -> EventDouble:
        event = event or EventDouble()
        event.after = {**self.waits_for, self: self.issued}
        return event

    def wait_event(self, event: EventDouble) -> None:
        for stream, issued in event.after.items():
            self.waits_for[stream] = max(issued, self.waits_for.get(stream, 0))

    def wait_stream(self, other: StreamDouble) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        ACTIVE[-1].wait("a stream is waited for")


class EventDouble:
    """What was issued, and waited for, when it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.after: dict[StreamDouble, int] = {}

    def record(self, stream: StreamDouble | None = None) -> None:
        (stream or ACTIVE[-1].stream).record_event(self)

    def wait(self, stream: StreamDouble | None = None) -> None:
        (stream or ACTIVE[-1].stream).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        ACTIVE[-1].wait("an event is waited for")


@contextmanager
def on_stream(stream: StreamDouble | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    double = ACTIVE[-1]
    before, double.stream = double.stream, stream or double.stream
    try:
        yield
    finally:
        double.stream = before


class DeviceTensor(torch.Tensor):
    """A tensor that says that it is on CUDA; ``inner`` is where its values are."""

    inner: Tensor
    written: tuple[StreamDouble, int]
    readers: set[StreamDouble]

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,  # what C++ sees: a build without CUDA has no autograd for its tensors
            requires_grad=inner.requires_grad,
        )
        made.inner = inner.detach()
        stream = ACTIVE[-1].stream
        stream.issued += 1
        made.written, made.readers = (stream, stream.issued), set()
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        assert isinstance(stream, StreamDouble), "streams on the double are doubles"
        self.readers.add(stream)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ACTIVE[-1].run(func, args, kwargs or {})


def is_cuda(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return torch.device(device).type == "cuda"
    return False


def inner_of(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.inner
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def to_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value
