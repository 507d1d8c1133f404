"""``model.reshard``: another plan during training, all or nothing. It is a load with ranks as its files.

::

    agree      on the plan, and on each rank's contents: a manifest with ranks as file numbers
    build      the lookups and tables of the new plan, beside the old ones
    read       ids, then rows with their states: from this rank's memory, or from another's (remote_reads.py)
    commit     after an agreement that all of it is there, each rank by itself: what knows the parameters follows

Until the last agreement an error on any rank undoes what was built, and nothing of the old plan was written to.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from shardrec.checkpoint.ids import Moves, dynamic_tables
from shardrec.checkpoint.manifest import Manifest, Read
from shardrec.checkpoint.optimizer import optimizer_groups, optimizer_state, state_targets
from shardrec.checkpoint.parts import HeldTensor, as_matrix
from shardrec.checkpoint.remote_reads import Messages
from shardrec.checkpoint.save import described_parts, of_all_ranks, step_counts, wait_for_save
from shardrec.checkpoint.state import parameter_infos, table_tensors
from shardrec.errors import ConfigError
from shardrec.exchange.agree import on_all_ranks
from shardrec.layout import ShardingPlan
from shardrec.modules.annotate import annotate_for_dynamo
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.inventory import Kind
from shardrec.modules.operators import Program
from shardrec.modules.shard import agree_on_plan
from shardrec.modules.sharded_model import ShardedModel

Optimizer = torch.optim.Optimizer

_REMEDY = "the model keeps its old plan and continues"


@torch.inference_mode(False)  # an inference tensor could not be written later
def reshard_model(model: ShardedModel, plan: ShardingPlan, optimizer: Optimizer | None = None) -> int:
    """See :meth:`ShardedModel.reshard`."""
    wait_for_save(model)
    ranks = model.ranks
    agree_on_plan(plan, _plan_faults(model, plan), ranks, "reshard")
    plan = plan.on_one_rank() if plan.world_size == 1 else plan
    changes = {change.name for change in model.plan.diff(plan)}
    elsewhere = model.plan.topology != plan.topology  # rows may be summed on other hosts
    changed = [
        collection
        for collection in model.sharded_collections
        if elsewhere or changes & {layout.name for layout in collection.table_layouts.values()}
    ]
    if not changed:
        model.plan = plan
        return 0
    held: dict[str, HeldTensor] = {}
    (frozen,) = (item for item in model.inventory() if item.kind is Kind.FROZEN)

    def describe() -> Manifest:
        _refuse_unused(model)
        states, numbers = optimizer_state(model, optimizer)
        stay = tuple(f"ids.{table.path}." for table in dynamic_tables(model) if table.layout.name not in changes)
        held.update({name: tensor for name, tensor in table_tensors(model).items() if not name.startswith(stay)})
        held.update(states)
        return Manifest(
            data="",
            tensors=described_parts(held, ranks.rank, saved=True),
            numbers=numbers,
            step_counts=step_counts(model),
            param_groups=optimizer_groups(model, optimizer),
            extra={Kind.FROZEN.value: frozen.get()},
        )

    described = on_all_ranks(describe, ranks, "reshard", remedy=_REMEDY)
    manifest = of_all_ranks(described, model)
    tensors = dict(manifest.tensors)
    for name, here in described_parts(held, ranks.rank, saved=False).items():  # read here, not from others that hold it
        of_rect = {part.rect: part for part in here.parts}
        tensors[name] = replace(here, parts=tuple(of_rect.get(part.rect, part) for part in tensors[name].parts))
    manifest = replace(manifest, tensors=tensors)
    before = [(collection, collection.tables(), collection.replicas) for collection in changed]
    targets: dict[str, HeldTensor] = {}

    def build() -> None:
        trained = {parameter for parameter in model.dense_parameters() if parameter.requires_grad}
        in_backward = any(getattr(parameter, "_in_backward_optimizers", ()) for parameter in trained)
        for collection in changed:
            collection.replan(plan, stack)
        frozen.set([name for rank_manifest in described for name in rank_manifest.extra[Kind.FROZEN.value]])
        known = set() if optimizer is None else _follow(model, optimizer, manifest, stack)
        fresh = {parameter for parameter in model.dense_parameters() if parameter.requires_grad} - trained - known
        if fresh:
            infos = parameter_infos(model)
            names = ", ".join(sorted({infos[id(parameter)].name for parameter in fresh})[:3])
            of_optimizer = (
                "an optimizer in backward that was given after shardrec.shard and does not move: give it before"
                if in_backward
                else "an ordinary optimizer, and its states move with them: call model.reshard(plan, optimizer) with it"
            )
            raise ConfigError(f"{names} move and are trained by {of_optimizer}")
        targets.update(table_tensors(model) | state_targets(model, optimizer, manifest))

    def wanted() -> Iterator[Read]:
        """What this rank does not have where it wants it. ``place`` has written the ids."""
        moves.place()
        for name, target in ((name, target) for name, target in targets.items() if not name.startswith("ids.")):
            known = {part.rect: part.values.data_ptr() for part in held[name].parts} if name in held else {}
            for part in target.parts:
                if known.get(part.rect) != part.values.data_ptr():
                    yield from moves.reads(name, part, as_matrix(part.values))

    with ExitStack() as stack, torch.no_grad():
        kept = [id_map for maps in (each.id_maps for each in changed) if maps for id_map in maps.maps.values()]
        on_all_ranks(build, ranks, "reshard", remedy=_REMEDY)
        moves = Moves(model, manifest, kept, model.tables_without_room)
        parts = [part for tensor in held.values() for part in tensor.parts]
        messages = Messages(parts, ranks, model.context, _REMEDY)
        messages.run(moves.finding())
        messages.run(wanted())
        stack.pop_all()
    for collection, tables, replicas in before:
        collection.load_step_counts(manifest.step_counts)
        _let_go(collection, tables, has_replicas=replicas is collection.replicas)
    model.follow_plan(plan)
    return messages.received


def _plan_faults(model: ShardedModel, plan: ShardingPlan) -> list[str]:
    size = model.context.collectives.world_size
    if plan.world_size != size:
        return [f"the plan is for {plan.world_size} ranks and the model is on {size}. Plan for {size}"]
    tables = {table.name: (table.num_embeddings, table.embedding_dim) for table in model.plan.tables}
    return plan.table_faults(tables) or [
        fault for collection in model.sharded_collections for fault in collection.plan_faults(plan)
    ]


def _refuse_unused(model: ShardedModel) -> None:
    """Raise for lookups and gradients of the old plan that are still to be used."""
    if model.context.life_cycle.rows_looked_up:
        raise ConfigError("shardrec.detect_anomaly watches the lookups of one plan. Leave it before reshard")
    for collection in model.sharded_collections:
        tables = collection.tables()
        fused = [parameter for name in collection.fused_optimizers() for parameter in tables[name].parameters()]
        if any(part.backwards for part in collection.shards.deferred()) or any(
            parameter.grad is not None for parameter in fused
        ):
            raise ConfigError(
                "tables have gradients that no step has applied. Call model.fused_optimizer.step() before reshard, or "
                "model.zero_grad() to drop them"
            )
        if collection.portable_programs:
            gc.collect()  # a program is often garbage
        if collection.portable_programs:
            raise ConfigError(
                "a portable program of this model lives, and would go on with the rows of the old plan: let go of it "
                "before reshard, and script the model again after it"
            )
    unused = sum(call is not None and call.error is None for call in (known() for known in model.context.step.unused))
    if unused:
        raise ConfigError(f"the values of {unused} lookups were not used yet. Use or drop them before reshard")


def _follow(model: ShardedModel, optimizer: Optimizer, manifest: Manifest, stack: ExitStack) -> set[torch.nn.Parameter]:
    """Give an ordinary optimizer the parameters of the new plan, and return them all. ``stack`` undoes it."""
    state = {parameter: dict(states) for parameter, states in optimizer.state.items()}
    keyed: dict[str, torch.nn.Parameter] = optimizer.params if isinstance(optimizer, KeyedOptimizer) else {}
    lists, inner, keyed_before = [group["params"] for group in optimizer.param_groups], optimizer, dict(keyed)
    while isinstance(inner, OptimizerWrapper):
        lists += [inner._replicate_params] if isinstance(inner, GradientClippingOptimizer) else []
        inner = inner._optimizer
    lists_before = [list(params) for params in lists]

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        for params, before in zip(lists, lists_before, strict=True):
            params[:] = before
        keyed.clear()
        keyed.update(keyed_before)

    stack.callback(restore)
    infos = parameter_infos(model)
    names = {parameter: infos[id(parameter)].name for parameter in model.parameters()}
    gone = {parameter for before in lists_before for parameter in before} - names.keys()
    for parameter in state.keys() & gone:
        del optimizer.state[parameter]
    known = dict[torch.nn.Parameter, None]()
    for params, group in zip(lists, manifest.param_groups or (), strict=False):
        trained = set(group["parameters"])
        stays = dict.fromkeys(parameter for parameter in params if parameter not in gone)
        params[:] = stays | dict.fromkeys(parameter for parameter, name in names.items() if name in trained)
        known |= dict.fromkeys(params)
    for params in lists[len(optimizer.param_groups) :]:  # of clipping
        params[:] = known
    for name in [name for name, parameter in keyed.items() if parameter in gone]:
        del keyed[name]  # in place, for wrappers have it
    fresh = known.keys() - {*keyed.values()}
    keyed.update({name: parameter for name, parameter in model.named_parameters() if parameter in fresh})
    return {*known}


def _let_go(collection: ShardedCollection, tables: Mapping[str, torch.nn.Module], *, has_replicas: bool) -> None:
    """Have compiled code know the tables of the new plan, and let go of the memory of the old ones."""
    traced = vars(collection).get("_traced")
    if not has_replicas:
        vars(collection).pop("_traced", None)
        Program.expire(
            collection,
            "this program has replicated tables of the plan before model.reshard(), and they are others now: script or "
            "compile the model again",
        )
    if traced is not None or hasattr(collection, "_is_fsdp_managed_module"):
        annotate_for_dynamo(collection, mode="boundary" if traced is None else "traced")
    held = set(collection.parameters())
    for parameter in (
        parameter for table in tables.values() for parameter in table.parameters() if parameter not in held
    ):
        parameter.data = parameter.data.new_empty(0)  # programs may have it
