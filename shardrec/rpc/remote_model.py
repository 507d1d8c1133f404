"""A trainer's model with its cut tables on embedding servers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardrec.checkpoint.save import Written
from shardrec.errors import CheckpointError, ConfigError, PeerError, ShardrecError
from shardrec.exchange.agree import Ranks, all_gather, ranks_of, same_everywhere
from shardrec.exchange.bad_ids import policies_of
from shardrec.exchange.batch import OnBadId
from shardrec.exchange.collectives import collectives_of
from shardrec.layout import ShardingPlan, Topology
from shardrec.layout.discover import collections_of, remappers_of, table_shapes
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.dense import DenseOptions, DenseWrap
from shardrec.modules.servers import Servers
from shardrec.modules.shard import (
    agree_on_plan,
    agree_on_values,
    features_of,
    sharded_collection,
    with_sharded,
)
from shardrec.modules.sharded_model import ShardedModel
from shardrec.rpc.messages import Connections
from shardrec.rpc.remote_storage import RemoteTable, remote_storage
from shardrec.rpc.server import fused_optimizers_of
from shardrec.rpc.trainer_collectives import RemoteCollectives
from shardrec.step.context import ExchangeOptions, ModelContext


class RemoteModel(ShardedModel):
    """The result of :func:`shardrec.shard` with ``servers``: the :class:`shardrec.ShardedModel` of one trainer.

    Its state_dict has whole tables, read from the servers. A checkpoint has the same form as the sharded model's, and
    either can load the other's: each server writes and reads its own shards, in a folder that all processes share.
    """

    _collectives: RemoteCollectives

    def flush(self) -> None:
        """Wait until the servers have made all the updates that this trainer has pushed.

        Raises:
            PeerError: if a server is gone or did not answer in time.
        """
        self._collectives.wait_for_updates()

    def server_statistics(self) -> list[dict[str, Any]]:
        """Per server, its description and statistics: requests, fused lookups made for them, updates."""
        servers = self._collectives.servers
        return [servers.call(number, "describe").wait() for number in range(len(servers))]

    def save_servers(self, data: Path, first: int) -> list[Written]:
        saved: list[Written] = []

        def save() -> None:
            for number in range(self.servers) if self._collectives.rank == 0 else ():
                call = self._collectives.servers.call(number, "save", str(data.absolute()), first + number)
                saved.append(call.wait())

        _on_all(self.ranks, self.flush)  # of all trainers, before any server saves
        _on_all(self.ranks, save)
        return saved

    def load_servers(self, folder: Path) -> None:
        def load() -> None:
            for number in range(self.servers) if self._collectives.rank == 0 else ():
                self._collectives.servers.call_replicas(number, "load", str(folder.absolute()))

        _on_all(self.ranks, self._collectives.end_updates)
        _on_all(self.ranks, load)


def shard_over_servers(
    model: nn.Module,
    plan: ShardingPlan | None,
    servers: Servers,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
    dedup: bool,
    dense: DenseWrap | DenseOptions,
    on_bad_id: OnBadId | Mapping[str, OnBadId],
    updates_at_step: bool,
) -> RemoteModel:
    """:func:`shardrec.shard` with servers, on a trainer with a running RPC agent (:mod:`shardrec._late_imports`)."""
    trainers = collectives_of(group)
    connections = Connections(servers)
    if plan is None:
        from shardrec.planner import plan as make_plan  # numpy, scipy and HiGHS: not for those who give a plan

        # Servers have their tables on the CPU.
        plan = make_plan(model, Topology.of_world(len(connections)), device="cpu", dedup=dedup)
    collections = collections_of(model)
    collectives = RemoteCollectives(trainers, connections, staleness=servers.staleness)
    collectives.updates_at_step = updates_at_step
    policies = policies_of(on_bad_id, (name for module in collections.values() for name in features_of(module)))
    context = ModelContext(collectives, device, ExchangeOptions(on_bad_id=policies, updates_at_step=updates_at_step))
    context.gradients.are_reduced = trainers.world_size == 1  # nothing to reduce
    everyone = (group or dist.group.WORLD) if trainers.world_size > 1 else None
    ranks = ranks_of(everyone, device)
    agree_on_plan(plan, _faults(plan, model, len(connections)), ranks)
    agree_on_values(collections, plan, [range(trainers.world_size)], ranks)
    collectives.session = same_everywhere(secrets.randbits(32), ranks)
    shifted = _after(plan, trainers.world_size)
    replaced: dict[int, ShardedCollection] = {}
    for number, (path, module) in enumerate(collections.items()):
        replaced[id(module)] = sharded_collection(
            module,
            shifted,
            dedup=dedup,
            path=path,
            device=device,
            group=group,
            context=context,
            storage=remote_storage(collectives, number),
        )
    remote_collections = list(replaced.values())
    collectives.rates = {optimizer: optimizer.lr for optimizer in fused_optimizers_of(remote_collections)}
    _on_all(ranks, lambda: _check_servers(plan, list(collections), collectives))
    for module in collections.values():
        _on_all(ranks, partial(_send_first_values, module, replaced[id(module)]))
    model = with_sharded(model, replaced, device)
    remote = RemoteModel(model, plan, context, everyone, dense=dense)
    remote._collectives, remote.servers = collectives, len(connections)
    return remote


def _send_first_values(module: nn.Module, collection: ShardedCollection) -> None:
    """Send the servers the values that an unsharded collection has. Where it is on meta, they keep their own."""
    for key, weight in module.named_parameters():
        table = collection.tables()[key.split(".")[1]]
        if isinstance(table, RemoteTable) and not weight.is_meta:
            table.write(weight.detach())


def _after(plan: ShardingPlan, trainers: int) -> ShardingPlan:
    """The plan of trainers and servers: trainers come first, and do not have shards."""
    tables = tuple(
        replace(table, shards=tuple(replace(shard, rank=shard.rank + trainers) for shard in table.shards))
        for table in plan.tables
    )
    return ShardingPlan(topology=Topology(ranks_per_host=plan.world_size + trainers), tables=tables)


def _faults(plan: ShardingPlan, model: nn.Module, servers: int) -> Sequence[str]:
    faults: list[str] = []
    if plan.world_size != servers:
        faults.append(
            f"the plan is for {plan.world_size} ranks and there are {servers} servers. Plan for as many as there "
            "are, with shardrec.plan(model, shardrec.Topology(ranks_per_host=...))"
        )
    if remappers_of(model):
        faults.append("a module keeps a map from ids to rows, and each trainer would learn another. Map ids beforehand")
    return faults + plan.table_faults(table_shapes(model))


def _check_servers(plan: ShardingPlan, paths: Sequence[str], collectives: RemoteCollectives) -> None:
    """Raise if a server is not what the plan and the model ask for."""
    servers = collectives.servers
    wanted = {
        "servers": len(servers),
        "plan": plan.fingerprint,
        "collections": list(paths),
        "optimizers": [repr(optimizer) for optimizer in collectives.rates],
    }
    for number in range(len(servers)):
        answer = servers.call(number, "describe").wait()
        for key, value in {"rank": number, **wanted}.items():
            if answer[key] != value:
                raise ConfigError(
                    f"server {servers.names[number][0]!r} has {key} {answer[key]!r} and this trainer {value!r}. Give "
                    "both the same model and plan"
                )


_CLASSES = (ShardrecError, ConfigError, CheckpointError, PeerError)


def _on_all(ranks: Ranks, work: Callable[[], None]) -> None:
    """Do ``work``, and raise on every trainer what goes wrong on any: also that a server is gone."""
    error: ShardrecError | None = None
    try:
        work()
    except ShardrecError as raised:
        error = raised
    errors = [theirs for theirs in all_gather(error, ranks, "servers' work") if theirs is not None]
    if errors:
        kind = max((cls for theirs in errors for cls in _CLASSES if isinstance(theirs, cls)), key=_CLASSES.index)
        raise kind("; ".join(sorted({str(theirs) for theirs in errors}))) from error
