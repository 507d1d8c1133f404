"""``model.replan``: a plan for the ids that training sees now, if the move to it pays. The first rank decides."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._versions import check_extra
from shardrec.checkpoint.agree import Ranks
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan
from shardrec.modules.dynamic import constraints_of
from shardrec.modules.model import ShardedModel
from shardrec.planner.constraint import Constraint, constraints_by_table
from shardrec.planner.cost import Profile
from shardrec.planner.planner import Planner
from shardrec.planner.replanning import Replanned, paying_plan
from shardrec.planner.tables import loads_of, sampled_features

__all__ = ["replan_model"]

_REMEDY = "the model has its old plan and goes on"


def replan_model(
    model: ShardedModel,
    sample_batches: Iterable[KeyedJaggedTensor],
    *,
    optimizer: torch.optim.Optimizer | None,
    constraints: Mapping[str, Constraint] | None,
    profile: Profile | None,
    **options: Any,
) -> Replanned | None:
    """See :meth:`ShardedModel.replan`."""
    check_extra("planner")
    ranks, batches = Ranks(model.group, model.context.device), list[KeyedJaggedTensor]()

    def count() -> tuple[int, dict[str, int]]:
        """Samples, and ids by feature."""
        batches.extend(sample_batches)
        ids = Counter[str]()
        for batch in batches:
            ids.update(dict(zip(batch.keys(), batch.length_per_key(), strict=True)))
        return sum(batch.stride() for batch in batches), dict(ids)

    def decide() -> tuple[Any, dict[str, float]] | None:
        """The new plan and what it wins, as values that can be sent."""
        samples, ids = sum(number for number, _ in counted), Counter[str]()
        for _, of_rank in counted:
            ids.update(of_rank)
        if not samples:
            raise ConfigError("sample_batches holds no sample on any rank; give batches of the last steps")
        tables = [table for collection in model.sharded_collections for table in collection.planned_tables()]
        features = {feature for table in tables for feature in table.config.feature_names}
        loads = loads_of(
            tables,
            poolings={feature: number / samples for feature, number in ids.items() if feature in features},
            sampled=sampled_features(batches) if counted[0][0] else None,
        )
        limits = constraints_of(model.context.options.dynamic_ids)
        planner = Planner(
            loads,
            model.plan.topology,
            batch_size=max(1, round(samples / max(1, len(batches)) / ranks.size)),
            constraints=limits | constraints_by_table(loads, constraints, ranks.size),
            profile=profile,
            device=model.context.device.type,
        )
        change = paying_plan(planner, model.plan, **options)
        if change is None:
            return None
        figures = ("old_ms", "new_ms", "moved_bytes", "pause_ms")
        return change.new.to_json(), {name: float(getattr(change, name)) for name in figures}

    counted = ranks.agree("replan", count, remedy=_REMEDY)
    decided = ranks.agree("replan", lambda: None if ranks.rank else decide(), remedy=_REMEDY)[0]
    if decided is None:
        return None
    plan, figures = decided
    change = Replanned(old=model.plan, new=ShardingPlan.from_json(plan), **figures)
    begin = time.perf_counter()
    model.reshard(change.new, optimizer)
    return replace(change, pause_ms=1e3 * (time.perf_counter() - begin))
