"""Training batches: some users with their histories, and the items that they choose among.

::

    users    u0          u1      u2            one row each of the "user" and the "history" feature
    history  [a b c]     [b d]   [a e f g]     the user's items in train; each is also a positive
    items    a b c d e f g | x y z ...         every positive of the batch once, then random items; sorted

Choosing users, not interactions, pools each history once for all of a user's positives.

Legend: B users of this rank's batch, P positives of those, C candidate items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.gowalla.data import Interactions

__all__ = ["BatchSampler", "TrainingBatch", "item_features", "user_features"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """What one rank trains on in one step.

    Attributes:
        users: features "user" and "history", stride B.
        items: feature "item", stride C.
        rows: int64 (P,), the row of the user of each positive.
        columns: int64 (P,), the column of its item among the candidates.
        positives: float32 (B,), how many a user has.
        log_inclusion: float32 (C,), log of the probability that the item is among the candidates of a step.
    """

    users: KeyedJaggedTensor
    items: KeyedJaggedTensor
    rows: Tensor
    columns: Tensor
    positives: Tensor
    log_inclusion: Tensor


def user_features(train: Interactions, users: Tensor) -> KeyedJaggedTensor:
    """What the user tower reads for int64 (B,) users, in training and in evaluation: their ids and their items."""
    history, lengths = train.of(users)
    return KeyedJaggedTensor(
        keys=["user", "history"],
        values=torch.cat([users, history]),
        lengths=torch.cat([torch.ones_like(users), lengths]),
    )


def item_features(items: Tensor) -> KeyedJaggedTensor:
    """What the item tower reads for int64 (C,) items."""
    return KeyedJaggedTensor(keys=["item"], values=items, lengths=torch.ones_like(items))


class BatchSampler:
    """Deals the users out over ranks and steps, in a new random order each epoch.

    Every rank draws the same order from the seed and takes its own share; the random items differ between ranks.

    Args:
        train: the interactions; a user without any is left out.
        users_per_batch: most users in a rank's batch.
        num_negatives: random items drawn per batch, uniformly, with replacement.
        rank: this rank.
        world_size: number of ranks.
        seed: of the order and of the random items.
    """

    def __init__(
        self,
        train: Interactions,
        *,
        users_per_batch: int,
        num_negatives: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        self._train = train
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
        positives, lengths = self._train.of(users)
        negatives = torch.randint(self._train.num_items, (self._num_negatives,), generator=self._noise)
        candidates, columns = torch.unique(torch.cat([positives, negatives]), return_inverse=True)
        return TrainingBatch(
            users=user_features(self._train, users),
            items=item_features(candidates),
            rows=torch.arange(len(users)).repeat_interleave(lengths),
            columns=columns[: len(positives)],
            positives=lengths.float(),
            log_inclusion=self._inclusion(len(users))[candidates].log().float(),
        )

    def _inclusion(self, batch_size: int) -> Tensor:
        """Probability of each item to be a candidate: to be drawn, or to be an item of one of the batch's users."""
        not_drawn = (1 - 1 / self._train.num_items) ** self._num_negatives
        # As if users were drawn with replacement, which differs little where a batch is a small part of them.
        not_positive = (1 - batch_size / len(self._users)) ** self._popularity
        return 1 - not_drawn * not_positive
