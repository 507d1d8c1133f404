"""``shardrec.plan`` and ``replan``: from a model, or from tables, to a sharding plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology
from shardrec.planner.constraint import Constraint
from shardrec.planner.cost import Profile, TableLoad
from shardrec.planner.infeasible import refuse
from shardrec.planner.planner import Planner
from shardrec.planner.replanning import replan_tables
from shardrec.planner.solve import SolveLimits, solve

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def plan(
    model: nn.Module,
    topology: Topology | None = None,
    *,
    batch_size: int = 4096,
    constraints: Mapping[str, Constraint] | None = None,
    profile: Profile | None = None,
    poolings: Mapping[str, float] | None = None,
    sample_batches: Iterable[KeyedJaggedTensor] | None = None,
    limits: SolveLimits | None = None,
    device: torch.device | str | None = None,
    dedup: bool = True,
) -> ShardingPlan:
    """Plan where each table of a model's embedding collections goes.

    Without a time limit the result is a pure function of the arguments, so every rank may compute it independently.

    Args:
        model: holds ``torchrec.EmbeddingBagCollection`` or ``EmbeddingCollection`` modules. Meta tables are fine.
        topology: the ranks. Default: the default process group's ranks (one rank without a group).
        batch_size: samples per rank in a step.
        constraints: limits by table name (``"path.to.collection.table"``, or ``"table"`` where one collection has it)
            or pattern with ``*`` and ``?``.
        profile: time coefficients (``shardrec calibrate``). Default: the coefficients of the topology's machine.
        poolings: ids of a sample, by feature or table. Default: 1, or as in ``sample_batches``.
        sample_batches: batches of one rank, from which the planner estimates the ids per sample, how often ids repeat,
            and which rows they hit. A few thousand samples are enough.
        limits: when to stop searching.
        device: of the tables, unless the topology has a machine. Default: the default of :func:`shardrec.shard`.
        dedup: the argument ``dedup`` that :func:`shardrec.shard` will get: sequence collections send each distinct id
            of a table once.

    Returns:
        The plan; :func:`shardrec.planner.explain`, ``to_html`` and ``to_png`` show its cost and the reasons for its
        cuts.

    Raises:
        ConfigError: if the model lacks collections, or a constraint names an unknown table or cannot be met.
        PlanError: if the tables do not fit. Names them and the remedies.
    """
    tables, kind = _tables_of(model, poolings, sample_batches, dedup), _device_type(model, device)
    ranks = topology or _current_topology()
    planner = Planner(tables, ranks, batch_size=batch_size, constraints=constraints, profile=profile, device=kind)
    return best_plan(planner, limits)


def plan_tables(
    tables: Mapping[str, TableLoad],
    topology: Topology,
    *,
    batch_size: int = 4096,
    constraints: Mapping[str, Constraint] | None = None,
    profile: Profile | None = None,
    limits: SolveLimits | None = None,
) -> ShardingPlan:
    """Plan tables that are known by their shapes and loads. See :func:`plan`.

    Args:
        tables: by name.
        topology: the ranks; without a machine they are CUDA devices where torch sees one.
        batch_size: samples per rank in a step.
        constraints: by table name or pattern.
        profile: time coefficients.
        limits: when to stop searching.
    """
    planner = Planner(tables, topology, batch_size=batch_size, constraints=constraints, profile=profile)
    return best_plan(planner, limits)


def replan(
    old_plan: ShardingPlan,
    model: nn.Module,
    *,
    max_moved_bytes: float,
    batch_size: int = 4096,
    constraints: Mapping[str, Constraint] | None = None,
    profile: Profile | None = None,
    poolings: Mapping[str, float] | None = None,
    sample_batches: Iterable[KeyedJaggedTensor] | None = None,
    limits: SolveLimits | None = None,
    device: torch.device | str | None = None,
    dedup: bool = True,
) -> ShardingPlan:
    """A better plan for the same ranks that moves few bytes.

    A byte is moved if a rank holds a weight in the new plan that it does not hold in the old one. Optimizer state moves
    with it.

    Args:
        old_plan: in use now.
        model: as for :func:`plan`. The other arguments of ``plan`` are accepted as well.
        max_moved_bytes: most bytes of weights and optimizer state that ranks may have to receive.
        batch_size: samples per rank in a step.
        constraints: by table name or pattern. They hold for the tables that move.
        profile: time coefficients.
        poolings: ids of a sample.
        sample_batches: batches as one rank gets them.
        limits: when to stop searching.
        device: where the tables will be.
        dedup: as :func:`shardrec.shard` will be told.

    Returns:
        The plan, with the bound of a new plan.
    """
    tables, kind = _tables_of(model, poolings, sample_batches, dedup), _device_type(model, device)
    old_plan.check_tables({name: (load.num_embeddings, load.embedding_dim) for name, load in tables.items()})
    ranks = old_plan.topology
    planner = Planner(tables, ranks, batch_size=batch_size, constraints=constraints, profile=profile, device=kind)
    return replan_tables(planner, old_plan, max_moved_bytes=max_moved_bytes, limits=limits)


def best_plan(planner: Planner, limits: SolveLimits | None) -> ShardingPlan:
    """The best plan that is found. Raises PlanError if there is none. Tables are in tier ``"cached"``, without a
    constraint that says so, only if there is no plan otherwise."""
    solution, chosen = solve(planner.problem(), limits), planner
    if solution is None and planner.machine.kind == "cuda":
        chosen = planner.changed(spills=True)
        solution = solve(chosen.problem(), limits)
    if solution is None:
        refuse(planner)
    return chosen.finished(solution)


def _tables_of(
    model: nn.Module, poolings: Mapping[str, float] | None, batches: Iterable[KeyedJaggedTensor] | None, dedup: bool
) -> dict[str, TableLoad]:
    from shardrec.planner.describe import sampled_features, table_loads  # with torch

    sampled = None if batches is None else sampled_features(batches)
    tables = table_loads(model, poolings=poolings, sampled=sampled, dedup=dedup)
    if not tables:
        raise ConfigError(
            f"{type(model).__name__} holds no torchrec embedding collection to plan. Was it sharded already?"
        )
    return tables


def _current_topology() -> Topology:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return Topology.of_world(dist.get_world_size())
    return Topology()


def _device_type(model: nn.Module, device: torch.device | str | None) -> str:
    import torch

    from shardrec.layout.discover import default_device  # with torchrec

    return (default_device(model) if device is None else torch.device(device)).type
