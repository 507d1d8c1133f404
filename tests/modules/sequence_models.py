"""An EmbeddingCollection of three tables, and its batches."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

ROWS = {"t0": 13, "t1": 7, "t2": 29}


FEATURES = {"t0": ["a"], "t1": ["b", "c"], "t2": ["a"]}


KEY_ROWS = {"a": 13, "b": 7, "c": 7}


DIM = 16


def collection(optimizer: Any, lr: float, device: str = "cpu", dim: int = DIM) -> EmbeddingCollection:
    torch.manual_seed(0)
    made = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=FEATURES[name])
            for name, rows in ROWS.items()
        ],
        device=torch.device(device),
        need_indices=True,
    )
    if optimizer is not None:
        _apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": lr})
    return made


class Holder(nn.Module):
    def __init__(self, sequences: EmbeddingCollection) -> None:
        super().__init__()
        self.sequences = sequences

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.sequences(features)


def batch(rng: random.Random, keys: list[str], size: int) -> KeyedJaggedTensor:
    lengths, values = [], []
    for key in keys:
        for _ in range(size):
            count = rng.randrange(0, 4)
            lengths.append(count)
            values += [rng.randrange(KEY_ROWS.get(key, 1000)) for _ in range(count)]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )
