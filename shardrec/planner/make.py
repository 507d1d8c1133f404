"""``shardrec.plan``: from a model to a sharding plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology
from shardrec.planner.balance import TableSize, balanced_plan
from shardrec.planner.constraint import Constraint

if TYPE_CHECKING:
    from torch import nn

__all__ = ["plan"]


def plan(
    model: nn.Module,
    topology: Topology | None = None,
    *,
    batch_size: int = 4096,
    constraints: Mapping[str, Constraint] | None = None,
) -> ShardingPlan:
    """Plan where each table of a model's embedding collections goes.

    The result is a pure function of the arguments, so every rank may compute it for itself.

    Args:
        model: holds ``torchrec.EmbeddingBagCollection`` or ``EmbeddingCollection`` modules; meta tables are fine.
        topology: the ranks; default: those of the default process group (one rank without a group).
        batch_size: samples per rank in a step.
        constraints: limits by table name (``"path.to.collection.table"``) or pattern with ``*`` and ``?``.

    Raises:
        ConfigError: if the model has no collection, or a constraint is for an unknown table or cannot be met.
    """
    from shardrec.modules.discover import table_configs

    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    sizes = {
        name: TableSize(
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            features=len(config.feature_names),
        )
        for name, config in table_configs(model).items()
    }
    if not sizes:
        raise ConfigError(
            f"{type(model).__name__} holds no torchrec embedding collection to plan; was it sharded already?"
        )
    return balanced_plan(sizes, topology or _current_topology(), batch_size=batch_size, constraints=constraints)


def _current_topology() -> Topology:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return Topology.of_world(dist.get_world_size())
    return Topology()
