"""DLRM and DCN v2: TorchRec's, with dropout and batch norm.

Rows of a table with a width of its own go through a learned linear map to ``dim``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.crossnet import CrossNet

from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import FeatureVectors, Share, Size, Sizes, activation, pooled_features


class DLRM(torchrec_dlrm.DLRM):  # type: ignore[misc]  # TorchRec is seen without types
    """Dot products between the embeddings of all pairs of features, then a multi-layer perceptron.

    "Deep Learning Recommendation Model for Personalization and Recommendation Systems", Naumov et al., 2019.

    Args:
        dense_layers: widths of the dense features' layers, without the last one, which is ``dim``.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        dense_layers: Sizes = (64, 32),
        hidden: Sizes = (128, 64),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(**_arguments(schema, dim, dense_layers, hidden))
        _own_widths(self, schema, dim)
        _regularize(self, dropout, batch_norm)


class DCN(torchrec_dlrm.DLRM_DCN):  # type: ignore[misc]  # TorchRec is seen without types
    """A cross network over concatenated embeddings, then a multi-layer perceptron.

    "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems", Wang et al.,
    2021, in its stacked form, with dense features through layers of their own as in DLRM: TorchRec's DLRM_DCN.

    Args:
        layers: of the cross network.
        rank: of their matrices; 0: full.
        dense_layers: widths of the dense features' layers, without the last one, which is ``dim``.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        layers: Size = 2,
        rank: Annotated[int, Field(ge=0)] = 32,
        dense_layers: Sizes = (64, 32),
        hidden: Sizes = (128, 64),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        arguments = _arguments(schema, dim, dense_layers, hidden)
        super().__init__(**arguments, dcn_num_layers=layers, dcn_low_rank_dim=rank or 1)
        features = len(schema.sparse_names)
        crossnet = self.get_submodule("inter_arch.crossnet") if rank else CrossNet((features + 1) * dim, layers)
        self.inter_arch: nn.Module = _Interaction(features, crossnet)
        _own_widths(self, schema, dim)
        _regularize(self, dropout, batch_norm)


class _Interaction(torchrec_dlrm.InteractionDCNArch):  # type: ignore[misc]  # TorchRec is seen without types
    """TorchRec's, which fails for a batch without rows."""

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """(B, D) and (B, F, D) to (B, (F + 1) * D)."""
        features = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        crossed: Tensor = self.crossnet(features.flatten(1))
        return crossed


def _arguments(
    schema: ClickSchema, dim: int, dense_layers: tuple[int, ...], hidden: tuple[int, ...]
) -> dict[str, object]:
    """The arguments of TorchRec's DLRM and DLRM_DCN."""
    return {
        "embedding_bag_collection": pooled_features(replace(schema, dims=()), dim),
        "dense_in_features": len(schema.dense_names),
        "dense_arch_layer_sizes": [*dense_layers, dim],
        "over_arch_layer_sizes": [*hidden, 1],
        "dense_device": torch.device("cpu"),
    }


def _own_widths(model: torchrec_dlrm.DLRM, schema: ClickSchema, dim: int) -> None:
    """Replace the tables of TorchRec's DLRM, which have one width, where the schema has others."""
    if {*schema.dims} - {None, dim}:
        model.sparse_arch = FeatureVectors(schema, dim)


def _regularize(model: torchrec_dlrm.DLRM, dropout: float, batch_norm: bool) -> None:
    """Put dropout and batch norm, where asked for, after the hidden layers of TorchRec's DLRM, which has neither."""
    if dropout or batch_norm:
        for layer in (*model.dense_arch.model._mlp[:-1], *model.over_arch.model[0]._mlp):
            layer._activation_fn = activation(layer._out_size, dropout, batch_norm)
