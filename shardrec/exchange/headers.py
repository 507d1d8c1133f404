"""The headers of a model's exchanges, by which all ranks fail together.

[Note: failing together]
A rank with bad input must not leave the others waiting in the next collective. Each exchange begins with a header, an
all-to-all of a few integers that is needed anyway. One of them says "my batch is faulty", one is a checksum of what the
ranks must agree on (id dtype, gradients on or off, dtypes of the dense inputs). When any header says so, every rank
knows it at the same step, and only then do they exchange their messages as text, so that each raises the same error. A
step without a fault exchanges no messages. An exception of the model's own code stays as it is on its rank. The others
raise an error that quotes it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from shardrec.errors import AnomalyError, InputError, PeerError, ShardrecError
from shardrec.exchange.collectives import Collectives, Pending
from shardrec.exchange.fault_flags import FaultFlags

_NO_MORE_HERE = "this rank has no further batch, and others have one: give every rank as many batches"

FIXED_COLUMNS = 2
"""Header columns before the modules' parts: fault flag, checksum of the agreement."""


FORWARD_FAILED, NO_MORE = 2, 3
"""Fault flags beside 1 (a faulty batch): the forward of the previous batch failed, and there is no further batch."""


class ForwardFailed(InputError):
    """While the next batch's ids were exchanged: another rank's forward failed, and this rank's forward lacks a
    backward."""


def is_shared(error: BaseException) -> bool:
    """Whether all ranks raise an error of a step, or know of it from the collective that failed."""
    return isinstance(error, (InputError, AnomalyError, PeerError))


def is_own(error: BaseException) -> bool:
    """Whether an exception in a step is a failure of this rank alone, of which the others have to hear. Control flow is
    not: an interrupt, which each rank receives by itself, and torch's end of a recomputation, which all ranks make. Nor
    are errors of ``torch.jit.trace``, which one rank may call alone.
    """
    is_failure = isinstance(error, Exception) and not isinstance(error, _StopRecomputationError)
    return is_failure and not is_shared(error) and not torch._C._is_tracing()  # type: ignore[no-untyped-call,unused-ignore]


def quoted(error: BaseException) -> str:
    """An error of a rank's own, with its notes, as the errors of the other ranks quote it."""
    text = str(error) if isinstance(error, ShardrecError) else f"{type(error).__name__}: {error}"
    return "; ".join([text, *getattr(error, "__notes__", ())])


def checksum(text: str) -> int:
    """A number that is equal for equal texts in every process."""
    return zlib.crc32(text.encode())


def _differences(texts: Sequence[str]) -> list[str]:
    """Per rank, the parts of its agreement that another rank's lacks. All parts if the ranks have the same ones, in
    other calls."""
    of_ranks = [re.split("[,;] ", text) for text in texts]
    shared = set(of_ranks[0]).intersection(*of_ranks)
    differing = [", ".join(part for part in parts if part not in shared) for parts in of_ranks]
    return [text or "none of these" for text in differing] if any(differing) else list(texts)


class Headers:
    """The header exchanges of a group: of a model's embeddings, or of ranks that agree about something else.

    Attributes:
        columns: width of a header, the same in every exchange, so that a rank can answer for any of them.
        modules: number of sharded modules that send their calls under the headers.
        exchanged: number of headers so far.
        plans: number of plans that the modules had before the present one.
        flags: of the batches that are checked on a device.
        before_raising: called with an error that all ranks are about to raise, for example to tell other replicas.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self.collectives = collectives
        self.device = device
        self.columns = FIXED_COLUMNS
        self.modules = 0
        self.exchanged = 0
        self.plans = 0
        self.flags = FaultFlags(device)
        self.before_raising: Callable[[InputError], None] = lambda _: None

    def add_module(self, columns: int) -> None:
        """Make room in each header for the calls of a further sharded module."""
        self.columns += columns
        self.modules += 1

    def exchange(self, header: Tensor) -> Tensor:
        """Send row q of ``header`` (W, C) int64 to rank q. Returns the rows received, one from each rank."""
        self.exchanged += 1
        return self.collectives.header(header)

    def exchange_with_ids(
        self, rows: Sequence[list[int]], parts: Sequence[Sequence[Tensor]]
    ) -> tuple[list[list[int]], Callable[[Sequence[int]], Pending]]:
        """:meth:`exchange` of numbers that the host knows, and the payload: see :meth:`Collectives.header_with_ids`."""
        self.exchanged += 1
        return self.collectives.header_with_ids(rows, self.columns, parts)

    def fail_all(self, message: str, flag: int = 1) -> NoReturn:
        """Take part in the other ranks' next header exchange with a fault, and raise it here as there."""
        self._exchange_flag(flag)
        self.raise_faults(message, "")

    def end_all(self) -> None:
        """Take part in the other ranks' next header exchange, in which they have no further batch either.

        Raises:
            InputError: on every rank, if some have one, or have failed.
        """
        flags = self._exchange_flag(NO_MORE)
        if any(flag != NO_MORE for flag in flags):
            self.raise_faults("" if {1, FORWARD_FAILED} & set(flags) else _NO_MORE_HERE, "", flags)

    def _exchange_flag(self, flag: int) -> list[int]:
        """A header of a flag alone. Returns the headers of all ranks."""
        header = torch.zeros((self.collectives.world_size, self.columns), dtype=torch.int64, device=self.device)
        header[:, 0] = flag
        flags: list[int] = self.exchange(header)[:, 0].tolist()
        return flags

    def raise_faults(
        self, message: str, agreement: str, flags: Sequence[int] = (), *, cause: Exception | None = None
    ) -> NoReturn:
        """Exchange the messages of all ranks and raise them. Every rank must call this in the same step.

        Args:
            message: what is wrong on this rank, or "".
            agreement: what this rank would have sent, used when no rank has a message.
            flags: fault flags of all ranks.
            cause: the exception behind ``message``, from which this rank raises the error.

        Raises:
            InputError: the same on every rank. A ForwardFailed if a flag says so.
        """
        kind = ForwardFailed if FORWARD_FAILED in flags else InputError
        messages = self.all_gather_text(message)
        if any(messages):
            lines = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text]
            error = kind(
                lines[0] if len(lines) == 1 else f"{len(lines)} ranks have bad input:\n  " + "\n  ".join(lines)
            )
        else:
            texts = _differences(self.all_gather_text(agreement))
            lines = [f"rank {rank}: {text}" for rank, text in enumerate(texts)]
            error = kind(
                "the ranks disagree about their input. Give every rank the same dtypes and modes:\n  "
                + "\n  ".join(lines)
            )
        self.before_raising(error)
        if cause is not None:
            raise error from cause
        raise error

    def all_gather_text(self, text: str) -> list[str]:
        """The texts of all ranks, on every rank."""
        collectives, what = self.collectives, "error message"
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        size = torch.tensor([data.numel()], device=self.device)
        sizes = torch.cat(collectives.gather(size, [1] * collectives.world_size, what)).tolist()
        texts = collectives.gather(data, sizes, what)
        return [bytes(text.tolist()).decode(errors="replace") for text in texts]
