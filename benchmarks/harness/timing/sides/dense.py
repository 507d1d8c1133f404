"""The dense part of a DLRM without its embeddings: what a whole step takes at least, besides theirs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.module import unsharded_module
from benchmarks.harness.timing.case import Job
from benchmarks.harness.timing.dense import DENSE_LR, DenseInputs, click_model
from benchmarks.harness.timing.inputs import Batch
from benchmarks.harness.timing.sides.sharded import gradient_of
from shardrec.launch.ranks import RankInfo

__all__ = ["DensePart", "DenseSide"]


class DenseSide:
    """Forward, backward and update of the dense part, on pooled columns that are there already.

    Args:
        job: what is measured, of mode ``dlrm``.
        rank_info: this rank.
    """

    def __init__(self, job: Job, rank_info: RankInfo) -> None:
        case = job.case
        self.keys, self.widths = ["logits"], [1]
        torch.manual_seed(job.seed)
        collection = unsharded_module(case.tables, pooled=True, weighted=False, optimizer=case.optimizer)
        part: nn.Module = DensePart(click_model(collection, rank_info.device))
        if dist.get_world_size() > 1:
            part = DistributedDataParallel(part, gradient_as_bucket_view=True, broadcast_buffers=False)
        self._part = part
        self._inputs = DenseInputs(case.batch_size, rank_info)
        self._optimizer = torch.optim.SGD(part.parameters(), lr=DENSE_LR)
        pooled = gradient_of(case, [table.feature for table in case.tables], rank_info)
        self._pooled = pooled.view(case.batch_size, len(case.tables), -1).requires_grad_()

    def prepare(self, batch: Batch) -> None:
        """Nothing: ids have no part in it."""

    def step(self, inputs: None) -> Tensor:
        """The step. Returns logits."""
        self._optimizer.zero_grad(set_to_none=True)
        self._pooled.grad = None
        logits: Tensor = self._part(self._inputs.values, self._pooled)
        nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), self._inputs.labels).backward()
        self._optimizer.step()
        return logits


class DensePart(nn.Module):
    """Dense features (B, 13) and pooled columns (B, F, D) to logits (B, 1)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = model.dense_arch, model.inter_arch, model.over_arch

    def forward(self, values: Tensor, pooled: Tensor) -> Tensor:
        logits: Tensor = self.over_arch(self.inter_arch(self.dense_arch(values), pooled))  # type: ignore[operator]
        return logits
