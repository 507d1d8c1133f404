"""The price of any plan, made by the planner or by hand: what each rank bears, and what each table costs."""

from __future__ import annotations

from collections.abc import Mapping

from shardrec.layout import ShardingPlan
from shardrec.planner.candidates import priced_layout
from shardrec.planner.cost import Cost, CostModel, TableLoad

__all__ = ["priced_plan"]


def priced_plan(
    model: CostModel, tables: Mapping[str, TableLoad], plan: ShardingPlan
) -> tuple[list[Cost], dict[str, Cost]]:
    """The cost of each rank, and of each table on all ranks together.

    Args:
        model: the prices.
        tables: of the plan, by name.
        plan: any plan for the model's topology.
    """
    world = plan.world_size
    ranks = [Cost()] * world
    everywhere = Cost()
    per_table = {}
    for layout in plan.tables:
        shared, shards = priced_layout(model, tables[layout.name], layout)
        everywhere += shared
        total = Cost(times=tuple(world * t for t in shared.times), memory=tuple(world * m for m in shared.memory))
        for shard, cost in shards:
            ranks[shard.rank] += cost
            total += cost
        per_table[layout.name] = total
    return [rank + everywhere for rank in ranks], per_table
