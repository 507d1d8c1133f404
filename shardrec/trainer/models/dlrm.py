"""DLRM: dot products between the embeddings of all pairs of features, then a multi-layer perceptron.

"Deep Learning Recommendation Model for Personalization and Recommendation Systems", Naumov et al., 2019: TorchRec's,
with dropout and batch norm. Rows of a table with a width of its own go through a learned linear map to ``dim``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torchrec.models import dlrm as torchrec_dlrm

from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import FeatureVectors, Share, Size, Sizes, activation, pooled_features

__all__ = ["DLRM", "own_widths", "regularize", "torchrec_arguments"]


class DLRM(torchrec_dlrm.DLRM):  # type: ignore[misc]  # TorchRec is seen without types
    """See the file's text.

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
        super().__init__(**torchrec_arguments(schema, dim, dense_layers, hidden))
        own_widths(self, schema, dim)
        regularize(self, dropout, batch_norm)


def torchrec_arguments(
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


def own_widths(model: torchrec_dlrm.DLRM, schema: ClickSchema, dim: int) -> None:
    """Replace the tables of TorchRec's DLRM, which have one width, where the schema has others."""
    if {*schema.dims} - {None, dim}:
        model.sparse_arch = FeatureVectors(schema, dim)


def regularize(model: torchrec_dlrm.DLRM, dropout: float, batch_norm: bool) -> None:
    """Put dropout and batch norm, where asked for, after the hidden layers of TorchRec's DLRM, which has neither."""
    if dropout or batch_norm:
        for layer in (*model.dense_arch.model._mlp[:-1], *model.over_arch.model[0]._mlp):
            layer._activation_fn = activation(layer._out_size, dropout, batch_norm)
