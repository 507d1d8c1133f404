"""Held-out clicks ranked among all items of the model's item table, however that is cut.

::

    rank r      vectors of the items r·N/W … (r+1)·N/W, looked up once through the tables' own exchange
    each batch  queries of all ranks ──gather──► every rank's scores of its items, a block at a time
                items above each clicked one, equal to it, log of the sum of exp ──gather──► added up

A rank holds N / W vectors, as if the table were cut by rows; what travels for a query does not depend on N.

[Note: ties in a catalogue]
A clicked item comes after all others of its score that were not clicked, as in
:func:`~shardrec.trainer.data.ranking_metrics`. Products are summed in float64 and rounded to float32: a matrix
product's order of summation depends on the sizes of its blocks, and so on the number of ranks, and would decide ties
otherwise.

Legend: B clicked rows of a batch on a rank, Q of all ranks, D columns, F features, N items, W ranks; U distinct queries
of neighboring rows, M items that the rows' other features have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError, ShardedModel
from shardrec.pipeline import TrainPipeline, tell_others
from shardrec.trainer.data import ClickBatch, ClickMetrics, FeatureSpec
from shardrec.trainer.data.ranking import placed_metrics
from shardrec.trainer.run.config import TrainConfig
from shardrec.trainer.run.held_out import evaluate, gather_rows
from shardrec.trainer.run.task_metrics import TaskMetrics

__all__ = ["CatalogueRanking", "evaluator"]

_LOOKED_UP = 8192
"""Most items of a rank that are looked up at once."""
_SCORES = 1 << 22
"""Most scores at once, of all queries with a block of items."""


def evaluator(
    config: TrainConfig, spec: FeatureSpec, model: nn.Module, device: torch.device
) -> Callable[[Iterable[ClickBatch]], ClickMetrics | TaskMetrics]:
    """What computes a run's metrics from this rank's batches, the same on every rank.

    Raises:
        ConfigError: see :class:`CatalogueRanking`; for data with several labels.
    """
    if config.ranking != "rows":
        if spec.labels:
            raise ConfigError(
                f"ranking (--ranking) {config.ranking!r} ranks clicked rows, and the features (--features) name "
                "several labels: give label: COLUMN in their place, or ranking rows"
            )
        return CatalogueRanking(model, spec, device, k=config.top_k, unseen=config.ranking == "unseen")
    return partial(evaluate, model, device=device, k=config.top_k, tasks=spec.labels)


class CatalogueRanking:
    """Ranks the item of each clicked row among all rows of the item's table but row 0, which stands for unknown items.

    Args:
        model: sharded or not, with ``item_features``, the names of an item's features, and the methods
            ``query_vectors`` and ``item_vectors``, from (dense, sparse) to float32 (B, D), whose products are logits.
        spec: of its data.
        device: where it is.
        k: places that count.
        unseen: whether a row's items, those of its other features that share the item's table, are left out, but for
            the clicked one.

    Raises:
        ConfigError: for another model, items with features beside their ids, or dynamic ids; with ``unseen``, if no
            feature shares the item's table.
    """

    def __init__(
        self, model: nn.Module, spec: FeatureSpec, device: torch.device, *, k: int = 10, unseen: bool = False
    ) -> None:
        wanted = f"ranking (--ranking) {'unseen' if unseen else 'catalogue'!r} needs "
        missing = [name for name in ("item_features", "query_vectors", "item_vectors") if not hasattr(model, name)]
        if missing:
            raise ConfigError(
                f"{wanted}a model whose logits are products of two vectors, and this one has no {missing[0]}: give "
                "sasrec, hstu, two_tower, your own with query_vectors, item_vectors and item_features, or ranking rows"
            )
        features: Any = model.item_features
        by_name = {feature.name: feature for feature in spec.sparse}
        if len(features) > 1 or by_name[features[0]].dynamic_ids is not None:
            fault = f"are {list(features)}" if len(features) > 1 else f"have dynamic ids of {features[0]!r}"
            raise ConfigError(f"{wanted}items that a row of one table stands for, and its {fault}: give ranking rows")
        self._item, self._schema, self._k, self._device = str(features[0]), spec.schema_, k, device
        tables = dict(zip(self._schema.sparse_names, self._schema.tables, strict=True))
        of_items = [name for name in tables if tables[name] == tables[self._item] and name != self._item]
        if unseen and not of_items:
            raise ConfigError(
                f"{wanted}a feature with the items of a row that are left out: give one share: {self._item} in the "
                "features (--features), or ranking catalogue"
            )
        self._seen = of_items if unseen else []
        self._rows = by_name[self._item].num_embeddings
        self._steps = TrainPipeline(model, (), (), depth=0, device=device)
        self._ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._share = -(-self._rows // self._ranks)
        self._first = self._share * (dist.get_rank() if self._ranks > 1 else 0)

    def __call__(self, batches: Iterable[ClickBatch]) -> ClickMetrics:
        """Every rank calls it with as many batches, and gets the same.

        Returns:
            Metrics of the N rows of each clicked one: ``auc`` is the mean share of the other items below the clicked
            one, ``logloss`` the cross entropy of the softmax over all items, ``normalized_entropy`` that over log N.
            NDCG, recall and hit rate are of groups, or of single rows where the data have none.

        Raises:
            ConfigError: without a clicked row, for rows without an item or with several, for scores that are NaN.
        """
        vectors_ND = self._items()
        placed, keys = [torch.zeros((5, 0), dtype=torch.float64)], [torch.zeros((3, 0), dtype=torch.int64)]
        for queries_DB, keys_3B, seen_1M in self._steps.predict(batches, self._clicked):
            keys.append(gather_rows(keys_3B))
            queries_QD = gather_rows(queries_DB).t().to(self._device)
            placed.append(self._placed(vectors_ND, queries_QD, keys[-1][1], keys[-1][2], gather_rows(seen_1M)[0]))
        score, above, equal, seen, log_sum = torch.cat(placed, dim=1).numpy()
        group, item, _ = torch.cat(keys, dim=1).numpy()
        if not score.size:
            raise ConfigError("no held-out row was clicked: a ranking needs files with clicked rows (--valid, --test)")
        if not np.isfinite(log_sum).all():
            raise ConfigError(f"scores of {(~np.isfinite(log_sum)).sum()} rows are not numbers: has training diverged?")
        others = np.maximum(1, self._rows - 2 - seen)
        is_unknown = item == 0  # no item of the catalogue: it comes after all of them
        above, equal = np.where(is_unknown, others, above), np.where(is_unknown, 0, equal)
        logloss = float((np.where(is_unknown, np.logaddexp(log_sum, score), log_sum) - score).mean())
        below = 1 - (above + equal / 2) / others
        group = np.arange(score.size) if (group == -1).all() else group
        return ClickMetrics(
            auc=float(below.mean()),
            logloss=logloss,
            normalized_entropy=logloss / float(np.log(self._rows - 1)),
            click_rate=1 / (float(others.mean()) + 1),
            rows=score.size,
            auc_stderr=float(below.std() / score.size**0.5),
            ranking=placed_metrics(above + equal, score, item, group, k=self._k, gauc=float(below.mean())),
        )

    def _items(self) -> Tensor:
        """This rank's share of the items' vectors: (N / W, D)."""
        ids = torch.arange(self._first, max(self._first, min(self._rows, self._first + self._share)))
        blocks = [
            ids[start : start + _LOOKED_UP] for start in range(0, self._share, _LOOKED_UP)
        ]  # as many on each rank

        def vectors(model: nn.Module, ids: Tensor) -> Tensor:
            lengths = ids.new_zeros((len(self._schema.sparse_names), len(ids)))
            lengths[self._schema.sparse_names.index(self._item)] = 1
            weights = torch.ones_like(ids, dtype=torch.float32) if self._schema.weighted else None
            sparse = KeyedJaggedTensor([*self._schema.sparse_names], ids, weights=weights, lengths=lengths.view(-1))
            dense = torch.zeros(len(ids), len(self._schema.dense_names), device=ids.device)
            return _called(model, "item_vectors", dense, sparse)

        return torch.cat([*self._steps.predict(blocks, vectors)])

    def _clicked(self, model: nn.Module, batch: ClickBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Of the clicked rows: vectors (D, B); groups, -1 for none, items and numbers of seen ones, int64 (3, B); the
        seen items, int64 (1, M)."""
        item, is_clicked = batch.sparse[self._item], batch.labels > 0.5
        if not bool((item.lengths() == 1).all()):
            error = ConfigError(f"a row has no {self._item!r}, or several: a ranking needs one in each row")
            if isinstance(model, ShardedModel):
                tell_others(error, model.context)
            raise error
        vectors_BD = _called(model, "query_vectors", batch.dense, batch.sparse)
        groups = torch.full_like(item.values(), -1) if batch.groups is None else batch.groups
        seen = [batch.sparse[name] for name in self._seen]
        rows_M = torch.cat([torch.repeat_interleave(feature.lengths()) for feature in seen] or [groups[:0]])
        rows_M, order = rows_M.sort(stable=True)
        seen_M = torch.cat([feature.values() for feature in seen] or [rows_M])[order][is_clicked[rows_M]]
        keys_3B = torch.stack((groups, item.values(), torch.bincount(rows_M, minlength=batch.size)))
        return vectors_BD[is_clicked].t().cpu(), keys_3B[:, is_clicked].cpu(), seen_M.unsqueeze(0).cpu()

    def _placed(
        self, vectors_ND: Tensor, queries_QD: Tensor, items_Q: Tensor, sizes_Q: Tensor, seen_M: Tensor
    ) -> Tensor:
        """Score of the item, items above it, others equal to it, others that are seen, log of the sum of exp of all:
        float64 (5, Q), CPU."""
        # Each seen item of a row once, as a row and an item; neither the row's own nor the unknown one.
        pairs = torch.repeat_interleave(sizes_Q) * self._rows + seen_M
        is_left_out_M = (seen_M != items_Q.repeat_interleave(sizes_Q)) & (seen_M > 0)
        is_left_out_M &= (seen_M >= self._first) & (seen_M < self._first + len(vectors_ND))  # in this share
        pairs = pairs[is_left_out_M].unique().to(self._device)
        rows_M, seen_M = pairs // self._rows, pairs % self._rows - self._first
        distinct_UD, query_Q = queries_QD.double().unique_consecutive(dim=0, return_inverse=True)
        queries_QD, own_Q = queries_QD.double(), items_Q.to(self._device) - self._first
        rows_Q = ((own_Q >= 0) & (own_Q < len(vectors_ND))).nonzero().squeeze(1)  # whose item is in this share
        own_Q = own_Q[rows_Q]
        score_Q = queries_QD.new_zeros(len(queries_QD))
        score_Q[rows_Q] = (queries_QD[rows_Q] * vectors_ND[own_Q]).sum(1).float().double()
        score_Q = self._of_ranks(score_Q.unsqueeze(0)).sum(1)[0].to(self._device)
        above_Q, equal_Q, seen_Q = (torch.zeros_like(score_Q) for _ in range(3))
        log_sum_U = score_Q.new_full((len(distinct_UD),), -torch.inf)
        size = max(1, _SCORES // max(1, len(score_Q)))
        for start in range(0, len(vectors_ND), size):
            block_ND = vectors_ND[start : start + size].double()
            scores_UN = (distinct_UD @ block_ND.t()).float()
            scores_UN[:, : max(0, 1 - self._first - start)] = -torch.inf  # row 0 is no item
            log_sum_U = torch.logaddexp(log_sum_U, scores_UN.double().logsumexp(1))
            scores_QN = scores_UN[query_Q]
            here = (seen_M >= start) & (seen_M < start + size)
            scores_QN[rows_M[here], seen_M[here] - start] = -torch.inf
            seen_Q += torch.bincount(rows_M[here], minlength=len(score_Q))
            here = (own_Q >= start) & (own_Q < start + size)
            scores_QN[rows_Q[here], own_Q[here] - start] = -torch.inf
            above_Q += (scores_QN > score_Q.float().unsqueeze(1)).sum(1)
            equal_Q += (scores_QN == score_Q.float().unsqueeze(1)).sum(1)
        above, equal, seen, log_sum = self._of_ranks(torch.stack((above_Q, equal_Q, seen_Q, log_sum_U[query_Q])))
        return torch.stack((score_Q.cpu(), above.sum(0), equal.sum(0), seen.sum(0), log_sum.logsumexp(0)))

    def _of_ranks(self, rows_CQ: Tensor) -> Tensor:
        """What each rank has, on the CPU: (C, W, Q)."""
        gathered: Tensor = gather_rows(rows_CQ.cpu()).unflatten(1, (self._ranks, rows_CQ.size(1)))
        return gathered


def _called(model: nn.Module, method: str, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
    """What a method of a model returns, called as the model's forward: only there do ranks fail together.

    The swap lasts for the call. A subclass with another forward, as :func:`with_own_loss` makes it, would stay for the
    steps between two evaluations, and be compiled again; a forward hook sees the inputs and cannot call another method.
    """
    module: Any = model.module if isinstance(model, ShardedModel) else model
    module.forward = getattr(module, method)
    try:
        vectors: Tensor = model.forward(dense, sparse)
        return vectors
    finally:
        del module.forward
