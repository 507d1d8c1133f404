"""Training batches: some users, the items that they choose among, and the neighbors of both.

A user's neighbors are the user's items in train, an item's are its users. Each user and each item is a row ("node")
of one weighted KeyedJaggedTensor: itself with weight 1 in one feature, its neighbors in the other::

    node              u0            u1            a        b           c        x
    feature "user"    u0            u1            [u0 u7]  [u0 u1 u9]  [u1]     [u7 u9]
    feature "item"    [a b]         [b c]         a        b           c        x

    weight of u0 at a and of a at u0: neighbor_weight / sqrt(items of u0 * users of a)

The items are every positive of the users once (a b c) and random ones (x), sorted.

Legend: B users, C candidate items, P positives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.gowalla.data import Interactions

__all__ = ["BatchSampler", "Graph", "TrainingBatch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """What one rank trains on in one step.

    Attributes:
        nodes: features "user" and "item", stride B + C: the users, then the candidates.
        num_users: B.
        rows: int64 (P,), the row of the user of each positive.
        columns: int64 (P,), the column of its item among the candidates.
        edges: float32 (P,), the weight of each positive in the bags of its user and of its item.
        positives: float32 (B,), how many a user has.
        log_inclusion: float32 (C,), log of the probability that the item is among the candidates of a step.
    """

    nodes: KeyedJaggedTensor
    num_users: int
    rows: Tensor
    columns: Tensor
    edges: Tensor
    positives: Tensor
    log_inclusion: Tensor


class Graph:
    """The interactions as a bipartite graph with the symmetric normalization of LightGCN (He et al., 2020).

    Args:
        train: the interactions.
        neighbor_weight: what neighbors weigh beside the node itself; LightGCN has 1.

    Attributes:
        train: the interactions.
    """

    def __init__(self, train: Interactions, *, neighbor_weight: float) -> None:
        self.train = train
        self._users_of = train.transposed()
        self._user_scale = neighbor_weight * train.counts().float().rsqrt()
        self._item_scale = train.popularity().float().rsqrt()

    def edges(self, users: Tensor, items: Tensor) -> Tensor:
        """Weights of interactions between int64 (P,) users and int64 (P,) items; float32 (P,)."""
        return self._user_scale[users] * self._item_scale[items]

    def nodes(self, users: Tensor, items: Tensor) -> KeyedJaggedTensor:
        """What the model reads for int64 (B,) users and then int64 (C,) items, in training and in evaluation."""
        history, lengths = self.train.of(users)
        visitors, visits = self._users_of.of(items)
        return KeyedJaggedTensor(
            keys=["user", "item"],
            values=torch.cat([users, visitors, history, items]),
            weights=torch.cat(
                [
                    torch.ones(len(users)),
                    self.edges(visitors, items.repeat_interleave(visits)),
                    self.edges(users.repeat_interleave(lengths), history),
                    torch.ones(len(items)),
                ]
            ),
            lengths=torch.cat([torch.ones_like(users), visits, lengths, torch.ones_like(items)]),
        )


class BatchSampler:
    """Deals the users out over ranks and steps, in a new random order each epoch.

    Every rank draws the same order from the seed and takes its own share; the random items differ between ranks.

    Args:
        graph: of the interactions; a user without any is left out.
        users_per_batch: most users in a rank's batch.
        num_negatives: random items drawn per batch, uniformly, with replacement.
        rank: this rank.
        world_size: number of ranks.
        seed: of the order and of the random items.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        users_per_batch: int,
        num_negatives: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        train = graph.train
        self._graph = graph
        self._num_items = train.num_items
        self._num_negatives = num_negatives
        self._rank = rank
        self._world_size = world_size
        self._users = train.counts().nonzero().squeeze(1)
        self._popularity = train.popularity().double()
        self._order = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator().manual_seed(seed * world_size + rank + 1)
        self.steps = -(-len(self._users) // (users_per_batch * world_size))

    def epoch(self) -> Iterator[TrainingBatch]:
        """This rank's ``steps`` batches of one pass over the users; batch sizes differ by at most one."""
        order = self._users[torch.randperm(len(self._users), generator=self._order)]
        shares = torch.tensor_split(order, self.steps * self._world_size)
        for share in shares[self._rank :: self._world_size]:
            yield self.batch(share)

    def batch(self, users: Tensor) -> TrainingBatch:
        """The batch of the given users, int64 (B,)."""
        positives, lengths = self._graph.train.of(users)
        negatives = torch.randint(self._num_items, (self._num_negatives,), generator=self._noise)
        candidates, columns = torch.unique(torch.cat([positives, negatives]), return_inverse=True)
        return TrainingBatch(
            nodes=self._graph.nodes(users, candidates),
            num_users=len(users),
            rows=torch.arange(len(users)).repeat_interleave(lengths),
            columns=columns[: len(positives)],
            edges=self._graph.edges(users.repeat_interleave(lengths), positives),
            positives=lengths.float(),
            log_inclusion=self._inclusion(len(users))[candidates].log().float(),
        )

    def _inclusion(self, batch_size: int) -> Tensor:
        """Probability of each item to be a candidate: to be drawn, or to be an item of one of the batch's users."""
        not_drawn = (1 - 1 / self._num_items) ** self._num_negatives
        # As if users were drawn with replacement, which differs little where a batch is a small part of them.
        not_positive = (1 - batch_size / len(self._users)) ** self._popularity
        return 1 - not_drawn * not_positive
