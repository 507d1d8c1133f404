"""The fake kernels say what fbgemm's kernels give: shape and dtype, for tables of unequal widths and an empty batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardrec.lookup.fakes import FAKES, has_fake, register_fakes


class Recorder(TorchDispatchMode):
    """Keeps the calls of operators that have a fake here, with what they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        output = func(*args, **given)
        if func._schema.name in FAKES:
            self.calls.append((func, args, given, output))
        return output


@pytest.mark.parametrize("dtype", [SparseType.FP32, SparseType.FP16], ids=str)
@pytest.mark.parametrize("samples", [0, 3])
@pytest.mark.parametrize(
    ("pooling", "weighted", "dims"),
    [(PoolingMode.SUM, False, [4, 12]), (PoolingMode.SUM, True, [4, 12]), (PoolingMode.NONE, False, [8, 8])],
    ids=str,
)
def test_shapes_and_dtypes(
    pooling: PoolingMode, weighted: bool, dims: list[int], samples: int, dtype: SparseType
) -> None:
    register_fakes()
    specs = [(5, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for dim in dims]
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=EmbOptimType.EXACT_SGD, pooling_mode=pooling, output_dtype=dtype
    )
    lengths = torch.tensor([[2, 0, 1], [1, 3, 0]])[:, :samples].reshape(-1)
    ids = torch.arange(int(lengths.sum())) % 5
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    with Recorder() as recorder:
        kernel(ids, offsets, per_sample_weights=torch.ones(len(ids)) if weighted else None)
    assert len(recorder.calls) == 1, "fbgemm looks up by another operator"
    func, args, kwargs, expected = recorder.calls[0]
    assert has_fake(func._schema.name)
    with FakeTensorMode() as mode:
        fake = func(*tree_map_only(torch.Tensor, mode.from_tensor, args), **kwargs)
    assert (fake.shape, fake.dtype, fake.device) == (expected.shape, expected.dtype, expected.device)
    assert expected.shape == ((len(ids), 8) if pooling is PoolingMode.NONE else (samples, 16))
