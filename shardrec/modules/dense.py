"""Averages the gradients of the dense part over the ranks, at the end of each backward.

::

    parameters   in reverse order of registration   top.bias top.weight │ bottom.bias bottom.weight │ replicated table
    all-reduces  in this order                      bucket 0            │ bucket 1                  │ bucket 2 + flags

A bucket is all-reduced as soon as its gradients, and the gradients of the buckets before it, are complete. The
remaining ones at the end of the backward, which waits and writes the means to ``grad``. The order never changes, so
that sums are bit-identical in every run.

[Note: what a backward leaves]
``grad`` is then the mean over the ranks of their ``grad``, where a missing gradient counts as zero: gradients that were
accumulated before (in ``no_sync``, or by another backward) are averaged with the new ones. A parameter without a
gradient on any rank keeps none, so that an optimizer skips it, as in the unsharded model. Flags behind the last bucket,
one number per parameter, say which parameters have a gradient. The host reads them, and on CUDA waits for them, only on
a rank where a parameter lacks a gradient.

[Note: when a backward is over]
Each rank must make the same all-reduces, including a rank on which no parameter got a gradient. So a backward counts
from its first step in the model (:class:`shardrec.exchange.backward_watch.BackwardWatch`: an output, the exchange or a
parameter), if it accumulates gradients, which ``torch.autograd.grad`` does not: in dense parameters or, of a loss that
uses embeddings alone, in any leaf behind that step. A backward inside another one (reentrant checkpointing) averages
the gradients that exist by then, and the outer one averages the rest.

[Note: a separate group] Ranks whose losses use different parts complete a bucket at different times: one before the
exchange's gradients are sent, one after. Collectives of one process group are matched by their order. So if the
exchange uses the process group, the all-reduces use a separate one.

[Note: several models in a backward] Their gradients are complete in another order on each rank, too. So if several
models have begun a forward, the all-reduces are issued at the end of a backward, model after model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypedDict, get_args
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange.backward_watch import BEGUN, accumulates_in, reaches_a_leaf, weak_hook
from shardrec.exchange.collectives import Collectives, FunctionalCollectives
from shardrec.exchange.flight_record import flight_record
from shardrec.exchange.peers import meet, peer_error, peers, watch_device
from shardrec.exchange.shared.shared_memory import SharedCollectives
from shardrec.exchange.subgroups import subgroup
from shardrec.modules.fsdp import ShardedByFsdp
from shardrec.modules.in_backward import take_over_steps
from shardrec.modules.table import ModuleWatch, ShardedTable, averaged_parameters
from shardrec.step.context import ModelContext

_REQUIRES_GRAD = attrgetter("requires_grad")
_LOOK_EVERY = timedelta(seconds=0.5)
"""How long to wait for the CPU's collectives before looking whether a rank has reported a failure."""
_CAP_MB = 25
_FIRST_BYTES = 2**20
"""Of the first bucket, which is small so that its all-reduce begins early."""
_COALESCED_BYTES = 250 * 2**20

DenseWrap = Literal["ddp", "fsdp", "none"]
"""``ddp``: a copy on every rank, gradients all-reduced. ``fsdp``: sharded by FSDP2. ``none``: as it is, the user's, but
for replicated tables."""


class DenseOptions(TypedDict, total=False):
    """Options of DistributedDataParallel, or FSDP's option ``use_orig_params`` alone, which selects FSDP2."""

    bucket_cap_mb: float
    """Size of an all-reduce in MiB. A parameter of at least this size has one of its own. Default: 25."""
    broadcast_buffers: bool
    """Whether each forward begins with rank 0's buffers on every rank. Default: True."""
    use_orig_params: bool
    """Must be True, and the only option. FSDP1 needs it to keep a model's own parameters instead of flat ones. FSDP2
    has no flat parameters, so ``{"use_orig_params": True}`` is the same as ``"fsdp"``."""


_NOT_NEEDED = {
    "find_unused_parameters": "parameters without a gradient need no option",
    "static_graph": "the order of the all-reduces never changes",
    "gradient_as_bucket_view": "a gradient of a bucket of its own is not copied anyway",
    "mixed_precision": "cast the model before it is sharded, or use torch.autocast",
    "process_group": "give group= to shardrec.shard",
    "device_ids": "give device= to shardrec.shard",
}


def dense_options(dense: DenseWrap | DenseOptions) -> tuple[DenseWrap, DenseOptions]:
    """The argument ``dense`` of :func:`shardrec.shard`, checked.

    Raises:
        ConfigError: for another word, option or value.
    """
    if not isinstance(dense, Mapping):
        if dense not in get_args(DenseWrap):
            words = ", ".join(map(repr, get_args(DenseWrap)))
            raise ConfigError(f"dense is {dense!r}. Give one of {words}, or a dict of options")
        return dense, {}
    known = ", ".join(map(repr, DenseOptions.__annotations__))
    for name in dense:
        if name not in DenseOptions.__annotations__:
            raise ConfigError(f"dense has {name!r}, but takes {known}: {_NOT_NEEDED.get(name, 'leave it out')}")
    if "use_orig_params" in dense:
        if dense["use_orig_params"] is not True:
            raise ConfigError(
                f"use_orig_params of dense is {dense['use_orig_params']!r}, but FSDP2 has no flat parameters. Give "
                "True, or dense='fsdp'"
            )
        if len(dense) > 1:
            ddp = ", ".join(repr(name) for name in dense if name != "use_orig_params")
            raise ConfigError(
                f"dense has 'use_orig_params', of FSDP, beside {ddp}, of DistributedDataParallel: give one"
            )
        return "fsdp", {}
    size = dense.get("bucket_cap_mb", _CAP_MB)
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0:
        raise ConfigError(f"bucket_cap_mb of dense is {size!r}. Give a number of MiB above 0")
    return "ddp", dense


@dataclass(eq=False, kw_only=True)
class _Bucket:
    """Parameters with gradients that are all-reduced together.

    Args:
        parameters: of one dtype and device.
        dtype: of the parameters.
        device: of the parameters.
        is_large: whether it is one parameter. Its mean then becomes ``grad`` without a copy. Others are copied.
        flags: number of flags behind the gradients.

    Attributes:
        flat: the tensor that is reduced, made at its first use: gradients divided by the number of ranks, then flags.
        views: per gradient in ``flat``.
        left: parameters without a gradient in this backward yet.
        streams: the CUDA streams that wrote to ``flat`` in this backward.
    """

    parameters: list[nn.Parameter]
    dtype: torch.dtype
    device: torch.device
    is_large: bool = False
    flags: int = 0
    flat: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    left: int = 0
    streams: set[Any] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Of the gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def memory(self) -> Tensor:
        """``flat``."""
        if self.flat is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            total = sum(sizes)
            self.flat = torch.empty(total + self.flags, dtype=self.dtype, device=self.device)
            parts = self.flat[:total].split(sizes) if sizes else ()
            self.views = [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]
        return self.flat

    def forget(self) -> None:
        """Drop ``flat``, which is now a gradient, or used by an all-reduce that is not waited for."""
        self.flat, self.views = None, []


def _buckets(parameters: Sequence[nn.Parameter], first: int, cap: int) -> list[_Bucket]:
    """Parameters in buckets of ``cap`` bytes, by their last parameter. The first bucket per dtype and device has
    ``first`` bytes."""
    buckets: list[_Bucket] = []
    opened: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        if parameter.nbytes >= cap:
            buckets.append(_Bucket(parameters=[parameter], dtype=key[0], device=key[1], is_large=True))
            continue
        bucket = opened.pop(key, None) or _Bucket(parameters=[], dtype=key[0], device=key[1])
        bucket.parameters.append(parameter)
        if bucket.nbytes < limits.get(key, first):
            opened[key] = bucket  # behind the others that are open
            continue
        limits[key] = cap
        buckets.append(bucket)
    return [*buckets, *opened.values()]


@dataclass(frozen=True, kw_only=True)
class _PendingCollective:
    """A collective under way.

    Args:
        work: of the process group.
        what: the name of the operation, a noun.
        number: in the flight record.
        on_cpu: whether its tensors are on the CPU.
    """

    work: dist.Work
    what: str
    number: int
    on_cpu: bool


class DenseReducer:
    """Averages gradients over the ranks. See the notes above.

    Args:
        module: the model.
        group: of the ranks.
        context: of the model.
        options: of the user.
        dense: also average the gradients of the dense part, and not of replicated tables alone.
        fsdp: averages the gradients of the dense part, if there is one.

    Attributes:
        agreement: a text that says which parameters train, which the ranks compare.
        sparse: the parameters with sparse gradients.
        evaluates: the ranks that evaluate together, one replica's. None for one rank. Default: ``group``.
    """

    agreement = ""
    sparse: Sequence[nn.Parameter] = ()

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        context: ModelContext,
        options: DenseOptions,
        *,
        dense: bool,
        fsdp: ShardedByFsdp | None,
    ) -> None:
        self._dense = dense
        self._module, self._group, self._context, self._fsdp = module, group, context, fsdp
        self.evaluates: dist.ProcessGroup | None = group
        self._own_group = _group_beside(group, context.collectives, context.device)
        self._share = 1 / dist.get_world_size(group)
        self._limit = int(options.get("bucket_cap_mb", _CAP_MB) * 2**20)
        self._broadcasts = options.get("broadcast_buffers", True) and next(module.buffers(), None) is not None
        self._held: list[nn.Parameter] = []
        self._watch: ModuleWatch | None = None
        self._stepped: set[nn.Parameter] = set()  # with optimizers in backward, which step here
        self._trains: list[bool] | None = None
        self._task, self._issued = -1, 0  # the backward with the gradients that are averaged
        self._tasks: set[int] = set()  # backwards that have begun since the last forward
        self._missing: set[nn.Parameter] = set()
        self._in_flight: list[_PendingCollective] = []
        self.arm()
        _REDUCERS[id(self)] = self

    def _average(self, held: list[nn.Parameter]) -> None:
        """Average the gradients of these parameters from now on, in the order of their registration."""
        known, take = set(self._held), weak_hook(self._take)
        self._held, self._trains = held, None
        self._parameters = [
            parameter for parameter in dict.fromkeys(held) if parameter.is_floating_point() or parameter.is_complex()
        ]
        self._stepped.intersection_update(self._parameters)
        for parameter in self._parameters:
            if parameter not in known:
                trains = parameter.requires_grad
                # Also of a frozen parameter, which may be trained later. Torch wants one that requires a gradient.
                parameter.requires_grad_().register_post_accumulate_grad_hook(take)
                parameter.requires_grad_(trains)

    def broadcast_buffers(self, *, to_all: bool = False) -> None:
        """Broadcast the first rank's buffers ``to_all``, or, without gradients, to those that evaluate together."""
        group = self._group if to_all or torch.is_grad_enabled() else self.evaluates
        if self._broadcasts and group is not None:
            with peers(group, "buffer broadcast"):
                _broadcast([buffer.detach() for buffer in self._module.buffers()], group)

    def arm(self) -> None:
        """Put the parameters that the model has, and that train, now in buckets."""
        self._tasks.clear()
        if self._fsdp is not None:
            self._fsdp.recover()
            self._fsdp.refuse_in_backward()
        if self._watch is None or not self._watch.is_as_before():
            self._watch = ModuleWatch(self._module)
            held = averaged_parameters(self._module, [], dense=self._dense)
            if self._trains is None or list(map(id, held)) != list(map(id, self._held)):
                self._average(held)
        trains = list(map(_REQUIRES_GRAD, self._parameters))
        if trains == self._trains:
            return
        self._trains = trains
        shapes = [(parameter.shape, parameter.dtype) for parameter in self._parameters]
        checksum = zlib.crc32(repr((trains, shapes)).encode())
        self.agreement = f", {sum(trains)} dense parameters trained (checksum {checksum:x})"
        sparse = {
            id(module.weight)
            for module in self._module.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        trained = [parameter for parameter in reversed(self._parameters) if parameter.requires_grad]
        self.sparse = [parameter for parameter in trained if id(parameter) in sparse]
        dense = [parameter for parameter in trained if id(parameter) not in sparse]
        self._buckets = _buckets(dense, min(_FIRST_BYTES, self._limit), self._limit)
        if self._fsdp is not None and not self._buckets:
            self._buckets = [_Bucket(parameters=[], dtype=torch.float32, device=self._context.device)]
        self._places = {
            parameter: (bucket, number)
            for bucket in self._buckets
            for number, parameter in enumerate(bucket.parameters)
        }
        if self._buckets:
            self._buckets[-1].flags = len(self._places) + (0 if self._fsdp is None else len(self._fsdp.parameters))

    def begin(self) -> None:
        """Called when a backward begins."""
        reduces, task = self._context.gradients.reduce_this_backward, torch._C._current_graph_task_id()
        averaged = *self._places, *self.sparse
        accumulates = self._fsdp is not None or any(map(accumulates_in, averaged))
        is_needed = bool(averaged) or bool(self._context.life_cycle.gradients_averaged)
        if is_needed and not accumulates and task not in self._tasks:  # a backward inside of it may leave the rest
            accumulates = reaches_a_leaf()
        self._tasks.add(task)
        self._stepped.update(filter(take_over_steps, self._parameters))  # some may have come since the last backward
        if reduces and not accumulates:
            # From torch.autograd.grad, or from a lookup's operator inside a backward that continues after it.
            return
        if self._in_flight:  # of one that raised
            self._in_flight = []
            for bucket in self._buckets:
                bucket.forget()
        if self._fsdp is not None:
            self._fsdp.begin(reduce=reduces)
        self._task = task if reduces else -1
        if not reduces:
            return
        self._issued = 0
        self._missing = set(self._places)
        for bucket in self._buckets:
            bucket.left = len(bucket.parameters)
        # Those of FSDP2, and of DistributedDataParallel around a scripted model, may be queued later in this backward.
        # One that a callback queues comes after all of them.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(partial(queue, partial(_end_together, task)))

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Called when a parameter's gradient is complete."""
        self._context.gradients.backward.begin()
        if self._task < 0 or parameter not in self._missing:
            return
        bucket, number = self._places[parameter]
        self._copy(bucket, number)
        bucket.left -= 1
        # FSDP2's flags are known at the end.
        ready = len(self._buckets) - (self._fsdp is not None) if len(BEGUN) < 2 else 0
        while self._issued < ready and not self._buckets[self._issued].left:
            self._issue_next()

    def _copy(self, bucket: _Bucket, number: int) -> None:
        """Copy this rank's share of a gradient to its bucket."""
        parameter = bucket.parameters[number]
        bucket.memory()
        gradient, view = parameter.grad, bucket.views[number]
        if gradient is None:
            view.zero_()
            return
        self._missing.discard(parameter)
        torch.mul(gradient.to_dense() if gradient.is_sparse else gradient, self._share, out=view)
        if view.is_cuda:
            bucket.streams.add(torch.cuda.current_stream(view.device))

    def _issue_next(self) -> None:
        bucket = self._buckets[self._issued]
        self._issued += 1
        flat = bucket.memory()
        if bucket.flags:
            flags = flat[-bucket.flags :].fill_(1)
            for number, has_gradient in enumerate(self._flags()):
                if not has_gradient:
                    flags[number].zero_()
        streams, bucket.streams = bucket.streams, set()
        for stream in streams:
            torch.cuda.current_stream(flat.device).wait_stream(stream)
        self._issue("gradient all-reduce", flat, partial(dist.all_reduce, flat, group=self._own_group, async_op=True))

    def _flags(self) -> list[bool]:
        """Per parameter, whether this rank has a gradient of it: first those in buckets, then FSDP2's."""
        in_buckets = [parameter not in self._missing for parameter in self._places]
        return in_buckets if self._fsdp is None else [*in_buckets, *self._fsdp.flags()]

    @torch.no_grad()
    def end(self) -> None:
        """Called when all gradients of this rank are complete."""
        self._task = -1
        for bucket in self._buckets[self._issued :]:
            for number, parameter in enumerate(bucket.parameters):
                if parameter in self._missing:
                    self._copy(bucket, number)
        while self._issued < len(self._buckets):
            self._issue_next()
        means = list(self._sparse_means())
        self._wait_all()
        self._write()
        for parameter, mean in means:
            parameter.grad = mean
        life_cycle = self._context.life_cycle
        for average in life_cycle.gradients_averaged:
            average(self._parameters)
        for update in life_cycle.tables_update:
            update()

    def step_in_backward(self) -> None:
        """Make the steps of optimizers in backward, once all gradients are averaged."""
        for parameter in self._stepped:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None

    def _write(self) -> None:
        """Write the received means to the gradients."""
        present = self._flags()
        if not all(present):
            present = [count != 0 for count in self._buckets[-1].memory()[-len(present) :].tolist()]
        if self._fsdp is not None:
            self._fsdp.drop_unused(present[len(self._places) :])
        gradients, means = [], []
        for (parameter, (bucket, number)), has_gradient in zip(self._places.items(), present, strict=False):
            view, gradient = bucket.views[number], parameter.grad
            if not has_gradient:
                continue
            if bucket.is_large:
                parameter.grad = view
            elif gradient is None or gradient.is_sparse:
                parameter.grad = view.clone()
            else:
                gradients.append(gradient)
                means.append(view)
        if gradients:
            torch._foreach_copy_(gradients, means)
        for bucket in self._buckets:
            if bucket.is_large:
                bucket.forget()

    def _sparse_means(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The means of gradients that are sparse on every rank that has one. Dense, if they are dense on any."""
        if not self.sparse:
            return
        gradients = [parameter.grad for parameter in self.sparse]
        gradients = [
            gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient for gradient in gradients
        ]
        counts = [(-1 if gradient is None else gradient._nnz() if gradient.is_sparse else -2) for gradient in gradients]
        local_counts = torch.tensor(counts, device=self._context.device)
        of_ranks = self._gathered(local_counts).tolist()
        for number, (parameter, gradient) in enumerate(zip(self.sparse, gradients, strict=True)):
            sizes = [counts[number] for counts in of_ranks]
            if set(sizes) == {-1}:
                continue
            if -2 in sizes:
                whole = torch.zeros_like(parameter) if gradient is None else gradient.to_dense() * self._share
                issue = partial(dist.all_reduce, whole, group=self._own_group, async_op=True)
                self._issue("gradient all-reduce", whole, issue)
                self._wait_all()
                yield parameter, whole
                continue
            most, count = max(sizes), max(sizes[dist.get_rank(self._group)], 0)
            indices = torch.zeros(most, dtype=torch.int64, device=parameter.device)
            values = parameter.new_zeros((most, *parameter.shape[1:]), requires_grad=False)
            if gradient is not None:
                indices[:count] = gradient.indices()[0]
                torch.mul(gradient.values(), self._share, out=values[:count])
            parts = [self._gathered(tensor) for tensor in (indices, values)]
            kept = [
                torch.cat(
                    [rank_part[:size] for rank_part, size in zip(part, sizes, strict=True) if size > 0] or [part[0][:0]]
                )
                for part in parts
            ]
            yield parameter, torch.sparse_coo_tensor(kept[0][None], kept[1], parameter.shape).coalesce()

    def _gathered(self, tensor: Tensor) -> Tensor:
        """(W, ...) from a tensor of one shape on every rank."""
        world_size = dist.get_world_size(self._group)
        out = tensor.new_empty((world_size * tensor.size(0), *tensor.shape[1:]))
        issue = partial(dist.all_gather_into_tensor, out, tensor, group=self._own_group, async_op=True)
        self._issue("sparse gradient all-gather", out, issue)
        self._wait_all()
        return out.view(world_size, *tensor.shape)

    def _issue(self, what: str, tensor: Tensor, issue: Any) -> None:
        number = flight_record().begin(what, tensor.nbytes)
        try:
            work = issue()
        except RuntimeError as error:
            raise peer_error(self._group, what, error) from error
        self._in_flight.append(_PendingCollective(work=work, what=what, number=number, on_cpu=tensor.is_cpu))

    def _wait_all(self) -> None:
        """Wait for the collectives in progress; on CUDA the current stream waits."""
        while self._in_flight:
            first = self._in_flight[0]
            while not self._is_done(first):
                self._context.collectives.raise_reported_failure(first.what)
            flight_record().end(first.number)
            del self._in_flight[0]

    def _is_done(self, pending: _PendingCollective) -> bool:
        """Wait, on the CPU only for a while. Whether the collective is done."""
        work = pending.work
        try:
            if not pending.on_cpu:
                work.wait()
                watch_device(self._group)
                return True
            try:
                return bool(work.wait(_LOOK_EVERY))
            except RuntimeError:
                return work.is_completed() and bool(work.wait())
        except RuntimeError as error:
            raise peer_error(self._group, pending.what, error) from error


_REDUCERS: WeakValueDictionary[int, DenseReducer] = WeakValueDictionary()
"""By their ids, in the order in which the ranks have made them."""


def _end_together(task: int) -> None:
    """A backward ends. See [Note: several models in a backward]."""
    # Not those of a backward inside of it, which was the last to accumulate.
    ended = [reducer for reducer in list(_REDUCERS.values()) if reducer._task == task]
    for reducer in ended:
        BEGUN.end(reducer)
        reducer.end()
    for reducer in ended:  # a parameter of two models makes one step
        reducer.step_in_backward()


def average_dense(
    module: nn.Module, dense: DenseWrap | DenseOptions, group: dist.ProcessGroup, context: ModelContext
) -> DenseReducer:
    """Average the gradients of a model's dense part, and broadcast its initial values from rank 0.

    With ``dense="none"``, of replicated tables alone. Their copies would drift apart.
    """
    wrap, options = dense_options(dense)
    options = {"broadcast_buffers": False} if wrap == "none" else options
    parameters = list(dict.fromkeys(averaged_parameters(module, [], dense=wrap != "none")))
    buffers = () if wrap == "none" else module.buffers()
    meet(group)
    with peers(group, "start of the dense part"):
        if parameters:
            dist._verify_params_across_processes(group, [parameter.detach() for parameter in parameters], None)
        _broadcast([tensor.detach() for tensor in (*parameters, *buffers)], group)
    fsdp = None
    if wrap == "fsdp":  # which cannot shard tables: kernels read them in place
        ignored = [p for child in module.modules() if isinstance(child, ShardedTable) for p in child.parameters()]
        fsdp = ShardedByFsdp(module, group, ignored, context.device)
    return DenseReducer(module, group, context, options, dense=wrap == "ddp", fsdp=fsdp)


def _broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Rank 0's values, on every rank of the group."""
    if tensors:
        dist._broadcast_coalesced(group, list(tensors), _COALESCED_BYTES, 0)


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _group_beside(group: dist.ProcessGroup, exchange: Collectives, device: torch.device) -> dist.ProcessGroup:
    """The group for all-reduces. See [Note: a separate group]. Every rank of ``group`` calls this."""
    through_group = (
        exchange.far if isinstance(exchange, SharedCollectives) else isinstance(exchange, FunctionalCollectives)
    )
    if not through_group:
        return group
    if group not in _GROUPS:
        backend = dist.get_backend_config(group)
        _GROUPS[group] = subgroup(group, range(group.size()), device, what="start of the dense part", backend=backend)
    return _GROUPS[group]
