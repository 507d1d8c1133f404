"""Held-out metrics of a sharded model, over the rows of all ranks: exact, from the gathered predictions.

Legend: B rows of a batch, N rows of this rank, M rows of the longest rank, W ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.data import ClickBatch, ClickMetrics, click_metrics, ranking_metrics
from shardrec.exchange.peers import peers

__all__ = ["evaluate", "gather_rows"]


def evaluate(model: nn.Module, batches: Iterable[ClickBatch], device: torch.device, *, k: int = 10) -> ClickMetrics:
    """Score ``model`` on this rank's batches and those of all the others; every rank calls it and gets the same.

    Args:
        model: from (dense, sparse) to (B, 1) logits.
        batches: as many on every rank; with ranking metrics if they have groups.
        device: where the model is.
        k: places at the top of each group that ranking metrics count.

    Raises:
        ConfigError: if no row, or none or all of the rows, were clicked, so that there is no AUC.
    """
    was_training = model.training
    model.eval()
    scored: list[Tensor] = [torch.zeros((2, 0))]
    keys: list[Tensor] = [torch.zeros((1, 0), dtype=torch.int64)]
    grouped = False
    with torch.no_grad():
        for batch in batches:
            if batch.groups is not None:
                grouped = True
                keys.append(batch.groups.cpu().view(1, -1))
            here = batch.to(device)
            logits = model(here.dense, here.sparse).view(-1)
            scored.append(torch.stack((here.labels, logits.float())).cpu())
    model.train(was_training)
    labels, logits = gather_rows(torch.cat(scored, dim=1))
    metrics = click_metrics(labels.numpy(), torch.sigmoid(logits).numpy())
    if not grouped:
        return metrics
    # By logits: probabilities of 1 are equal where their logits are not.
    groups = gather_rows(torch.cat(keys, dim=1))
    return dataclasses.replace(metrics, ranking=ranking_metrics(labels.numpy(), logits.numpy(), groups.numpy(), k))


def gather_rows(rows_CN: Tensor) -> Tensor:
    """The columns of all ranks, rank by rank: (C, N) on the CPU → (C, sum of N)."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows_CN
    with peers(None, "gathering of predictions"):
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([rows_CN.size(1)]))
        sizes = [int(count) for count in counts]
        padded_CM = rows_CN.new_zeros((rows_CN.size(0), max(sizes)))
        padded_CM[:, : rows_CN.size(1)] = rows_CN
        gathered = [torch.zeros_like(padded_CM) for _ in sizes]
        dist.all_gather(gathered, padded_CM)
    return torch.cat([part[:, :size] for part, size in zip(gathered, sizes, strict=True)], dim=1)
