"""Tables in fbgemm's inference kernel, as a module that runs in eager mode and in TorchScript.

Shapes: T tables, S slots (a feature in a table), B samples, N ids, D columns of all the slots.

TorchScript cannot compile fbgemm's module. Its computation is one operator; so the module is used only to allocate the
memory, with a layout that depends on the device, and the operator is called here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from shardrec.serve.row_bytes import WeightFormat


class ServedTables(nn.Module):
    """Tables for inference that one call of fbgemm's inference kernel looks up.

    Args:
        shapes: (rows, columns) per table. At least one. On CUDA a row's columns fill multiples of 4 bytes.
        formats: format per table.
        slot_tables: the number of each slot's table. Every table has a slot.
        device: CPU or CUDA.
        pooled: sum each bag; if False, return a row per id, for tables of equal width.

    Attributes:
        rows: (rows, b) uint8 per table, a view of the kernel's memory. Fill it with the result of ``encode``.
    """

    # torch.jit reads this name: TorchScript leaves these attributes out.
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
            # The input exchange has checked the ids. Fbgemm's check would silently replace invalid ones.
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
            ids: (N,) int32 or int64 row numbers in each slot's table, slot after slot.
            lengths: (S, B) int32 number of ids per bag.
            weights: (N,) float32 weights of the ids, or None.

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
