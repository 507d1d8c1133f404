"""Vectors of users and items that pool each other's embeddings, and the loss that trains them.

This is LightGCN (He et al., 2020) with one layer: a user's vector is the user's embedding plus the weighted sum of the
embeddings of the user's items; an item's vector is the item's embedding plus the weighted sum of those of its users.
One lookup in a weighted ``EmbeddingBagCollection`` with two tables does both.

Legend: N = B users + C candidate items, D columns, P positives.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.gowalla.batches import TrainingBatch

__all__ = ["LightGCN", "sampled_softmax"]


class LightGCN(nn.Module):
    """Embeddings of users and items and sums of their neighbors' embeddings.

    All parameters are in the ``EmbeddingBagCollection`` ``tables``, with the tables "user" and "item".

    Args:
        num_users: rows of "user".
        num_items: rows of "item".
        dim: D, columns of both.
        scale: standard deviation of the initial values, which are uniform.
        device: of the tables; "meta" where only their shapes are wanted.
    """

    def __init__(
        self, num_users: int, num_items: int, *, dim: int, scale: float, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        most = scale * math.sqrt(3)
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=[name],
                    pooling=PoolingType.SUM,
                    weight_init_min=-most,
                    weight_init_max=most,
                )
                for name, rows in {"user": num_users, "item": num_items}.items()
            ],
            is_weighted=True,
            device=torch.device(device),
        )

    def forward(self, nodes: KeyedJaggedTensor, num_users: int) -> tuple[Tensor, Tensor]:
        """Look up users and items; the vector of each is the sum of the two results.

        Args:
            nodes: weighted features "user" and "item", stride N: the users, then the items.
            num_users: B, how many of them are users.

        Returns:
            Their own embeddings and the weighted sums of their neighbors', float32 (N, D) each.
        """
        pooled = self.tables(nodes)
        user, item = pooled["user"], pooled["item"]
        own = torch.cat([user[:num_users], item[num_users:]])
        neighbors = torch.cat([item[:num_users], user[num_users:]])
        return own, neighbors


def sampled_softmax(
    own: Tensor, neighbors: Tensor, batch: TrainingBatch, *, temperature: float, balance: float
) -> Tensor:
    """Cross entropy of each positive against the items its user has not, estimated from the batch's candidates.

    Logits are cosines over the temperature. Users and items of a positive pool each other's embeddings, which they
    do not in test: that part is taken out of both vectors before their cosine.

    A candidate counts by the inverse of its probability to be one, so that the sum over candidates estimates the sum
    over all items (the correction of Bengio and Senécal, 2008; for in-batch items that of Yi et al., 2019).

    Args:
        own: float32 (N, D), what ``LightGCN`` returns first.
        neighbors: float32 (N, D), what it returns second.
        batch: the batch they are of.
        temperature: divides the cosines.
        balance: a user with n positives weighs ``n ** balance``: 1 for equal positives, 0 for equal users.

    Returns:
        float32 scalar, the weighted mean over the P positives; 0 without any.
    """
    vectors = own + neighbors
    users, items = F.normalize(vectors, dim=1).tensor_split([batch.num_users])
    logits = torch.addmm(-batch.log_inclusion, users / temperature, items.t())
    logits[batch.rows, batch.columns] = -torch.inf
    others = logits.logsumexp(dim=1)

    def ends(rows: Tensor) -> tuple[Tensor, Tensor]:
        # index_select: its backward adds whole rows, that of rows[index] goes element by element.
        return rows.index_select(0, batch.rows), rows.index_select(0, batch.num_users + batch.columns)

    (user, item), (user_own, item_own) = ends(vectors), ends(own)
    edges = batch.edges[:, None]
    positive = F.cosine_similarity(user - edges * item_own, item - edges * user_own) / temperature
    weights = batch.positives[batch.rows] ** (balance - 1)
    losses = F.softplus(others[batch.rows] - positive)
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
