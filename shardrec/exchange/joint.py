"""The input exchange of one or several modules: one header and one payload all-to-all for all of them.

Shapes: W ranks, C columns of the header.

::

    header   (W, C) int64, row q to rank q:  fault | checksum | part of module 0 | part of module 1 | ...
    payload  int32, to rank q:               part of module 0 | part of module 1 | ...

C is the same in every exchange of a model, so that a rank which cannot come to one can answer for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from shardrec.errors import InputError
from shardrec.exchange.collectives import Pending
from shardrec.exchange.input import Addressed, InputExchange, Prepared, ShardInput
from shardrec.exchange.step import FIXED_COLUMNS, FORWARD_FAILED, ForwardFailed, StepContext, checksum

__all__ = ["InputsInFlight", "begin_exchange"]

Call = tuple[InputExchange, Prepared]


def begin_exchange(context: StepContext, calls: Sequence[Call]) -> InputsInFlight:
    """Exchange the headers of several modules, and let their ids go in one payload.

    Args:
        context: of the model.
        calls: the modules' exchanges and what each prepared, in the same order on every rank.

    Raises:
        InputError: on every rank, if a batch of any is faulty.
        PeerError: if another rank is gone.
    """
    addressed = _exchange_headers(context, calls)
    collectives = context.collectives
    ranks = range(collectives.world_size)
    words_in: list[list[int]] = []
    pending = None
    if collectives.world_size > 1:
        pieces = [[piece for one in addressed for piece in one.parts[rank]] for rank in ranks]
        words_in = [[one.words_in[rank] for one in addressed] for rank in ranks]
        pending = collectives.send(pieces, list(map(sum, words_in)), "payload")
    return InputsInFlight([exchange for exchange, _ in calls], addressed, words_in, pending)


class InputsInFlight:
    """Payloads on their way.

    Args:
        exchanges: the modules' exchanges.
        addressed: what each sends.
        words_in: per rank and module, the words that come.
        pending: their arrival; None on one rank.
    """

    def __init__(
        self,
        exchanges: Sequence[InputExchange],
        addressed: Sequence[Addressed],
        words_in: Sequence[Sequence[int]],
        pending: Pending | None,
    ) -> None:
        self._exchanges = exchanges
        self._addressed = addressed
        self._words_in = words_in
        self._pending = pending
        self._arrived: list[tuple[Addressed, ShardInput]] = []

    def finish(self) -> list[tuple[Addressed, ShardInput]]:
        """Wait for them.

        Returns:
            Per call, what this rank sent and what it received.

        Raises:
            PeerError: if another rank is gone.
        """
        if self._arrived:
            return self._arrived
        received: list[Tensor] = []
        if self._pending is not None:
            for whole, words in zip(self._pending.wait(), self._words_in, strict=True):
                if whole.is_cuda:  # it may have been allocated on another stream than the one that reads it
                    whole.record_stream(torch.cuda.current_stream(whole.device))
                received += whole.split(list(words))
            self._pending = None
        count = len(self._addressed)
        self._arrived = [
            (one, exchange.receive(one, received[index::count]))
            for index, (exchange, one) in enumerate(zip(self._exchanges, self._addressed, strict=True))
        ]
        return self._arrived


def _exchange_headers(context: StepContext, calls: Sequence[Call]) -> list[Addressed]:
    """Tell all ranks the sizes; what is sent, noted and received comes to the host in one copy."""
    world_size = context.collectives.world_size
    agreement = "; ".join(prepared.agreement for _, prepared in calls)
    received = context.exchange_header(_header(context, calls, agreement))
    wanted = [tensor.flatten() for _, prepared in calls for tensor in (prepared.counts, *prepared.notes)]
    numbers: list[int] = torch.cat([*wanted, received.flatten()]).tolist()
    width = context.header_columns
    first = len(numbers) - world_size * width
    headers = [numbers[row : row + width] for row in range(first, len(numbers), width)]
    flags = [header[0] for header in headers]
    if not context.check(flags, [header[1] for header in headers], agreement):
        try:
            _raise_faults(context, calls, agreement, faulty=bool(flags[context.collectives.rank]))
        except InputError as error:
            raise (ForwardFailed(str(error)) if FORWARD_FAILED in flags else error) from None
    addressed = []
    start, column = 0, FIXED_COLUMNS
    for exchange, prepared in calls:
        parts = []
        for tensor in (prepared.counts, *prepared.notes):
            parts.append(numbers[start : start + tensor.numel()])
            start += tensor.numel()
        own = [header[column : column + exchange.columns] for header in headers]
        column += exchange.columns
        addressed.append(exchange.address(prepared, parts[0], parts[1:], own))
    return addressed


def _header(context: StepContext, calls: Sequence[Call], agreement: str) -> Tensor:
    parts = [exchange.header(prepared) for exchange, prepared in calls]
    columns = FIXED_COLUMNS + sum(exchange.columns for exchange, _ in calls)
    assert columns <= context.header_columns, "the queue keeps an exchange within the header"
    header = parts[0].new_zeros((context.collectives.world_size, context.header_columns))
    if any(prepared.fault for _, prepared in calls):
        header[:, 0] = 1
    else:
        valid = calls[0][1].valid
        for _, prepared in calls[1:]:
            valid = valid & prepared.valid
        header[:, 0] = valid.logical_not()
    header[:, 1] = checksum(agreement)
    torch.cat(parts, dim=1, out=header[:, FIXED_COLUMNS:columns])
    return header


def _raise_faults(context: StepContext, calls: Sequence[Call], agreement: str, *, faulty: bool) -> NoReturn:
    words = [exchange.describe(prepared) for exchange, prepared in calls] if faulty else []
    context.raise_faults("; ".join(filter(None, words)), agreement)
