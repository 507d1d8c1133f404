"""FinalMLP: two multi-layer perceptrons over gated embeddings. A bilinear form combines their outputs.

"FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", Mao et al., 2023. A stream's gate scales each input by
a number between 0 and 2, computed from the features in the stream's context; without a context, a learned constant.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError
from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import MLP, Share, Size, Sizes, columns_of, pooled_features


class FinalMLP(nn.Module):
    """See the file's text.

    Args:
        context1: features that the first stream's gate sees, such as the user's.
        context2: features that the second's sees, such as the item's.
        gate: width of the gates' hidden layer.
        heads: blocks of the bilinear form. Divides the last width of both streams.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        hidden: Sizes = (128, 64),
        context1: tuple[str, ...] = (),
        context2: tuple[str, ...] = (),
        gate: Size = 64,
        heads: Size = 1,
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.bags = pooled_features(schema, dim)
        names = columns_of(self.bags)
        columns = len(names) + len(schema.dense_names)
        if not hidden or hidden[-1] % heads:
            raise ConfigError(f"hidden is {hidden}: give a last width that is a multiple of {heads} heads")
        if unknown := {*context1, *context2} - {*names}:
            raise ConfigError(f"context1 and context2 name {sorted(unknown)}, which are not features with a table")
        self.gate1, self.gate2 = (
            _Gate(columns, [column for column, name in enumerate(names) if name in context], gate)
            for context in (context1, context2)
        )
        self.stream1, self.stream2 = (MLP(columns, hidden, dropout=dropout, batch_norm=batch_norm) for _ in range(2))
        self.fusion = _Fusion(hidden[-1], heads)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits (B,)."""
        inputs = torch.cat([self.bags(sparse).values(), dense], dim=1)
        logits: Tensor = self.fusion(self.stream1(self.gate1(inputs)), self.stream2(self.gate2(inputs)))
        return logits


class _Gate(nn.Module):
    """Scales (B, columns) inputs by a function of a 1 and the context's inputs."""

    def __init__(self, columns: int, context: list[int], hidden: int) -> None:
        super().__init__()
        self.context: Tensor
        self.register_buffer("context", torch.tensor(context, dtype=torch.int64), persistent=False)
        self.network = MLP(1 + len(context), [hidden], columns)

    def forward(self, inputs: Tensor) -> Tensor:
        seen = torch.cat([torch.ones_like(inputs[:, :1]), inputs.index_select(1, self.context)], dim=1)
        scaled: Tensor = inputs * (2 * self.network(seen).sigmoid())
        return scaled


class _Fusion(nn.Module):
    """A linear function of both streams (B, D), and a bilinear one in each of the heads, added up: (B,)."""

    def __init__(self, columns: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear1, self.linear2 = nn.Linear(columns, 1), nn.Linear(columns, 1, bias=False)
        self.products = nn.Parameter(torch.empty(heads, columns // heads, columns // heads))
        nn.init.xavier_normal_(self.products)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        first_BHD, second_BHD = first.unflatten(1, [self.heads, -1]), second.unflatten(1, [self.heads, -1])
        crossed_BHD = torch.einsum("bhi,hij->bhj", first_BHD, self.products) * second_BHD
        linear: Tensor = (self.linear1(first) + self.linear2(second)).squeeze(1)
        logits: Tensor = linear + crossed_BHD.sum([1, 2])
        return logits
