"""LightGCN with one layer: the vectors of users and items are their embeddings plus their neighbors' embeddings.

"LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation", He et al., 2020. Cosines score pairs.
The loss is a softmax over candidates that a rank's batch shares. Each counts by the inverse of the probability
to be one (Bengio and Senécal, 2008). ``prior`` is from "Long-tail learning via logit adjustment", Menon et al., 2021.

Legend: B rows, P items of their histories, C candidates, M users that have these, D columns, I items.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError
from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import Positive, Size, check_one_each, pooled_features


class LightGCN(nn.Module):
    """A user's neighbors are the items of the row's history, an item's the users of the training data that have it.

    Args:
        graph: Parquet file of the training data, with columns ``user``, a number of a row, and ``history``, a list of
            such numbers of items. Each rank holds all of it, 12 bytes for each item of a user.
        user: feature of the user, one id a row. ``history`` has the user's items, each once.
        neighbor_weight: what neighbors count beside the embedding itself; 1 in the paper.
        negatives: random items of a step, beside the batch's items.
        temperature: divides the cosine.
        prior: what the log of an item's number of users counts beside the cosine, but in the loss.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        graph: str,
        user: str = "user",
        history: str = "history",
        item: str = "item",
        dim: Size = 16,
        neighbor_weight: float = 1.0,
        negatives: Size = 1024,
        temperature: Positive = 0.1,
        prior: float = 0.0,
    ) -> None:
        super().__init__()
        self.user, self.history, self.item, self.item_features = user, history, item, (item,)
        self.negatives, self.temperature, self.prior = negatives, temperature, prior
        tables = pooled_features(schema, dim, features=[user, item]).embedding_bag_configs()
        for table in tables:
            table.embedding_dim, table.init_fn = dim, lambda weight: nn.init.uniform_(weight, -0.12, 0.12)
        self.bags = EmbeddingBagCollection(tables=tables, is_weighted=True, device=torch.device("meta"))
        sizes = [schema.num_embeddings[schema.sparse_names.index(name)] for name in (user, item)]
        self.graph = _ItemNeighbors(graph, (user, history), sizes[0], sizes[1], neighbor_weight)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The logit per row of its user and item: (B,)."""
        logits: Tensor = (self.query_vectors(dense, sparse) * self.item_vectors(dense, sparse)).sum(1)
        return logits

    def query_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The vector of each row's user. Its product with an item's vector is a logit: float32 (B, D + 1)."""
        rows, neighbors, _ = self._looked_up(sparse, sparse[self.item].values()[:0])
        return F.pad(F.normalize(rows + neighbors, dim=1), [0, 1], value=1.0) / self.temperature

    def item_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Each row's item: float32 (B, D + 1)."""
        items_B = sparse[self.item].values()
        check_one_each(sparse[self.item].lengths())
        rows, neighbors, _ = self._looked_up(sparse, items_B)
        item_BD = F.normalize((rows + neighbors).tensor_split(2)[1], dim=1)
        visits_B = self.graph.visits_I[items_B.cpu()].clamp(min=1).to(item_BD)
        return torch.cat([item_BD, self.prior * visits_B.log().unsqueeze(1)], dim=1)

    def loss(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        """Softmax cross entropy of all items of the clicked rows' histories against candidates that the row lacks.

        An item and its user are taken out of each other's neighbors, because a test's neighbors do not include them.
        The mean over the items, where a row with n items weighs sqrt(n), in nats.
        """
        size, chosen_P, lengths_B = labels.numel(), sparse[self.history].values(), sparse[self.history].lengths()
        row_P, others = torch.repeat_interleave(lengths_B), self.graph.visits_I.numel() - 1
        drawn = torch.randint(1, others + 1, (self.negatives,), device=chosen_P.device)
        items_C, columns = torch.cat([chosen_P, drawn]).unique(return_inverse=True)
        rows, neighbors, edges_P1 = self._looked_up(sparse, items_C)
        vectors, column_P = rows + neighbors, columns[: chosen_P.numel()]
        users_BD, items_CD = F.normalize(vectors, dim=1).tensor_split([size])
        left_C = max(0.0, 1 - size / self.graph.num_users) ** self.graph.visits_I[items_C.cpu()].to(vectors)
        logits_BC = users_BD @ items_CD.t() / self.temperature
        logits_BC = logits_BC - torch.log1p(-((1 - 1 / others) ** self.negatives) * left_C)
        # Not -inf: the gradient of the logsumexp of nothing else is nan.
        logits_BC = logits_BC.index_put((row_P, column_P), logits_BC.new_tensor(torch.finfo(logits_BC.dtype).min))
        user_PD = vectors.index_select(0, row_P) - edges_P1 * rows.index_select(0, size + column_P)
        item_PD = vectors.index_select(0, size + column_P) - edges_P1 * rows.index_select(0, row_P)
        logits_P = F.cosine_similarity(user_PD, item_PD) / self.temperature
        share_P = (labels * lengths_B.clamp(min=1).rsqrt())[row_P]
        losses_P = F.softplus(logits_BC.logsumexp(1).index_select(0, row_P) - logits_P) * share_P
        loss: Tensor = losses_P.sum() / share_P.sum().clamp(min=torch.finfo(share_P.dtype).tiny)
        return loss

    def _looked_up(self, sparse: KeyedJaggedTensor, items_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings and neighbors of the rows' users, then of some items: (B + C, D) each. The histories' weights.

        feature "user": u0            | u1            | users that have a | users that have b
        feature "item": history of u0 | history of u1 | a                 | b
        """
        user, history, (visitors, edges_M, visits_C) = sparse[self.user], sparse[self.history], self.graph(items_C)
        scale_P = history.lengths().rsqrt().repeat_interleave(history.lengths())
        edges_P = self.graph.scale_I[history.values().cpu()].to(scale_P) * scale_P
        ones_B, ones_C = torch.ones_like(user.values()), torch.ones_like(items_C)
        values = torch.cat([user.values(), visitors, history.values(), items_C])
        weights = torch.cat([ones_B.to(edges_P), edges_M, edges_P, ones_C.to(edges_P)])
        lengths = torch.cat([user.lengths(), visits_C, history.lengths(), ones_C])
        pooled = self.bags(KeyedJaggedTensor([self.user, self.item], values, weights, lengths))
        users, items, size = pooled[self.user], pooled[self.item], user.lengths().numel()
        return torch.cat([users[:size], items[size:]]), torch.cat([items[:size], users[size:]]), edges_P.unsqueeze(1)


class _ItemNeighbors(nn.Module):
    """The users per item, and ``weight`` times both weights by LightGCN's symmetric normalization.

    By a Parquet file's ``columns``, numbers of users and lists of numbers of items, each below the given one. On the
    CPU, and not in buffers, which each step would broadcast.
    """

    def __init__(self, path: str, columns: Sequence[str], num_users: int, num_items: int, weight: float) -> None:
        import pyarrow.parquet as pq  # which no other model needs

        super().__init__()
        try:
            user, lists = (column.combine_chunks() for column in pq.read_table(path, columns=[*columns]).columns)
            users, items = np.repeat(user.to_numpy(), lists.value_lengths().to_numpy()), lists.flatten().to_numpy()
            if users.max() >= num_users or items.max() >= num_items:
                raise ValueError(f"numbers of {columns} are above the features' rows")
            counts = np.bincount(items, minlength=num_items), np.bincount(users, minlength=num_users)
        except (OSError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"graph (--model-arg graph=FILE) is {path!r}: {error}. Give the training data") from error
        self.users, self.visits_I, sizes = (torch.tensor(of) for of in (users[np.argsort(items)], *counts))
        self.num_users, self.ends_I = int((sizes > 0).sum()), self.visits_I.cumsum(0)
        self.scale_I = weight * self.visits_I.clamp(min=1).rsqrt()
        self.weights = sizes.clamp(min=1).rsqrt()[self.users.long()] * self.scale_I.repeat_interleave(self.visits_I)

    def forward(self, items_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Users of some items, int64 (M,). Their weights, float32 (M,). How many each item has, int64 (C,)."""
        visits_C = self.visits_I[items_C.cpu()]
        shifts = (self.ends_I[items_C.cpu()] - visits_C.cumsum(0)).repeat_interleave(visits_C)
        places = torch.arange(shifts.numel()) + shifts
        return self.users[places].to(items_C), self.weights[places].to(items_C.device), visits_C.to(items_C)
