"""Whether the device found a batch faulty, which the host reads when it must know.

::

    forward     check_ids    writes the batch's number to its flag on the device if the batch is faulty
                send         copies the flag to pinned memory, and records an event
                lookup, dense part, loss: the host does not wait
    backward    check        waits for the event, and raises before a weight or a gradient changes

A flag is up if it holds the number of its batch. No flag is cleared: another number is of an earlier batch. The lookup
of a faulty batch reads safe ids (:func:`shardrec.exchange.check.checked_on_device`), and its values are meaningless.

Which forward reads its flag immediately is decided in :mod:`shardrec.step.step`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_FLAGS = 64
"""Largest number of batches with unread flags."""


class FaultFlag:
    """The flag of one batch.

    Args:
        number: of the batch.
        value: () int64 on the device.
        on_host: () int64, pinned.
    """

    __slots__ = ("_copied", "_is_up", "_on_host", "_report", "number", "value")

    def __init__(self, number: int, value: Tensor, on_host: Tensor) -> None:
        self.number, self.value, self._on_host = number, value, on_host
        self._copied: torch.cuda.Event | None = None
        self._is_up: bool | None = None
        self._report: Callable[[], None] | None = None

    def put_up(self, where: Tensor | None = None) -> None:
        """The batch is faulty; with ``where``, () bool on the device, if that is true."""
        if where is None:
            self.value.fill_(self.number)
        else:
            self.value.masked_fill_(where, self.number)

    def is_down(self) -> Tensor:
        """() bool on the device, whether the batch is sound as far as it was checked on the current stream."""
        return self.value != self.number

    def send(self, report: Callable[[], None]) -> None:
        """Copy the flag to the host, after the checks on the current stream.

        Args:
            report: raises the error of the batch.
        """
        self._on_host.copy_(self.value, non_blocking=True)
        self._copied = torch.cuda.current_stream(self.value.device).record_event()
        self._report = report

    def is_up(self) -> bool:
        """Whether the batch is faulty. Waits until the device has checked it."""
        if self._is_up is None:
            flag = self.value
            if self._copied is not None:
                self._copied.synchronize()
                flag = self._on_host
            self._is_up = int(flag) == self.number
        return self._is_up

    def check(self) -> None:
        """Wait for a flag that was sent.

        Raises:
            InputError: if the batch is faulty. Again in each call.
        """
        if self.is_up() and self._report is not None:
            self._report()
        self._report = None


class FaultFlags:
    """The flags of a model's batches.

    Attributes:
        unread: flags of batches that were looked up and may be faulty, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.unread: list[FaultFlag] = []
        self._device = device
        self._number = 0
        self._memory: list[tuple[Tensor, Tensor]] = []

    def next(self) -> FaultFlag:
        """The flag of a further batch. It reuses the memory of the 64th batch before, which is checked first if it was
        not."""
        if not self._memory:
            with torch.inference_mode(False):  # so that later batches may write to it
                # Two words for each: kernels are compiled once for memory at an address that is a multiple of 16.
                on_device = torch.zeros((_FLAGS, 2), dtype=torch.int64, device=self._device)
                on_host = torch.zeros(_FLAGS, dtype=torch.int64, pin_memory=True)
                self._memory = list(zip(on_device[:, 0].unbind(), on_host.unbind(), strict=True))
        self._number += 1
        if self.unread and self._number - self.unread[0].number >= _FLAGS:
            self.check()
        return FaultFlag(self._number, *self._memory[self._number % _FLAGS])

    def check_in_backward(self, outputs: object) -> None:
        """Read the unread flags when a backward reaches one of the tensors in ``outputs`` of a model's forward."""
        flags = self.unread.copy()

        def check(gradients: object) -> None:
            self.check()
            for flag in flags:
                flag.check()

        nodes = {leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
        for node in nodes:
            node.register_prehook(check)

    def check(self) -> None:
        """Wait for the unread flags, if there are any.

        Raises:
            InputError: of the first batch that is faulty. The flags of those after it are still unread.
        """
        while self.unread:
            self.unread.pop(0).check()
