"""Tensors that Python takes for CUDA's and that are computed on the CPU: a hidden wait for the device is an error.

On a machine without a GPU the code for CUDA would not be run at all. Under :func:`cuda_is_there` and
:func:`cuda_double` whatever is made on ``cuda`` is a :class:`DeviceTensor`: its ``device`` is ``cuda:0``, its values
are those of a CPU tensor inside of it, and each operator on it is looked at first:

=======================================================  ==========================================
operator                                                 on a GPU
=======================================================  ==========================================
``item``, ``tolist``, ``bool``, ``nonzero``, ``unique``  the host waits for the device
``repeat_interleave`` without an output size, masks      likewise
copies to the host, copies from pageable memory          likewise
a CPU tensor (of a dimension or more) beside one         an error, or a copy
an operator of ours that is compiled for the CPU         memory that the host cannot read
a tensor of another stream that was not waited for       half-written memory
rows that are newer in the cache, read behind it         old values
=======================================================  ==========================================

Where the host waits is noted in :attr:`CudaDouble.waits`, or is an error outside of :meth:`CudaDouble.may_wait`.
fbgemm's operators get inputs of the size that the lengths say, as its CPU build demands, and give outputs of the size
that CUDA's would have; what is left over is poison, so that code which reads it is found out. So is what a copy into
pinned memory has not brought yet, because the host has not waited. Kernels in Triton run in its interpreter, or not
at all (:data:`INTERPRETS_TRITON`).
"""

from __future__ import annotations

import os
import traceback
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.exchange import launching
from shardrec.lookup import bank, kernels
from shardrec.modules import sequences

__all__ = [
    "INTERPRETS_TRITON",
    "CachedKernelDouble",
    "CudaDouble",
    "DeviceTensor",
    "HiddenWait",
    "Race",
    "cuda_double",
    "cuda_is_there",
    "to_double",
    "value_of",
]

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_PACKAGE = Path(shardrec.__file__).parent
_make_kernel = kernels.make_kernel
_launch = launching.launch
_WRITTEN = {
    "find": (5, 6),
    "emit": (3,),
    "stamp": (2,),
    "sum_lengths": (1, 2),
    "check_ids": (3,),
    "write_header": (3,),
}
"""The arguments that kernels write."""
INTERPRETS_TRITON = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads the variable when it is imported, which others may do before a test."""

_POISON = 2**30 + 7  # no table has such a row
_WAYS = 2  # of a set of the cache
_aten = torch.ops.aten


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
        if _ACTIVE:
            _ACTIVE[-1].streams.append(self)
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
        _ACTIVE[-1].wait("a stream is waited for")


class EventDouble:
    """What was issued, and waited for, when it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.after: dict[StreamDouble, int] = {}

    def record(self, stream: StreamDouble | None = None) -> None:
        (stream or _ACTIVE[-1].stream).record_event(self)

    def wait(self, stream: StreamDouble | None = None) -> None:
        (stream or _ACTIVE[-1].stream).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _ACTIVE[-1].wait("an event is waited for")


@contextmanager
def _on_stream(stream: StreamDouble | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    double = _ACTIVE[-1]
    before, double.stream = double.stream, stream or double.stream
    try:
        yield
    finally:
        double.stream = before


_ACTIVE: list[CudaDouble] = []


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
            device=_CPU,  # what C++ sees: a build without CUDA has no autograd for its tensors
            requires_grad=inner.requires_grad,
        )
        made.inner = inner.detach()
        stream = _ACTIVE[-1].stream
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
        return _ACTIVE[-1].run(func, args, kwargs or {})


class CudaDouble(TorchFunctionMode):
    """The mode; see the module's docstring.

    Attributes:
        waits: where the host waited, with leave.
        stream: the current one.
        orders_kept: calls that cut bags in an order that threads do not choose.
        longest_loop: most ids of a bag that one thread, or one warp, has gone through.
        pageable_copies: calls of operators that copy from pageable memory.
        operators: how often each has run on the device.
        index_dtypes: of the ids given to lookups.
        streams: those that were made.
        pinned_bytes: all that were pinned, in blocks of powers of two, as torch takes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.index_dtypes: set[torch.dtype] = set()
        self.streams: list[StreamDouble] = []
        self.orders_kept = self.longest_loop = self.pageable_copies = self.pinned_bytes = 0
        self.stream = StreamDouble()
        self._in_backward = False
        self._copies: list[tuple[Tensor, Tensor]] = []  # into pinned memory, under way
        self.waits: list[str] = []
        self._leave = 0

    @contextmanager
    def may_wait(self) -> Iterator[None]:
        """Inside, the host may wait for the device."""
        self._leave += 1
        try:
            yield
        finally:
            self._leave -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes what is asked for on ``cuda`` here, where a build without CUDA could not."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "backward":
            return self._backward(*args, **kwargs)
        if _is_cuda(kwargs.get("device")) and name != "to":
            pinned = kwargs.pop("pin_memory", False)
            assert not pinned, "memory of the device is not pinned"
            copied = name in ("tensor", "as_tensor", "scalar_tensor")
            if copied:
                self.wait(f"torch.{name}(..., device=cuda): a copy from pageable memory")
            made = _to_device(func(*args, **(kwargs | {"device": _CPU})))
            if copied:
                self.stream.completed = self.stream.issued
            return made
        if kwargs.get("pin_memory") and not _is_cuda(kwargs.get("device")):
            del kwargs["pin_memory"]
            return self._pinned(func(*args, **kwargs))
        if name == "pin_memory":
            return self._pinned(args[0].clone())
        if name in ("to", "cuda") and not isinstance(args[0], DeviceTensor):
            targets = [one for one in (*args[1:], kwargs.get("device")) if _is_cuda(one)]
            if targets or name == "cuda":
                if not (kwargs.get("non_blocking") and getattr(args[0], "was_pinned", False)) and args[0].dim():
                    self.wait("a copy to the device from pageable memory, or one that blocks")
                dtypes = [one for one in (*args[1:], kwargs.get("dtype")) if isinstance(one, torch.dtype)]
                return _to_device(args[0].to(*dtypes))
        if name == "pad_sequence" and isinstance(args[0][0], DeviceTensor):
            # It makes its result by itself, where C++ sees its arguments to be.
            return _to_device(func([one.inner for one in args[0]], *args[1:], **kwargs))
        if name == "tolist" and isinstance(args[0], DeviceTensor):
            self.wait("tolist")
            return args[0].inner.tolist()
        if name in ("to", "cpu") and isinstance(args[0], DeviceTensor):
            targets = [one for one in (*args[1:], kwargs.get("device")) if isinstance(one, (str, torch.device))]
            if name == "cpu" or any(not _is_cuda(one) for one in targets):
                self.wait("a copy to the host")
                return args[0].inner.clone()
            like = [one.dtype if isinstance(one, Tensor) else one for one in (*args[1:], kwargs.get("dtype"))]
            dtypes = [one for one in like if isinstance(one, torch.dtype)]
            return func(args[0], *dtypes) if dtypes else args[0]
        return func(*args, **kwargs)

    def _pinned(self, made: Any) -> Any:
        made.was_pinned = True
        self.pinned_bytes += 1 << max(0, made.nbytes - 1).bit_length()
        return made

    def _backward(self, output: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
        """``output.backward(gradient)``, with this mode on for what is called meanwhile."""
        assert not any(options.values()), "plain backwards are all that is needed"
        self._in_backward = True
        with self:
            first = torch.ones_like(output) if gradient is None else gradient
            engine = torch.autograd.Variable._execution_engine
            try:
                engine.run_backward((output,), (first,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            finally:
                self._in_backward = False

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator of which an argument is on the device."""
        name = str(func)
        if name.startswith("shardrec."):
            raise AssertionError(f"{name} is compiled for the CPU and was given a tensor of the device")
        given = self._issue(name, (args, kwargs))
        self._judge(func, args, kwargs)
        if func is _aten.copy_.default and _is_async(args, kwargs):
            self._copies.append((args[0], args[1].inner.clone()))
            return args[0].fill_(_POISON)
        if name.startswith("fbgemm.permute_2D_sparse_data"):
            return _permute_2d(func, *args, **kwargs)
        if name.startswith("fbgemm.permute_1D_sparse_data") and not (args[0].numel() and args[1].numel()):
            return tuple(None if one is None else one.clone() for one in args[1:4])
        if name.startswith("fbgemm.block_bucketize_sparse_features"):
            return _bucketize(func, args, kwargs)
        if name.startswith("fbgemm.linearize_cache_indices"):
            return _to_device(_rows_of_ids(*map(_inner, args)))
        if name.startswith("fbgemm.lxu_cache_lookup"):
            return self.places(*args[:2], args[6] if len(args) > 6 else None)
        taken = tree_map(_inner, (args, kwargs))
        found = func(*taken[0], **taken[1])
        if func is _aten._local_scalar_dense.default:
            return found
        written = {id(one.inner): one for one in given}
        for one in tree_leaves(found):
            if id(one) in written:
                written[id(one)].written = self.stream, self.stream.issued
        return tree_map(lambda one: written[id(one)] if id(one) in written else _to_device(one), found)

    def launch(self, module: str, kernel: str, grid: tuple[int, ...], *values: Any, **constants: Any) -> None:
        """As :func:`shardrec.exchange.launching.launch` does."""
        self._issue(kernel, values)
        _launch(module, kernel, grid, *tree_map(_inner, values), **constants)
        for place in _WRITTEN[kernel]:
            values[place].written = self.stream, self.stream.issued

    def _issue(self, name: str, values: Any) -> list[DeviceTensor]:
        """Issue what reads these values on the current stream; returns the tensors of the device among them."""
        self.stream.issued += 1
        self.operators[name] += 1
        given = _tensors(values)
        for tensor in given:
            stream, issued = tensor.written
            # In backward autograd itself makes the streams wait for each other.
            late = stream is not self.stream and max(stream.completed, self.stream.waits_for.get(stream, 0)) < issued
            if late and not self._in_backward:
                raise Race(f"{name} reads a tensor of another stream, for which this one does not wait")
        return given

    def places(self, rows: Any, state: Any, out: Any = None) -> Any:
        found = (_inner(state)[_inner(rows) % len(_inner(state))] == _inner(rows).unsqueeze(1)).int()
        places = (_inner(rows) % len(_inner(state)) * _WAYS + found.argmax(1)).where(found.any(1), -1).int()
        if out is None:
            return _to_device(places)
        out.inner.copy_(places)
        out.written = self.stream, self.stream.issued
        return out

    def touch(self, tensor: Any) -> None:
        """Written, or read so that it must not be written meanwhile, on the current stream."""
        stream, issued = tensor.written
        if stream is not self.stream and max(stream.completed, self.stream.waits_for.get(stream, 0)) < issued:
            raise Race("the cache is used on another stream, for which this one does not wait")
        self.stream.issued += 1
        tensor.written = self.stream, self.stream.issued

    def wait(self, why: str) -> None:
        """The host would wait here."""
        for pinned, values in self._copies:
            pinned.copy_(values)
        self._copies.clear()
        lines = [line for line in traceback.extract_stack() if Path(line.filename).is_relative_to(_PACKAGE)]
        where = f"{Path(lines[-1].filename).relative_to(_PACKAGE)}:{lines[-1].lineno}" if lines else "the test"
        if not self._leave:
            raise HiddenWait(f"{where}: {why}")
        self.waits.append(where)
        self.stream.completed = self.stream.issued

    def _judge(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what makes the host wait, and refuse what fails on a GPU."""
        packet = func.overloadpacket
        if packet in _WAITS:
            self.wait(str(func))
        if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.wait("repeat_interleave without an output size")
        if packet in (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_):
            if any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
                self.wait("a mask as an index")
            if any(one is not None and not isinstance(one, DeviceTensor) for one in args[1]):
                self.wait("an index on the host")
            return
        if packet in (_aten.copy_, _aten._to_copy):
            here, there = (
                isinstance(args[0], DeviceTensor),
                isinstance(args[1] if len(args) > 1 else args[0], DeviceTensor),
            )
            if here != there and not _is_async(args, kwargs):
                self.wait("a copy between host and device")
            return
        for one in _tensors((args, kwargs), every=True):
            if not isinstance(one, DeviceTensor) and one.dim() and one.numel():
                raise AssertionError(f"{func}: a CPU tensor of shape {tuple(one.shape)} beside tensors of the device")


_WAITS = {
    _aten._local_scalar_dense,
    _aten.is_nonzero,
    _aten.equal,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_consecutive,
    _aten.unique_dim,
    _aten.bincount,
}


@contextmanager
def cuda_is_there() -> Iterator[None]:
    """Inside, torch says that it has a CUDA device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _ACTIVE[-1].stream)
        patch.setattr(torch.cuda, "Stream", StreamDouble)
        patch.setattr(torch.cuda, "Event", EventDouble)
        patch.setattr(torch.cuda, "stream", _on_stream)
        patch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(1, dtype=torch.uint8))
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
        patch.setattr(torch, "Generator", lambda device=None, of_cpu=torch.Generator: of_cpu())
        patch.setattr(bank, "make_kernel", KernelDouble.make)
        patch.setattr(sequences, "distinct_ids_pay", lambda device, world_size: True)  # as of several ranks
        patch.setattr(launching, "has_kernels", lambda device: device.type == "cuda" and INTERPRETS_TRITON)
        patch.setattr(launching, "launch", lambda *args, **constants: _ACTIVE[-1].launch(*args, **constants))
        # A module that moves gets new parameters: the memory of its own cannot become a double's.
        patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
        yield


@contextmanager
def cuda_double() -> Iterator[CudaDouble]:
    """Inside of :func:`cuda_is_there`: tensors on ``cuda`` are doubles."""
    double = CudaDouble()
    _ACTIVE.append(double)
    try:
        with double:
            yield double
    finally:
        _ACTIVE.pop()


def to_double(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights, inverse = features.weights_or_none(), features.inverse_indices_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().to("cuda"),
        lengths=features.lengths().to("cuda"),
        weights=None if weights is None else weights.to("cuda"),
        stride=None if features.variable_stride_per_key() else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
        inverse_indices=None if inverse is None else (inverse[0], inverse[1].to("cuda")),
    )


def value_of(found: Any) -> Tensor:
    """The values of a KeyedTensor, or of a dict of JaggedTensors, side by side."""
    values = found.values()
    return values if isinstance(values, Tensor) else torch.cat([one.values() for one in values])


class KernelDouble:
    """fbgemm's kernel for CUDA, of which its CPU build does the work.

    Args:
        kernel: on the CPU.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.weights_dev = _to_device(kernel.weights_host.detach())
        self.iter, self.iter_cpu = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    @staticmethod
    def make(shapes: Any, tables: Any, optimizer: Any, device: torch.device, **options: Any) -> Any:
        """As :func:`shardrec.lookup.kernels.make_kernel` does."""
        assert device.type != "cuda" or max(columns for _, columns in shapes) <= 2048, "max_D is 2048 at most"
        rows, _ = options.pop("cache_rows", 0), options.pop("tier", "")
        kernel = _make_kernel(shapes, tables, optimizer, _CPU, **options)
        if device.type != "cuda":
            return kernel
        return CachedKernelDouble(kernel, -(-rows // _WAYS)) if rows else KernelDouble(kernel)

    def split_embedding_weights(self) -> list[Any]:
        return [_to_device(one) for one in self.kernel.split_embedding_weights()]

    def split_optimizer_states(self) -> list[Any]:
        return [tuple(_to_device(state) for state in states) for states in self.kernel.split_optimizer_states()]

    @property
    def embedding_specs(self) -> Any:
        return self.kernel.embedding_specs

    def set_learning_rate(self, lr: float) -> None:
        self.kernel.set_learning_rate(lr)

    def __call__(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Any:
        """Reads as many ids as the offsets say, as CUDA's kernel does."""
        assert ids.dtype is offsets.dtype, "the kernel would cast the offsets"
        _ACTIVE[-1].index_dtypes.add(ids.dtype)
        if self.kernel.pooling_mode is PoolingMode.NONE and offsets.numel() > 1:
            _ACTIVE[-1].longest_loop = max(_ACTIVE[-1].longest_loop, int(offsets.inner.diff().max()))
        return _Lookup.apply(self, ids, offsets, weights, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]


class CachedKernelDouble(KernelDouble):
    """A kernel with a cache: an update in the cache poisons the row behind it, until it is flushed or evicted.

    The CPU's kernel computes with rows that are put into its memory from the cache, or from behind it, by the places
    that the call was told, right or wrong.

    Attributes:
        loads: rows that were put into the cache.
        populated: batches for which it was looked which rows to load.
    """

    def __init__(self, kernel: Any, sets: int) -> None:
        super().__init__(kernel)
        specs = kernel.embedding_specs
        self.behind = [torch.zeros(rows, columns) for rows, columns, *_ in specs]
        self.first = [0, *accumulate(rows for rows, *_ in specs)]
        self.total_cache_hash_size = self.first[-1]
        bases = [self.first[table] for table in kernel.feature_table_map]
        self.cache_hash_size_cumsum = _to_device(torch.tensor([*bases, self.first[-1]]))
        self.lxu_cache_state = _to_device(torch.full((sets, _WAYS), -1))
        self.stamps = torch.zeros(sets, _WAYS, dtype=torch.int64)
        self.cache = torch.full((sets * _WAYS, max(columns for _, columns, *_ in specs)), torch.nan)
        self.timestep, self.loads, self.populated = 1, 0, 0
        self.local_uvm_cache_stats = _to_device(torch.zeros(6, dtype=torch.int32))
        self.uvm_cache_stats: Any = _to_device(torch.zeros(6, dtype=torch.int64))
        self.timesteps_prefetched: list[int] = []
        self.lxu_cache_locations_list: list[Any] = []
        self.lxu_cache_locations: Any = None

    def split_embedding_weights(self) -> list[Any]:
        return [_to_device(one) for one in self.behind]

    def prefetch(self, ids: Any, offsets: Any) -> None:
        double, state = _ACTIVE[-1], self.lxu_cache_state.inner
        double.touch(self.lxu_cache_state)
        self.timestep += 1
        self.timesteps_prefetched.append(self.timestep)
        self.populated += 1
        rows = _rows_of_ids(self.cache_hash_size_cumsum.inner, ids.inner, offsets.inner)
        distinct = rows.unique().tolist()
        self.local_uvm_cache_stats.inner.zero_()
        for row in distinct:
            self.stamps[row % len(state)][state[row % len(state)] == row] = self.timestep
        for row in distinct:
            ways, stamps = state[row % len(state)], self.stamps[row % len(state)]
            way = int(stamps.argmin())
            if (ways == row).any():
                continue
            if stamps[way] == self.timestep:
                self.local_uvm_cache_stats.inner[4] += 1
                continue
            if ways[way] >= 0:
                self._write_back(row % len(state), way)
            ways[way], stamps[way] = row, self.timestep
            table, number = self._of(row)
            held = self.behind[table][number]
            self.cache[row % len(state) * _WAYS + way, : len(held)] = held
            self.loads += 1
        self.lxu_cache_locations_list.append(double.places(rows, self.lxu_cache_state))
        self._count()

    def flush(self) -> None:
        _ACTIVE[-1].touch(self.lxu_cache_state)
        for cache_set, way in (self.lxu_cache_state.inner >= 0).nonzero().tolist():
            self._write_back(cache_set, way)

    def reset_cache_states(self) -> None:
        _ACTIVE[-1].touch(self.lxu_cache_state)
        self.lxu_cache_state.inner.fill_(-1)
        self.stamps.zero_()
        self.timestep = 1

    def get_uvm_cache_stats(self) -> Any:
        _ACTIVE[-1].touch(self.lxu_cache_state)  # of a later prefetch than it is of
        return self.uvm_cache_stats

    def _count(self) -> None:
        """Add to the statistics, out of place: the sums so far are let go of while this stream is yet to read them."""
        double, before = _ACTIVE[-1], self.uvm_cache_stats
        if before.written[0] is not double.stream and double.stream not in before.readers:
            raise Race("statistics are let go of that another stream has made, whose memory is that stream's")
        self.uvm_cache_stats = _to_device(torch.tensor([self.populated, 0, 0, self.loads, 0, 0]))

    def __call__(self, ids: Any, offsets: Any, weights: Tensor | None) -> Any:
        if not self.timesteps_prefetched:
            self.prefetch(ids, offsets)
        self.timesteps_prefetched.pop(0)
        self.lxu_cache_locations = self.lxu_cache_locations_list.pop(0)
        return super().__call__(ids, offsets, weights)

    def load(self, rows: Tensor, places: Any) -> None:
        _ACTIVE[-1].touch(self.lxu_cache_state)
        memory = [one.data for one in self.kernel.split_embedding_weights()]
        for row, place in zip(rows.tolist(), places.inner.tolist(), strict=True):
            table, number = self._of(row)
            width = memory[table].size(1)
            memory[table][number] = self.behind[table][number] if place < 0 else self.cache[place, :width]

    def store(self, rows: Tensor, places: Any) -> None:
        memory = [one.data for one in self.kernel.split_embedding_weights()]
        for row, place in zip(rows.tolist(), places.inner.tolist(), strict=True):
            table, number = self._of(row)
            if place < 0:
                self.behind[table][number] = memory[table][number]
            else:
                self.cache[place, : memory[table].size(1)] = memory[table][number]
                self.behind[table][number] = torch.nan

    def _of(self, row: int) -> tuple[int, int]:
        table = bisect_right(self.first, row) - 1
        return table, row - self.first[table]

    def _write_back(self, cache_set: int, way: int) -> None:
        table, number = self._of(int(self.lxu_cache_state.inner[cache_set, way]))
        held = self.behind[table][number]
        held.copy_(self.cache[cache_set * _WAYS + way, : len(held)])


def _rows_of_ids(bases: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """The row of each id, counted over all tables, by the bags of its feature."""
    bags = (len(offsets) - 1) // (len(bases) - 1)
    feature = torch.searchsorted(offsets[bags:-1:bags].contiguous(), torch.arange(len(ids)), right=True)
    return ids.long() + bases[feature]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, double: Any, ids: Any, offsets: Any, weights: Any, _: Tensor) -> Any:
        kernel, count = double.kernel, int(offsets.inner[-1])
        ctx.double, ctx.rows = double, None
        if isinstance(double, CachedKernelDouble):
            ctx.rows = _rows_of_ids(double.cache_hash_size_cumsum.inner, ids.inner[:count], offsets.inner)
            ctx.places = double.lxu_cache_locations
            lacking = int((ctx.places.inner < 0).sum())
            assert not lacking or double.local_uvm_cache_stats.inner[4], "the kernel would read outside of the cache"
            double.load(ctx.rows, ctx.places)
        assert count <= ids.numel(), "the kernel would read past the ids"
        given = (
            None if weights is None else weights.inner[:count].detach().clone().requires_grad_(weights.requires_grad)
        )
        with torch.enable_grad():
            found = kernel(ids.inner[:count], offsets.inner, given)
        ctx.found, ctx.given = found, given
        return _to_device(found.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if ctx.rows is not None:
            ctx.double.load(ctx.rows, ctx.places)
        ctx.found.backward(gradient.inner)
        if ctx.rows is not None:
            ctx.double.store(ctx.rows, ctx.places)
        of_weights = ctx.given.grad if ctx.given is not None and ctx.given.requires_grad else None
        return None, None, None, None if of_weights is None else _to_device(of_weights), torch.zeros(())


def _permute_2d(
    func: Any,
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> Any:
    if permuted_lengths_sum is None:
        _ACTIVE[-1].wait("permute_2D_sparse_data without the number of permuted ids")
    places, of_bags, ids = _inner(permute), _inner(lengths), _inner(values)
    count = int(of_bags.sum())
    if not places.numel() or not of_bags.size(1):
        return lengths.clone(), values.clone(), None if weights is None else weights.clone()
    if permuted_lengths_sum is not None:
        # The last segment runs to the size that is told.
        begins = (of_bags.flatten().cumsum(0) - of_bags.flatten()).view(of_bags.shape)
        last = permuted_lengths_sum - (int(of_bags[places].sum()) - int(of_bags[places[-1], -1]))
        end = int(begins[places[-1], -1]) + last
        assert end <= ids.numel(), f"the last segment is read up to {end} of {ids.numel()} ids"
    given = None if weights is None else _inner(weights)[:count]
    found = func(places, of_bags, ids[:count], given, None)
    if permuted_lengths_sum is not None:
        assert found[1].numel() <= permuted_lengths_sum, f"{found[1].numel()} ids do not fit {permuted_lengths_sum}"
    return tuple(
        None if one is None else _to_device(one if number == 0 else _padded(one, permuted_lengths_sum))
        for number, one in enumerate(found)
    )


def _bucketize(func: Any, args: Any, kwargs: Any) -> Any:
    (lengths, values, *others), named = tree_map(_inner, (args, kwargs))
    given = dict(zip((one.name for one in func._schema.arguments[2:]), others, strict=False)) | named
    if not lengths.numel():
        raise RuntimeError("block_bucketize_sparse_features: grid.x value 0 is not within the range (0, 2147483647]")
    if given["sequence"]:
        _ACTIVE[-1].orders_kept += 1
        _ACTIVE[-1].longest_loop = max(_ACTIVE[-1].longest_loop, int(lengths.max()))
    if given.get("block_bucketize_pos") is not None:
        _ACTIVE[-1].pageable_copies += 1
    count, size = int(lengths.sum()), values.numel()
    if given.get("weights") is not None:
        given["weights"] = given["weights"][:count]
    found = func(lengths, values[:count], **given)
    return tuple(
        None if one is None else _to_device(one if number == 0 else _padded(one, size))
        for number, one in enumerate(found)
    )


def _padded(values: Tensor, size: int | None) -> Tensor:
    if size is None or size == values.numel():
        return values
    poison = torch.full((size - values.numel(),), _POISON, dtype=torch.int64).to(values.dtype)
    return torch.cat([values, poison])


def _is_cuda(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return torch.device(device).type == "cuda"
    return False


def _inner(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.inner
    return _CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _is_async(args: Any, kwargs: Any) -> bool:
    """Whether a ``copy_`` is into pinned memory, and one for which the host does not wait."""
    wanted = kwargs.get("non_blocking") or args[2:] == (True,)
    return bool(wanted) and getattr(args[0], "was_pinned", False) and isinstance(args[1], DeviceTensor)


def _to_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value


def _tensors(values: Any, *, every: bool = False) -> list[Any]:
    found: list[Any] = []

    def look(one: Any) -> bool:
        if isinstance(one, DeviceTensor) or (every and isinstance(one, Tensor)):
            found.append(one)
        return False

    tree_any(look, values)
    return found
