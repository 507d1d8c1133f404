"""fbgemm's table-batched kernels behind one constructor, which hides the differences between CPU and CUDA.

fbgemm's CPU build lacks Adam and, on both devices, its kernels see one column range of a row at a time. Tables for
which that matters are updated by :mod:`shardrec.lookup.row_optimizers` and use a kernel for the forward only.

[Note: 16-bit weights]
A 16-bit table must be updated as if its rows were float32 during the update and rounded to nearest after it. Measured
with fbgemm 1.8 on the CPU: rowwise Adagrad does so. SGD and Adagrad round the gradient first, so that a quarter of the
weights are off by a unit in the last place or more after one step. Neither device has a kernel for bfloat16 weights.
Stochastic rounding, which is fbgemm's default for FP16 on CUDA, is off.

[Note: order of sums on CUDA]
``block_bucketize_sparse_features`` puts the ids of a bag that is cut by rows in the order in which its threads come to
an atomic counter. So two runs on CUDA are equal up to the rounding of float32 sums, unless
``torch.use_deterministic_algorithms(True)`` asks for one order; on the CPU they are equal.

[Note: the direct call]
A lookup by fbgemm's module costs the host 100 us and 91 Python calls on the CPU, and by its operator 19.5 us. All
arguments but four are the same in each lookup, so :class:`DirectCall` records them once. A kernel with a cache is
called as a module, which keeps the cache.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DEFAULT_ASSOC,
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardrec.layout import COLUMN_UNIT
from shardrec.lookup.huge_pages import zeros_in_huge_pages
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind

_PRECISIONS = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16}

_LOCATIONS = {"device": "DEVICE", "cached": "MANAGED_CACHING", "host": "MANAGED"}

_TAKES_MEMORY = "preallocated_host_buffers" in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
"""False for fbgemm 1.6, which fills memory of its own with zeros."""

_MAX_COLUMNS = 2048
"""Of a table, for fbgemm's kernels on CUDA."""

_FBGEMM_OPTIMIZERS = {
    OptimizerKind.SGD: EmbOptimType.EXACT_SGD,
    OptimizerKind.ADAGRAD: EmbOptimType.EXACT_ADAGRAD,
    OptimizerKind.ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    # The last three on CUDA only. fbgemm's weight decay is decoupled, as AdamW's.
    OptimizerKind.ADAM: EmbOptimType.ADAM,
    OptimizerKind.ADAMW: EmbOptimType.ADAM,
    OptimizerKind.PARTIAL_ROWWISE_ADAM: EmbOptimType.PARTIAL_ROWWISE_ADAM,
}


class _Buffers(dict[str, Tensor]):
    """Does not show its tensors: fbgemm makes a text of all its arguments, for a log that is off."""

    def __repr__(self) -> str:
        return f"{{{', '.join(self)}}}"


def has_kernel(device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> bool:
    """Whether fbgemm looks up weights of ``dtype`` (see the note above) and these widths on ``device``."""
    most = _MAX_COLUMNS if device.type == "cuda" else math.inf
    return dtype in _PRECISIONS and not any(width % COLUMN_UNIT or width > most for width in widths)


def has_fused_kernel(
    optimizer: FusedOptimizer, device: torch.device, dtype: torch.dtype, widths: Iterable[int]
) -> bool:
    """Whether fbgemm has the optimizer's backward on ``device``, exact for weights of ``dtype`` (see the note)."""
    if not has_kernel(device, dtype, widths) or optimizer.kind not in _FBGEMM_OPTIMIZERS:
        return False
    # fbgemm's kernels lack L2 decay by the rules of torch's classes.
    if optimizer.weight_decay and not optimizer.is_decay_decoupled:
        return False
    if device.type == "cuda":
        # fbgemm's Adam takes its row counters, which are empty here, for float32 and makes them of the weights' type.
        return dtype is torch.float32 or optimizer.kind not in (OptimizerKind.ADAM, OptimizerKind.ADAMW)
    if dtype is not torch.float32:
        return optimizer.kind is OptimizerKind.ROWWISE_ADAGRAD
    return not optimizer.counts_steps


def make_kernel(
    shapes: Sequence[tuple[int, int]],
    feature_tables: Sequence[int],
    optimizer: FusedOptimizer | None,
    device: torch.device,
    *,
    pooled: bool = True,
    dtype: torch.dtype = torch.float32,
    tier: str = "device",
    cache_rows: int = 0,
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """A table-batched embedding lookup with sum pooling or none, with uninitialised weights and initial states.

    Args:
        shapes: (rows, columns) per local table.
        feature_tables: per feature, the number of its table.
        optimizer: fused into backward. None for a kernel that is only used forward.
        device: CPU or CUDA.
        pooled: sum each bag; else give a row per id, for tables of one width.
        dtype: of the weights, float32 or float16. Output and optimizer states are float32.
        tier: where weights are on CUDA. Except with ``"device"``, states kept per weight are in the host's memory as
            well.
        cache_rows: of tier ``"cached"``, the rows that its cache has room for, rounded up to whole sets.
    """
    on_cuda = device.type == "cuda"
    location = EmbeddingLocation[_LOCATIONS[tier]] if on_cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
    rule = optimizer or FusedOptimizer(kind=OptimizerKind.SGD, lr=0.0)
    host_memory: dict[str, Any] = {}
    if not on_cuda and _TAKES_MEMORY:
        sizes = [rows * cols for rows, cols in shapes]
        memory = _Buffers(weights=zeros_in_huge_pages(sum(sizes), dtype=dtype))
        if rule.states:
            count = sum(rows for rows, _ in shapes) if rule.row_states else sum(sizes)
            memory["momentum1"] = zeros_in_huge_pages(count, dtype=torch.float32)
        host_memory["preallocated_host_buffers"] = memory
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(rows, cols, location, compute) for rows, cols in shapes],
        feature_table_map=list(feature_tables),
        pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
        # The input exchange has checked the ids. Fbgemm's check would hide a fault by replacing the id.
        bounds_check_mode=BoundsCheckMode.NONE,
        stochastic_rounding=False,
        weights_precision=_PRECISIONS[dtype],
        output_dtype=SparseType.FP32,
        device=device,
        optimizer=_FBGEMM_OPTIMIZERS[rule.kind],
        learning_rate=rule.lr,
        eps=rule.eps,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=rule.weight_decay,
        **host_memory,
        cache_sets=-(-cache_rows // DEFAULT_ASSOC),
        uvm_host_mapped=True,
        gather_uvm_cache_stats=cache_rows > 0,
    )
    if cache_rows:
        kernel.should_log = lambda: False  # of the cache's numbers, for which the host would wait
    if rule.initial_accumulator_value:
        for states in kernel_states(kernel, rule):
            for state in states.values():
                state.fill_(rule.initial_accumulator_value)
    return kernel


def kernel_states(kernel: SplitTableBatchedEmbeddingBagsCodegen, optimizer: FusedOptimizer) -> list[dict[str, Tensor]]:
    """Per local table, its optimizer states by name, as views of the kernel's memory."""
    if not optimizer.states:
        return [{} for _ in kernel.embedding_specs]
    return [dict(zip(optimizer.states, states, strict=True)) for states in kernel.split_optimizer_states()]


class DirectCall:
    """The operator of a kernel without a cache, with the arguments that its module passes.

    Args:
        kernel: from :func:`make_kernel`, of at least one feature. Memory and learning rate must stay in its tensors.
    """

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        device, features = kernel.current_device, len(kernel.feature_table_map)
        ids, offsets = (torch.zeros(count, dtype=torch.int64, device=device) for count in (0, features + 1))
        with torch.no_grad(), _OperatorCall() as call:
            kernel(ids, offsets)
        assert call.operator is not None, "fbgemm's module calls its operator"
        self._operator = call.operator.default
        schema = self._operator._schema.arguments
        self._arguments = [call.arguments.get(argument.name, argument.default_value) for argument in schema]
        places = {argument.name: place for place, argument in enumerate(schema)}
        self._ids, self._offsets = places["indices"], places["offsets"]
        self._id_weights, self._integers = places["indice_weights"], places["aux_int"]

    def __call__(self, ids: Tensor, offsets: Tensor, id_weights: Tensor | None, update: int = 0) -> Tensor:
        """What the module gives, with its backward.

        Args:
            ids: (N,) int32 or int64.
            offsets: (S·B + 1,) of the same dtype.
            id_weights: (N,) float32 or None.
            update: of optimizers that count, the number of the update that backward makes, from 1.
        """
        arguments = self._arguments.copy()
        arguments[self._ids], arguments[self._offsets], arguments[self._id_weights] = ids, offsets, id_weights
        if update:
            arguments[self._integers] = [update, *arguments[self._integers][1:]]
        rows: Tensor = self._operator(*arguments)
        return rows


class _OperatorCall(TorchFunctionMode):
    """Records the call of fbgemm's lookup operator.

    Attributes:
        operator: that was called. None before.
        arguments: by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operator: Any = None
        self.arguments: dict[str, Any] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if str(function).startswith("fbgemm.split_embedding_codegen_lookup_"):
            self.operator, self.arguments = function, dict(kwargs or {})
        return function(*args, **(kwargs or {}))
