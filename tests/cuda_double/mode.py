"""The mode in which what is made on ``cuda`` is a double, and what is to be replaced in torch for it."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.exchange import launching
from shardrec.lookup import group_shards as bank
from shardrec.modules import sequences
from tests.cuda_double.device import (
    ACTIVE,
    CPU,
    POISON,
    DeviceTensor,
    EventDouble,
    HiddenWait,
    Race,
    StreamDouble,
    inner_of,
    is_cuda,
    on_stream,
    to_device,
)
from tests.cuda_double.kernels import WAYS, KernelDouble
from tests.cuda_double.operators import bucketize, check_ids, permute_2d, rows_of_ids

__all__ = ["INTERPRETS_TRITON", "CudaDouble", "cuda_double", "cuda_is_there", "to_double", "value_of"]

_PACKAGE = Path(shardrec.__file__).parent
_launch = launching.launch
_WRITTEN = {
    "find": (5, 6),
    "emit": (3,),
    "stamp": (2,),
    "check_ids": (3, 4, 5, 6),
    "write_header": (3,),
}
"""The arguments that kernels write."""
INTERPRETS_TRITON = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads the variable when it is imported, which others may do before a test."""
_aten = torch.ops.aten


class CudaDouble(TorchFunctionMode):
    """The mode; see the module's docstring.

    Attributes:
        waits: where the host waited, with leave.
        stream: the current one.
        orders_kept: calls that cut bags in an order that threads do not choose.
        longest_loop: most ids of a bag that one thread, or one warp, has gone through.
        pageable_copies: calls of operators that copy from pageable memory.
        operators: how often each has run on the device.
        launches: the same, without those that only give a view of a tensor, or memory.
        index_dtypes: of the ids given to lookups.
        streams: those that were made.
        pinned_bytes: all that were pinned, in blocks of powers of two, as torch takes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.index_dtypes: set[torch.dtype] = set()
        self.streams: list[StreamDouble] = []
        self.orders_kept = self.longest_loop = self.pageable_copies = self.pinned_bytes = 0
        self.stream = StreamDouble()
        self._in_backward = False
        self._pinned_memory: dict[int, torch.UntypedStorage] = {}  # by address, kept so that no other has its address
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
        if is_cuda(kwargs.get("device")) and name != "to":
            pinned = kwargs.pop("pin_memory", False)
            assert not pinned, "memory of the device is not pinned"
            copied = name in ("tensor", "as_tensor", "scalar_tensor")
            if copied:
                self.wait(f"torch.{name}(..., device=cuda): a copy from pageable memory")
            made = to_device(func(*args, **(kwargs | {"device": CPU})))
            if copied:
                self.stream.completed = self.stream.issued
            return made
        if kwargs.get("pin_memory") and not is_cuda(kwargs.get("device")):
            del kwargs["pin_memory"]
            return self._pinned(func(*args, **kwargs))
        if name == "pin_memory":
            return self._pinned(args[0].clone())
        if name in ("to", "cuda") and not isinstance(args[0], DeviceTensor):
            targets = [one for one in (*args[1:], kwargs.get("device")) if is_cuda(one)]
            if targets or name == "cuda":
                if not (kwargs.get("non_blocking") and self._is_pinned(args[0])) and args[0].dim():
                    self.wait("a copy to the device from pageable memory, or one that blocks")
                dtypes = [one for one in (*args[1:], kwargs.get("dtype")) if isinstance(one, torch.dtype)]
                return to_device(args[0].to(*dtypes))
        if name == "pad_sequence" and isinstance(args[0][0], DeviceTensor):
            # It makes its result by itself, where C++ sees its arguments to be.
            return to_device(func([one.inner for one in args[0]], *args[1:], **kwargs))
        if name == "tolist" and isinstance(args[0], DeviceTensor):
            self.wait("tolist")
            return args[0].inner.tolist()
        if name in ("to", "cpu") and isinstance(args[0], DeviceTensor):
            targets = [one for one in (*args[1:], kwargs.get("device")) if isinstance(one, (str, torch.device))]
            if name == "cpu" or any(not is_cuda(one) for one in targets):
                self.wait("a copy to the host")
                return args[0].inner.clone()
            like = [one.dtype if isinstance(one, Tensor) else one for one in (*args[1:], kwargs.get("dtype"))]
            dtypes = [one for one in like if isinstance(one, torch.dtype)]
            return func(args[0], *dtypes) if dtypes else args[0]
        return func(*args, **kwargs)

    def _pinned(self, made: Any) -> Any:
        self._pinned_memory[made.untyped_storage().data_ptr()] = made.untyped_storage()
        self.pinned_bytes += 1 << max(0, made.nbytes - 1).bit_length()
        return made

    def _is_pinned(self, tensor: Tensor) -> bool:
        """Whether the memory was pinned, of which the tensor may be a part."""
        return not isinstance(tensor, DeviceTensor) and tensor.untyped_storage().data_ptr() in self._pinned_memory

    def _is_async(self, args: Any, kwargs: Any) -> bool:
        """Whether a ``copy_`` is into pinned memory, and one for which the host does not wait."""
        wanted = kwargs.get("non_blocking") or args[2:] == (True,)
        return bool(wanted) and self._is_pinned(args[0]) and isinstance(args[1], DeviceTensor)

    def _backward(
        self, output: Tensor, gradient: Tensor | None = None, retain_graph: bool | None = None, **options: Any
    ) -> None:
        """``output.backward(gradient)``, with this mode on for what is called meanwhile."""
        assert not any(options.values()), "plain backwards are all that is needed"
        before, self._in_backward = self._in_backward, True
        with self:
            first = torch.ones_like(output) if gradient is None else gradient
            engine = torch.autograd.Variable._execution_engine
            try:
                keep = bool(retain_graph)
                engine.run_backward((output,), (first,), keep, False, (), allow_unreachable=True, accumulate_grad=True)
            finally:
                self._in_backward = before

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator of which an argument is on the device."""
        name = str(func)
        if name.startswith("shardrec."):
            raise AssertionError(f"{name} is compiled for the CPU and was given a tensor of the device")
        given = self.issue(name, (args, kwargs), runs=not _gives_memory(func))
        self._judge(func, args, kwargs)
        if func is _aten.copy_.default and self._is_async(args, kwargs):
            self._copies.append((args[0], args[1].inner.clone()))
            return args[0].fill_(POISON)
        if name.startswith("fbgemm.permute_2D_sparse_data"):
            return permute_2d(func, *args, **kwargs)
        if name.startswith("fbgemm.permute_1D_sparse_data") and not (args[0].numel() and args[1].numel()):
            return tuple(None if one is None else one.clone() for one in args[1:4])
        if name.startswith("fbgemm.block_bucketize_sparse_features"):
            return bucketize(func, args, kwargs)
        if name.startswith("fbgemm.linearize_cache_indices"):
            return to_device(rows_of_ids(*map(inner_of, args)))
        if name.startswith("fbgemm.lxu_cache_lookup"):
            return self.places(*args[:2], args[6] if len(args) > 6 else None)
        taken = tree_map(inner_of, (args, kwargs))
        found = func(*taken[0], **taken[1])
        if func is _aten._local_scalar_dense.default:
            return found
        written = {id(one.inner): one for one in given}
        for one in tree_leaves(found):
            if id(one) in written:
                written[id(one)].written = self.stream, self.stream.issued
        return tree_map(lambda one: written[id(one)] if id(one) in written else to_device(one), found)

    def launch(self, module: str, kernel: str, grid: tuple[int, ...], *values: Any, **constants: Any) -> None:
        """As :func:`shardrec.exchange.launching.launch` does."""
        self.issue(kernel, values)
        given = tree_map(inner_of, values)
        if INTERPRETS_TRITON:
            _launch(module, kernel, grid, *given, **constants)
        else:
            assert kernel == "check_ids", "other kernels have no equivalent here"
            check_ids(*given)
        for place in _WRITTEN[kernel]:
            values[place].written = self.stream, self.stream.issued

    def issue(self, name: str, values: Any, *, runs: bool = True) -> list[DeviceTensor]:
        """Issue what reads these values on the current stream; returns the tensors of the device among them."""
        self.stream.issued += 1
        self.operators[name] += 1
        if runs:
            self.launches[name] += 1
        given = _tensors(values)
        for tensor in given:
            stream, issued = tensor.written
            # In backward autograd itself makes the streams wait for each other.
            late = stream is not self.stream and max(stream.completed, self.stream.waits_for.get(stream, 0)) < issued
            if late and not self._in_backward:
                raise Race(f"{name} reads a tensor of another stream, for which this one does not wait")
        return given

    def places(self, rows: Any, state: Any, out: Any = None) -> Any:
        found = (inner_of(state)[inner_of(rows) % len(inner_of(state))] == inner_of(rows).unsqueeze(1)).int()
        places = (inner_of(rows) % len(inner_of(state)) * WAYS + found.argmax(1)).where(found.any(1), -1).int()
        if out is None:
            return to_device(places)
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
            if here != there and not self._is_async(args, kwargs):
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
        patch.setattr(torch.cuda, "current_stream", lambda device=None: ACTIVE[-1].stream)
        patch.setattr(torch.cuda, "Stream", StreamDouble)
        patch.setattr(torch.cuda, "Event", EventDouble)
        patch.setattr(torch.cuda, "stream", on_stream)
        patch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(1, dtype=torch.uint8))
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
        patch.setattr(torch, "Generator", lambda device=None, of_cpu=torch.Generator: of_cpu())
        patch.setattr(bank, "make_kernel", KernelDouble.make)
        patch.setattr(bank, "DirectCall", KernelDouble.direct_call)
        patch.setattr(sequences, "distinct_ids_pay", lambda device, world_size: True)  # as of several ranks
        patch.setattr(launching, "has_kernels", lambda device: device.type == "cuda" and INTERPRETS_TRITON)
        patch.setattr(launching, "launch", lambda *args, **constants: ACTIVE[-1].launch(*args, **constants))
        # A module that moves gets new parameters: the memory of its own cannot become a double's.
        patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
        yield


@contextmanager
def cuda_double() -> Iterator[CudaDouble]:
    """Inside of :func:`cuda_is_there`: tensors on ``cuda`` are doubles."""
    double = CudaDouble()
    ACTIVE.append(double)
    try:
        with double:
            yield double
    finally:
        ACTIVE.pop()


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


def _gives_memory(func: Any) -> bool:
    """Whether an operator gives a view of its argument, or new memory: nothing runs on the device."""
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return is_view or func.overloadpacket in (_aten.empty_like, _aten.new_empty)


def _tensors(values: Any, *, every: bool = False) -> list[Any]:
    found: list[Any] = []

    def look(one: Any) -> bool:
        if isinstance(one, DeviceTensor) or (every and isinstance(one, Tensor)):
            found.append(one)
        return False

    tree_any(look, values)
    return found
