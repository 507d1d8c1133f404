"""Gradient clipping over the dense part and the tables of a sharded model, as of the unsharded one."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardrec.errors import ConfigError
from shardrec.modules.sharded_model import ShardedModel, require_sharded


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of a sharded model so that their common norm is at most ``max_norm``.

    The norm is the norm of the unsharded model's gradients: dense parameters and replicated tables once, and each row
    of a cut table once, however it is cut, its gradients of all backward calls since the last step added up. Every rank
    calls it, after the backward. It exchanges two numbers. The rows are multiplied by the step.

    Args:
        model: what :func:`shardrec.shard` returned, with ``update="step"`` if tables have an optimizer in backward.
        max_norm: of the gradients.
        norm_type: p of the p-norm, above 0. May be ``inf``.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Returns:
        () float32: the norm before, the same on every rank.

    Raises:
        ConfigError: if the model is not sharded, is updated in backward, or has replicas, or for another ``norm_type``.
        RuntimeError: if the norm is not finite and ``error_if_nonfinite``. Nothing is scaled.
        PeerError: if another rank is gone.
    """
    return clip_by_norm(model, max_norm, norm_type, error_if_nonfinite)[0]


@torch.no_grad()
def clip_by_norm(
    model: nn.Module, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`clip_grad_norm_`, which also returns (2,) float32: the norms of the dense part and of all tables."""
    sharded = check_clipping(model, "shardrec.clip_grad_norm_")
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(
            f"norm_type of shardrec.clip_grad_norm_ is {norm_type:g}: give a number above 0 or 'inf', since the "
            "gradients of rows that no sample looked up, which are 0, are not kept"
        )
    gradients = _gradients(sharded)
    deferred = sharded.deferred_gradients()
    rows = [gradient for part in deferred for gradient in part.sums(to_change=norm_type != 2.0)]
    is_max, device = norm_type == torch.inf, sharded.context.device
    numbers = [gradient.values for gradient in rows] if norm_type != 2.0 else []
    totals = [_total(part, norm_type, device) for part in (*gradients[:3], [*gradients[3], *numbers])]
    if norm_type == 2.0:
        totals[3] = sum((gradient.square_sums().sum() for gradient in rows), totals[3])
    ours, theirs = torch.stack(totals).view(2, 2)
    collectives = sharded.context.collectives
    if collectives.world_size > 1:
        of_ranks = torch.stack(collectives.gather(theirs, [2] * collectives.world_size, "gradient norm"))
        theirs = of_ranks.amax(dim=0) if is_max else of_ranks.sum(dim=0)
    norms = torch.maximum(ours, theirs) if is_max else (ours + theirs) ** (1 / norm_type)
    norm = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped. Look for "
            "the cause with shardrec.detect_anomaly, or leave error_if_nonfinite out"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if device.type == "cuda" or bool(factor != 1):  # a GPU would be waited for
        for gradient in chain(*gradients):
            gradient.mul_(factor.to(gradient.device))
        for part in deferred:
            part.scale(factor)
    return norm, norms


@torch.no_grad()
def clip_grad_value_(model: nn.Module, clip_value: float) -> None:
    """Clamp all gradients of a sharded model to ``[-clip_value, clip_value]``.

    Those of a table's row are added up first, over all backward calls since the last step.

    Args:
        model: what :func:`shardrec.shard` returned, with ``update="step"`` if tables have an optimizer in backward.
        clip_value: the largest absolute value that is left.

    Raises:
        ConfigError: if the model is not sharded, is updated in backward, or has replicas.
    """
    sharded = check_clipping(model, "shardrec.clip_grad_value_")
    gradients = _gradients(sharded)
    rows = (gradient.values for part in sharded.deferred_gradients() for gradient in part.sums(to_change=True))
    for gradient in chain(*gradients, rows):
        gradient.clamp_(-clip_value, clip_value)


def check_clipping(model: nn.Module, taker: str) -> ShardedModel:
    """The model, if its gradients can be clipped by ``taker``.

    Raises:
        ConfigError: if the model is not sharded, is updated in backward, or has replicas or servers.
    """
    require_sharded(model, taker)
    assert isinstance(model, ShardedModel), "checked above"
    if fault := model.update_in_backward():
        raise ConfigError(f"{taker} finds no gradients to clip in a part of this model: {fault}")
    if type(model) is not ShardedModel:
        raise ConfigError(
            f"{taker} takes no {type(model).__name__}: the gradients of its rows are added up on servers, or "
            "belong to the copies of replicas, and no rank sees them. Shard it without replicas and servers"
        )
    return model


def _gradients(model: ShardedModel) -> list[list[Tensor]]:
    """Whole ones of the dense part, whole ones of tables, then this rank's parts of the dense part's and of tables'."""
    collections = model.sharded_collections
    cut = {id(parameter) for collection in collections for parameter in collection.unreduced_parameters()}
    modules = [table for collection in collections for table in collection.tables().values()]
    tables = {id(parameter) for table in modules for parameter in table.parameters()}
    gradients: list[list[Tensor]] = [[], [], [], []]
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        is_part = id(parameter) in cut or isinstance(gradient, DTensor)
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()  # type: ignore[no-untyped-call,unused-ignore]
        elif gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        gradients[2 * is_part + (id(parameter) in tables)].append(gradient)
    return gradients


def _total(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """() float32: the sum of the p-th powers of all numbers, or the largest of them."""
    numbers = [gradient.to(torch.float32) for gradient in gradients if gradient.numel()]
    if not numbers:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm(numbers, norm_type)
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if norm_type == torch.inf else (stacked**norm_type).sum()
