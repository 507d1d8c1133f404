"""Held-out clicks ranked among all items of the model's item table, however that is cut.

::

    rank r      vectors of the items r·N/W … (r+1)·N/W, looked up once through the tables' own exchange
    each batch  queries of all ranks ──gather──► every rank's scores of its items, a block at a time
                items above each clicked one, equal to it, log of the sum of exp ──gather──► added up

A rank holds N / W vectors, as if the table were cut by rows; what travels for a query does not depend on N.

[Note: ties in a catalogue]
A clicked item comes after all others of its score that were not clicked, as in :func:`shardrec.data.ranking_metrics`.
Products are summed in float64 and rounded to float32: a matrix product's order of summation depends on the sizes of its
blocks, and so on the number of ranks, and would decide ties otherwise.

Legend: B clicked rows of a batch on a rank, Q of all ranks, D columns, F features, N items, W ranks.
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

from shardrec.data import ClickBatch, ClickMetrics, FeatureSpec
from shardrec.data.ranking import placed_metrics
from shardrec.errors import ConfigError
from shardrec.modules import ShardedModel
from shardrec.pipeline.lookahead import tell_others
from shardrec.pipeline.train import TrainPipeline
from shardrec.train.config import TrainConfig
from shardrec.train.metrics import evaluate, gather_rows
from shardrec.train.tasks import TaskMetrics

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
    if config.ranking == "catalogue":
        if spec.labels:
            raise ConfigError(
                "ranking (--ranking) 'catalogue' ranks clicked rows, and the features (--features) name several "
                "labels: give label: COLUMN in their place, or ranking rows"
            )
        return CatalogueRanking(model, spec, device, k=config.top_k)
    return partial(evaluate, model, device=device, k=config.top_k, tasks=spec.labels)


class CatalogueRanking:
    """Ranks the item of each clicked row among all rows of the item's table but row 0, which stands for unknown items.

    Args:
        model: sharded or not, with ``item_features``, the names of an item's features, and the methods
            ``query_vectors`` and ``item_vectors``, from (dense, sparse) to float32 (B, D), whose products are logits.
        spec: of its data.
        device: where it is.
        k: places that count.

    Raises:
        ConfigError: for another model, items with features beside their ids, or dynamic ids.
    """

    def __init__(self, model: nn.Module, spec: FeatureSpec, device: torch.device, *, k: int = 10) -> None:
        wanted = "ranking (--ranking) 'catalogue' needs "
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
        self._rows = by_name[self._item].num_embeddings
        self._steps = TrainPipeline(model, (), (), depth=0, device=device)
        self._ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._share = -(-self._rows // self._ranks)
        self._first = self._share * (dist.get_rank() if self._ranks > 1 else 0)

    def __call__(self, batches: Iterable[ClickBatch]) -> ClickMetrics:
        """Every rank calls it with as many batches, and gets the same.

        Returns:
            Metrics of the N rows of each clicked one: ``auc`` is the mean share of the other items below the clicked
            one, ``logloss`` the cross entropy of the softmax over the items, ``normalized_entropy`` that over log N.
            NDCG, recall and hit rate are of groups, or of single rows where the data have none.

        Raises:
            ConfigError: without a clicked row, for rows without an item or with several, for scores that are NaN.
        """
        vectors_ND = self._items()
        placed, keys = [torch.zeros((4, 0), dtype=torch.float64)], [torch.zeros((2, 0), dtype=torch.int64)]
        for queries_DB, keys_2B in self._steps.predict(batches, self._clicked):
            keys.append(gather_rows(keys_2B))
            placed.append(self._placed(vectors_ND, gather_rows(queries_DB).t().to(self._device), keys[-1][1]))
        score, above, equal, log_sum = torch.cat(placed, dim=1).numpy()
        group, item = torch.cat(keys, dim=1).numpy()
        if not score.size:
            raise ConfigError("no held-out row was clicked: a ranking needs files with clicked rows (--valid, --test)")
        if not np.isfinite(log_sum).all():
            raise ConfigError(f"scores of {(~np.isfinite(log_sum)).sum()} rows are not numbers: has training diverged?")
        others = self._rows - 2
        is_unknown = item == 0  # no item of the catalogue: it comes after all of them
        above, equal = np.where(is_unknown, others, above), np.where(is_unknown, 0, equal)
        logloss = float((np.where(is_unknown, np.logaddexp(log_sum, score), log_sum) - score).mean())
        below = 1 - (above + equal / 2) / others
        group = np.arange(score.size) if (group == -1).all() else group
        return ClickMetrics(
            auc=float(below.mean()),
            logloss=logloss,
            normalized_entropy=logloss / float(np.log(others + 1)),
            click_rate=1 / (others + 1),
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

    def _clicked(self, model: nn.Module, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """Of the clicked rows: vectors (D, B); groups, -1 for none, and items, int64 (2, B)."""
        item, is_clicked = batch.sparse[self._item], batch.labels > 0.5
        if not bool((item.lengths() == 1).all()):
            error = ConfigError(f"a row has no {self._item!r}, or several: a ranking needs one in each row")
            if isinstance(model, ShardedModel):
                tell_others(error, model.context)
            raise error
        vectors_BD = _called(model, "query_vectors", batch.dense, batch.sparse)
        groups = torch.full_like(item.values(), -1) if batch.groups is None else batch.groups
        return vectors_BD[is_clicked].t().cpu(), torch.stack((groups, item.values()))[:, is_clicked].cpu()

    def _placed(self, vectors_ND: Tensor, queries_QD: Tensor, items_Q: Tensor) -> Tensor:
        """Score of the item, items above it, others equal to it, log of the sum of exp of all: float64 (4, Q), CPU."""
        queries_QD, own_Q = queries_QD.double(), items_Q.to(self._device) - self._first
        rows_Q = ((own_Q >= 0) & (own_Q < len(vectors_ND))).nonzero().squeeze(1)  # whose item is in this share
        own_Q = own_Q[rows_Q]
        score_Q = queries_QD.new_zeros(len(queries_QD))
        score_Q[rows_Q] = (queries_QD[rows_Q] * vectors_ND[own_Q]).sum(1).float().double()
        score_Q = self._of_ranks(score_Q.unsqueeze(0)).sum(1)[0].to(self._device)
        above_Q, equal_Q, log_sum_Q = (torch.full_like(score_Q, value) for value in (0, 0, -torch.inf))
        size = max(1, _SCORES // max(1, len(score_Q)))
        for start in range(0, len(vectors_ND), size):
            block_ND = vectors_ND[start : start + size].double()
            scores_QN = (queries_QD @ block_ND.t()).float().double()
            scores_QN[:, : max(0, 1 - self._first - start)] = -torch.inf  # row 0 is no item
            log_sum_Q = torch.logaddexp(log_sum_Q, scores_QN.logsumexp(1))
            here = (own_Q >= start) & (own_Q < start + size)
            scores_QN[rows_Q[here], own_Q[here] - start] = -torch.inf
            above_Q += (scores_QN > score_Q.unsqueeze(1)).sum(1)
            equal_Q += (scores_QN == score_Q.unsqueeze(1)).sum(1)
        above, equal, log_sum = self._of_ranks(torch.stack((above_Q, equal_Q, log_sum_Q)))
        return torch.stack((score_Q.cpu(), above.sum(0), equal.sum(0), log_sum.logsumexp(0)))

    def _of_ranks(self, rows_CQ: Tensor) -> Tensor:
        """What each rank has, on the CPU: (C, W, Q)."""
        gathered: Tensor = gather_rows(rows_CQ.cpu()).unflatten(1, (self._ranks, rows_CQ.size(1)))
        return gathered


def _called(model: nn.Module, method: str, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
    """What a method of a model returns, called as the model's forward: only there do ranks fail together."""
    module: Any = model.module if isinstance(model, ShardedModel) else model
    module.forward = getattr(module, method)
    try:
        vectors: Tensor = model.forward(dense, sparse)
        return vectors
    finally:
        del module.forward
