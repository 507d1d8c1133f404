"""The items of a model with their vectors, and their scores for queries, however the item's table is cut.

::

    rank r      vectors of the items r·N/W … (r+1)·N/W, looked up once through the tables' own exchange
    each batch  queries of all ranks ──gather──► every rank's scores of its items, a block at a time
                each rank's k best items ──gather──► the k best of them all

A rank holds N / W vectors, as if the table were cut by rows. What travels for a query does not depend on N.

[Note: equal scores]
Products are summed in float64 and rounded to float32: a matrix product's order of summation depends on the sizes of its
blocks, and so on the number of ranks, and would decide otherwise which scores are equal. Of the k best items, those
with equal scores are in the order of their rows, and so are those that just are among the k.

Legend: B rows of a batch on a rank, Q of all ranks, D columns, N items of a rank, W ranks. U distinct queries. M items
that are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError, ShardedModel
from shardrec.pipeline import TrainPipeline
from shardrec.trainer.data import ClickBatch, FeatureSpec
from shardrec.trainer.run.held_out import gather_rows

_LOOKED_UP = 8192
"""Largest number of items of a rank in one lookup."""
_SCORES = 1 << 22
"""Largest number of scores in memory, of all queries with a block of items."""
_BLOCK = 1 << 15
"""Most items of a block, whose vectors in float64 are to stay in a cache."""
_FIRST = 1 << 10
"""Items of the first block for the best, which is scored whole. Each further block is twice as large, up to _BLOCK."""
_LOW = 0xFFFFFFFF


class Seen(NamedTuple):
    """Items that the rows of a batch have: ``counts_B`` of each row, and the items, row after row, int64 (M,)."""

    counts_B: Tensor
    items_M: Tensor


class Catalogue:
    """All rows of the item's table but row 0, which stands for unknown items.

    Args:
        model: sharded or not, with ``item_features``, the names of an item's features, and the methods
            ``query_vectors`` and ``item_vectors``, from (dense, sparse) to float32 (B, D). Their products are logits.
        spec: of its data.
        device: where it is.
        purpose: what needs the items, for messages.
        remedy: what else to do, for messages.

    Attributes:
        item: the item's feature.
        rows: of its table.
        sharing: names of the other features that share its table, such as a history.
        first: row of this rank's first item.
        vectors_ND: of this rank's items, float32, after :meth:`look_up`.
        steps: run the model's methods on batches.

    Raises:
        ConfigError: for another model, items with features beside their ids, or dynamic ids.
    """

    def __init__(self, model: nn.Module, spec: FeatureSpec, device: torch.device, *, purpose: str, remedy: str) -> None:
        missing = [name for name in ("item_features", "query_vectors", "item_vectors") if not hasattr(model, name)]
        if missing:
            raise ConfigError(
                f"{purpose} needs a model with a vector for each item: train sasrec or hstu on files of shardrec "
                "sequences, two_tower, lightgcn, or your own with query_vectors, item_vectors and item_features "
                f"(this model has no {missing[0]}){remedy}"
            )
        features: Any = model.item_features
        by_name = {feature.name: feature for feature in spec.sparse}
        if len(features) > 1 or by_name[features[0]].dynamic_ids is not None:
            fault = f"are {list(features)}" if len(features) > 1 else f"have dynamic ids of {features[0]!r}"
            raise ConfigError(
                f"{purpose} needs items that a row of one table stands for, and its {fault}: give the item one feature "
                f"without dynamic ids{remedy}"
            )
        self.item, self._schema, self._device = str(features[0]), spec.schema_, device
        tables = dict(zip(self._schema.sparse_names, self._schema.tables, strict=True))
        self.sharing = [name for name in tables if tables[name] == tables[self.item] and name != self.item]
        self.rows = by_name[self.item].num_embeddings
        self.steps = TrainPipeline(model, (), (), depth=0, device=device)
        self._ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._rank = dist.get_rank() if self._ranks > 1 else 0
        self._share = -(-self.rows // self._ranks)
        self.first = self._share * self._rank
        self.vectors_ND, self._longest = torch.zeros(0, 0), 0.0

    def look_up(self) -> None:
        """Look up this rank's share of the items' vectors, as the model has them now. Every rank calls it.

        Raises:
            ConfigError: for vectors that are not of finite numbers; on every rank.
        """
        ids = torch.arange(self.first, max(self.first, min(self.rows, self.first + self._share)))
        blocks = [
            ids[start : start + _LOOKED_UP] for start in range(0, self._share, _LOOKED_UP)
        ]  # as many on each rank

        def vectors(model: nn.Module, ids: Tensor) -> Tensor:
            lengths = ids.new_zeros((len(self._schema.sparse_names), len(ids)))
            lengths[self._schema.sparse_names.index(self.item)] = 1
            weights = torch.ones_like(ids, dtype=torch.float32) if self._schema.weighted else None
            sparse = KeyedJaggedTensor([*self._schema.sparse_names], ids, weights=weights, lengths=lengths.view(-1))
            dense = torch.zeros(len(ids), len(self._schema.dense_names), device=ids.device)
            return _called(model, "item_vectors", dense, sparse)

        self.vectors_ND = torch.cat([*self.steps.predict(blocks, vectors)])
        lengths_N = torch.linalg.vector_norm(self.vectors_ND, dim=1, dtype=torch.float64)
        self._longest = float(lengths_N.max()) if len(lengths_N) else 0.0
        if not gather_rows(self.vectors_ND.isfinite().all().view(1, 1).cpu()).all():
            raise ConfigError("vectors of items are not finite numbers: has training diverged?")

    def queries(self, model: nn.Module, batch: ClickBatch) -> Tensor:
        """Vectors of a batch's rows: float32 (B, D)."""
        return _called(model, "query_vectors", batch.dense, batch.sparse)

    def seen(self, batch: ClickBatch, features: list[str]) -> Seen:
        """The items that a batch's rows have in some features. An item may be there twice."""
        jagged = [batch.sparse[name] for name in features]
        none = torch.zeros(0, dtype=torch.int64)
        rows_M = torch.cat([torch.repeat_interleave(feature.lengths()) for feature in jagged] or [none])
        rows_M, order = rows_M.sort(stable=True)
        items_M = torch.cat([feature.values() for feature in jagged] or [none])[order]
        return Seen(torch.bincount(rows_M, minlength=batch.size), items_M)

    def left_out(self, seen: Seen, kept_Q: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows and places in this rank's share of the items to leave out, each once: int64 (M,) each."""
        counts_Q, items_M = seen
        is_here_M = (items_M > 0) & (items_M >= self.first) & (items_M < self.first + len(self.vectors_ND))
        if kept_Q is not None:
            is_here_M &= items_M != kept_Q.repeat_interleave(counts_Q)
        pairs = (torch.repeat_interleave(counts_Q) * self.rows + items_M)[is_here_M].unique().to(self._device)
        return pairs // self.rows, pairs % self.rows - self.first

    def scores(self, queries_UD: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
        """Each block of this rank's items: its place in the share, and the scores, float32 (U, items of the block).

        Args:
            queries_UD: float64.
            most: queries that a block is for, U or more.
        """
        size = max(1, min(_BLOCK, _SCORES // max(1, most)))
        for start in range(0, len(self.vectors_ND), size):
            yield start, self._scored(queries_UD, slice(start, start + size), start)

    def _scored(self, queries_UD: Tensor, places: slice | Tensor, first: int) -> Tensor:
        """Scores of the items at some ascending places, the first of which is given: float32 (U, items)."""
        scores_UN = (queries_UD @ self.vectors_ND[places].double().t()).float()
        scores_UN[:, : int(first + self.first == 0)] = -torch.inf  # row 0 is not an item
        return scores_UN

    def top(self, queries_BD: Tensor, seen: Seen, k: int) -> tuple[Tensor, Tensor]:
        """The k best items of each query: rows, int64 (B, k), and scores, float32 (B, k), on the CPU.

        Of equal scores the lower row is first. Where fewer items are left, the last rows are 0 and their scores -inf.
        Every rank calls it, with its own queries.

        Raises:
            ConfigError: for a query that is not of finite numbers; on every rank.
        """
        ranks_Q = gather_rows(torch.full((1, len(queries_BD)), self._rank))[0]
        queries_QD = gather_rows(queries_BD.t().cpu()).t().double().to(self._device)
        if not queries_QD.isfinite().all():
            raise ConfigError("vectors of queries are not finite numbers: has training diverged?")
        seen_Q = Seen(*(gather_rows(each.cpu().unsqueeze(0))[0] for each in seen))
        rows_M, places_M = self.left_out(seen_Q)
        none = torch.zeros(k, dtype=torch.int64, device=self._device)
        best_Qk = _keys(torch.full((len(queries_QD), k), -torch.inf, device=self._device), none)
        start, size = 0, min(_FIRST, _BLOCK)
        while len(queries_QD) and start < len(self.vectors_ND):
            # An item with the score of the last of the best has a higher row than it, and is not among them.
            may_be_N = self._may_be_above(queries_QD, _scores(best_Qk[:, -1:]), self.vectors_ND[start : start + size])
            places_N = start + may_be_N.nonzero().squeeze(1)
            start, size = start + size, min(2 * size, _BLOCK)
            if not len(places_N):
                continue
            scores_QN = self._scored(queries_QD, places_N, int(places_N[0]))
            columns_M = torch.searchsorted(places_N, places_M).clamp(max=len(places_N) - 1)
            here = places_N[columns_M] == places_M
            scores_QN[rows_M[here], columns_M[here]] = -torch.inf
            keys_QN = _keys(scores_QN, places_N + self.first)
            best_Qk = torch.cat([best_Qk, keys_QN], dim=1).topk(k).values
        best_Qk = self.of_ranks(best_Qk.t()).flatten(0, 1).t().topk(k).values[ranks_Q == self._rank]
        return _LOW - (best_Qk & _LOW), _scores(best_Qk)

    def _may_be_above(self, queries_QD: Tensor, limits_Q1: Tensor, block_ND: Tensor) -> Tensor:
        """Which items of a block may have a score above its limit for some query: bool, of the block's items.

        On the CPU by products in float32, which are off by at most D roundings of the product of both lengths.
        """
        if self._device.type != "cpu":  # where products in float32 may be of fewer bits
            return torch.ones(len(block_ND), dtype=torch.bool, device=self._device)
        slack_Q1 = queries_QD.norm(dim=1, keepdim=True) * self._longest * (block_ND.size(1) * 2.0**-22)
        above_NQ = (block_ND @ queries_QD.float().t()).sub_((limits_Q1 - slack_Q1).float().t())
        is_below_N: Tensor = above_NQ.amax(1) <= 0  # False for nan: the difference of two infinite numbers
        return ~is_below_N

    def of_ranks(self, rows_CQ: Tensor) -> Tensor:
        """What each rank has, on the CPU: (C, W, Q)."""
        gathered: Tensor = gather_rows(rows_CQ.cpu()).unflatten(1, (self._ranks, rows_CQ.size(1)))
        return gathered


def _keys(scores_QN: Tensor, rows_N: Tensor) -> Tensor:
    """A number for each score and row, int64 (Q, N), which is larger for a larger score, or an equal one and a lower
    row: the bits of the score, in the order of the scores, over those of the row."""
    ordered_QN = _ordered((scores_QN + 0.0).view(torch.int32))  # adding 0 makes 0 of -0
    return (ordered_QN.long() << 32) + (_LOW - rows_N)


def _scores(keys_QN: Tensor) -> Tensor:
    return _ordered((keys_QN >> 32).int()).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """The bits of float32 as integers in the order of the floats; and back."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _called(model: nn.Module, method: str, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
    """What a method of a model returns, called as the model's forward: only there do ranks fail together.

    The swap lasts for the call. A subclass with another forward, as :func:`with_own_loss` makes it, would stay for the
    steps between two evaluations, and be compiled again. A forward hook sees the inputs and cannot call another method.
    """
    module: Any = model.module if isinstance(model, ShardedModel) else model
    module.forward = getattr(module, method)
    try:
        vectors: Tensor = model.forward(dense, sparse)
        return vectors
    finally:
        del module.forward
