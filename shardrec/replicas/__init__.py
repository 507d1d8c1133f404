"""Replicas of a sharded model: copies of its tables, which are averaged every few steps.

::

    replicas.py          the option, the process groups, and the averaging of the copies
    replicated_model.py  the model whose replicas are ranks of one process group
    elastic.py           the agreement between jobs, each a replica, that come and go
    elastic_model.py     the model whose replicas are such jobs
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from shardrec.exchange.context import ModelContext
from shardrec.layout import ShardingPlan
from shardrec.modules import ShardedModel
from shardrec.modules.dense import DenseOptions, DenseWrap
from shardrec.replicas.elastic_model import ElasticModel
from shardrec.replicas.replicas import ReplicaGroups, Replicas
from shardrec.replicas.replicated_model import ReplicatedModel

__all__ = ["ElasticModel", "ReplicaGroups", "Replicas", "ReplicatedModel"]


def replica_of(
    module: nn.Module,
    plan: ShardingPlan,
    context: ModelContext,
    group: dist.ProcessGroup,
    *,
    groups: ReplicaGroups,
    options: Replicas,
    dense: DenseWrap | DenseOptions,
) -> ShardedModel:
    """The model of one replica, of the class that its options ask for; the other arguments are the model's."""
    if options.elastic is not None:
        return ElasticModel(module, plan, context, group, options=options, dense=dense)
    return ReplicatedModel(module, plan, context, group, groups=groups, options=options, dense=dense)
