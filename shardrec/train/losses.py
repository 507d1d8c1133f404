"""Losses of a batch, from its logits: of each row by itself, or of the order of the rows in a group.

A rank's batch knows its own rows only: a group that is spread over ranks or steps counts as several. No loss makes the
host wait for the device.

Legend: B rows; a group's number is at most B - 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from shardrec.data import ClickBatch

__all__ = ["LOSSES", "batch_loss", "click_loss", "pairwise_loss", "softmax_loss"]


def batch_loss(name: str) -> Callable[[nn.Module, ClickBatch], Tensor]:
    """The loss of a model, from (dense, sparse) to (B,) or (B, 1) logits, on a batch.

    Args:
        name: one of :data:`LOSSES`.
    """

    def loss(model: nn.Module, batch: ClickBatch) -> Tensor:
        logits = model(batch.dense, batch.sparse)
        if name == "bce":
            return click_loss(logits, batch.labels)
        assert batch.groups is not None, "checked when the data were opened"
        return _BY_GROUP[name](logits, batch.labels, batch.groups)

    return loss


def click_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of (B, 1) logits, in nats per row; 0, with gradients of 0, for a batch without rows."""
    total = binary_cross_entropy_with_logits(logits.view(-1), labels, reduction="sum")
    return total / max(1, labels.numel())


def softmax_loss(logits: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
    """Cross entropy between the softmax of a group's logits and its clicked rows, which share a mass of 1.

    "An Analysis of the Softmax Cross Entropy Loss for Learning-to-Rank with Binary Relevance", Bruch et al., 2019.

    Args:
        logits: (B,) or (B, 1).
        labels: float32 (B,), 0 or 1.
        groups: int64 (B,), the same for the rows of a group.

    Returns:
        The mean over the groups that have a clicked row, in nats; 0, with gradients of 0, without any.
    """
    scores, group = logits.view(-1).float(), _numbered(groups)
    count = scores.numel()
    # Subtracting a constant leaves a softmax as it is, so that the largest logit takes no part in the gradient.
    top = scores.new_full((count,), -torch.inf).scatter_reduce(0, group, scores.detach(), "amax")
    shifted = scores - top[group]
    mass = scores.new_zeros(count).index_add(0, group, shifted.exp())
    of_rows = mass[group].log() - shifted
    clicked = labels.new_zeros(count).index_add(0, group, labels)
    total = (labels * of_rows / clicked[group].clamp(min=1)).sum()
    return total / (clicked > 0).sum().clamp(min=1)


def pairwise_loss(logits: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
    """``softplus(other - clicked)`` of each clicked row and one other row of its group, drawn at random.

    "BPR: Bayesian Personalized Ranking from Implicit Feedback", Rendle et al., 2009.

    Args:
        logits: (B,) or (B, 1).
        labels: float32 (B,), 0 or 1.
        groups: int64 (B,), the same for the rows of a group.

    Returns:
        The mean over the clicked rows whose group has another row, in nats; 0, with gradients of 0, without any.
    """
    scores, group = logits.view(-1).float(), _numbered(groups)
    count = scores.numel()
    # Rows by group, those that were not clicked first: a group's others lie together.
    order = torch.argsort(2 * group + labels.long(), stable=True)
    rows = torch.ones_like(group)
    size = torch.zeros_like(group).index_add(0, group, rows)
    others = torch.zeros_like(group).index_add(0, group, 1 - labels.long())
    first = size.cumsum(0) - size
    drawn = (torch.rand_like(scores, dtype=torch.float64) * others[group]).long()
    other = order[(first[group] + drawn).clamp(max=max(0, count - 1))]
    paired = labels * (others[group] > 0)
    total = (paired * softplus(scores[other] - scores)).sum()
    return total / paired.sum().clamp(min=1)


def _numbered(groups: Tensor) -> Tensor:
    """Groups numbered from 0, in the order of their keys: int64 (B,)."""
    ordered, order = torch.sort(groups, stable=True)
    changes = torch.zeros_like(groups)
    changes[1:] = (ordered[1:] != ordered[:-1]).long()
    return torch.empty_like(groups).scatter(0, order, changes.cumsum(0))


_BY_GROUP: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": softmax_loss,
    "pairwise": pairwise_loss,
}
LOSSES = ("bce", *_BY_GROUP)
"""Names of the losses."""
