"""An embedding whose columns live on other ranks: one all-to-all, in eager mode and as a scripted twin.

The least that a sharded module has to do for ``shardrec.script``; docs/scripting.md describes it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the autograd formulas
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

import shardrec
from shardrec.pending import Await, LazyAwaitable

__all__ = ["ColumnEmbedding"]


def issue(rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Sends (W * B, D) rows to their ranks; the (W * B, D) that arrive are valid after ``finish`` only."""
    return torch.ops._c10d_functional_autograd.all_to_all_single(rows, receive, send, group)


def finish(arriving: Tensor, ranks: int, keys: list[str], dims: list[int]) -> KeyedTensor:
    arrived = torch.ops._c10d_functional.wait_tensor(arriving)
    columns = torch.cat(arrived.chunk(ranks), dim=1)
    return KeyedTensor(keys, dims, columns)


class ColumnEmbedding(nn.Module):
    """A table of (rows, W * dim), of which each rank holds dim columns; every rank asks for as many rows.

    Args:
        name: the key of the output.
        rows: of the table.
        dim: columns per rank.
    """

    def __init__(self, name: str, rows: int, dim: int) -> None:
        super().__init__()
        self.name = name
        self.ranks = dist.get_world_size()
        self.weight = nn.Parameter(torch.randn(rows, dim))
        group = dist.group.WORLD
        assert group is not None
        self.group = group.group_name

    def forward(self, ids: Tensor) -> LazyAwaitable[KeyedTensor]:
        """
        Args:
            ids: (B,) of this rank.

        Returns:
            (B, W * dim) under ``name``.
        """
        return _PendingColumns(self, ids)

    def scripted_twin(self) -> nn.Module:
        return ColumnEmbeddingTwin(self)


class _PendingColumns(LazyAwaitable[KeyedTensor]):
    def __init__(self, module: ColumnEmbedding, ids: Tensor) -> None:
        super().__init__()
        sizes = [ids.numel()] * module.ranks
        self._module = module
        self._arriving = issue(all_rows(module.weight, ids, module.ranks, module.group), sizes, sizes, module.group)

    def _wait_impl(self) -> KeyedTensor:
        module = self._module
        width = module.ranks * module.weight.size(1)
        return finish(self._arriving, module.ranks, [module.name], [width])


def all_rows(weight: Tensor, ids: Tensor, ranks: int, group: str) -> Tensor:
    """(W * B, dim): this rank's columns of the rows that each rank asks for."""
    everyone = torch.ops._c10d_functional.all_gather_into_tensor(ids, ranks, group)
    return nn.functional.embedding(torch.ops._c10d_functional.wait_tensor(everyone), weight)


class ColumnEmbeddingTwin(nn.Module):
    """What TorchScript sees of a ColumnEmbedding: the same parameter, and an Await in place of the LazyAwaitable."""

    def __init__(self, original: ColumnEmbedding) -> None:
        super().__init__()
        self.name = original.name
        self.ranks = original.ranks
        self.group = original.group
        self.weight = original.weight

    def forward(self, ids: Tensor) -> Await[KeyedTensor]:
        sizes = [ids.numel()] * self.ranks
        arriving = issue(all_rows(self.weight, ids, self.ranks, self.group), sizes, sizes, self.group)
        width = self.ranks * self.weight.size(1)
        return shardrec.pending.awaitable(finish, arriving, self.ranks, [self.name], [width])
