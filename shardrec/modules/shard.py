"""``shardrec.shard``: a model's collections replaced by sharded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable as TorchRecAwaitable
from torchrec.distributed.types import LazyAwaitable as TorchRecLazyAwaitable
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec._late_imports import late_import
from shardrec.errors import ConfigError, PlanError
from shardrec.exchange.agree import Ranks, all_gather, by_rank, ranks_of
from shardrec.exchange.bad_ids import policies_of
from shardrec.exchange.batch import OnBadId
from shardrec.exchange.collectives import LocalCollectives, collectives_of
from shardrec.exchange.transport import Transport, transport_of
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.ids.options import DynamicIds
from shardrec.layout import ShardingPlan, Topology
from shardrec.layout.discover import (
    Collection,
    collections_of,
    configs_of,
    default_device,
    qualified_name,
    table_shapes,
)
from shardrec.memory import keep_large_blocks
from shardrec.modules.annotate import annotate_for_dynamo
from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.dense import DenseOptions, DenseWrap, dense_options
from shardrec.modules.dynamic import (
    dynamic_tables,
    refuse_remappers,
    without_managed_collision,
)
from shardrec.modules.fsdp import refuse_in_backward
from shardrec.modules.given_tables import TABLE_DTYPES
from shardrec.modules.in_backward import take_over_steps
from shardrec.modules.initial import draw_dense, refuse_dense_on_meta, value_checksums
from shardrec.modules.overrides import refuse_overrides
from shardrec.modules.sequences import ShardedEmbeddingCollection
from shardrec.modules.servers import Servers
from shardrec.modules.sharded_model import ShardedModel
from shardrec.modules.tied_weights import refuse_ties
from shardrec.pending import Awaitable, LazyAwaitable
from shardrec.planner.constraint import constraints_of
from shardrec.step.context import ExchangeOptions, ModelContext

if TYPE_CHECKING:
    from shardrec.replicas.replicas import Replicas

# isinstance(output, torchrec's LazyAwaitable) is asked by code that waits by hand.
TorchRecAwaitable.register(Awaitable)
TorchRecLazyAwaitable.register(LazyAwaitable)

UpdateTime = Literal["backward", "step"]
"""When tables with an optimizer of their own are updated."""

_START = "header exchange"
"""The event that a rank waits for, in messages: it misses another rank's first header."""


@torch.inference_mode(False)  # an inference tensor could not be written later
def shard(
    model: nn.Module,
    plan: ShardingPlan | TorchRecPlan | None = None,
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    dedup: bool = True,
    comms: QuantizedComms | None = None,
    output_dtype: torch.dtype = torch.float32,
    transport: Transport | None = None,
    replicas: Replicas | None = None,
    dense: DenseWrap | DenseOptions = "ddp",
    on_bad_id: OnBadId | Mapping[str, OnBadId] = "error",
    dynamic_ids: Mapping[str, DynamicIds] | None = None,
    servers: Servers | None = None,
    update: UpdateTime = "backward",
) -> ShardedModel:
    """Shard the embedding collections of a model, and average the gradients of its dense part over the ranks.

    Inside a process group every rank calls this with the same model and plan. Without one, the model runs sharded on
    one rank.

    With ``replicas=Replicas(R)`` the W ranks hold R copies of the tables (2-D parallelism): each run of W / R
    neighbouring ranks shards one copy, and every ``sync_every`` training steps the copies are averaged. See
    :class:`shardrec.replicas.ReplicatedModel`.

    Args:
        model: a model with ``torchrec.EmbeddingBagCollection`` or ``EmbeddingCollection`` modules, on the CPU or on
            meta, where modules of the dense part are given the values of their ``reset_parameters()``. It is changed in
            place. Optimizers that ``apply_optimizer_in_backward`` gave to tables are fused.
        plan: the layout per table on the ranks of the group (with replicas, on the ranks of one replica); also
            accepts a plan from TorchRec's planner. Default: :func:`shardrec.plan` for these ranks.
        device: of the tables and of the model. Default: the model's CUDA device if it is on one. This process's current
            CUDA device if NCCL is the group's only backend; else the CPU.
        group: the process group. Default: the default group.
        dedup: whether sequence collections send and look up each distinct id of a table once per batch.
        comms: formats in which pooled rows and gradients travel. Default: float32 both ways.
        output_dtype: of the collections' outputs: float32 (as for unsharded collections), float16 or bfloat16. Rows are
            summed and exchanged as float32, or as ``comms`` says, and converted at the end, like their gradients.
        transport: ``"auto"``: ranks with tables on the CPU that share a host exchange through shared memory.
            ``"group"``: through the process group, as between hosts. Default: the environment variable
            ``SHARDREC_TRANSPORT``, or else ``auto``.
        replicas: copies of the tables, as a :class:`shardrec.Replicas`. The result is then a
            :class:`shardrec.replicas.ReplicatedModel`, for ``Replicas(1)`` too, or, with ``elastic``, a
            :class:`shardrec.replicas.ElasticModel`. Default: one copy.
        dense: ``"ddp"``: every rank holds the dense part. Its gradients are averaged at the end of each backward as
            by DistributedDataParallel, but losses may use different parameters on each rank. ``"fsdp"``: FSDP2
            (``fully_shard``) shards the dense part's parameters. Replicated tables stay unsharded. ``"none"``: only
            gradients of replicated tables are averaged. A dict is ``"ddp"`` with options of DistributedDataParallel:
            ``bucket_cap_mb`` (25), the MiB of an all-reduce, and ``broadcast_buffers`` (True), which sends rank 0's
            buffers to all before each forward. ``{"use_orig_params": True}``, FSDP's option, means ``"fsdp"``.
        on_bad_id: the policy for ids outside ``[0, num_embeddings)``, for all features or by feature. ``"error"``:
            every rank raises InputError. ``"zero"``: the id is looked up as a row of zeros, which takes no gradient. A
            pooled bag is as if the id were not in it, and a mean does not count it (as ``padding_idx`` of
            ``nn.EmbeddingBag``). ``"wrap"``: the id is taken modulo ``num_embeddings`` of the smallest table in which
            the feature is looked up. :meth:`ShardedModel.bad_ids` counts them.
        dynamic_ids: by name, the tables with rows that are assigned to raw 64-bit ids during training, and their
            options. Their ``num_embeddings`` is the number of rows (docs/dynamic_ids.md). This replaces TorchRec's
            managed collision, if the tables use it.
        servers: embedding servers that hold the tables, as a :class:`shardrec.Servers`. Default: the ranks of the group
            hold them.
        update: when tables with an optimizer of ``apply_optimizer_in_backward`` are updated (docs/guide.md).
            ``"backward"``: inside each ``backward()``, as in TorchRec. ``"step"``: by ``model.fused_optimizer.step()``,
            once, with the sum of the gradients of all backward calls since the last step, which are kept until then.

    Returns:
        The sharded model, which has the attributes and the state_dict keys of ``model``.

    Raises:
        PlanError: if the plan does not fit the model or the group, or differs between ranks.
        ConfigError: if a launcher started several processes without a process group; if a table that is cut has
            other values on another rank; if the model lacks collections, or has one that cannot be sharded; if a
            table's weight is tied to another parameter, or parametrized; if methods or hooks were added to a
            collection; if each rank would learn its own map from ids to rows (managed collision, pruning); if the
            number of replicas does not divide the number of ranks, or differs between ranks.
    """
    if replicas is not None and not hasattr(replicas, "make_groups"):
        raise ConfigError(f"replicas is {replicas!r}. Give a shardrec.Replicas, such as Replicas(2)")
    if servers is not None and not isinstance(servers, Servers):
        raise ConfigError(f"servers is {servers!r}. Give a shardrec.Servers, such as Servers(['server0'])")
    target = default_device(model, group) if device is None else torch.device(device)
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device is '{target}'. Tables are on 'cpu' or 'cuda': leave it out for a model on meta, whose tables are "
            "then drawn on the ranks that hold them, or give it to shardrec.plan to only plan"
        )
    collectives = collectives_of(group)
    collections = collections_of(model)
    if not collections:
        raise ConfigError(
            f"{type(model).__name__} holds no torchrec embedding collection to shard: if it is sharded already, use "
            "it as it is; else build its embeddings with one, or wrap it in DistributedDataParallel"
        )
    refuse_ties(model)
    refuse_overrides(collections)
    weights = {parameter for collection in collections.values() for parameter in collection.parameters()}
    refuse_dense_on_meta(model, weights)
    if dense_options(dense)[0] == "fsdp" and collectives.world_size > 1:
        refuse_in_backward(model, weights)
    if output_dtype not in TABLE_DTYPES.values():
        known = ", ".join(str(dtype) for dtype in TABLE_DTYPES.values())
        raise ConfigError(f"output_dtype is {output_dtype}. Embeddings come as one of {known}")
    if isinstance(plan, TorchRecPlan):
        from shardrec.planner import from_torchrec  # with TorchRec's planner

        copies = 1 if replicas is None else max(1, replicas.count)
        holders = collectives.world_size // copies if servers is None else len(servers.names)
        plan = from_torchrec(plan, Topology.of_world(holders), table_shapes(model))
    if update not in get_args(UpdateTime):
        raise ConfigError(f"update is {update!r}. Give one of {', '.join(map(repr, get_args(UpdateTime)))}")
    if servers is not None:
        if update == "step" and servers.staleness:
            raise ConfigError(
                f"update='step' waits for the servers' update, and staleness={servers.staleness} does not. Leave one "
                "out"
            )
        without = (comms, replicas, transport, dynamic_ids or None)
        if any(value is not None for value in without) or output_dtype is not torch.float32:
            raise ConfigError(
                f"servers={servers} go with none of comms, replicas, transport, dynamic_ids and output_dtype. Leave "
                "these out"
            )
        remote: ShardedModel = late_import("shard_over_servers")(
            model,
            plan,
            servers,
            device=target,
            group=group,
            dedup=dedup,
            dense=dense,
            on_bad_id=on_bad_id,
            updates_at_step=update == "step",
        )
        return remote
    policies = policies_of(
        on_bad_id, (feature for collection in collections.values() for feature in features_of(collection))
    )
    raw = without_managed_collision(model, dynamic_ids or {})
    refuse_remappers(model, raw, collectives.world_size)
    whole = group or dist.group.WORLD
    ranks = ranks_of(whole, target)
    _agree_on_replicas(replicas, ranks)
    _agree_on_options(
        {
            "dense": dense,
            "update": update,
            "dedup": dedup,
            "comms": comms,
            "output_dtype": output_dtype,
            "on_bad_id": on_bad_id,
            "dynamic_ids": dynamic_ids,
            **_in_backward(model),
        },
        ranks,
    )
    elastic = replicas is not None and replicas.elastic is not None
    if elastic and (dense_options(dense)[0] != "ddp" or not dist.is_initialized()):
        raise ConfigError(
            f"elastic replicas average the dense part's gradients (dense='ddp', not {dense!r}) in a process group of "
            "each replica: call torch.distributed.init_process_group, on a single rank too"
        )
    copies = 1 if replicas is None or elastic else replicas.count
    size = collectives.world_size // copies
    if plan is None:
        from shardrec.planner import plan as make_plan  # imports scipy and HiGHS, which a given plan does not need

        limits = constraints_of(dynamic_ids or {})
        plan = make_plan(model, Topology.of_world(size), device=target, constraints=limits, dedup=dedup)
    tables, faults = dynamic_tables(model, plan, dynamic_ids or {}, 1 if replicas is None else replicas.count + elastic)
    agree_on_plan(plan, _plan_faults(plan, model, copies, collectives.world_size) or faults, ranks)
    copies_of = [range(start, start + size) for start in range(0, collectives.world_size, size)]
    agree_on_values(collections, plan, copies_of, ranks)
    plan = plan.on_one_rank() if size == 1 else plan
    everyone = whole if collectives.world_size > 1 or elastic else None
    groups = None if replicas is None else replicas.make_groups(group, target)
    within = groups.within if groups is not None else everyone
    if target.type == "cpu":
        keep_large_blocks()
    exchange = LocalCollectives() if within is None else transport_of(within, target, transport)
    options = ExchangeOptions(
        comms=comms or QuantizedComms(),
        output_dtype=output_dtype,
        on_bad_id=policies,
        dynamic_ids=tables,
        updates_at_step=update == "step",
    )
    context = ModelContext(exchange, target, options)
    replaced: dict[int, ShardedCollection] = {}
    for path, module in collections.items():
        arguments: dict[str, Any] = {"path": path, "device": target, "group": within, "context": context}
        replaced[id(module)] = sharded_collection(module, plan, dedup=dedup, **arguments)
    model = with_sharded(put_in_place(model, raw), replaced, target)
    if replicas is None:
        return ShardedModel(model, plan, context, everyone, dense=dense)
    given: dict[str, Any] = {"options": replicas, "dense": dense}
    if elastic:
        replica: ShardedModel = late_import("ElasticModel")(model, plan, context, everyone, **given)
    else:
        replica = late_import("ReplicatedModel")(model, plan, context, everyone, groups=groups, **given)
    return replica


def sharded_collection(
    module: Collection, plan: ShardingPlan, *, dedup: bool = True, **given: Any
) -> ShardedEmbeddingBagCollection | ShardedEmbeddingCollection:
    """The sharded collection of an unsharded one; with its constructor's arguments."""
    if isinstance(module, EmbeddingBagCollection):
        return ShardedEmbeddingBagCollection(module, plan, **given).train(module.training)
    return ShardedEmbeddingCollection(module, plan, dedup=dedup, **given).train(module.training)


def features_of(collection: Collection) -> list[str]:
    """The features of an unsharded collection, table after table."""
    return [feature for config in configs_of(collection) for feature in config.feature_names]


def _agree_on_replicas(replicas: Replicas | None, ranks: Ranks) -> None:
    """Raise on every rank if any rank's replicas are unsound, or differ from another's: no rank may continue and
    wait."""
    faults = "" if replicas is None else "; ".join(replicas.faults(ranks.world_size))
    theirs, words = zip(*all_gather((faults, f"replicas={replicas}"), ranks, _START), strict=True)
    if any(theirs):
        raise ConfigError(faults or "; ".join(by_rank(theirs)))
    if len(set(words)) > 1:
        lines = "\n  ".join(by_rank(words))
        raise ConfigError(f"the ranks ask for different replicas. Give all of them the same:\n  {lines}")


def _agree_on_options(given: Mapping[str, object], ranks: Ranks) -> None:
    """Raise on every rank if an option, or an optimizer in backward, differs between ranks."""
    of_ranks = all_gather({name: _as_text(value) for name, value in given.items()}, ranks, _START)
    for name in of_ranks[0]:
        values = [of_rank.get(name) for of_rank in of_ranks]  # None: the rank has another model, which is told later
        if None not in values and len(set(values)) > 1:
            lines = "\n  ".join(by_rank(list(map(str, values))))
            raise ConfigError(f"the ranks give different values of {name}. Give all of them the same:\n  {lines}")


def _as_text(value: object) -> str:
    """A value as a text that does not depend on the order of keys, nor on the device of a tensor."""
    if isinstance(value, Mapping):
        return repr({name: _as_text(value[name]) for name in sorted(value)})
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def _in_backward(model: nn.Module) -> dict[str, object]:
    """By parameter, the classes and settings of the optimizers in backward that it was given."""
    return {
        f"the optimizer in backward of {name}": [
            (each.__name__, _as_text(settings))
            for each, settings in zip(
                getattr(parameter, "_optimizer_classes", ()), getattr(parameter, "_optimizer_kwargs", ()), strict=False
            )
        ]
        for name, parameter in model.named_parameters()
    }


def _plan_faults(plan: ShardingPlan, model: nn.Module, copies: int, world_size: int) -> tuple[str, ...]:
    size = world_size // copies
    if plan.world_size != size and copies > 1:
        return (
            f"the plan is for {plan.world_size} ranks and each of the {copies} replicas has {size} of the "
            f"process group's {world_size}. Plan for {size}, with "
            f"shardrec.plan(model, shardrec.Topology(ranks_per_host={size}))",
        )
    if plan.world_size != size:
        return (
            f"the plan is for {plan.world_size} ranks and the process group has {size}. Plan for {size}, "
            f"or start {plan.world_size} ranks",
        )
    return tuple(plan.table_faults(table_shapes(model)))


def agree_on_plan(plan: ShardingPlan, faults: Sequence[str], ranks: Ranks, what: str = _START) -> None:
    """Raise on every rank if any rank's plan has ``faults``, or differs from another's: no rank may continue and
    wait."""
    theirs, fingerprints = zip(*all_gather(("; ".join(faults), plan.fingerprint), ranks, what), strict=True)
    if any(theirs):
        raise PlanError(faults or by_rank(theirs))
    differing = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if differing:
        raise PlanError(
            f"the plan of rank(s) {', '.join(map(str, differing))} differs from rank 0's. Make the plan on one rank "
            "and send it to the others, or save and load it"
        )


def agree_on_values(
    collections: Mapping[str, Collection], plan: ShardingPlan, copies: Sequence[Sequence[int]], ranks: Ranks
) -> None:
    """Raise on every rank if a cut table has other values on some of the ranks that share a copy: each keeps a part."""
    checksums = dict[str, int]()
    for path, collection in collections.items() if ranks.world_size > 1 else ():
        numbers = {qualified_name(path, name): number for name, number in value_checksums(collection).items()}
        checksums |= {name: number for name, number in numbers.items() if not plan.by_name[name].replicated}
    if not checksums:
        return
    of_ranks = all_gather(list(checksums.values()), ranks, _START)
    for rank, first in ((rank, copy[0]) for copy in copies for rank in copy):
        for name, number, right in zip(checksums, of_ranks[rank], of_ranks[first], strict=True):
            if number != right:
                raise ConfigError(
                    f"table {name!r} has other values on rank {rank} than on rank {first}, and each rank keeps its "
                    "own part of it: give all ranks one seed before the model is built, or "
                    "broadcast one rank's values before shardrec.shard"
                )


def with_sharded(model: nn.Module, replaced: dict[int, ShardedCollection], device: torch.device) -> nn.Module:
    """The model with sharded collections instead of the modules with these ids, and the rest of it on ``device``."""
    model = put_in_place(model, replaced)
    draw_dense(model, device)
    model.to(device)  # a sharded collection stays where it is
    annotate_for_dynamo(model)
    return model


def put_in_place(model: nn.Module, replaced: Mapping[int, nn.Module]) -> nn.Module:
    """The model, with other modules instead of the modules with these ids."""
    for module in model.modules():
        if isinstance(replaced.get(id(module)), ShardedCollection):
            for weight in module.parameters():
                take_over_steps(weight)  # its optimizer is fused, and nothing is to keep it alive
    if id(model) in replaced:
        return replaced[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in replaced:
                setattr(parent, name, replaced[id(child)])
    return model
