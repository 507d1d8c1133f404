"""The price of any plan, made by the planner or by hand: the cost per rank, and per table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardrec.layout import ShardingPlan, TableLayout
from shardrec.planner.cost import Cost, CostModel, TableLoad

_FORWARD, _BACKWARD = 3, 1
"""All-to-alls of a step, with or without bytes: header, payload, output; gradient."""


def priced_plan(
    model: CostModel, tables: Mapping[str, TableLoad], plan: ShardingPlan
) -> tuple[list[Cost], dict[str, Cost]]:
    """The cost per rank, and per table on all ranks together."""
    ranks = [Cost()] * plan.world_size
    everywhere = Cost()
    per_table = {}
    for layout in plan.tables:
        shared, parts = priced_layout(model, tables[layout.name], layout)
        everywhere += shared
        total = shared.times_each(plan.world_size)
        for rank, cost in parts:
            ranks[rank] += cost
            total += cost
        per_table[layout.name] = total
    return [rank + everywhere for rank in ranks], per_table


def overhead_ms(model: CostModel, tables: Mapping[str, TableLoad], plan: ShardingPlan) -> float:
    """The time of a step in addition to the work of its shards: see :meth:`CostModel.overhead_ms`."""
    return sum(_overheads(model, tables, plan))


def predicted_ms(model: CostModel, tables: Mapping[str, TableLoad], plan: ShardingPlan) -> float:
    """Time of a step: the slowest rank's, and the overhead."""
    return sum(predicted_phases(model, tables, plan))


def predicted_phases(model: CostModel, tables: Mapping[str, TableLoad], plan: ShardingPlan) -> tuple[float, float]:
    """Time of a step until all ranks have their outputs, and the remaining time, which includes replicas."""
    ranks, _ = priced_plan(model, tables, plan)
    forward, backward = _overheads(model, tables, plan)
    first = max(rank.forward_ms for rank in ranks)
    return forward + first, backward + max(rank.ms for rank in ranks) - first


def _overheads(model: CostModel, tables: Mapping[str, TableLoad], plan: ShardingPlan) -> tuple[float, float]:
    cut = [each for each in plan.tables if not each.replicated]
    norms = any(tables[each.name].whole_row_state and len(each.stripes()) > 1 for each in cut)
    return model.overhead_ms(
        forward=_FORWARD, backward=_BACKWARD + norms, reduces=any(each.replicated for each in plan.tables)
    )


def priced_layout(model: CostModel, table: TableLoad, layout: TableLayout) -> tuple[Cost, list[tuple[int, Cost]]]:
    """The cost of any layout for every rank, and its additional costs for some ranks: (rank, cost), first the shards'
    in their order."""
    if layout.replicated:
        return model.replicated(table), []
    if (layout.tier, layout.load_factor) != (table.tier, table.load_factor):
        table = replace(table, tier=layout.tier, load_factor=layout.load_factor)
    topology, stripes = model.topology, layout.stripes()
    shards: list[tuple[int, Cost]] = []
    sums: list[tuple[int, Cost]] = []
    sources = 0.0
    for stripe in stripes:
        cols = stripe.col_end - stripe.col_start
        on_host: dict[int, list[int]] = {}
        for shard in stripe.shards:
            on_host.setdefault(shard.rank // topology.ranks_per_host, []).append(shard.rank)
        summed = {host for host, there in on_host.items() if model.sums_in_hosts(table) and len(set(there)) > 1}
        for host in sorted(summed):
            cost = model.host_sum(table, cols=cols, blocks=len(on_host[host]))
            sums += [(rank, cost) for rank in topology.host_ranks(host)]
        sources += cols * (len(summed) + sum(len(there) for host, there in on_host.items() if host not in summed))
        for shard in stripe.shards:
            cost = model.shard(
                table,
                rows=shard.rows,
                cols=shard.cols,
                share=table.share(shard.row_start, shard.row_end),
                stripes=len(stripes),
                summed=shard.rank // topology.ranks_per_host in summed,
            )
            shards.append((shard.rank, cost))
    everywhere = model.everywhere(
        table, stripes=len(stripes), shards=len(shards), sources=sources / table.embedding_dim
    )
    return everywhere, shards + sums
