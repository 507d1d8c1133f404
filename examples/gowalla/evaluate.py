"""Recall@k and NDCG@k by the protocol of the published figures: rank every item that the user has not in train.

Legend: B users of a chunk, I items, D columns, k ranks that count, T test items of the chunk's users.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from examples.gowalla.batches import Graph
from examples.gowalla.data import Interactions
from examples.gowalla.model import LightGCN

__all__ = ["Metrics", "evaluate", "recall_and_ndcg", "top_items"]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Means over the users that have test items.

    Attributes:
        recall: share of a user's test items that are among the first k.
        ndcg: discounted gain of the first k, over that of the best possible order.
        users: how many users the means are of.
    """

    recall: float
    ndcg: float
    users: int


def top_items(scores: Tensor, train: Interactions, users: Tensor, *, k: int) -> Tensor:
    """The k best items that each user has not in train, best first.

    Args:
        scores: float32 (B, I); the items in train are overwritten with -inf.
        train: what not to recommend.
        users: int64 (B,), whose scores these are.
        k: at most I. A user with fewer than k items left gets items of train at the end.

    Returns:
        int64 (B, k).
    """
    seen, lengths = train.of(users)
    scores[torch.arange(len(users)).repeat_interleave(lengths), seen] = -torch.inf
    return scores.topk(k, dim=1).indices


def recall_and_ndcg(top: Tensor, test: Interactions, users: Tensor) -> tuple[Tensor, Tensor]:
    """Recall@k and NDCG@k of each user.

    Args:
        top: int64 (B, k), recommended items, best first.
        test: what was to be predicted.
        users: int64 (B,), each with at least one test item.

    Returns:
        Recall, hits over all test items of the user, and NDCG, with the ideal gain over min(k, test items); float64
        (B,) each.
    """
    items, lengths = test.of(users)
    rows = torch.arange(len(users))
    wanted = rows.repeat_interleave(lengths) * test.num_items + items
    hits = torch.isin(rows[:, None] * test.num_items + top, wanted).double()
    k = top.shape[1]
    discounts = 1 / torch.arange(2, k + 2, dtype=torch.float64).log2()
    ideal = discounts.cumsum(0)[lengths.clamp(max=k) - 1]
    return hits.sum(1) / lengths, (hits @ discounts) / ideal


@torch.no_grad()
def evaluate(
    model: LightGCN,
    graph: Graph,
    test: Interactions,
    *,
    prior: float,
    k: int = 20,
    chunk: int = 512,
    rank: int = 0,
    world_size: int = 1,
) -> Metrics:
    """Evaluate a model, sharded or not, on all users; every rank calls this and ranks the items for its share of them.

    Vectors come from the model's own forward, so each rank makes the same number of calls, the last maybe empty.

    Args:
        model: whose vectors are compared.
        graph: of train, whose items are left out.
        test: what is to be found.
        prior: an item's score is its cosine plus ``prior * log(users of the item)``, a logit adjustment after training
            (Menon et al., 2021) towards popular items.
        k: ranks that count.
        chunk: users scored at a time; scores take chunk * I * 4 bytes.
        rank: this rank.
        world_size: number of ranks.

    Returns:
        The same on every rank.
    """
    num_items = graph.train.num_items
    none = torch.empty(0, dtype=torch.int64)

    def vectors(users: Tensor, items: Tensor) -> Tensor:
        own, neighbors = model(graph.nodes(users, items), len(users))
        return F.normalize(own + neighbors, dim=1)

    vectors_ID = torch.cat([vectors(none, items) for items in torch.arange(num_items).split(8192)])
    prior_I = prior * graph.train.popularity().clamp(min=1).log()
    testers = test.counts().nonzero().squeeze(1)
    calls = max(1, math.ceil(len(testers) / (chunk * world_size)))
    totals = torch.zeros(3, dtype=torch.float64)
    # One buffer for all chunks: fresh pages for each would cost as much as the product.
    buffer_BI = torch.empty(chunk, num_items)
    for users in torch.tensor_split(testers, calls * world_size)[rank::world_size]:
        vectors_BD = vectors(users, none)
        if len(users):
            scores_BI = torch.addmm(prior_I, vectors_BD, vectors_ID.t(), out=buffer_BI[: len(users)])
            top = top_items(scores_BI, graph.train, users, k=min(k, num_items))
            recall, ndcg = recall_and_ndcg(top, test, users)
            totals += torch.stack([recall.sum(), ndcg.sum(), torch.tensor(float(len(users)))])
    if world_size > 1:
        dist.all_reduce(totals)
    recall_sum, ndcg_sum, count = totals.tolist()
    return Metrics(recall=recall_sum / max(count, 1), ndcg=ndcg_sum / max(count, 1), users=int(count))
