"""Random lookups: features in tables of a random plan."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from shardrec.exchange.route import Lookup, Route, build_route
from shardrec.layout import ShardingPlan
from tests.plans import random_plan, random_tables, random_topology

__all__ = ["Case", "draw", "random_case"]

HUGE = (2**31 - 1, 2**31, 2**31 + 5, 5 * 10**9)
"""Row counts on either side of what 32 bits can number."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Lookups and their route.

    Args:
        plan: where the tables are.
        lookups: in output order.
        route: of the lookups.
        rows: per feature, ids must be below this.
    """

    plan: ShardingPlan
    lookups: tuple[Lookup, ...]
    route: Route
    rows: dict[str, int]


def random_case(rng: Random, *, huge: bool = False, most_ranks: int = 5, dynamic: bool = False) -> Case:
    """1 to 4 tables in up to 3 lookup groups, features shared between tables, several features in a table.

    Args:
        rng: where the draws come from.
        huge: one table may have more rows than 32 bits can number.
        most_ranks: size of the world at most.
        dynamic: some tables have dynamic ids, of any value.
    """
    tables = random_tables(rng)
    if huge and rng.random() < 0.5:
        name = rng.choice(sorted(tables))
        tables[name] = (rng.choice(HUGE), tables[name][1])
    plan = random_plan(rng, tables, random_topology(rng, most_ranks))
    groups = rng.randint(1, 3)
    lookups = []
    for name in tables:
        group = rng.randrange(groups)
        is_dynamic = dynamic and rng.random() < 0.5
        for feature in rng.sample("abcde", rng.randint(1, 3)):
            lookups.append(
                Lookup(
                    feature=feature,
                    layout=plan.by_name[name],
                    group=group,
                    output=f"{feature}@{name}",
                    dynamic=is_dynamic,
                )
            )
    rows = {
        feature: min(
            2**62 if lookup.dynamic else lookup.layout.num_embeddings for lookup in lookups if lookup.feature == feature
        )
        for feature in sorted({lookup.feature for lookup in lookups})
    }
    route = build_route(lookups, plan.world_size, groups)
    return Case(plan=plan, lookups=tuple(lookups), route=route, rows=rows)


def draw(rng: Random, rows: int, columns: int) -> Tensor:
    """Small whole numbers, of which float32 gives exact sums in any order."""
    return torch.tensor(
        [[rng.randint(-50, 50) for _ in range(columns)] for _ in range(rows)], dtype=torch.float32
    ).view(rows, columns)
