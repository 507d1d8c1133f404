"""Two towers of embeddings, and the loss that trains them.

The user's vector is an embedding of the user plus the mean of embeddings of the items in the history, as in YoutubeDNN
(Covington et al., 2016) and SimpleX (Mao et al., 2021); the item's vector is an embedding of the item. Both are scaled
to length 1.

Legend: B users, C candidate items, D columns, P positives.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from examples.gowalla.batches import TrainingBatch

__all__ = ["TwoTower", "sampled_softmax"]


class TwoTower(nn.Module):
    """Cosine similarities between users and items.

    All parameters are in two ``EmbeddingBagCollection`` modules: ``users`` with the tables "user" and "history", and
    ``items`` with the table "item".

    Args:
        num_users: rows of "user".
        num_items: rows of "history" and of "item".
        dim: D, columns of each.
        scale: standard deviation of the initial values, which are uniform.
        device: of the tables; "meta" where only their shapes are wanted.
    """

    def __init__(
        self, num_users: int, num_items: int, *, dim: int, scale: float, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        most = scale * math.sqrt(3)

        def table(name: str, rows: int, pooling: PoolingType) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[name],
                pooling=pooling,
                weight_init_min=-most,
                weight_init_max=most,
            )

        target = torch.device(device)
        self.users = EmbeddingBagCollection(
            tables=[table("user", num_users, PoolingType.SUM), table("history", num_items, PoolingType.MEAN)],
            device=target,
        )
        self.items = EmbeddingBagCollection(tables=[table("item", num_items, PoolingType.SUM)], device=target)

    def forward(self, users: KeyedJaggedTensor, items: KeyedJaggedTensor) -> Tensor:
        """Cosine of every user with every item.

        Args:
            users: features "user" and "history", stride B.
            items: feature "item", stride C.

        Returns:
            float32 (B, C), from -1 to 1.
        """
        # Sharded collections answer at once; neither is waited for before the exchanges of both are under way.
        user_lookup, item_lookup = self.users(users), self.items(items)
        return _user_vectors(user_lookup) @ _item_vectors(item_lookup).t()

    def embed_users(self, users: KeyedJaggedTensor) -> Tensor:
        """float32 (B, D) vectors of length 1 for features "user" and "history", stride B."""
        return _user_vectors(self.users(users))

    def embed_items(self, items: KeyedJaggedTensor) -> Tensor:
        """float32 (C, D) vectors of length 1 for feature "item", stride C."""
        return _item_vectors(self.items(items))


def _user_vectors(pooled: KeyedTensor) -> Tensor:
    return F.normalize(pooled["user"] + pooled["history"], dim=1)


def _item_vectors(pooled: KeyedTensor) -> Tensor:
    return F.normalize(pooled["item"], dim=1)


def sampled_softmax(cosines: Tensor, batch: TrainingBatch, *, temperature: float, balance: float) -> Tensor:
    """Cross entropy of each positive against the items its user has not, estimated from the batch's candidates.

    A candidate counts by the inverse of its probability to be one, so that the sum over candidates estimates the sum
    over all items (the correction of Bengio and Senécal, 2008; for in-batch items that of Yi et al., 2019).

    Args:
        cosines: float32 (B, C).
        batch: the batch they are of.
        temperature: divides the cosines.
        balance: a user with n positives weighs ``n ** balance``: 1 for equal positives, 0 for equal users.

    Returns:
        float32 scalar, the weighted mean over the P positives; 0 without any.
    """
    logits = cosines / temperature
    positive = logits[batch.rows, batch.columns]
    own = torch.zeros_like(logits, dtype=torch.bool)
    own[batch.rows, batch.columns] = True
    others = (logits - batch.log_inclusion).masked_fill(own, -torch.inf).logsumexp(dim=1)
    weights = batch.positives[batch.rows] ** (balance - 1)
    losses = F.softplus(others[batch.rows] - positive)
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
