"""DCN v2: a cross network over concatenated embeddings, then a multi-layer perceptron.

"DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems", Wang et al., 2021,
in its stacked form, with dense features through layers of their own as in DLRM: TorchRec's DLRM_DCN. Rows of a table
with a width of its own go through a learned linear map to ``dim``.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM_DCN, InteractionDCNArch
from torchrec.modules.crossnet import CrossNet

from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.dlrm import own_widths, regularize, torchrec_arguments
from shardrec.trainer.models.parts import Share, Size, Sizes

__all__ = ["DCN"]


class DCN(DLRM_DCN):  # type: ignore[misc]  # TorchRec is seen without types
    """See the file's text.

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
        arguments = torchrec_arguments(schema, dim, dense_layers, hidden)
        super().__init__(**arguments, dcn_num_layers=layers, dcn_low_rank_dim=rank or 1)
        features = len(schema.sparse_names)
        crossnet = self.get_submodule("inter_arch.crossnet") if rank else CrossNet((features + 1) * dim, layers)
        self.inter_arch: nn.Module = _Interaction(features, crossnet)
        own_widths(self, schema, dim)
        regularize(self, dropout, batch_norm)


class _Interaction(InteractionDCNArch):  # type: ignore[misc]  # TorchRec is seen without types
    """TorchRec's, which fails for a batch without rows."""

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """(B, D) and (B, F, D) to (B, (F + 1) * D)."""
        features = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        crossed: Tensor = self.crossnet(features.flatten(1))
        return crossed
