"""``model.reshard``: another plan while training goes on, all or nothing. It is a load whose files are the ranks.

::

    agree      on the plan; on what every rank holds, a manifest whose file numbers are ranks
    build      the lookups and tables of the new plan, beside the old ones
    read       ids, then rows with their states: from this rank's memory, or from the others' (messages.py)
    agree      that all of it is there; until then an error on any rank undoes what was built
    commit     on each rank by itself: what knows the model's parameters follows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice

import torch
from torch import nn

from shardrec.checkpoint.agree import Ranks
from shardrec.checkpoint.files import DTYPES
from shardrec.checkpoint.ids import Moves, dynamic_tables
from shardrec.checkpoint.manifest import Manifest, Read, SavedPart, SavedTensor
from shardrec.checkpoint.messages import Messages
from shardrec.checkpoint.optimizer import optimizer_groups, optimizer_state, state_targets
from shardrec.checkpoint.parts import HeldTensor, as_matrix
from shardrec.checkpoint.save import merged, of_all_ranks, step_counts, wait_for_save
from shardrec.checkpoint.state import parameter_infos, table_tensors
from shardrec.errors import ConfigError, PlanError
from shardrec.exchange.operators import Program
from shardrec.layout import ShardingPlan
from shardrec.lookup.shards import ShardLookup
from shardrec.modules.annotate import annotate_for_dynamo
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.convert import agree_on_plan
from shardrec.modules.model import ShardedModel

__all__ = ["reshard_model"]

Optimizer = torch.optim.Optimizer

_REMEDY = "the model has its old plan and goes on"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def reshard_model(model: ShardedModel, plan: ShardingPlan, optimizer: Optimizer | None = None) -> int:
    """See :meth:`ShardedModel.reshard`."""
    wait_for_save(model)
    agree_on_plan(plan, _plan_faults(model, plan), model.context.headers)
    changed = _changed(model, plan)
    if not changed:
        model.plan = plan
        return 0
    ranks = Ranks(model.group, model.context.device)
    held: dict[str, HeldTensor] = {}

    def describe() -> Manifest:
        """What this rank holds."""
        _refuse_unused(model)
        states, numbers = optimizer_state(model, optimizer)
        held.update(_tensors(model, plan) | states)
        return _described(model, optimizer, held, numbers, ranks.rank)

    described = ranks.agree("reshard", describe, remedy=_REMEDY)
    move = _Move(model, optimizer, ranks, held, described)
    with ExitStack() as stack, torch.no_grad():
        before = [(collection, collection.tables(), collection.replicas) for collection in changed]
        kept_maps = [id_map for one in changed if one.id_maps for id_map in one.id_maps.maps.values()]
        ranks.agree("reshard", lambda: move.build(plan, changed, stack), remedy=_REMEDY)
        messages = Messages(
            [part for tensor in held.values() for part in tensor.parts], model.context.collectives, model.context.device
        )
        moves = Moves(model, move.manifest, kept_maps)
        messages.run(moves.finding())
        ranks.agree("reshard", lambda: messages.check(moves.place), remedy=_REMEDY)
        messages.run(move.reads(moves))
        ranks.agree("reshard", messages.check, remedy=_REMEDY)
        stack.pop_all()
    _commit(model, plan, move.manifest, before)
    return messages.received


def _plan_faults(model: ShardedModel, plan: ShardingPlan) -> list[str]:
    size = model.context.collectives.world_size
    if plan.world_size != size:
        return [f"the plan is for {plan.world_size} ranks and the model is on {size}; plan for {size}"]
    try:
        plan.check_tables({table.name: (table.num_embeddings, table.embedding_dim) for table in model.plan.tables})
    except PlanError as error:
        return list(error.faults)
    return [fault for collection in model.sharded_collections for fault in collection.plan_faults(plan)]


def _changed(model: ShardedModel, plan: ShardingPlan) -> list[ShardedCollection]:
    """The collections of which a table is cut or placed otherwise, or whose rows are summed on other hosts."""
    if model.plan.topology != plan.topology:
        return list(model.sharded_collections)
    tables = {change.name for change in model.plan.diff(plan)}
    return [one for one in model.sharded_collections if tables & {table.name for table in one.table_layouts.values()}]


def _tensors(model: ShardedModel, plan: ShardingPlan) -> dict[str, HeldTensor]:
    """Tables with their states, and the ids of those that change."""
    tensors = table_tensors(model)
    changes = {change.name for change in model.plan.diff(plan)}
    for table in dynamic_tables(model):
        if table.layout.name in changes:
            tensors |= table.held()
    return tensors


def _refuse_unused(model: ShardedModel) -> None:
    """Raise for lookups and gradients of the old plan that are still to be used."""
    for collection in model.sharded_collections:
        if not isinstance(collection.shards, ShardLookup):
            raise ConfigError(
                "reshard inside of shardrec.detect_anomaly, which watches the old lookups; leave it first"
            )
        tables = collection.tables()
        waits = any(deferred.backwards for deferred in collection.shards.deferred()) or any(
            parameter.grad is not None
            for name in collection.fused_optimizers()
            for parameter in tables[name].parameters()
        )
        if waits:
            raise ConfigError(
                "tables have gradients that no step has applied; call model.fused_optimizer.step() before reshard, or "
                "model.zero_grad() to drop them"
            )
    if model.context.queue.unused:
        raise ConfigError(
            f"{len(model.context.queue.unused)} lookups were made whose values were not used yet; use or drop them "
            "before reshard, between a step and the next forward"
        )


def _described(
    model: ShardedModel,
    optimizer: Optimizer | None,
    held: Mapping[str, HeldTensor],
    numbers: Mapping[str, float],
    rank: int,
) -> Manifest:
    """A manifest of what a rank holds: a part's file is the rank, and its first byte the part's number."""
    tensors: dict[str, SavedTensor] = {}
    start = 0
    for name, tensor in held.items():
        if tensor.dtype not in _NAMES:
            raise ConfigError(f"{name} is {tensor.dtype}, which does not move; convert it before")
        parts = {
            part.rect: SavedPart(rect=part.rect, file=rank, start=start + number)
            for number, part in reversed(list(enumerate(tensor.parts)))
            if part.saved
        }
        tensors[name] = SavedTensor(dtype=_NAMES[tensor.dtype], shape=tensor.shape, parts=tuple(parts.values()))
        start += len(tensor.parts)
    return Manifest(
        data="",
        tensors=tensors,
        numbers=numbers,
        step_counts=step_counts(model),
        param_groups=optimizer_groups(model, optimizer),
        extra={},
    )


class _Move:
    """The way of this rank's rows from the old plan to the new one.

    Args:
        model: under the old plan.
        optimizer: an ordinary one.
        ranks: of the model.
        held: what this rank holds.
        described: what each rank holds.

    Attributes:
        manifest: what is read from where; from this rank, where it holds the same.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: Optimizer | None,
        ranks: Ranks,
        held: Mapping[str, HeldTensor],
        described: list[Manifest],
    ) -> None:
        self._model, self._optimizer, self._held = model, optimizer, held
        self._trained = {one for one in model.dense_parameters() if one.requires_grad}
        tensors: dict[str, SavedTensor] = {}
        for manifest in described:
            for name, tensor in manifest.tensors.items():
                tensors[name] = merged(tensors.get(name, tensor), tensor, name)
        numbers = {}
        start = 0
        for name, held_tensor in held.items():
            for number, part in enumerate(held_tensor.parts):
                numbers[name, part.rect] = SavedPart(rect=part.rect, file=ranks.rank, start=start + number)
            start += len(held_tensor.parts)
        for name, tensor in tensors.items():
            parts = tuple(numbers.get((name, part.rect), part) for part in tensor.parts)
            tensors[name] = replace(tensor, parts=parts)
        self.manifest = replace(of_all_ranks(described, model), tensors=tensors)
        self._targets: dict[str, HeldTensor] = {}

    def build(self, plan: ShardingPlan, changed: list[ShardedCollection], stack: ExitStack) -> None:
        """Make the lookups and tables of the new plan, and put them in the model."""
        faults = [
            fault for name, tensor in self.manifest.tensors.items() for fault in islice(tensor.uncovered(name), 1)
        ]
        if faults:
            raise ConfigError(
                f"the ranks do not hold all of {'; '.join(faults[:3])}; make a training step on every rank"
            )
        for collection in changed:
            collection.replan(plan, stack)
        if self._optimizer is not None:
            self._follow(self._optimizer, stack)
        known = (
            set()
            if self._optimizer is None
            else {one for group in self._optimizer.param_groups for one in group["params"]}
        )
        fresh = {one for one in self._model.dense_parameters() if one.requires_grad} - self._trained
        if fresh - known:
            infos = parameter_infos(self._model)
            names = sorted(infos[id(one)].name for one in fresh - known)
            raise ConfigError(
                f"tables {', '.join(names[:3])} move and are trained by an ordinary optimizer, whose states move with "
                "them: call model.reshard(plan, optimizer) with the one that has their parameters"
            )
        tensors = table_tensors(self._model) | state_targets(self._model, self._optimizer, self.manifest)
        self._targets = {name: tensor for name, tensor in tensors.items()}

    def _follow(self, optimizer: Optimizer, stack: ExitStack) -> None:
        """Give an ordinary optimizer the parameters of the new plan."""
        state = {parameter: dict(states) for parameter, states in optimizer.state.items()}
        groups = [(group["params"], list(group["params"])) for group in optimizer.param_groups]

        def restore() -> None:
            optimizer.state.clear()
            optimizer.state.update(state)
            for params, before in groups:
                params[:] = before

        stack.callback(restore)
        infos = parameter_infos(self._model)
        for parameter in state:
            if id(parameter) not in infos:
                del optimizer.state[parameter]
        parameters = {id(one): one for one in self._model.parameters()}
        for (params, before), group in zip(groups, self.manifest.param_groups or (), strict=True):
            held, known = set(group["parameters"]), set(map(id, before))
            params[:] = [one for one in before if id(one) in infos] + [
                parameters[number] for number, info in infos.items() if number not in known and info.name in held
            ]

    def reads(self, moves: Moves) -> Iterator[Read]:
        """What this rank wants and does not have where it wants it."""
        for name, target in self._targets.items():
            before = {
                part.rect: part.values.data_ptr() for part in (self._held[name].parts if name in self._held else ())
            }
            for part in target.parts:
                if before.get(part.rect) != part.values.data_ptr():
                    yield from moves.reads(name, part, as_matrix(part.values))


def _commit(
    model: ShardedModel,
    plan: ShardingPlan,
    manifest: Manifest,
    before: Sequence[tuple[ShardedCollection, Mapping[str, nn.Module], object]],
) -> None:
    """The new plan takes effect."""
    for collection, tables, replicas in before:
        collection.load_step_counts(manifest.step_counts)
        if replicas is not collection.replicas:
            Program.expire(
                collection,
                "this program knows replicated tables of the plan before model.reshard(), which are others now; script "
                "or compile the model again",
            )
        _annotate(collection, replicas is not collection.replicas)
        held = {id(one) for table in collection.tables().values() for one in table.parameters()}
        for table in tables.values():
            for parameter in table.parameters():
                if id(parameter) not in held:  # programs may have it, whose memory is let go
                    parameter.data = parameter.data.new_empty(0)
    model.follow_plan(plan)


def _annotate(collection: ShardedCollection, replicas_changed: bool) -> None:
    """Mark the new tables for torch.compile as the old ones were."""
    traced = vars(collection).get("_traced")
    if traced is not None and replicas_changed:
        vars(collection).pop("_traced")
    if traced is not None or hasattr(collection, "_is_fsdp_managed_module"):
        annotate_for_dynamo(collection, mode="boundary" if traced is None else "traced")
