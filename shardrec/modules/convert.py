"""``shardrec.shard``: a model's collections replaced by sharded ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.errors import ConfigError, PlanError
from shardrec.exchange.collectives import collectives_of
from shardrec.exchange.step import StepContext
from shardrec.exchange.wire import QuantizedComms
from shardrec.layout import ShardingPlan, Topology
from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.discover import Collection, collections_of, table_shapes
from shardrec.modules.model import ShardedModel
from shardrec.modules.sequences import ShardedEmbeddingCollection

__all__ = ["shard"]


def shard(
    model: nn.Module,
    plan: ShardingPlan | None = None,
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    dedup: bool = True,
    comms: QuantizedComms | None = None,
) -> ShardedModel:
    """Shard the embedding collections of a model; the rest goes into DistributedDataParallel.

    Inside a process group every rank calls this with the same model and plan. Without one, the model runs sharded on
    one rank.

    Args:
        model: holds ``torchrec.EmbeddingBagCollection`` or ``EmbeddingCollection`` modules, on the CPU or on meta;
            is changed in place. Optimizers that ``apply_optimizer_in_backward`` gave to tables are fused.
        plan: where each table goes; default: :func:`shardrec.plan` for the group.
        device: of the tables and of the model; default: the CPU.
        group: the process group; default: the default group.
        dedup: sequence collections send and look up each distinct id of a table once per batch.
        comms: formats in which pooled rows and gradients travel; default: float32 both ways.

    Returns:
        The sharded model, which has the attributes and the state_dict keys of ``model``.

    Raises:
        PlanError: if the plan does not fit the model or the group, or differs between ranks.
        ConfigError: if the model has no collection, or one that cannot be sharded.
    """
    target = torch.device(device or "cpu")
    collectives = collectives_of(group)
    collections = collections_of(model)
    if not collections:
        raise ConfigError(
            f"{type(model).__name__} holds no torchrec embedding collection to shard; build its embeddings with one, "
            "or wrap it in DistributedDataParallel as it is"
        )
    if plan is None:
        from shardrec.planner import plan as make_plan

        plan = make_plan(model, Topology.of_world(collectives.world_size))
    context = StepContext(collectives, target, comms)
    _check_plan(plan, model, context)
    replaced = {
        id(module): _shard_collection(module, plan, path, target, group, context, dedup)
        for path, module in collections.items()
    }
    model = _replace(model, replaced)
    _move_dense(model, target)
    world = (group or dist.group.WORLD) if collectives.world_size > 1 else None
    return ShardedModel(model, plan, context, world)


def _shard_collection(
    module: Collection,
    plan: ShardingPlan,
    path: str,
    device: torch.device,
    group: dist.ProcessGroup | None,
    context: StepContext,
    dedup: bool,
) -> ShardedCollection:
    if isinstance(module, EmbeddingBagCollection):
        return ShardedEmbeddingBagCollection(module, plan, path=path, device=device, group=group, context=context)
    return ShardedEmbeddingCollection(module, plan, path=path, device=device, group=group, context=context, dedup=dedup)


def _plan_faults(plan: ShardingPlan, model: nn.Module, world_size: int) -> tuple[str, ...]:
    if plan.world_size != world_size:
        return (
            f"the plan is for {plan.world_size} ranks and the process group has {world_size}; plan for {world_size}, "
            f"or start {plan.world_size} ranks",
        )
    try:
        plan.check_tables(table_shapes(model))
    except PlanError as error:
        return error.faults
    return ()


def _check_plan(plan: ShardingPlan, model: nn.Module, context: StepContext) -> None:
    """Raise on every rank if the plan of any does not fit, or differs from another's: none may go on to wait."""
    world_size = context.collectives.world_size
    faults = _plan_faults(plan, model, world_size)
    header = torch.tensor([[plan.fingerprint, len(faults)]] * world_size, dtype=torch.int64, device=context.device)
    received = context.exchange_header(header)
    if bool(received[:, 1].any()):
        others = context.all_gather_text("; ".join(faults))
        raise PlanError(faults or [f"rank {rank}: {fault}" for rank, fault in enumerate(others) if fault])
    fingerprints = received[:, 0].tolist()
    differing = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if differing:
        raise PlanError(
            f"the plan of rank(s) {', '.join(map(str, differing))} differs from rank 0's; make the plan on one rank "
            "and send it to the others, or save and load it"
        )


def _replace(model: nn.Module, replaced: dict[int, ShardedCollection]) -> nn.Module:
    if id(model) in replaced:
        return replaced[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in replaced:
                setattr(parent, name, replaced[id(child)])
    return model


def _move_dense(model: nn.Module, device: torch.device) -> None:
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ConfigError(
            f"parameters {', '.join(map(repr, meta[:5]))} are on meta; only embedding collections may be: build the "
            "dense part on a real device"
        )
    for module in model.children() if isinstance(model, ShardedCollection) else [model]:
        module.to(device)
