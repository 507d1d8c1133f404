"""The first stages of a call, which need no other rank: read → check → cut.

Shapes: F keys of the input, U features that the tables use, S slots of all ranks (see :mod:`shardrec.exchange.route`),
B local batch size, N ids.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from shardrec.exchange.bad_ids import mended
from shardrec.exchange.batch import Batch, Expectation, read_batch, unreadable
from shardrec.exchange.check import add_up, checked_on_device, describe_fault, ids_are_valid
from shardrec.step.input_plan import InputPlan
from shardrec.step.records import GRAD_MODES, FullBatch, InFlight, StepPlan


def begin(
    input: InputPlan,
    features: object,
    agreement: str,
    fault: str = "",
    *,
    plan: StepPlan | None = None,
    assigns_new_ids: bool = False,
) -> InFlight:
    """A call whose batch was checked and cut. Raises nothing for a faulty batch. The exchange tells all ranks about it.
    Waits for the device only for dynamic ids.

    Args:
        input: the module's exchange of ids.
        features: a KeyedJaggedTensor. Keys in any order, further keys are ignored.
        agreement: what the ranks must have in common beyond the ids' dtype.
        fault: of the module, or "".
        plan: of the module. None if no rows will be looked up.
        assigns_new_ids: whether it gives rows to new dynamic ids.
    """
    cause = None
    try:
        given = read_batch(features, input.expect)
    except Exception as error:  # which alone would leave the other ranks waiting for this rank's header
        given, cause = unreadable(error), error
    if isinstance(given, str):
        fault, given = fault or given, _empty_batch(input.expect)
    mode = GRAD_MODES[torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    flight = InFlight(input, given, agreement, mode, fault=fault, features=features)
    if cause is not None:
        flight.cause = cause
    weights = given.weights
    if weights is not None and weights.requires_grad and flight.mode.gradients:
        flight.learned_weights = weights
    if plan is not None:
        flight.plan, flight.assigns_new_ids = plan, assigns_new_ids
        flight.requires_grad = plan.trains_shards or flight.learned_weights is not None
    if input.world_size > 1:
        flight.agreement = f"ids {str(given.values.dtype).removeprefix('torch.')}, {agreement}"
        flight.agreement += "" if flight.learned_weights is None else ", weights with gradient"
    _check(flight)
    if flight.fault and flight.flag is None:
        return flight  # there is nothing to send but the fault
    flight.to_send = flight.batch
    if input.distinct is not None:
        flight.to_send, flight.distinct_index = input.distinct(flight.batch)
    keep_positions = input.keeps_positions or flight.learned_weights is not None
    flight.cut = input.cutter.cut(flight.to_send, keep_positions=keep_positions, given=given)
    flight.lengths = flight.cut.lengths
    if input.per_id:
        _as_one_bag(flight)
    elif flight.to_send.sizes is not None and input.world_size > 1:
        flight.slot_sizes = _slot_sizes(input, flight.to_send.keys, flight.to_send.sizes)
    if plan is not None and plan.replicas is not None:
        flight.counted = plan.output.counted(flight)
    return flight


def _check(flight: InFlight) -> None:
    """Find what is wrong with the batch: on the CPU ``fault`` says it, on a device ``flag`` will."""
    input, given = flight.input, flight.given
    if input.expect.device.type == "cuda":
        _check_on_device(flight)
        return
    limits, unlimited = input.limits(given.keys)
    whole, valid = given, ids_are_valid(given, limits, unlimited=unlimited)
    if input.expect.on_bad_id and given.size and not bool(valid):
        whole, fit, flight.bad_ids = _mended(input, given)
        limits, unlimited = input.limits(whole.keys)
        valid = fit & ids_are_valid(whole, limits, unlimited=unlimited)
    if not flight.fault and not bool(valid):
        flight.fault = describe_fault(given, input.expect)
    if flight.fault:
        return
    flight.batch = Batch(
        keys=whole.keys,
        # The caller's memory may change before backward reads it.
        lengths=whole.lengths.to(torch.int32, copy=True).contiguous(),
        values=whole.values.to(input.cutter.id_dtype).contiguous(),
        weights=None if whole.weights is None else whole.weights.detach().float().contiguous(),
        sizes=whole.sizes,
        inverse=whole.inverse,
        with_dropped=whole.with_dropped,
    )


def _check_on_device(flight: InFlight) -> None:
    """:func:`_check` without waiting for the device."""
    input, given = flight.input, flight.given
    if flight.fault and input.world_size == 1:
        return
    flag = flight.flag = input.flags.next()
    if flight.fault:
        flag.put_up()
    whole = given
    if input.expect.on_bad_id and given.size:
        whole, fit, flight.bad_ids = _mended(input, given)
        flag.put_up(fit.logical_not())
    limits, _ = input.limits(whole.keys)
    ids, offsets, lengths = checked_on_device(whole, limits, input.cutter.id_dtype, flag)
    weights, with_dropped = whole.weights, whole.with_dropped
    if with_dropped is not None:
        with_dropped = replace(with_dropped, lengths=with_dropped.lengths * flag.is_down())
    flight.batch = replace(
        whole,
        lengths=lengths,
        values=ids,
        weights=None if weights is None else weights.detach().float().contiguous(),
        with_dropped=with_dropped,
        offsets=offsets,
    )


def _mended(input: InputPlan, batch: Batch) -> tuple[Batch, Tensor, Tensor]:
    """The batch without the bad ids that are not an error, whether its lengths fit, and their number per feature
    (U,)."""
    limits, _ = input.limits(batch.keys)
    policies, places = input.policies(batch.keys)
    whole, bad_F = mended(batch, limits, policies, drops=input.drops)
    lengths = batch.lengths
    fit = add_up(lengths, lengths.sum(dim=1, dtype=torch.int64), batch.values.numel())
    return whole, fit, bad_F.index_select(0, places)


def _as_one_bag(flight: InFlight) -> None:
    """Where each id gets a row of its own: count ids per slot, per key and per key as given."""
    flight.lengths = flight.cut.lengths.sum(dim=1, keepdim=True, dtype=torch.int32)
    batch, sent = flight.batch, flight.to_send.lengths
    local = batch.lengths if batch.with_dropped is None else batch.with_dropped.lengths
    sent_ids = sent.sum(dim=1, dtype=torch.int64)
    flight.counted = sent_ids, sent_ids if local is sent else local.sum(dim=1, dtype=torch.int64)
    if batch.inverse is not None:
        inverse = batch.inverse if flight.flag is None else batch.inverse * flight.flag.is_down()
        lengths = nn.functional.pad(local, [0, 1])  # so that 0 is a bag also of a batch without bags
        starts = flight.input.policies(flight.given.keys)[1] * lengths.size(1)
        order = (inverse + starts.unsqueeze(1)).to(torch.int32)
        flight.full = FullBatch(lengths=lengths.flatten(), order=order)
        full_lengths = flight.full.lengths.index_select(0, order.flatten()).view_as(order)
        flight.counted += (full_lengths.sum(dim=1, dtype=torch.int64),)


def _slot_sizes(input: InputPlan, keys: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    size_of = dict(zip(keys, sizes, strict=True))
    unit_sizes = [size_of[key] for key in input.route.unit_keys]
    return tuple(unit_sizes[slot.unit] for rank_slots in input.route.slots for slot in rank_slots)


def _empty_batch(expect: Expectation) -> Batch:
    keys = expect.features
    return Batch(
        keys=keys,
        lengths=torch.zeros((len(keys), 0), dtype=torch.int32, device=expect.device),
        values=torch.zeros(0, dtype=torch.int64, device=expect.device),
        weights=torch.zeros(0, dtype=torch.float32, device=expect.device) if expect.weighted else None,
    )
