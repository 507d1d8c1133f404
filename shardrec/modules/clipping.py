"""Gradient clipping over the dense part and the tables of a sharded model, as of the unsharded one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardrec.errors import ConfigError
from shardrec.exchange.peers import peers
from shardrec.modules.model import ShardedModel, require_sharded

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of a sharded model so that their common norm is at most ``max_norm``.

    The norm is that of the unsharded model's gradients: dense parameters and replicated tables once, and each row of a
    cut table once, however it is cut, its gradients of all backward calls since the last step added up. Every rank
    calls it, after the backward; one all-reduce.

    Args:
        model: what :func:`shardrec.shard` returned, with ``update="step"`` if tables have an optimizer in backward.
        max_norm: of the gradients.
        norm_type: p of the p-norm; may be ``inf``.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Returns:
        () float32: the norm before, the same on every rank.

    Raises:
        ConfigError: if the model is not sharded, is updated in backward, or has replicas.
        RuntimeError: if the norm is not finite and ``error_if_nonfinite``; nothing is scaled.
        PeerError: if another rank is gone.
    """
    sharded = _checked(model, "clip_grad_norm_")
    whole, parts = _gradients(sharded)
    is_max = norm_type == torch.inf
    ours, theirs = (_total(gradients, norm_type, sharded.context.device) for gradients in (whole, parts))
    if sharded.group is not None:
        with peers(sharded.group, "gradient norm"):
            dist.all_reduce(theirs, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=sharded.group)
    norm = torch.maximum(ours, theirs) if is_max else (ours + theirs) ** (1 / norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; look for "
            "the cause with shardrec.detect_anomaly, or leave error_if_nonfinite out"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in (whole, parts):
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
    return norm


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
    for gradients in _gradients(_checked(model, "clip_grad_value_")):
        for gradient in gradients:
            gradient.clamp_(-clip_value, clip_value)


def _checked(model: nn.Module, taker: str) -> ShardedModel:
    require_sharded(model, f"shardrec.{taker}")
    assert isinstance(model, ShardedModel), "checked above"
    if model.has_fused_tables and not model.context.updates_at_step:
        raise ConfigError(
            f"shardrec.{taker}: the tables of this model have been updated in backward, before their gradients could "
            "be clipped; shard it with shardrec.shard(..., update='step')"
        )
    if type(model) is not ShardedModel:
        raise ConfigError(
            f"shardrec.{taker} takes no {type(model).__name__}: the gradients of its tables are not those of one copy "
            "of the model on all ranks; shard it without replicas and servers"
        )
    return model


def _gradients(model: ShardedModel) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that every rank has whole, and this rank's parts of the others."""
    cut = {id(parameter) for collection in model.sharded_collections for parameter in collection.unreduced_parameters()}
    whole: list[Tensor] = []
    parts = list(row_gradients(model))
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            parts.append(gradient.to_local())  # type: ignore[no-untyped-call,unused-ignore]
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        (parts if id(parameter) in cut else whole).append(gradient)
    return whole, parts


def row_gradients(model: ShardedModel) -> Iterator[Tensor]:
    """The values (U, w) float32 that ``step()`` will take as gradients of distinct rows of this rank."""
    for collection in model.sharded_collections:
        for deferred in collection.shards.deferred():
            for gradient in deferred.sums():
                yield gradient.values


def _total(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """() float32: the sum of the p-th powers of all numbers, or the largest of them."""
    norms = torch._foreach_norm([one.to(torch.float32) for one in gradients if one.numel()], norm_type)
    if not norms:
        return torch.zeros((), device=device)
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if norm_type == torch.inf else (stacked**norm_type).sum()
