"""The batches of a loop, some of which are copied and exchanged ahead of their steps."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError, InputError, ShardrecError
from shardrec.exchange.headers import FORWARD_FAILED, ForwardFailed, is_own, quoted
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.compiled import leaves
from shardrec.modules.forward import AheadOfSome, dense_signature
from shardrec.pipeline.feature_sources import ForwardRecord, PostProcessed, Source
from shardrec.step.calls_ahead import Ahead
from shardrec.step.context import ForwardState, ModelContext
from shardrec.step.records import GradMode

_Result = TypeVar("_Result")

_Observed = list[tuple[Any, object, GradMode]]
"""The calls of a forward: module, features, mode."""


class _KnownCall(NamedTuple):
    """A call of a sharded module that each forward makes.

    Args:
        module: that is called.
        mode: in which it is called.
        source: of its features. None if it is not made ahead.
    """

    module: ShardedCollection
    mode: GradMode
    source: Source | None


@dataclass(eq=False)
class _Slot:
    """A batch before its step.

    Args:
        batch: on the device.
        stages: number of the user's stages that it has passed.
        processed: what post-processors have made of it.
        error: the error that its step raises.
        told: whether the other ranks know of the error.
        ahead: its calls, made ahead.
        begun: their modules and features.
        exchanged: whether their ids are being sent.
        ready: on CUDA, an event recorded after the work done ahead.
    """

    batch: object = None
    stages: int = 0
    processed: PostProcessed | None = None
    error: Exception | None = None
    told: bool = False
    ahead: Ahead | None = None
    begun: Sequence[tuple[object, object]] = ()
    exchanged: bool = False
    ready: torch.cuda.Event | None = None

    def let_go(self) -> None:
        """Drop the calls that no forward has made."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None


class Lookahead:
    """Steps through batches. See :mod:`shardrec.pipeline.train`.

    Args:
        batches: the same number on every rank.
        context: of the sharded model. None: inputs are only copied ahead.
        depth: 0, 1 or 2.
        device: of the model.
        model: its post-processors are run ahead.
        stages: functions from batch to batch. Each is run one step before the next.
    """

    def __init__(
        self,
        batches: Iterable[object],
        context: ModelContext | None,
        *,
        depth: int,
        device: torch.device,
        model: nn.Module,
        stages: Sequence[Callable[[Any], object]] = (),
    ) -> None:
        self._batches = batches
        self._source: Iterator[object] | None = iter(batches)
        self._needs_batch = False  # a pass over the batches that is not the first
        self._context = context
        self._depth = depth
        self._device = device
        self._slots: deque[_Slot] = deque()
        self._model = model
        self._stages = stages
        self._calls: list[_KnownCall] | None = None
        self._made: dict[nn.Module, Source] = {}  # of modules with features from post-processors
        self._replaced: set[nn.Module] = set()  # modules with features that the forward makes from their source
        self._has_warned = False
        on_gpu = device.type == "cuda"
        # Their short kernels go before the kernels of the step under way.
        streams = [torch.cuda.Stream(device, priority=-1) if on_gpu else None for _ in range(2 + len(stages))]
        self._copies, self._ids, *self._stage_streams = streams

    @property
    def modules_ahead(self) -> list[nn.Module]:
        """The post-processors that run ahead, and the sharded modules whose ids are exchanged ahead."""
        known = [(call.module, call.source) for call in self._calls or () if call.source is not None]
        makers = [maker.module for _, source in known for maker in source.makers()]
        return list(dict.fromkeys([*makers, *(module for module, _ in known)]))

    @property
    def _exchanges_ahead(self) -> bool:
        return any(call.source is not None for call in self._calls or ())

    def step(self, forward: Callable[[Any], _Result]) -> _Result:
        """One step, up to its backward.

        Raises:
            StopIteration: if there is no further batch.
            InputError: if this batch is faulty, or an earlier batch with a backward that has not reported it.
        """
        self._fetch(1)
        if not self._slots:
            self._read_flags()
            raise StopIteration
        self._run_stages(self._slots[0], len(self._stages))
        slot = self._slots.popleft()
        if slot.ahead is not None and slot.ahead.is_stale:  # its ids went where the rows were
            slot.let_go()
            slot.exchanged = False
        if self._exchanges_ahead and not slot.exchanged and not slot.told:
            self._exchange(slot)
        if not slot.exchanged:  # nothing is exchanged ahead any more
            slot.let_go()
        if slot.error is not None:
            if not slot.told and self._context is not None:
                # The others are in this step's forward.
                tell_others(slot.error, self._context)
            raise slot.error
        if self._depth:
            self._fetch(self._depth + max(len(self._stages) - 1, 0))
            for place, later in enumerate(self._slots):
                self._run_stages(later, len(self._stages) - place)
        following = self._slots[0] if self._slots else None
        if following is not None:
            self._prepare(following)
        is_first = self._calls is None
        try:
            result = self._forward(slot, forward)
            if self._exchanges_ahead:
                self._exchange(following)
        except BaseException:
            if is_first:  # ranks that fail at different places would know different calls
                self._calls = None
            if following is not None:
                following.let_go()
            raise
        return result

    def begin_pass(self) -> None:
        """Begin another pass over the batches, if the previous pass is over. Without batches, the first step raises."""
        if self._source is None and not self._slots:
            self._source, self._needs_batch = iter(self._batches), True

    def go_on_with(self, batches: Iterable[object]) -> None:
        """Take further batches from here, after those in progress. After :meth:`close`, from where the iterator is."""
        if batches is not self._batches or (self._source is None and not self._slots):
            self._batches, self._source, self._needs_batch = batches, iter(batches), False

    def close(self) -> None:
        """Drop the batches in progress. Every rank calls this after the same step."""
        self._source = None
        for slot in self._slots:
            slot.let_go()
        self._slots.clear()
        self._read_flags()

    def _read_flags(self) -> None:
        """Raise if a batch was faulty that was looked up on a device, and has had no backward."""
        if self._context is not None:
            self._context.headers.flags.check()

    def _fetch(self, count: int) -> None:
        """Fetch batches up to this number, as far as the loader has any."""
        while self._source is not None and len(self._slots) < count and not any(slot.error for slot in self._slots):
            try:
                batch = next(self._source)
            except StopIteration:
                self._source = None
                if not self._needs_batch:
                    return
                reason = (
                    f"the dataloader of this TrainPipeline, a {type(self._batches).__name__}, has no batch for another "
                    "loop: give it one that can be iterated again, such as a DataLoader or a list, or make a pipeline "
                    "for each epoch"
                )
                slot = _Slot(error=ConfigError(reason))
            except Exception as error:
                slot = _Slot(error=error)
            else:
                self._needs_batch = False
                slot = self._copy(batch)
            self._slots.append(slot)

    def _copy(self, batch: object) -> _Slot:
        """The batch on the device, or the error that its step raises."""
        try:
            with _on(self._copies):
                slot = _Slot(batch=_copied(batch, self._device))
                slot.ready = None if self._copies is None else self._copies.record_event()
        except Exception as error:
            error.add_note(f"{_uncopied(batch, self._device)} could not be copied to {self._device}")
            slot = _Slot(error=error)
        return slot

    def _run_stages(self, slot: _Slot, count: int) -> None:
        """Have a batch pass the first stages, up to this number. An error is raised in its step."""
        try:
            while slot.stages < count and slot.error is None:
                stream = self._stage_streams[slot.stages]
                with _on(stream, slot.ready), torch.no_grad():
                    _keep(slot.batch, stream)
                    slot.batch = self._stages[slot.stages](slot.batch)
                    slot.ready = None if stream is None else stream.record_event()
                slot.stages += 1
        except Exception as error:
            slot.error = error

    def _prepare(self, slot: _Slot) -> None:
        """Make the features that its step will look up, check and cut them."""
        if self._context is None or not self._exchanges_ahead or slot.error is not None or slot.ahead is not None:
            return
        context = self._context
        before, context.forward_state = context.forward_state, ForwardState(dense_signature(slot.batch))
        try:
            with _on(self._ids, slot.ready):
                _keep(slot.batch, self._ids)
                calls = []
                slot.processed = slot.processed or PostProcessed(slot.batch)
                for module, mode, source in self._calls or ():
                    features = None if source is None else slot.processed.value(source)
                    # A model that calls a module for some batches only does so for those that have its features.
                    if features is not None:
                        with mode.entered():
                            calls.append((module, features, module.begin(features)))
                is_whole = all(call.source is not None for call in self._calls or ())
                slot.begun = [(module, features) for module, features, _ in calls]
                slot.ahead = (Ahead if is_whole else AheadOfSome)(context.headers, calls)
        except Exception as error:
            slot.error = error
        finally:
            context.forward_state = before

    def _exchange(self, slot: _Slot | None) -> None:
        """Exchange the headers of the next batch. Every rank does so in every step, even without a batch.

        Raises:
            ForwardFailed: if another rank's forward has failed.
            PeerError: if another rank is gone.
        """
        context = self._context
        assert context is not None, "only a sharded model has calls"
        if context.collectives.world_size == 1 and (slot is None or slot.error is not None):
            return
        try:
            if slot is None:
                context.headers.end_all()
                return
            self._prepare(slot)
            if slot.error is not None:
                slot.told = True
                context.headers.fail_all(quoted(slot.error))
            assert slot.ahead is not None, "a slot without an error has its calls"
            with _on(self._ids, slot.ready):
                slot.ahead.exchange()
                slot.ahead.prefetch()
                slot.exchanged = True
                if self._ids is not None:
                    slot.ahead.find_rows()
                slot.ready = None if self._ids is None else self._ids.record_event()
        except ForwardFailed:
            context.step.forget_call_batching()
            raise
        except InputError as error:
            if slot is None:
                self._slots.append(_Slot(error=error, told=True))
                return
            slot.told = True
            slot.error = slot.error or error
            slot.let_go()

    def _forward(self, slot: _Slot, forward: Callable[[Any], _Result]) -> _Result:
        context = self._context
        if slot.ready is not None:
            main = torch.cuda.current_stream(self._device)
            main.wait_event(slot.ready)
            _keep(slot.batch, main)
        if context is None:
            return forward(slot.batch)
        observed = context.step.observed = [] if self._depth else None
        context.step.ahead, told = slot.ahead, context.failures_told
        record = ForwardRecord(slot.batch) if self._calls is None and self._depth else None
        try:
            if slot.ready is not None and slot.ahead is not None:
                # What was made on the other stream is read on this one, and freed when the host is done with it.
                _keep(slot.ahead.arrived(), main)
                _keep(slot.processed.outputs if slot.processed is not None else (), main)
            with ExitStack() as stack:
                if slot.processed is not None:
                    stack.enter_context(slot.processed.in_place())
                if record is not None:
                    stack.enter_context(record.calls_of(self._model, self._device))
                result = forward(slot.batch)
            self._find_sources(slot, observed, record)
            if slot.ahead is not None:
                slot.ahead.refuse_other_modes()
        except Exception as error:
            if is_own(error) and context.failures_told == told:
                self._fail(slot, observed, record, error)
            raise
        finally:
            context.step.observed = None
            context.step.ahead = None
            slot.let_go()
        return result

    def _fail(self, slot: _Slot, observed: _Observed | None, record: ForwardRecord | None, error: Exception) -> None:
        """Let the other ranks finish this forward, and tell them, before its backward."""
        context = self._context
        assert context is not None, "only a sharded model waits"
        if observed and self._calls is None:
            self._find_sources(slot, observed, record)
        if not self._exchanges_ahead or context.collectives.world_size == 1:
            return
        if slot.ahead is not None:
            context.step.serve(slot.ahead)
        context.step.forget_call_batching()
        with suppress(InputError):  # this rank raises the error itself
            context.headers.fail_all(f"the model's forward failed: {quoted(error)}", FORWARD_FAILED)

    def _find_sources(self, slot: _Slot, observed: _Observed | None, record: ForwardRecord | None) -> None:
        """Find the sources of the features of this step's calls."""
        if observed is None:
            return
        known = self._calls or []
        are_known = [(module, mode) for module, _, mode in observed] == [(call.module, call.mode) for call in known]
        if slot.ahead is not None and slot.ahead.is_used_up and are_known:
            return
        for module, features, _ in observed:
            begun = [others for other, others in slot.begun if other is module]
            if begun and all(others is not features for others in begun):
                self._replaced.add(module)
        record = record or ForwardRecord(slot.batch)
        sources = [record.source(features) or self._made.get(module) for module, features, _ in observed]
        without = {module for (module, *_), source in zip(observed, sources, strict=True) if source is None}
        without |= self._replaced
        # A module's calls are made in their order: all of them ahead, or none.
        self._calls = [
            _KnownCall(module, mode, None if module in without else source)
            for (module, _, mode), source in zip(observed, sources, strict=True)
        ]
        self._made |= {call.module: call.source for call in self._calls if call.source and call.source.maker}
        if without:
            names = ", ".join(dict.fromkeys(type(module).__name__ for module, *_ in observed if module in without))
            reason = (
                f" of {names} ahead, because the forward makes their features: call it with a KeyedJaggedTensor "
                "that the batch holds, or that a module without trainable parameters makes of it"
            )
        elif not observed:
            reason = " ahead of this step: no sharded module was called outside of a compiled forward"
        elif slot.ahead is not None:
            reason = " ahead of this step: the model calls its sharded modules otherwise than in the step before"
        else:
            return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"TrainPipeline exchanges no ids{reason}", stacklevel=5)


def tell_others(error: Exception, context: ModelContext) -> None:
    """Raise an error of this rank, which lacks a batch for its step, on all other ranks at their header exchange."""
    if context.collectives.world_size == 1:
        return
    # This rank raises the error itself, which says more than its shared form, or than news that the others are gone.
    with suppress(ShardrecError):
        if context.gradients.reducer is not None:
            context.gradients.reducer.broadcast_buffers()  # as the others do before their first header
        context.headers.fail_all(quoted(error))


def _on(stream: torch.cuda.Stream | None, after: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
    """Issue on a CUDA stream, after an event. Nothing on the CPU."""
    if stream is None:
        return nullcontext()
    if after is not None:
        stream.wait_event(after)
    return torch.cuda.stream(stream)


def _copied(batch: object, device: torch.device) -> object:
    """The batch on a device. To CUDA it is copied from pinned memory, without waiting."""
    if isinstance(batch, (tuple, list)):
        moved = [_copied(part, device) for part in batch]
        make: Callable[..., object] = type(batch)
        return make(*moved) if hasattr(batch, "_fields") else make(moved)
    if isinstance(batch, Mapping):
        return {key: _copied(part, device) for key, part in batch.items()}
    if not hasattr(batch, "to"):
        return batch
    to_gpu = device.type == "cuda"
    pinned = batch.pin_memory() if to_gpu and hasattr(batch, "pin_memory") else batch
    return pinned.to(device, non_blocking=to_gpu)  # as TorchRec's Pipelineable, which lacks a default for it


def _uncopied(batch: object, device: torch.device, name: str = "batch") -> str:
    """The part of a batch that cannot be copied to a device, such as ``batch.dense``."""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(batch, Mapping):
        parts = ((f"[{key!r}]", part) for key, part in batch.items())
    elif isinstance(batch, (tuple, list)):
        fields = getattr(batch, "_fields", ())
        suffixes = [f".{field}" for field in fields] or [f"[{index}]" for index in range(len(batch))]
        parts = zip(suffixes, batch, strict=True)
    elif not isinstance(batch, (Tensor, KeyedJaggedTensor)):
        parts = ((f".{field}", part) for field, part in getattr(batch, "__dict__", {}).items())
    for suffix, part in parts:
        try:
            _copied(part, device)
        except Exception:
            return _uncopied(part, device, name + suffix)
    return name


def _keep(value: object, stream: torch.cuda.Stream | None) -> None:
    """Tell CUDA's allocator that ``stream`` reads the tensors in a value."""
    for leaf in leaves(value) if stream is not None else ():
        on_cpu = isinstance(leaf, Tensor) and not leaf.is_cuda
        if hasattr(leaf, "record_stream") and not on_cpu:
            leaf.record_stream(stream)
