"""The DLRM, and batches of generated clicks: what both programs train."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain

__all__ = ["TABLES", "batches", "dlrm"]

FEATURES = [f"f{number}" for number in range(8)]
TABLES = [f"t_{feature}" for feature in FEATURES]
DENSE, DIM, ROWS, BATCH = 4, 16, 1000, 256


def dlrm() -> DLRMTrain:
    """The unsharded model, with the same values in every process."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[feature], init_fn=first_values
        )
        for name, feature in zip(TABLES, FEATURES, strict=True)
    ]
    bags = EmbeddingBagCollection(tables=tables)
    return DLRMTrain(DLRM(bags, DENSE, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[32, 1]))


def batches(rank: int, steps: range) -> Iterator[Batch]:
    """A rank's batches of these steps: dense features (B, D), an id per feature, clicks (B,) that depend on both."""
    taste = torch.randn(ROWS, generator=torch.Generator().manual_seed(100))
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        dense = torch.randn(BATCH, DENSE, generator=generator)
        ids = torch.randint(0, ROWS, (len(FEATURES), BATCH), generator=generator)
        logits = taste[ids].sum(0) / len(FEATURES) ** 0.5 + dense[:, 0]
        clicks = (torch.rand(BATCH, generator=generator) < torch.sigmoid(2 * logits)).float()
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        yield Batch(dense, KeyedJaggedTensor(FEATURES, ids.view(-1), lengths=lengths, stride=BATCH), clicks)


def first_values(weight: Tensor) -> None:
    """Fill a table (rows, columns), with the same values in each call: TorchRec draws them again when it shards."""
    with torch.no_grad():
        weight.uniform_(-(ROWS**-0.5), ROWS**-0.5, generator=torch.Generator(weight.device).manual_seed(0))
