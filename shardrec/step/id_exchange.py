"""The exchange of ids: headers tell each rank how many ids it will receive, payloads carry them.

Shapes: W ranks, C columns of the header, G lookup groups.

::

    header   (W, C) int64, row q to rank q:  fault | checksum | part of call 0 | part of call 1 | ...
    payload  int32, to rank q:               part of call 0 | part of call 1 | ...

C is the same in every exchange of a model, so that a rank that failed can take part in the other ranks' header
exchange. With tables on a GPU the header is written there, and all that the host must know comes to it in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter, itemgetter

import torch
from torch import Tensor

from shardrec.exchange import launching
from shardrec.exchange.batch import Batch
from shardrec.exchange.check import describe_fault, ids_are_valid
from shardrec.exchange.collectives import Pending, joined
from shardrec.exchange.headers import FIXED_COLUMNS, Headers, checksum
from shardrec.exchange.payload import HEADER_SIZES, ShardInput
from shardrec.exchange.to_device import staged
from shardrec.step.input_plan import InputPlan
from shardrec.step.records import InFlight

_FAULT, _AGREEMENT = attrgetter("fault"), attrgetter("agreement")
_FLAG, _CHECK = itemgetter(0), itemgetter(1)


def exchange_ids(headers: Headers, calls: Sequence[InFlight]) -> None:
    """Send the ids of several calls to the ranks that hold their rows. Without a call, only exchange headers.

    Args:
        headers: of the model.
        calls: the same on every rank, in the same order.

    Raises:
        InputError: on every rank, if a batch of any is faulty.
        PeerError: if another rank is gone.
    """
    world_size = headers.collectives.world_size
    if world_size == 1:
        for call in calls:
            if call.fault:
                headers.raise_faults(call.fault, "", cause=call.cause)
        if headers.device.type != "cuda" or all(map(_has_known_sizes, calls)):
            for call in calls:
                pack(call)
                if call.flag is not None:
                    call.flag.send(partial(_raise_fault, headers, call.given, call.input))
            return
    if headers.device.type == "cuda":
        made, received, counted = _exchange_headers_on_device(headers, calls)
        for call, counts in zip(calls, _of_calls(calls, made), strict=True):
            pack(call, [count for of_rank in counts for count in of_rank[HEADER_SIZES:]], counted)
        if world_size == 1:
            return
        _receive_later(calls, received, partial(headers.collectives.ids, _joined_parts(calls, world_size)))
        return
    faults = list(filter(None, map(_FAULT, calls)))
    check = checksum(agreement := "; ".join(map(_AGREEMENT, calls)))
    rows: list[list[int]] = []
    parts: list[list[Tensor]] = []
    for _ in range(world_size):
        rows.append([int(bool(faults)), check])
        parts.append([])
    if not faults:
        for call in calls:
            pack(call)
            bag_words, packed = call.input.payload.bag_words(call.slot_sizes), call.parts
            assert packed is not None, "what is packed has parts"
            for rank, (row, words, of_groups) in enumerate(zip(rows, bag_words, call.counts, strict=True)):
                row += (call.lengths.size(1), words, *of_groups)
                parts[rank] += packed[rank]
    received, receive = headers.exchange_with_ids(rows, parts)
    flags = list(map(_FLAG, received))
    if any(flags) or set(map(_CHECK, received)) != {check}:
        headers.raise_faults("; ".join(faults), agreement, flags, cause=_first_cause(calls))
    if calls:
        _receive_later(calls, received, receive)


def pack(call: InFlight, counts: Sequence[int] | None = None, counted: Iterator[int] | None = None) -> None:
    """Put a call's ids in slots and pack them, once the host knows the sizes.

    Args:
        call: is given ``parts`` and their sizes. On one rank, it is given ``received``.
        counts: ids for each rank and lookup group, rank after rank. Default: they are read from the CPU.
        counted: values of ``call.counted``. Default: as above.
    """
    input, lengths = call.input, call.lengths
    if call.counted:
        numbers = iter(joined([tensor.flatten() for tensor in call.counted]).tolist()) if counted is None else counted
        call.counted_values = [list(islice(numbers, tensor.numel())) for tensor in call.counted]
    if counts is None:
        spans = input.group_spans
        if len(spans) == 1 and call.cut.slots is None:
            counts = [call.cut.values.size(0)]
        else:
            # A slot's ids fit 32 bits, and torch adds int32 up as int32 ten times as fast as it does as int64.
            of_slots: list[int] = lengths.sum(dim=1, dtype=torch.int32).tolist()
            counts = list(map(sum, map(of_slots.__getitem__, spans)))
    ids, weights, positions = input.cutter.in_slots(call.cut, sum(counts))
    if positions is not None:
        call.positions = positions if input.per_id else call.to_send.input_positions(positions)
        call.slot_ids = lengths.sum(dim=1)
    if input.world_size == 1:
        call.counts = (tuple(counts),)
        call.received = ShardInput(
            lengths=lengths,
            ids=ids,
            weights=weights,
            batch_sizes=(lengths.size(1),),
            group_ids=call.counts[0],
            counts=call.counts,
            slot_sizes=(None,),
            offsets=call.to_send.offsets if lengths is call.to_send.lengths else None,
        )
        return
    groups = input.route.groups
    call.counts = tuple(zip(*[iter(counts)] * groups, strict=True)) if groups else ((),) * input.world_size
    call.parts = input.payload.pack(lengths, ids, weights, list(map(sum, call.counts)), call.slot_sizes)


def _has_known_sizes(call: InFlight) -> bool:
    """Whether the host knows what it would read in the header of one rank, the fault flag aside: ids are in one lookup
    group, as they were given."""
    is_as_given = call.input.route.blocks == 1 and call.cut.slots is None and len(call.input.group_spans) == 1
    return is_as_given and not call.counted and call.bad_ids is None and call.batch.inverse is None


def _raise_fault(headers: Headers, given: Batch, input: InputPlan) -> None:
    """Raise the fault of a batch of one rank that the device has reported as faulty."""
    limits, unlimited = input.limits(given.keys)
    fault = (
        "a batch had an id outside of its table, or lengths that do not add up, when it was looked up, and its tensors "
        "have been changed since: do not write to a batch between its forward and its backward"
    )
    if not bool(ids_are_valid(given, limits, unlimited=unlimited)):
        fault = describe_fault(given, input.expect)
    headers.raise_faults(fault, "")


def _joined_parts(calls: Sequence[InFlight], world_size: int) -> list[list[Tensor]]:
    """Per rank, the parts of all calls."""
    return [[part for call in calls for part in (call.parts or ())[rank]] for rank in range(world_size)]


def _of_calls(calls: Sequence[InFlight], rows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Per call, its part of every header in ``rows``."""
    column, of_calls = FIXED_COLUMNS, []
    for call in calls:
        end = column + call.input.columns
        of_calls.append(list(map(itemgetter(slice(column, end)), rows)))
        column = end
    return of_calls


def _receive_later(
    calls: Sequence[InFlight], received: Sequence[Sequence[int]], receive: Callable[[Sequence[int]], Pending]
) -> None:
    """Let each call's ``receive`` wait for the payload of all calls."""
    headers = _of_calls(calls, received)
    words = []
    for call, rows in zip(calls, headers, strict=True):
        words.append(map(call.input.payload.words_in, rows))
    words_in = list(zip(*words, strict=True))
    pending: list[Pending] = [receive(list(map(sum, words_in)))]
    arrived: list[ShardInput] = []

    def wait(number: int) -> ShardInput:
        if pending:
            split = []
            for whole, sizes in zip(pending.pop().wait(), words_in, strict=True):
                if whole.is_cuda:  # it may have been allocated on a stream that does not read it
                    whole.record_stream(torch.cuda.current_stream(whole.device))
                split.append(whole.split(sizes) if len(sizes) > 1 else (whole,))
            for call, rows, parts in zip(calls, headers, zip(*split, strict=True), strict=True):
                arrived.append(call.input.payload.unpack(parts, rows, keep_order=call.learned_weights is not None))
        return arrived[number]

    for number, call in enumerate(calls):
        call.receive = partial(wait, number)


def _exchange_headers_on_device(
    headers: Headers, calls: Sequence[InFlight]
) -> tuple[list[list[int]], list[list[int]], Iterator[int]]:
    """The header for each rank, the header from each rank, and the values of the calls' ``counted``."""
    agreement = "; ".join(call.agreement for call in calls)
    world_size, width = headers.collectives.world_size, headers.columns
    header = torch.zeros((world_size, width), dtype=torch.int64, device=headers.device)
    column = FIXED_COLUMNS
    for call in calls:
        write_header(call, header, column, checksum(agreement))
        column += call.input.columns
    received = headers.exchange(header)
    matrices = [received] if received is header else [received, header]
    counted = [tensor.flatten() for call in calls for tensor in call.counted]
    numbers: list[int] = joined([*(matrix.view(-1) for matrix in matrices), *counted]).tolist()
    headers.collectives.raise_reported_failure("header exchange")
    rows = [numbers[row * width : (row + 1) * width] for row in range(world_size * len(matrices))]
    of_ranks, made = rows[:world_size], rows[-world_size:]
    flags = [row[0] for row in of_ranks]
    if any(flags) or any(row[1] != of_ranks[0][1] for row in of_ranks):
        faults = [_describe(call) for call in calls] if flags[headers.collectives.rank] else []
        headers.raise_faults("; ".join(filter(None, faults)), agreement, flags, cause=_first_cause(calls))
    for call in calls:
        call.flag = None
    return made, of_ranks, iter(numbers[len(rows) * width :])


def write_header(call: InFlight, header: Tensor, column: int, check: int) -> None:
    """Write a call's part of the header for each rank, from ``column`` on, and its fault. The parts were zeros."""
    input, lengths_SB, flag = call.input, call.lengths, call.flag
    assert flag is not None, "the host has not read it"
    if input.route.groups and launching.has_kernels(header.device):
        grid = input.world_size * input.route.groups, 32
        place = header.size(1), column, check
        values = (lengths_SB, input.group_edges, flag.value, header, flag.number, call.size, input.route.groups, *place)
        constants = {"SIZES": HEADER_SIZES, "SHARES": grid[1], "BLOCK": 1024}
        launching.launch("shardrec.exchange.input_kernels", "write_header", grid, *values, **constants)
    else:
        header[:, 0].logical_or_(flag.value == flag.number)
        header[:, 1] = check
        header[:, column] = call.size
        ends_S = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_SB.sum(dim=1, dtype=torch.int64))
        counts = ends_S.index_select(0, input.group_edges).diff()
        header[:, column + HEADER_SIZES : column + input.columns] = counts.view(input.world_size, input.route.groups)
    if call.slot_sizes is not None:
        words = input.payload.bag_words(call.slot_sizes)
        header[:, column + 1] = staged(words, torch.int64, header.device)


def _describe(call: InFlight) -> str:
    """What is wrong with the batch, or "". Reads tensors on the host."""
    if call.fault or call.flag is None or not call.flag.is_up():
        return call.fault
    return describe_fault(call.given, call.input.expect)


def _first_cause(calls: Sequence[InFlight]) -> Exception | None:
    return next((call.cause for call in calls if call.cause is not None), None)


def can_share(headers: Headers, call: InFlight, calls: Sequence[InFlight]) -> bool:
    """Whether a call can share an exchange with others: all were made in one mode, and fit the header."""
    first = calls[0]
    columns = sum(other.input.columns for other in (*calls, call))
    return (
        first.mode == call.mode and first.by_operator == call.by_operator and columns <= headers.columns - FIXED_COLUMNS
    )


def split_by_compatibility(headers: Headers, calls: Sequence[InFlight]) -> list[list[InFlight]]:
    """The calls in runs, in order, each as long as its calls can share an exchange."""
    runs: list[list[InFlight]] = []
    for call in calls:
        if not runs or not can_share(headers, call, runs[-1]):
            runs.append([])
        runs[-1].append(call)
    return runs
