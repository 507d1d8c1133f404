"""Models to be scripted, in a module of their own: TorchScript evaluates their annotations in its names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import shardrec

__all__ = [
    "BesideAFork",
    "FromTensors",
    "Reader",
    "Scorer",
    "Three",
    "Towers",
    "TwoForks",
    "WithAwaitable",
    "WithFork",
]


class Scorer(nn.Module):
    """Pooled features through a layer.

    Args:
        sparse: the embedding bags.
        pooled: columns of their output.
    """

    def __init__(self, sparse: nn.Module, pooled: int) -> None:
        super().__init__()
        self.sparse = sparse
        torch.manual_seed(5)
        self.over = nn.Linear(pooled, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.sparse(features)
        return self.head(pooled)

    def head(self, pooled: KeyedTensor) -> Tensor:
        scores: Tensor = self.over(pooled.values()).squeeze(1)
        return scores


class FromTensors(nn.Module):
    """A model with an entry that takes plain tensors, as a program without torchrec calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        scores: Tensor = self.model(features)
        return scores

    @torch.jit.export
    def from_tensors(self, keys: list[str], values: Tensor, lengths: Tensor) -> Tensor:
        scores: Tensor = self.model(KeyedJaggedTensor(keys, values, lengths=lengths))
        return scores


class Reader(nn.Module):
    """Sequence embeddings, each feature's rows summed up in its own way.

    Args:
        words: the embedding collection.
        dim: its columns.
    """

    def __init__(self, words: nn.Module, dim: int) -> None:
        super().__init__()
        self.words = words
        torch.manual_seed(6)
        self.over = nn.Linear(dim, 2)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, one in self.words(features).items():
            found[name] = self.over(one.values())
            found[name + " lengths"] = one.lengths()
        return found


class Three(nn.Module):
    """Two bag collections and a sequence collection, and a dense part before the first use."""

    def __init__(self, left: nn.Module, right: nn.Module, words: nn.Module, columns: int, dim: int) -> None:
        super().__init__()
        self.left = left
        self.right = right
        self.words = words
        torch.manual_seed(7)
        self.dense = nn.Linear(3, 4)
        self.over = nn.Linear(columns + 4, 1)
        self.over_words = nn.Linear(dim, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        left = self.left(features)
        right = self.right(features)
        words = self.words(features)
        hidden = self.dense(dense).relu()
        scores = self.over(torch.cat([left.values(), right.values(), hidden], dim=1)).squeeze(1)
        for _, one in words.items():
            scores = scores + 0.1 * self.over_words(one.values()).sum()
        return scores


class Towers(nn.Module):
    """A query tower and an item tower, each with a collection of its own, scored by their product.

    Args:
        query_bags: embedding bags of features a and b.
        item_bags: of features c and d.
        dim: columns of each feature.
    """

    def __init__(self, query_bags: nn.Module, item_bags: nn.Module, dim: int) -> None:
        super().__init__()
        self.query_bags = query_bags
        self.item_bags = item_bags
        torch.manual_seed(8)
        self.query, self.item = MLP(2 * dim, [dim, 4]), MLP(2 * dim, [dim, 4])

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        query = self.query_bags(features)
        item = self.item_bags(features)
        left = self.query(query.values())
        return (left * self.item(torch.cat([item["c"], item["d"]], dim=1))).sum(dim=1)


class TwoForks(nn.Module):
    """Two collections, each called in a fork of its own."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one = one
        self.two = two

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        first = torch.jit.fork(self.look_up, features)
        second = torch.jit.fork(self.look_up_two, features)
        return torch.jit.wait(first) + torch.jit.wait(second)

    def look_up(self, features: KeyedJaggedTensor) -> Tensor:
        return self.one(features).values()

    def look_up_two(self, features: KeyedJaggedTensor) -> Tensor:
        return self.two(features).values()


class BesideAFork(nn.Module):
    """A collection, and a fork that has nothing to do with it."""

    def __init__(self, one: nn.Module) -> None:
        super().__init__()
        self.one = one

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        number = torch.jit.fork(self.two, torch.ones(1))
        return self.one(features).values() + torch.jit.wait(number)

    def two(self, one: Tensor) -> Tensor:
        return one + 1


class WithAwaitable(nn.Module):
    """A method of its own, awaited: layers, a number, and the embedding bags."""

    def __init__(self, sparse: nn.Module, pooled: int) -> None:
        super().__init__()
        self.sparse = sparse
        self.over = nn.Linear(pooled, 1)
        self.times = 3

    def head(self, features: KeyedJaggedTensor) -> Tensor:
        scores: Tensor = self.over(self.sparse(features).values())
        return scores * self.times

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pending = shardrec.pending.awaitable(self.head, features)
        count = features.values().sum()
        scores: Tensor = shardrec.wait(pending) + count
        return scores


class WithFork(nn.Module):
    """The embedding bags in a fork."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        future = shardrec.pending.fork(self.sparse, features)
        pooled = shardrec.wait(future)
        values: Tensor = pooled.values() * 2
        return values
