"""DIN: a history with items weighted by a network that sees each of them beside the item to score.

"Deep Interest Network for Click-Through Rate Prediction", Zhou et al., 2018. As there, the weights do not add up to 1.
Hidden layers have ReLU instead of the paper's Dice. Histories are not padded.

Legend: B rows, T tokens (the items of all histories, row after row), D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import (
    MLP,
    Share,
    Size,
    Sizes,
    check_one_each,
    columns_of,
    item_rows,
    pooled_features,
)


class DIN(nn.Module):
    """See the file's text.

    Args:
        attention: widths of the hidden layers of the network that weights items.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        history: str = "history",
        item: str = "item",
        dim: Size = 16,
        attention: Sizes = (64, 32),
        hidden: Sizes = (128, 64),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.history, self.item = history, item
        self.items = item_rows(schema, dim, history=history, item=item)
        others = [feature for feature in schema.sparse_names if feature not in (history, item)]
        self.bags = pooled_features(schema, dim, features=others) if others else None
        width = self.items.embedding_dim()
        self.attention = MLP(4 * width, attention, 1)
        pooled = len(columns_of(self.bags)) if self.bags is not None else 0
        columns = 2 * width + pooled + len(schema.dense_names)
        self.over = MLP(columns, hidden, 1, dropout=dropout, batch_norm=batch_norm)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits (B,)."""
        rows = self.items(sparse)
        check_one_each(sparse[self.item].lengths())
        inputs = [dense]
        if self.bags is not None:
            inputs.append(self.bags(sparse).values())
        target_BD, tokens_TD = rows[self.item].values(), rows[self.history].values()
        row_T = torch.repeat_interleave(sparse[self.history].lengths())
        target_TD = target_BD[row_T]
        beside = torch.cat([tokens_TD, target_TD, tokens_TD - target_TD, tokens_TD * target_TD], dim=1)
        history_BD = torch.zeros_like(target_BD).index_add(0, row_T, self.attention(beside) * tokens_TD)
        inputs += [target_BD, history_BD]
        logits: Tensor = self.over(torch.cat(inputs, dim=1)).squeeze(1)
        return logits
