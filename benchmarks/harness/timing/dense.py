"""The whole model of mode ``dlrm``, and what it is fed besides ids."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.errors import ConfigError
from shardrec.launch.ranks import RankInfo

__all__ = ["DENSE_LR", "DenseInputs", "click_model", "dense_parameters"]

DENSE_LR = 0.01
"""Of the dense part's SGD."""

_DENSE_FEATURES = 13
_DENSE_LAYERS = (512, 256)
_OVER_LAYERS = (512, 512, 256, 1)
_PARTS = ("dense_arch", "inter_arch", "over_arch")


class DenseInputs:
    """One rank's dense features and labels, the same in each step.

    Args:
        batch_size: B.
        rank_info: the rank.

    Attributes:
        values: (B, 13) floats.
        labels: (B,) zeros and ones.
    """

    def __init__(self, batch_size: int, rank_info: RankInfo) -> None:
        generator = torch.Generator().manual_seed(rank_info.rank)
        self.values = torch.rand(batch_size, _DENSE_FEATURES, generator=generator).to(rank_info.device)
        self.labels = (torch.rand(batch_size, generator=generator) < 0.25).float().to(rank_info.device)


def click_model(collection: EmbeddingBagCollection, device: torch.device) -> DLRM:
    """A DLRM around the collection, its dense part in the proportions of MLPerf's, at a size for CPUs.

    Raises:
        ConfigError: if the tables are not of one width.
    """
    dims = sorted({config.embedding_dim for config in collection.embedding_bag_configs()})
    if len(dims) > 1:
        raise ConfigError(f"a DLRM's tables have one width and these have {', '.join(map(str, dims))} columns")
    model = DLRM(
        embedding_bag_collection=collection,
        dense_in_features=_DENSE_FEATURES,
        dense_arch_layer_sizes=[*_DENSE_LAYERS, dims[0]],
        over_arch_layer_sizes=list(_OVER_LAYERS),
        dense_device=device,
    )
    # TorchRec leaves them on the CPU, from where each step would copy them, and a CUDA graph could not.
    model.inter_arch.triu_indices = model.inter_arch.triu_indices.to(device)
    return model


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not those of tables."""
    return [value for name, value in model.named_parameters() if any(part in name.split(".") for part in _PARTS)]
