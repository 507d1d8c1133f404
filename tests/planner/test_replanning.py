"""Replanning: never over its budget of bytes, never worse than before, and free to do anything with enough."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.planner import SolveLimits, TableLoad
from shardrec.planner.planner import Planner
from shardrec.planner.price import priced_plan
from shardrec.planner.replanning import moved_bytes, paying_plan, replan_tables
from tests.plans import random_layout, randoms

QUICK = SolveLimits(gap=0.05, effort=3)


def skewed(tables: int = 6, ranks: int = 3) -> tuple[Planner, ShardingPlan]:
    """Everything on rank 0."""
    loads = {f"t{n}": TableLoad(num_embeddings=10**5 * (n + 1), embedding_dim=16) for n in range(tables)}
    topology = Topology(ranks_per_host=ranks)
    old = tuple(cuts.table_wise(name, load.num_embeddings, 16, rank=0) for name, load in loads.items())
    return Planner(loads, topology, batch_size=512), ShardingPlan(topology=topology, tables=old)


def cost(planner: Planner, plan: ShardingPlan) -> float:
    return max(rank.ms for rank in priced_plan(planner.model, planner.tables, plan)[0])


def moved(planner: Planner, old: ShardingPlan, new: ShardingPlan) -> float:
    return moved_bytes(planner.tables, old, *new.tables)


def test_more_bytes_are_never_worse() -> None:
    planner, old = skewed()
    costs = [cost(planner, old)]
    for budget in (0, 7e6, 2e7, 1e9):
        new = replan_tables(planner, old, max_moved_bytes=budget, limits=QUICK)
        assert moved(planner, old, new) <= budget
        assert new.report is not None
        assert new.report.cost_ms == pytest.approx(cost(planner, new))
        assert 0 < new.report.bound_ms <= new.report.cost_ms, "the bound is that of a new plan"
        costs.append(new.report.cost_ms)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.6 * costs[0]


def test_ranks_of_different_memory_are_relieved_first() -> None:
    planner, old = skewed()
    needed = sum(rank.bytes for rank in priced_plan(planner.model, planner.tables, old)[0])
    topology = Topology(ranks_per_host=3, rank_memory=(0.2 * needed, 0.4 * needed, 0.6 * needed))
    small = Planner(planner.tables, topology, batch_size=512)
    found = replan_tables(small, ShardingPlan(topology=topology, tables=old.tables), max_moved_bytes=1e12, limits=QUICK)
    assert found.report is not None
    assert topology.rank_memory is not None
    assert all(held <= most for held, most in zip(found.report.rank_bytes, topology.rank_memory, strict=True))


def test_nothing_moves_without_a_budget() -> None:
    planner, old = skewed()
    new = replan_tables(planner, old, max_moved_bytes=0, limits=QUICK)
    assert moved(planner, old, new) == 0
    new = replan_tables(planner, old, max_moved_bytes=7e6, limits=SolveLimits(seconds=1e-9))
    assert moved(planner, old, new) == 0, "nor without time"
    with pytest.raises(ConfigError, match="max_moved_bytes is -1"):
        replan_tables(planner, old, max_moved_bytes=-1)


def test_a_plan_pays_if_its_steps_win_more_than_the_move_takes() -> None:
    planner, old = skewed()
    change = paying_plan(planner, old, steps=10_000, min_gain=0.05, limits=QUICK)
    assert change is not None
    assert change.moved_bytes == moved(planner, old, change.new)
    assert change.old_ms - change.new_ms == pytest.approx(cost(planner, old) - cost(planner, change.new), rel=0.1)
    assert change.pause_ms <= 10_000 * 0.05 * change.old_ms
    assert paying_plan(planner, change.new, steps=10_000, min_gain=0.05, limits=QUICK) is None, "it is as good as any"
    assert paying_plan(planner, old, steps=10_000, min_gain=0.9, limits=QUICK) is None
    assert paying_plan(planner, old, steps=1, min_gain=0.05, limits=QUICK) is None, "the least table takes longer"
    fewer = paying_plan(planner, old, steps=change.pause_ms / (0.1 * change.old_ms), min_gain=0.05, limits=QUICK)
    assert fewer is not None and fewer.moved_bytes < change.moved_bytes
    assert fewer.pause_ms <= change.pause_ms / 2


@given(rng=randoms())
def test_moved_bytes_are_those_of_the_cells(rng: Random) -> None:
    """Against a count cell by cell: what a rank is to hold and does not."""
    load = TableLoad(num_embeddings=rng.randint(1, 9), embedding_dim=8)
    old, new = (random_layout(rng, "t", load.num_embeddings, 8, 3) for _ in range(2))

    def cells(layout: object, rank: int) -> set[tuple[int, int]]:
        if layout.replicated:  # type: ignore[attr-defined]
            return {(r, c) for r in range(load.num_embeddings) for c in range(8)}
        return {
            (r, c)
            for s in layout.on_rank(rank)  # type: ignore[attr-defined]
            for r in range(s.row_start, s.row_end)
            for c in range(s.col_start, s.col_end)
        }

    expected = 4 * sum(len(cells(new, rank) - cells(old, rank)) for rank in range(3))
    plan = ShardingPlan(topology=Topology(ranks_per_host=3), tables=(old,))
    assert moved_bytes({old.name: load}, plan, new) == expected
