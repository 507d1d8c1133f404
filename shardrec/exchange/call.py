"""The step of sharded modules: exchange of ids, lookup and exchange of rows, for the calls that share an exchange.

Shapes: W ranks, C columns of the header.

::

    prepare        when a call is made: checks its batch and cuts its ids                (one call)
    exchange ids   header   (W, C) int64, row q to rank q:  fault | checksum | part of call 0 | part of call 1 | ...
                   payload  int32, to rank q:               part of call 0 | part of call 1 | ...
    look up        the ids that all ranks sent to this one, a kernel call per lookup group
    send rows      one all-to-all of float rows (on several hosts, one inside each host before it)
    finish         at the first use of a call's value: puts its columns or rows in order (one call)

:func:`exchange_and_look_up` runs the middle three; ``Caller.new_call`` prepares, and :meth:`Call.value` finishes. C is
the same in every exchange of a model, so that a rank that failed can take part in the other ranks' header exchange.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardrec.exchange.collectives import Collectives, Pending, joined
from shardrec.exchange.headers import FIXED_COLUMNS, Headers, checksum
from shardrec.exchange.payload import HEADER_SIZES, ShardInput
from shardrec.exchange.prepared_input import InputPacker, Prepared, SentIds
from shardrec.exchange.route import Lookup
from shardrec.exchange.row_exchange import BlocksInFlight, RowAllToAll, Stream

__all__ = [
    "Call",
    "Caller",
    "DifferentiableOutput",
    "GradMode",
    "can_share",
    "exchange_and_look_up",
    "exchange_ids",
    "split_by_compatibility",
]


def exchange_and_look_up(headers: Headers, inside: RowAllToAll, output: RowAllToAll, calls: Sequence[Call]) -> None:
    """Run calls that share an exchange, each prepared when it was made, up to their rows under way.

    What happens to a batch's ``values``, in order (docs/design.md also has the backward):

    1. ``InputPacker.prepare``, when the call was made, checks them, removes duplicates (for sequences), and cuts them
       in blocks of rows; the C++ operator puts them directly into slots, else ``InputPacker.pack`` does.
    2. :func:`exchange_ids` (before the forward, for calls made ahead): the header tells each rank how many ids it will
       receive, the payload carries them, and :meth:`Call.received` waits for them.
    3. ``Call.look_up``: dynamic ids become rows of their shard; one kernel call per lookup group gives float rows.
    4. ``Call.outgoing`` gives the rows in the order of the requesting ranks, after sums inside hosts, and
       ``RowAllToAll.start`` sends them. ``Call.issued`` looks up this rank's replicated tables in the meantime.
    5. ``Call.finish``, at the first use of the call's value, adds partial sums of row blocks, puts columns or rows in
       order, divides means, and expands duplicates and inverse indices.

    Args:
        headers: of the model.
        inside: the exchange of partial sums inside hosts.
        output: the exchange of rows.
        calls: the same on every rank, in the same order.

    Raises:
        InputError: on every rank, if a batch of any is faulty.
        PeerError: if another rank is gone.
    """
    unsent = [call for call in calls if call.sent is None]
    if unsent:
        exchange_ids(headers, unsent)
    shard_inputs = [call.received() for call in calls]
    partial_sums = [call.look_up(shard_input) for call, shard_input in zip(calls, shard_inputs, strict=True)]
    streams = [stream for stream in partial_sums if stream is not None]
    requires_grad = any(call.requires_grad for call in calls)
    inside_flight = inside.start(streams, requires_grad=requires_grad) if streams else None
    rows, number = [], 0
    for call, stream in zip(calls, partial_sums, strict=True):
        rows.append(call.outgoing(None if stream is None else inside_flight, number))
        number += stream is not None
    flight = output.start(rows, requires_grad=requires_grad)
    for number, call in enumerate(calls):
        call.launch(flight, number)


class GradMode(NamedTuple):
    """Whether gradients, and inference mode, are enabled where a call is made."""

    gradients: bool
    inference: bool

    @classmethod
    def current(cls) -> GradMode:
        """That of torch now."""
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, it is torch's."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients):
            yield


class Caller(Protocol):
    """A sharded module, which makes calls."""

    training: bool
    shards: Any
    id_maps: Any

    def new_call(self, features: object) -> Call:
        """A call with these features, which are checked and cut."""

    def fault(self) -> str:
        """What is wrong with the module, regardless of the features; "" for nothing."""

    def assigns_new_ids(self) -> bool:
        """Whether a call gives rows to new dynamic ids."""


class DifferentiableOutput(NamedTuple):
    """The part of a call's value that has a gradient, in segments.

    Args:
        values: (n, D).
        sizes: of the segments, one per lookup, along ``dim``.
        dim: 0 or 1.
        lookups: one per segment.
    """

    values: Tensor
    sizes: Sequence[int]
    dim: int
    lookups: Sequence[Lookup]


class Call(abc.ABC):
    """One forward of a sharded module, from its batch to its value: a ``BagCall`` (:mod:`shardrec.modules.bags`) or a
    ``SequenceCall`` (:mod:`shardrec.modules.sequences`).

    Args:
        on_use: called with this call at each use of its value; the model's queue then begins the exchange.
        input: the module's input exchange.
        prepared: the batch.
        requires_grad: whether its rows take a gradient, if gradients are enabled; the same on every rank.

    Attributes:
        grad_mode: in which it was made.
        assigns_new_ids: whether it gives rows to new dynamic ids.
        sent: the batch as it was sent, from the header exchange until the row exchange begins; else None.
        found_rows: of dynamic ids, what :meth:`find_rows` has found; else None.
        by_operator: made by an operator (:mod:`shardrec.exchange.operators`), whose backward differs.
        on_value: called with the call and its value.
        error: why its exchange failed; set it to None to exchange the call again.
    """

    def __init__(
        self, on_use: Callable[[Call], None], input: InputPacker, prepared: Prepared, *, requires_grad: bool
    ) -> None:
        self.input = input
        self.prepared = prepared
        self.requires_grad = requires_grad
        self.sent: SentIds | None = None
        self.found_rows: Any = None
        self.by_operator = False
        self.on_value: Callable[[Call, Any], None] | None = None
        self.error: BaseException | None = None
        self.grad_mode = GradMode.current()
        self._on_use = on_use
        self._receive: Callable[[], ShardInput] | None = None
        self._flight: BlocksInFlight | None = None
        self._stream = 0

    assigns_new_ids = False

    @abc.abstractmethod
    def find_rows(self) -> None:
        """Called on a GPU for a call made ahead, once its ids are being sent, for work that changes nothing."""

    @abc.abstractmethod
    def look_up(self, shard_input: ShardInput) -> Stream | None:
        """Look up the rows, which the call keeps; gives the partial sums to be added up inside hosts, or None."""

    @abc.abstractmethod
    def outgoing(self, inside: BlocksInFlight | None, stream: int) -> Stream:
        """The rows to send to the requesting ranks; ``inside`` is the exchange inside hosts."""

    @abc.abstractmethod
    def issued(self) -> None:
        """Called once the rows are being sent, for work that needs no other rank."""

    @abc.abstractmethod
    def finish(self, flight: BlocksInFlight, stream: int) -> Any:
        """The output, made of the received rows."""

    @abc.abstractmethod
    def differentiable_output(self, value: Any) -> DifferentiableOutput:
        """What takes a gradient in the call's value."""

    def mode(self) -> AbstractContextManager[None]:
        """The grad mode in which the call was made: its value is finished in it, wherever it is first used."""
        return nullcontext() if self.grad_mode == GradMode.current() else self.grad_mode.entered()

    @property
    def is_queued(self) -> bool:
        """Whether its rows are not exchanged yet; its ids may be."""
        return self._flight is None and self.error is None

    @property
    def is_launched(self) -> bool:
        """Whether the exchange of its rows has begun."""
        return self._flight is not None

    def flight(self) -> BlocksInFlight:
        """The exchange of the rows; the queue begins it if it has not begun.

        Raises:
            ShardrecError: what made the exchange fail.
        """
        self._on_use(self)
        if self.error is not None:
            raise self.error
        assert self._flight is not None, "a call that did not fail is under way"
        return self._flight

    def value(self) -> Any:
        """The output; waits for the rows.

        Raises:
            ShardrecError: what made the exchange fail.
        """
        flight = self.flight()
        with self.mode():
            value = self.finish(flight, self._stream)
            if self.on_value is not None:
                self.on_value(self, value)
        return value

    def set_receive(self, sent: SentIds, receive: Callable[[], ShardInput]) -> None:
        """Record that its ids are being sent; ``receive`` waits for those of all ranks."""
        self.sent, self._receive = sent, receive

    def received(self) -> ShardInput:
        """Wait for the ids that all ranks request from this one, slot by slot (``Payload.unpack``)."""
        assert self._receive is not None, "ids are exchanged before they are looked up"
        return self._receive()

    def launch(self, flight: BlocksInFlight, stream: int) -> None:
        """Record that its rows are being sent, as stream number ``stream`` of ``flight``."""
        self._flight, self._stream = flight, stream
        self.issued()
        self.sent = self._receive = self.found_rows = None


def can_share(headers: Headers, call: Call, calls: Sequence[Call]) -> bool:
    """Whether a call can share an exchange with others: all were made in one mode, and fit the header."""
    first = calls[0]
    columns = sum(other.input.columns for other in (*calls, call))
    return (
        first.grad_mode == call.grad_mode
        and first.by_operator == call.by_operator
        and columns <= headers.columns - FIXED_COLUMNS
    )


def split_by_compatibility(headers: Headers, calls: Sequence[Call]) -> list[list[Call]]:
    """The calls in runs, in order, each as long as its calls can share an exchange."""
    runs: list[list[Call]] = []
    for call in calls:
        if not runs or not can_share(headers, call, runs[-1]):
            runs.append([])
        runs[-1].append(call)
    return runs


def exchange_ids(headers: Headers, calls: Sequence[Call]) -> None:
    """Exchange the headers of several calls, and let their ids go in one payload; for no call, only the headers.

    Args:
        headers: of the model.
        calls: the same on every rank, in the same order.

    Raises:
        InputError: on every rank, if a batch of any is faulty.
        PeerError: if another rank is gone.
    """
    made, received, numbers = _exchange_headers(headers, calls)
    if not calls:
        return
    column = FIXED_COLUMNS
    sent, own_headers = [], []
    for call in calls:
        end = column + call.input.columns
        counts = [count for header in made for count in header[column + HEADER_SIZES : end]]
        extra_counts = [list(islice(numbers, tensor.numel())) for tensor in call.prepared.extra_counts]
        own_headers.append([header[column:end] for header in received])
        column = end
        sent.append(call.input.pack(call.prepared, counts, extra_counts))
    if headers.collectives.world_size == 1:
        for call, sent_ids, rows in zip(calls, sent, own_headers, strict=True):
            call.set_receive(sent_ids, partial(call.input.payload.unpack_local, sent_ids.parts[0], rows[0]))
        return
    payloads = _Payloads(headers.collectives, calls, sent, own_headers)
    for number, call in enumerate(calls):
        call.set_receive(sent[number], partial(payloads.receive, number))


class _Payloads:
    """The payloads of several calls on their way between ranks."""

    def __init__(
        self,
        collectives: Collectives,
        calls: Sequence[Call],
        sent: Sequence[SentIds],
        headers: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        self._payloads = [(call.input.payload, call.prepared.weights_require_grad) for call in calls]
        self._headers = headers
        words = [map(payload.words_in, rows) for (payload, _), rows in zip(self._payloads, headers, strict=True)]
        self._words_in = list(map(list, zip(*words, strict=True)))
        parts = [[part for sent_ids in sent for part in sent_ids.parts[rank]] for rank in range(collectives.world_size)]
        sizes = list(map(sum, self._words_in))
        self._pending: Pending | None = collectives.ids(parts, sizes)
        self._arrived: list[ShardInput] = []

    def receive(self, number: int) -> ShardInput:
        """Wait for them: what all ranks ask of this one in a call."""
        if self._pending is not None:
            split = []
            for whole, words in zip(self._pending.wait(), self._words_in, strict=True):
                if whole.is_cuda:  # it may have been allocated on another stream than the one that reads it
                    whole.record_stream(torch.cuda.current_stream(whole.device))
                split.append(whole.split(words))
            self._pending = None
            self._arrived = [
                payload.unpack(parts, rows, keep_order=keep_order)
                for (payload, keep_order), rows, parts in zip(
                    self._payloads, self._headers, zip(*split, strict=True), strict=True
                )
            ]
        return self._arrived[number]


def _exchange_headers(
    headers: Headers, calls: Sequence[Call]
) -> tuple[list[list[int]], list[list[int]], Iterator[int]]:
    """Tell all ranks the sizes; all that the host must know comes to it in one copy.

    Returns:
        The header for each rank, the header of each rank, and the extra counts of the calls.
    """
    agreement = "; ".join(call.prepared.agreement for call in calls)
    world_size, width = headers.collectives.world_size, headers.columns
    header = torch.zeros((world_size, width), dtype=torch.int64, device=headers.device)
    column = FIXED_COLUMNS
    for call in calls:
        call.input.write_header(call.prepared, header, column, checksum(agreement))
        column += call.input.columns
    assert column <= width, "the queue keeps an exchange within the header"
    received = headers.exchange(header)
    matrices = [received] if received is header else [received, header]
    extra_counts = [tensor.flatten() for call in calls for tensor in call.prepared.extra_counts]
    numbers: list[int] = joined([*(matrix.view(-1) for matrix in matrices), *extra_counts]).tolist()
    if received.is_cuda:
        headers.collectives.raise_reported_failure("header exchange")
    rows = [numbers[row * width : (row + 1) * width] for row in range(world_size * len(matrices))]
    of_ranks, made = rows[:world_size], rows[-world_size:]
    flags = [row[0] for row in of_ranks]
    if any(flags) or any(row[1] != of_ranks[0][1] for row in of_ranks):
        faults = [call.input.describe(call.prepared) for call in calls] if flags[headers.collectives.rank] else []
        headers.raise_faults("; ".join(filter(None, faults)), agreement, flags)
    return made, of_ranks, iter(numbers[len(rows) * width :])
