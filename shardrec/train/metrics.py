"""Held-out metrics of a sharded model, over the rows of all ranks: exact, from the gathered predictions.

Legend: B rows of a batch, N rows of this rank, M rows of the longest rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.data import ClickBatch, ClickMetrics, click_metrics
from shardrec.exchange.peers import peers
from shardrec.pipeline.train import TrainPipeline

__all__ = ["evaluate", "gather_rows"]


def evaluate(model: nn.Module, batches: Iterable[ClickBatch], device: torch.device) -> ClickMetrics:
    """Score ``model`` on this rank's batches and those of all the others; every rank calls it and gets the same.

    Args:
        model: from (dense, sparse) to (B, 1) logits.
        batches: as many on every rank.
        device: where the model is.

    Raises:
        ConfigError: if no row, or none or all of the rows, were clicked, so that there is no AUC.
    """
    steps = TrainPipeline(model, (), (), depth=0, device=device)  # copies batches to the device without waiting
    scored = [torch.zeros((2, 0), device=device), *steps.predict(batches, _scores)]
    # Scores stay on the device until here: reading each batch's would make the host wait for it.
    labels, probabilities = gather_rows(torch.cat(scored, dim=1).cpu()).numpy()
    return click_metrics(labels, probabilities)


def _scores(model: nn.Module, batch: ClickBatch) -> Tensor:
    """(2, B): labels, and probabilities of a click."""
    logits: Tensor = model(batch.dense, batch.sparse)
    return torch.stack((batch.labels, torch.sigmoid(logits.view(-1).float())))


def gather_rows(scored_2N: Tensor) -> Tensor:
    """The columns of all ranks, rank by rank: float32 (2, N) on the CPU → (2, sum of N)."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return scored_2N
    with peers(None, "gathering of predictions"):
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([scored_2N.size(1)]))
        sizes = [int(count) for count in counts]
        padded_2M = torch.zeros((2, max(sizes)))
        padded_2M[:, : scored_2N.size(1)] = scored_2N
        gathered = [torch.zeros_like(padded_2M) for _ in sizes]
        dist.all_gather(gathered, padded_2M)
    return torch.cat([part[:, :size] for part, size in zip(gathered, sizes, strict=True)], dim=1)
