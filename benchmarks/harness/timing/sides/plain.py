"""Plain torch: an ``nn.EmbeddingBag`` per table, on one rank, or replicated with its gradients averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.module import EPS, LEARNING_RATE
from benchmarks.harness.timing.case import Case, Job, fits
from benchmarks.harness.timing.inputs import Batch, fill_weight
from benchmarks.harness.timing.sides.sharded import gradient_of
from shardrec.errors import ConfigError
from shardrec.launch.ranks import RankInfo

__all__ = ["PlainSide"]


class PlainSide:
    """The step with torch's own modules. The update is a few lines of torch, so that it is the fused one's rule.

    Args:
        job: what is measured.
        rank_info: this rank.

    Raises:
        ConfigError: for a case that it does not fit, see :func:`benchmarks.harness.timing.case.fits`.
    """

    def __init__(self, job: Job, rank_info: RankInfo) -> None:
        case = job.case
        if not fits(case, "torch"):
            raise ConfigError(
                "side 'torch' is for modes forward and train, sgd and rowwise_adagrad, and on several ranks for tables "
                "small enough to average their gradients"
            )
        self.keys = [table.feature for table in case.tables]
        self.widths = [table.dim for table in case.tables]
        self._bags = _Bags(case, sparse=rank_info.world_size == 1).to(rank_info.device)
        for number, bag in enumerate(self._bags.bags):
            fill_weight(bag.weight, number)
        self._model: nn.Module = self._bags
        if rank_info.world_size > 1 and case.trains:
            self._model = DistributedDataParallel(self._bags, gradient_as_bucket_view=True, broadcast_buffers=False)
        self._rowwise = case.optimizer == "rowwise_adagrad"
        self._sums = [torch.zeros(table.rows, device=rank_info.device) for table in case.tables]
        self._trains = case.trains
        self._gradient = gradient_of(case, self.keys, rank_info) if case.trains else torch.empty(0)

    def prepare(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Ids and offsets per feature."""
        lengths = batch.lengths.view(len(batch.keys), batch.stride)
        counts = lengths.sum(1).tolist()
        starts = lengths.cumsum(1) - lengths
        return list(zip(batch.values.split(counts), starts.unbind(), strict=True))

    def step(self, inputs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Forward, backward and the update."""
        with torch.set_grad_enabled(self._trains):
            output: Tensor = self._model(inputs)
        if self._trains:
            output.backward(self._gradient)
            self._update()
        return output

    @torch.no_grad()
    def _update(self) -> None:
        for bag, sums in zip(self._bags.bags, self._sums, strict=True):
            gradient = bag.weight.grad
            assert gradient is not None, "each table is looked up"
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                if self._rowwise:
                    sums.index_add_(0, rows, values.square().mean(1))
                    values = values / (sums[rows].sqrt() + EPS)[:, None]
                bag.weight.index_add_(0, rows, values, alpha=-LEARNING_RATE)
            elif self._rowwise:
                sums += gradient.square().mean(1)
                bag.weight.addcdiv_(gradient, (sums.sqrt() + EPS)[:, None], value=-LEARNING_RATE)
            else:
                bag.weight.add_(gradient, alpha=-LEARNING_RATE)
            bag.weight.grad = None


class _Bags(nn.Module):
    """The bags of all the tables, their columns side by side."""

    def __init__(self, case: Case, *, sparse: bool) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(table.rows, table.dim, mode="sum", sparse=sparse) for table in case.tables]
        self.bags: Sequence[nn.EmbeddingBag] = nn.ModuleList(bags)  # type: ignore[assignment]

    def forward(self, inputs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.cat([bag(ids, offsets) for bag, (ids, offsets) in zip(self.bags, inputs, strict=True)], dim=1)
