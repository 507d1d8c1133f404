"""One rank's bare fbgemm calls: what the sharded step is made of, without anything around it."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from benchmarks.harness.module import EPS, LEARNING_RATE
from benchmarks.harness.timing.case import Job, fits
from benchmarks.harness.timing.inputs import Batch, fill_weight
from benchmarks.harness.timing.sides.sharded import gradient_of
from shardrec.errors import ConfigError
from shardrec.launch.ranks import RankInfo

__all__ = ["KernelsSide"]

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class KernelsSide:
    """A table-batched lookup over all the tables, with ids and offsets as the kernel takes them.

    Args:
        job: what is measured, on one rank.
        rank_info: this rank.

    Raises:
        ConfigError: on several ranks, for a whole model, or an optimizer without a kernel everywhere.
    """

    def __init__(self, job: Job, rank_info: RankInfo) -> None:
        case = job.case
        if rank_info.world_size > 1 or not fits(case, "kernels"):
            raise ConfigError(
                f"side 'kernels' is for one rank, modes forward and train, and {', '.join(_OPTIMIZERS)}. This case has "
                f"{rank_info.world_size} ranks, mode {case.mode}, {case.optimizer}"
            )
        self.keys = [table.feature for table in case.tables]
        self.widths = [table.dim for table in case.tables]
        cuda = rank_info.device.type == "cuda"
        location = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
        self._kernel = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(table.rows, table.dim, location, compute) for table in case.tables],
            optimizer=_OPTIMIZERS[case.optimizer],
            learning_rate=LEARNING_RATE,
            eps=EPS,
            bounds_check_mode=BoundsCheckMode.NONE,
            stochastic_rounding=False,
            device=rank_info.device,
        )
        for number, weight in enumerate(self._kernel.split_embedding_weights()):
            fill_weight(weight, number)
        self._trains = case.trains
        self._gradient = gradient_of(case, self.keys, rank_info) if case.trains else torch.empty(0)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(N,) ids and (F * B + 1,) offsets, int64."""
        offsets = torch.zeros(batch.lengths.numel() + 1, dtype=torch.int64, device=batch.lengths.device)
        torch.cumsum(batch.lengths, 0, out=offsets[1:])
        return batch.values, offsets

    def step(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Forward, and backward with the fused update."""
        with torch.set_grad_enabled(self._trains):
            output: Tensor = self._kernel(*inputs)
        if self._trains:
            output.backward(self._gradient)
        return output
