"""``model.replan``: a plan for the ids that training sees now, if the move to it pays. The first rank decides."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.exchange.agree import on_all_ranks, on_threads
from shardrec.exchange.transport import timeout_s
from shardrec.layout import ShardingPlan
from shardrec.modules.sharded_model import ShardedModel
from shardrec.planner.constraint import Constraint, constraints_by_table, constraints_of
from shardrec.planner.describe import Sampled, loads_of, sampled_features
from shardrec.planner.planner import Planner
from shardrec.planner.replanning import Replanned, paying_plan
from shardrec.planner.solve import SolveLimits

_LIMITS = SolveLimits(seconds=10)
"""Of each of the two searches: the other ranks wait."""
_REMEDY = "the model keeps its old plan and continues"


def replan_model(
    model: ShardedModel,
    sample_batches: Iterable[KeyedJaggedTensor],
    optimizer: torch.optim.Optimizer | None,
    *,
    steps: float,
    min_gain: float,
    constraints: Mapping[str, Constraint] | None = None,
    limits: SolveLimits | None = _LIMITS,
    **prices: Any,
) -> Replanned | None:
    """See :meth:`ShardedModel.replan`."""
    ranks, batches = model.ranks, list[KeyedJaggedTensor]()
    tables = [table for collection in model.sharded_collections for table in collection.planned_tables()]
    features = {feature for table in tables for feature in table.config.feature_names}
    sampled = dict[str, Sampled]()

    def look() -> dict[str, float]:
        """The ids of a sample of this rank, by feature."""
        for name, value in (("steps", steps), ("min_gain", min_gain)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}. Give a number above 0")
        batches.extend(sample_batches)
        sampled.update(sampled_features(batches))
        return {feature: each.pooling for feature, each in sampled.items() if feature in features}

    def decide() -> tuple[Any, ...] | None:
        """The fields of the change after the old plan, as values that can be sent."""
        of_ranks: dict[str, list[float]] = {}
        for feature, pooling in chain.from_iterable(each.items() for each in seen):
            of_ranks.setdefault(feature, []).append(pooling)
        poolings = {feature: fmean(each) for feature, each in of_ranks.items()}
        loads = loads_of(tables, poolings=poolings, sampled=sampled)
        planner = Planner(
            loads,
            model.plan.topology,
            batch_size=max(1, round(fmean(batch.stride() for batch in batches))),
            constraints=constraints_of(model.context.options.dynamic_ids)
            | constraints_by_table(loads, constraints, ranks.world_size),
            device=model.context.device.type,
            **prices,
        )
        change = paying_plan(planner, model.plan, steps=steps, min_gain=min_gain, limits=limits)
        return None if change is None else (change.new.to_json(), *change[2:])

    seen = on_all_ranks(look, ranks, "replan", remedy=_REMEDY)
    wait_s = 60.0 if ranks.group is None else timeout_s(ranks.group, model.context.device) / 4
    decision = on_threads(lambda: decide() if ranks.is_lead else None, ranks, "replan", wait_s)
    decided = on_all_ranks(decision.result, ranks, "replan", remedy=_REMEDY)[0]
    if decided is None:
        return None
    change = Replanned(model.plan, ShardingPlan.from_json(decided[0]), *decided[1:])
    begin = time.perf_counter()
    model.reshard(change.new, optimizer)
    return change._replace(pause_ms=1e3 * (time.perf_counter() - begin))
