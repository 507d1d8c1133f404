"""Losses of a batch: of the rows' logits, of the order of the rows in a group, or the model's own.

A rank's batch knows its own rows only: a group that is spread over ranks or steps counts as several. No loss makes the
host wait for the device.

Legend: B rows. A group's number is at most B - 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError
from shardrec.trainer.data import ClickBatch, Task
from shardrec.trainer.run.task_metrics import outputs_of, task_loss


def batch_loss(
    name: str,
    model: Callable[..., Tensor],
    batch: ClickBatch,
    tasks: Sequence[Task] = (),
    divisors: Callable[[], Tensor | None] = lambda: None,
) -> Tensor:
    """The loss of a model on a batch.

    Args:
        name: ``bce``, ``softmax``, ``pairwise``, or ``model`` for the own one of a model from :func:`with_own_loss`.
        model: from (dense, sparse) to (B,) or (B, 1) logits.
        batch: where the model is.
        tasks: of data with several labels. Their losses are added up instead of ``bce``.
        divisors: of the sums over the rows of these. Called after the forward. See :func:`task_loss`.
    """
    if name == "model":
        return _scalar(model(batch.dense, batch.sparse, batch.labels))
    logits = model(batch.dense, batch.sparse)
    if tasks:
        return task_loss(outputs_of(logits, batch.size, tasks), batch.labels, batch.row_weights, tasks, divisors())
    if name == "bce":
        return click_loss(logits, batch.labels)
    assert batch.groups is not None, "checked when the data were opened"
    return _BY_GROUP[name](logits, batch.labels, batch.groups)


def with_own_loss(model: nn.Module, name: str) -> nn.Module:
    """The same module with a forward that gives its ``loss(dense, sparse, labels)`` when it is called with labels.

    A loss that calls other parts of a model than its forward has to run inside of the forward: only there do the
    lookups of several calls share an exchange. The module gets a subclass of its own class, so that the names of its
    parameters stay.

    Raises:
        ConfigError: for a model without this method.
    """
    model_loss = getattr(model, "loss", None)
    wanted = (
        f"loss (--loss) is 'model' and model (--model) {name!r} has {{}}: give it a method loss(dense, sparse, labels) "
        "that returns a scalar tensor, or train on the logits with loss bce, softmax or pairwise"
    )
    if not callable(model_loss):
        raise ConfigError(wanted.format("no method loss"))
    signature = inspect.signature(model_loss.forward if isinstance(model_loss, nn.Module) else model_loss)
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise ConfigError(wanted.format(f"loss({', '.join(signature.parameters)})")) from None
    cls = type(model)

    def forward(self: Any, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor | None = None) -> Any:
        return cls.forward(self, dense, sparse) if labels is None else self.loss(dense, sparse, labels)

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return model


def _scalar(loss: object) -> Tensor:
    """The loss that a model gave.

    Raises:
        ConfigError: if it is not a tensor with one number and a gradient.
    """
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad:
        return loss
    kind = type(loss).__name__
    result = kind if not isinstance(loss, Tensor) else f"{kind} of shape {tuple(loss.shape)}, dtype {loss.dtype}"
    detached = " that needs no gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
    raise ConfigError(
        f"loss (--loss) is 'model' and the model's loss(dense, sparse, labels) returns a {result}{detached}: return a "
        "scalar computed from its parameters, such as the mean over the rows"
    )


def click_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of (B, 1) logits, in nats per row; 0, with gradients of 0, for a batch without rows."""
    total = binary_cross_entropy_with_logits(logits.view(-1).float(), labels, reduction="sum")
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
    """``softplus(other - clicked)`` per clicked row and another row of its group, drawn at random.

    "BPR: Bayesian Personalized Ranking from Implicit Feedback", Rendle et al., 2009.

    Args:
        logits: (B,) or (B, 1).
        labels: float32 (B,), 0 or 1.
        groups: int64 (B,), the same for the rows of a group.

    Returns:
        The mean over the clicked rows with another row in their group, in nats. 0, with gradients of 0, without any.
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
