"""Held-out clicks ranked among all items of a :class:`~shardrec.trainer.run.catalogue.Catalogue`.

Each rank counts the items of its share with a higher score than the clicked one and those with an equal score. The
counts are added up. A clicked item comes after all others of its score that were not clicked, as in
:func:`~shardrec.trainer.data.ranking_metrics`.

Legend: B clicked rows of a batch on a rank, Q of all ranks, D columns, N items of a rank. U distinct queries of
neighboring rows, M items that the rows' other features have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from shardrec import ConfigError, ShardedModel
from shardrec.pipeline import tell_others
from shardrec.trainer.data import ClickBatch, ClickMetrics, FeatureSpec
from shardrec.trainer.data.ranking import placed_metrics
from shardrec.trainer.run.catalogue import Catalogue, Seen
from shardrec.trainer.run.config import TrainConfig
from shardrec.trainer.run.held_out import evaluate, gather_rows
from shardrec.trainer.run.task_metrics import TaskMetrics


def evaluator(
    config: TrainConfig, spec: FeatureSpec, model: nn.Module, device: torch.device
) -> Callable[[Iterable[ClickBatch]], ClickMetrics | TaskMetrics]:
    """What computes a run's metrics from this rank's batches, the same on every rank.

    Raises:
        ConfigError: see :class:`CatalogueRanking`; for data with several labels.
    """
    if config.output.ranking != "rows":
        if spec.labels:
            raise ConfigError(
                f"ranking (--ranking) {config.output.ranking!r} ranks clicked rows, and the features (--features) name "
                "several labels: give label: COLUMN in their place, or ranking rows"
            )
        return CatalogueRanking(model, spec, device, k=config.output.top_k, unseen=config.output.ranking == "unseen")
    return partial(evaluate, model, device=device, k=config.output.top_k, tasks=spec.labels)


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
        purpose = f"ranking (--ranking) {'unseen' if unseen else 'catalogue'!r}"
        self._catalogue = Catalogue(model, spec, device, purpose=purpose, remedy=", or ranking rows")
        if unseen and not self._catalogue.sharing:
            raise ConfigError(
                f"{purpose} needs a feature with the items of a row that are left out: give one share: "
                f"{self._catalogue.item} in the features (--features), or ranking catalogue"
            )
        self._left_out = self._catalogue.sharing if unseen else []
        self._k, self._device = k, device

    def __call__(self, batches: Iterable[ClickBatch]) -> ClickMetrics:
        """Every rank calls it with as many batches, and gets the same.

        Returns:
            Metrics of the N rows of each clicked one: ``auc`` is the mean share of the other items below the clicked
            one, ``logloss`` the cross entropy of the softmax over all items, ``normalized_entropy`` that over log N.
            NDCG, recall and hit rate are of groups, or of single rows where the data have none.

        Raises:
            ConfigError: without a clicked row, for rows without an item or with several, for scores that are NaN.
        """
        self._catalogue.look_up()
        placed, keys = [torch.zeros((5, 0), dtype=torch.float64)], [torch.zeros((3, 0), dtype=torch.int64)]
        for queries_DB, keys_3B, seen_1M in self._catalogue.steps.predict(batches, self._clicked):
            keys.append(gather_rows(keys_3B))
            queries_QD = gather_rows(queries_DB).t().to(self._device)
            seen = Seen(keys[-1][2], gather_rows(seen_1M)[0])
            placed.append(self._placed(queries_QD, keys[-1][1], seen))
        score, above, equal, seen, log_sum = torch.cat(placed, dim=1).numpy()
        group, item, _ = torch.cat(keys, dim=1).numpy()
        if not score.size:
            raise ConfigError("no held-out row was clicked: a ranking needs files with clicked rows (--valid, --test)")
        if not np.isfinite(log_sum).all():
            raise ConfigError(f"scores of {(~np.isfinite(log_sum)).sum()} rows are not numbers: has training diverged?")
        others = np.maximum(1, self._catalogue.rows - 2 - seen)
        is_unknown = item == 0  # no item of the catalogue: it comes after all of them
        above, equal = np.where(is_unknown, others, above), np.where(is_unknown, 0, equal)
        logloss = float((np.where(is_unknown, np.logaddexp(log_sum, score), log_sum) - score).mean())
        below = 1 - (above + equal / 2) / others
        group = np.arange(score.size) if (group == -1).all() else group
        return ClickMetrics(
            auc=float(below.mean()),
            logloss=logloss,
            normalized_entropy=logloss / float(np.log(self._catalogue.rows - 1)),
            click_rate=1 / (float(others.mean()) + 1),
            rows=score.size,
            auc_stderr=float(below.std() / score.size**0.5),
            ranking=placed_metrics(above + equal, score, item, group, k=self._k, gauc=float(below.mean())),
        )

    def _clicked(self, model: nn.Module, batch: ClickBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Of the clicked rows: vectors (D, B). Groups, -1 for none, items and numbers of seen ones, int64 (3, B). The
        seen items, int64 (1, M)."""
        item, is_clicked = batch.sparse[self._catalogue.item], batch.labels > 0.5
        if not bool((item.lengths() == 1).all()):
            error = ConfigError(f"a row has no {self._catalogue.item!r}, or several: a ranking needs one in each row")
            if isinstance(model, ShardedModel):
                tell_others(error, model.context)
            raise error
        vectors_BD = self._catalogue.queries(model, batch)
        groups = torch.full_like(item.values(), -1) if batch.groups is None else batch.groups
        counts, items_M = self._catalogue.seen(batch, self._left_out)
        items_M = items_M[is_clicked.repeat_interleave(counts)]
        keys_3B = torch.stack((groups, item.values(), counts))
        return vectors_BD[is_clicked].t().cpu(), keys_3B[:, is_clicked].cpu(), items_M.unsqueeze(0).cpu()

    def _placed(self, queries_QD: Tensor, items_Q: Tensor, seen: Seen) -> Tensor:
        """Score of the item, items above it, others equal to it, others that are seen, log of the sum of exp of all:
        float64 (5, Q), CPU."""
        catalogue, vectors_ND = self._catalogue, self._catalogue.vectors_ND
        rows_M, places_M = catalogue.left_out(seen, items_Q)
        distinct_UD, query_Q = queries_QD.double().unique_consecutive(dim=0, return_inverse=True)
        queries_QD, own_Q = queries_QD.double(), items_Q.to(self._device) - catalogue.first
        rows_Q = ((own_Q >= 0) & (own_Q < len(vectors_ND))).nonzero().squeeze(1)  # whose item is in this share
        own_Q = own_Q[rows_Q]
        score_Q = queries_QD.new_zeros(len(queries_QD))
        score_Q[rows_Q] = (queries_QD[rows_Q] * vectors_ND[own_Q]).sum(1).float().double()
        score_Q = catalogue.of_ranks(score_Q.unsqueeze(0)).sum(1)[0].to(self._device)
        above_Q, equal_Q, seen_Q = (torch.zeros_like(score_Q) for _ in range(3))
        log_sum_U = score_Q.new_full((len(distinct_UD),), -torch.inf)
        for start, scores_UN in catalogue.scores(distinct_UD, len(score_Q)):
            count = scores_UN.size(1)
            log_sum_U = torch.logaddexp(log_sum_U, scores_UN.double().logsumexp(1))
            scores_QN = scores_UN[query_Q]
            here = (places_M >= start) & (places_M < start + count)
            scores_QN[rows_M[here], places_M[here] - start] = -torch.inf
            seen_Q += torch.bincount(rows_M[here], minlength=len(score_Q))
            here = (own_Q >= start) & (own_Q < start + count)
            scores_QN[rows_Q[here], own_Q[here] - start] = -torch.inf
            above_Q += (scores_QN > score_Q.float().unsqueeze(1)).sum(1)
            equal_Q += (scores_QN == score_Q.float().unsqueeze(1)).sum(1)
        above, equal, seen_Q, log_sum = catalogue.of_ranks(torch.stack((above_Q, equal_Q, seen_Q, log_sum_U[query_Q])))
        return torch.stack((score_Q.cpu(), above.sum(0), equal.sum(0), seen_Q.sum(0), log_sum.logsumexp(0)))
