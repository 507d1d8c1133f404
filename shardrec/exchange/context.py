"""State that the sharded modules of one model share in a step: the collectives, and how all ranks fail together.

[Note: failing together]
A rank with invalid input must not leave the others waiting in the next collective. Each exchange begins with a header,
an all-to-all of a few integers that is needed anyway; one of them says "my batch is faulty", one is a checksum of the
properties that must be equal on all ranks (id dtype, gradients on or off, dtypes of the dense inputs). If any header
says so, every rank knows it at the same step, and only then do the ranks exchange their messages as text, so that all
raise the same error. A step without a fault has no overhead.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor

from shardrec.errors import AnomalyError, InputError
from shardrec.exchange.backward_watch import BackwardWatch
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.wire import QuantizedComms

if TYPE_CHECKING:
    from shardrec.exchange.batch import OnBadId
    from shardrec.ids.options import DynamicIds

__all__ = ["FIXED_COLUMNS", "FORWARD_FAILED", "NO_MORE", "ForwardFailed", "StepContext", "checksum"]

_NO_MORE_HERE = "there is no further batch, and others have one: give every rank as many batches"

FIXED_COLUMNS = 2
"""Header columns before the modules' parts: fault flag, checksum of the agreement."""


FORWARD_FAILED, NO_MORE = 2, 3
"""Fault flags beside 1, a faulty batch: the forward of the batch before failed; there is no further batch."""


class ForwardFailed(InputError):
    """Another rank's forward failed, as the exchange of the next batch's ids shows; this rank must not run backward."""


def checksum(text: str) -> int:
    """A number that is equal for equal texts in every process."""
    return zlib.crc32(text.encode())


class Reducer(Protocol):
    """Averages the gradients of ordinary parameters over the ranks (:mod:`shardrec.modules.dense`)."""

    @property
    def agreement(self) -> str:
        """What the ranks must have in common, in words."""

    def arm(self) -> None:
        """A forward with gradients begins."""

    def begin(self) -> None:
        """A backward begins."""


class StepContext:
    """Shared by the sharded modules of a model.

    Args:
        collectives: of the group that the embeddings are sharded over.
        device: where header and payload live.
        comms: formats of the output exchanges.

    Attributes:
        dense_signature: dtypes of the model's other inputs in this step, set by the model's wrapper.
        modules: number of sharded modules.
        header_columns: width of a header, the same in every exchange, so that a rank can answer for any of them.
        exchanges: number of headers exchanged so far.
        on_bad_id: per feature, what is done with ids outside of its table, where that is no error.
        dynamic_ids: per table, by its name in the plan, what is done with its ids, where they are dynamic.
        output_dtype: of the modules' outputs; rows are added up, and travel, as float32 or as ``comms`` says.
        detect_anomaly: look for NaN and Inf; see :mod:`shardrec.exchange.anomaly`.
        anomalies: those that this rank found and no rank has raised yet.
        refusal: what is wrong with the batch whose tracing was ended, or "".
        gradients_are_reduced: the reducer or the user averages the gradients of ordinary parameters over the ranks.
        reducer: does so, unless that is left to the user, or there is one rank.
        updates: called at the end of each backward in which the reducer has averaged gradients.
        forwards: called when a forward with gradients begins.
        accumulates: forwards are in ``no_sync``.
        reduce_this_backward: the last forward with gradients was not, so that its backward averages.
        backward: tells the reducer of backwards, and the other ranks of one that raises here.
    """

    def __init__(self, collectives: Collectives, device: torch.device, comms: QuantizedComms | None = None) -> None:
        self.comms = comms or QuantizedComms()
        self.collectives = collectives
        self.device = device
        self.dense_signature = ""
        self.modules = 0
        self.header_columns = FIXED_COLUMNS
        self.exchanges = 0
        self.on_bad_id: dict[str, OnBadId] = {}
        self.dynamic_ids: dict[str, DynamicIds] = {}
        self.output_dtype = torch.float32
        self.detect_anomaly = False
        self.anomalies: list[str] = []
        self.refusal = ""
        self.gradients_are_reduced = False
        self.reducer: Reducer | None = None
        self.updates: list[Callable[[], None]] = []
        self.forwards: list[Callable[[], None]] = []
        self.accumulates = False
        self.reduce_this_backward = True
        self.backward = BackwardWatch(collectives.tell, self._backward_begins)

    def begin_forward(self) -> None:
        """A forward begins: if it has gradients, it decides whether its backward averages them."""
        if torch.is_grad_enabled():
            self.reduce_this_backward = not self.accumulates
            for begin in self.forwards:
                begin()
            if self.reducer is not None:
                self.reducer.arm()

    def agreement(self) -> str:
        """What the ranks must have in common in a forward."""
        if not torch.is_grad_enabled():
            return "gradients off"
        trained = "" if self.reducer is None else self.reducer.agreement
        return f"gradients on{' in no_sync' if self.accumulates else ''}{trained}"

    def _backward_begins(self) -> None:
        if self.reducer is not None:
            self.reducer.begin()

    def exchange_header(self, header: Tensor) -> Tensor:
        """Send row q of ``header`` (W, C) int64 to rank q; returns the rows received, one from each rank."""
        self.exchanges += 1
        return self.collectives.header(header)

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
        """A header of a flag alone; returns those of all ranks."""
        header = torch.zeros((self.collectives.world_size, self.header_columns), dtype=torch.int64, device=self.device)
        header[:, 0] = flag
        flags: list[int] = self.exchange_header(header)[:, 0].tolist()
        return flags

    def raise_faults(self, message: str, agreement: str, flags: Sequence[int] = ()) -> NoReturn:
        """Exchange the messages of all ranks and raise them; every rank must call this in the same step.

        Args:
            message: what is wrong on this rank, or "".
            agreement: what this rank would have sent, used when no rank has a message.
            flags: fault flags of all ranks.

        Raises:
            InputError: the same on every rank; a ForwardFailed if a flag says so.
        """
        error = ForwardFailed if FORWARD_FAILED in flags else InputError
        messages = self.all_gather_text(message)
        if any(messages):
            lines = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text]
            raise error(lines[0] if len(lines) == 1 else f"{len(lines)} ranks have bad input:\n  " + "\n  ".join(lines))
        agreements = self.all_gather_text(agreement)
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(agreements)]
        raise error(
            "the ranks disagree about their input; give every rank the same dtypes and modes:\n  " + "\n  ".join(lines)
        )

    def before_gradients(self) -> None:
        """In each backward, on every rank, before gradients are sent.

        Raises:
            AnomalyError: the same on every rank.
        """
        self.backward.begin()
        self.raise_anomalies()

    def raise_anomalies(self) -> None:
        """Raise what any rank found, on every rank; does nothing unless anomalies are looked for.

        Raises:
            AnomalyError: the same on every rank.
        """
        if not self.detect_anomaly:
            return
        anomalies, self.anomalies = self.anomalies, []
        messages = self.all_gather_text("; ".join(anomalies))
        if any(messages):
            raise AnomalyError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text))

    def all_gather_text(self, text: str) -> list[str]:
        """The text of each rank, on every rank."""
        collectives, what = self.collectives, "error message"
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        size = torch.tensor([data.numel()], device=self.device)
        sizes = torch.cat(collectives.gather(size, [1] * collectives.world_size, what)).tolist()
        texts = collectives.gather(data, sizes, what)
        return [bytes(text.tolist()).decode(errors="replace") for text in texts]
