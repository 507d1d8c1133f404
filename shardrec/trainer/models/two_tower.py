"""Two towers: a multi-layer perceptron for the query and one for the item. The cosine of their outputs scores the pair.

"Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", Yi et al., 2019, with a softmax
over the distinct items of a rank's batch as loss. Its correction for how frequent each item is counts clicks exactly.

Legend: B rows, D columns of the towers' outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError
from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import (
    MLP,
    ItemCounts,
    Positive,
    Share,
    Size,
    Sizes,
    check_one_each,
    columns_of,
    pooled_features,
)


class TwoTower(nn.Module):
    """See the file's text.

    Args:
        item: features of the item, dense ones among them. The first has one id a row, which says which item it is. All
            other features are the query's.
        columns: of the towers' outputs.
        temperature: divides the cosine.
        log_q: whether the loss corrects for popular items being in more batches.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        item: tuple[str, ...] = ("item",),
        dim: Size = 16,
        hidden: Sizes = (128, 64),
        columns: Size = 32,
        temperature: Positive = 0.1,
        log_q: bool = False,
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        names = (*schema.sparse_names, *schema.dense_names)
        query = [name for name in names if name not in item]
        if not item or item[0] not in schema.sparse_names or {*item} - {*names} or {*query} <= {*schema.dense_names}:
            raise ConfigError(
                f"the item's features are {list(item)} (--model-arg item=[...]) and the data's {', '.join(names)}: "
                "name some of these, the item's id first, and leave one with a table for the query"
            )
        self.item, self.item_features, self.temperature = item[0], tuple(item), temperature
        self.counts = ItemCounts(schema.num_embeddings[schema.sparse_names.index(item[0])]) if log_q else None
        widths = (*hidden, columns)
        self.bags = pooled_features(schema, dim)  # of both towers: their features may share a table
        self.query_tower, self.item_tower = (
            _Tower(self.bags, schema.dense_names, features, widths, dropout=dropout, batch_norm=batch_norm)
            for features in (query, item)
        )

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The cosine per row of its query and item, divided by the temperature: (B,)."""
        pooled = self.bags(sparse).values()
        query_BD, item_BD = self.query_tower(dense, pooled), self.item_tower(dense, pooled)
        logits: Tensor = (query_BD * item_BD).sum(1) / self.temperature
        return logits

    def query_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The vector of each row's query. Its product with an item's vector is a logit: float32 (B, D)."""
        query_BD: Tensor = self.query_tower(dense, self.bags(sparse).values()) / self.temperature
        return query_BD

    def item_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Each row's item: float32 (B, D)."""
        item_BD: Tensor = self.item_tower(dense, self.bags(sparse).values())
        return item_BD

    def loss(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        """Softmax cross entropy of each clicked row's item among the items of the rank's batch: the mean, in nats."""
        feature = sparse[self.item]
        check_one_each(feature.lengths())
        ids_B = feature.values()
        pooled = self.bags(sparse).values()
        query_BD, item_BD = self.query_tower(dense, pooled), self.item_tower(dense, pooled)
        scores_BB = query_BD @ item_BD.t() / self.temperature
        same_BB = ids_B.unsqueeze(1) == ids_B
        if self.counts is None:
            losses_B = (scores_BB - same_BB.sum(1).log()).logsumexp(1) - scores_BB.diagonal()  # an item counts once
        else:
            self.counts.add(ids_B[labels > 0])
            others_BB = (scores_BB - self.counts.log_q(ids_B)).masked_fill(same_BB, torch.finfo(scores_BB.dtype).min)
            losses_B = F.softplus(others_BB.logsumexp(1) - scores_BB.diagonal() + self.counts.log_q(ids_B))
        loss: Tensor = (losses_B * labels).sum() / labels.sum().clamp(min=1)
        return loss


class _Tower(nn.Module):
    """Some features, dense and with tables, as a unit vector (B, D)."""

    def __init__(
        self,
        bags: EmbeddingBagCollection,
        dense_names: Sequence[str],
        features: Sequence[str],
        widths: Sizes,
        *,
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        dense_columns = [number for number, name in enumerate(dense_names) if name in features]
        pooled_columns = [number for number, name in enumerate(columns_of(bags)) if name in features]
        self.dense_columns: Tensor
        self.pooled_columns: Tensor
        self.register_buffer("dense_columns", torch.tensor(dense_columns, dtype=torch.int64), persistent=False)
        self.register_buffer("pooled_columns", torch.tensor(pooled_columns, dtype=torch.int64), persistent=False)
        columns = len(pooled_columns) + len(dense_columns)
        self.network = MLP(columns, widths[:-1], widths[-1], dropout=dropout, batch_norm=batch_norm)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        parts = [pooled.index_select(1, self.pooled_columns), dense.index_select(1, self.dense_columns)]
        return F.normalize(self.network(torch.cat(parts, dim=1)), dim=1)
