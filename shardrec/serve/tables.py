"""Tables in fbgemm's inference kernel, as a module that runs both in eager mode and in TorchScript.

Shapes: T tables, S slots (a feature in a table), B samples, N ids, D columns of all the slots.

TorchScript cannot save fbgemm's module without its Python functions. What it computes is one
operator; so it is used for the layout of the memory only, which it knows for each device, and the operator is called
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from shardrec.serve.format import WeightFormat

__all__ = ["ServedTables"]


class ServedTables(nn.Module):
    """Tables that are looked up by one call of fbgemm's inference kernel, and not trained.

    Args:
        shapes: (rows, columns) of each table; at least one. On CUDA, columns in multiples of 4 bytes.
        formats: of each table.
        slot_tables: per slot, the number of its table; each table has a slot.
        device: CPU or CUDA.
        pooled: sum each bag; else give a row per id, for tables of one width.

    Attributes:
        rows: of each table (rows, b) uint8, the kernel's memory of its rows, to be filled with what ``encode`` gives.
    """

    # What is for Python only, by the name under which torch.jit looks for it.
    __jit_ignored_attributes__: ClassVar = ["rows"]

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        formats: Sequence[WeightFormat],
        slot_tables: Sequence[int],
        device: torch.device,
        *,
        pooled: bool,
    ) -> None:
        super().__init__()
        location = EmbeddingLocation.DEVICE if device.type == "cuda" else EmbeddingLocation.HOST
        mode = PoolingMode.SUM if pooled else PoolingMode.NONE
        kernel = IntNBitTableBatchedEmbeddingBagsCodegen(
            [
                ("", rows, columns, SparseType(form.value), location)
                for (rows, columns), form in zip(shapes, formats, strict=True)
            ],
            feature_table_map=list(slot_tables),
            pooling_mode=mode,
            device=device,
            # The input exchange has checked the ids; a second check would hide a fault by mending it.
            bounds_check_mode=BoundsCheckMode.NONE,
            output_dtype=SparseType.FP32,
        )
        kernel.initialize_weights()
        self.pooling_mode = int(mode)
        self.output_dtype = int(kernel.output_dtype)
        self.row_alignment = int(kernel.row_alignment)
        self.total_D = int(kernel.total_D)
        self.max_int4_D = int(kernel.max_int4_D)
        self.max_int8_D = int(kernel.max_int8_D)
        self.max_float16_D = int(kernel.max_float16_D)
        self.max_float32_D = int(kernel.max_float32_D)
        self.register_buffer("weights", kernel.weights_dev if device.type == "cuda" else kernel.weights_host)
        self.register_buffer("no_weights", torch.zeros(0, dtype=torch.uint8, device=device))
        self.register_buffer("weights_placements", kernel.weights_placements)
        self.register_buffer("weights_offsets", kernel.weights_offsets)
        self.register_buffer("weights_tys", kernel.weights_tys)
        self.register_buffer("D_offsets", kernel.D_offsets)
        views = kernel.split_embedding_weights(split_scale_shifts=False)
        self.rows: list[Tensor] = [
            view[:, : form.row_bytes(columns)]
            for (view, _), form, (_, columns) in zip(views, formats, shapes, strict=True)
        ]

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """Sums of rows, or the rows.

        Args:
            ids: (N,) int32 or int64 rows of each slot's table, slot after slot.
            lengths: (S, B) int32, ids of each bag.
            weights: (N,) float32 or None.

        Returns:
            (B, D) float32, or (N, w) without pooling.
        """
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.reshape(-1))
        rows: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.weights,
            uvm_weights=self.no_weights,
            weights_placements=self.weights_placements,
            weights_offsets=self.weights_offsets,
            weights_tys=self.weights_tys,
            D_offsets=self.D_offsets,
            total_D=self.total_D,
            max_int2_D=0,
            max_int4_D=self.max_int4_D,
            max_int8_D=self.max_int8_D,
            max_float16_D=self.max_float16_D,
            max_float32_D=self.max_float32_D,
            indices=ids,
            offsets=offsets.to(ids.dtype),
            pooling_mode=self.pooling_mode,
            indice_weights=weights,
            output_dtype=self.output_dtype,
            row_alignment=self.row_alignment,
        )
        return rows
