"""Batches of generated clicks, the same for both programs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

__all__ = ["DENSE", "DIM", "FEATURES", "ROWS", "batches", "first_values"]

FEATURES = [f"f{number}" for number in range(8)]
DENSE, DIM, ROWS, BATCH, STEPS = 4, 16, 1000, 256, 50


def batches(rank: int) -> Iterator[tuple[Tensor, KeyedJaggedTensor, Tensor]]:
    """This rank's dense features (B, D) and ids, and the clicks (B,) that depend on them."""
    generator = torch.Generator().manual_seed(rank)
    taste = torch.randn(ROWS, generator=torch.Generator().manual_seed(100))
    for _ in range(STEPS):
        dense = torch.randn(BATCH, DENSE, generator=generator)
        ids = torch.randint(0, ROWS, (len(FEATURES), BATCH), generator=generator)
        logits = taste[ids].sum(0) / len(FEATURES) ** 0.5 + dense[:, 0]
        labels = (torch.rand(BATCH, generator=generator) < torch.sigmoid(2 * logits)).float()
        sparse = KeyedJaggedTensor(
            keys=FEATURES, values=ids.view(-1), lengths=torch.ones(ids.numel(), dtype=torch.int64), stride=BATCH
        )
        yield dense, sparse, labels


def first_values(weight: Tensor) -> None:
    """Values of a table (rows, columns), the same whenever they are drawn: TorchRec draws them again when it shards."""
    with torch.no_grad():
        weight.uniform_(-(ROWS**-0.5), ROWS**-0.5, generator=torch.Generator(weight.device).manual_seed(0))
