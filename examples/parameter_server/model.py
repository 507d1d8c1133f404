"""A DLRM on generated clicks, with fused optimizers: what servers and trainers both build."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["DENSE", "FEATURES", "batch", "build"]

DENSE, DIM, FEATURES = 4, 16, 8
_ROWS = 2000


def build() -> nn.Module:
    """The unsharded model, the same in every process."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{one}", num_embeddings=_ROWS, embedding_dim=DIM, feature_names=[f"f{one}"])
        for one in range(FEATURES)
    ]
    bags = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.1})
    return DLRM(bags, DENSE, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[32, 1])


def batch(step: int, trainer: int, size: int = 256) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """(B, DENSE) inputs, ids, and (B,) labels on which every id has a say."""
    generator = torch.Generator().manual_seed(2 * step + trainer)
    dense = torch.randn(size, DENSE, generator=generator)
    lengths = torch.randint(1, 4, (FEATURES * size,), generator=generator)
    ids = torch.randint(0, _ROWS, (int(lengths.sum()),), generator=generator)
    sample = torch.arange(FEATURES * size).remainder(size).repeat_interleave(lengths)
    score = torch.zeros(size).index_add_(0, sample, torch.sin(ids * 7.0))
    keys = [f"f{one}" for one in range(FEATURES)]
    features = KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths.to(torch.int32), stride=size)
    return dense, features, (score + dense[:, 0] > 0).float()
