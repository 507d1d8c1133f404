"""The planner's best few different plans, timed in turn on this machine, and the fastest of them.

A cost model errs by some percent, and does not tell plans with closer costs apart. So tables are
planned again with coefficients that are off by as much as the fit was, one part of the model at a time. What comes out
are plans that are the best if the model errs in that part. Those with the least cost by the coefficients as they are
get timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from shardrec import ConfigError, ShardingPlan, Topology
from shardrec.planner import CostModel, Planner, Profile, SolveLimits, TableLoad, best_plan, predicted_ms
from shardrec.trainer.calibrate.measure import measure_plans

__all__ = ["TimedPlan", "different_plans", "time_plans"]

_PARTS = (
    ("lookup_id_ns", "row_byte_ns"),
    ("update_id_ns", "summed_id_ns", "decode_ns"),
    ("pooled_byte_ns",),
    ("bag_ns", "shard_us", "route_id_ns"),
    ("exchange_us", "exchange_byte_ns", "host_exchange_byte_ns"),
    ("reduce_byte_ns", "replica_byte_ns"),
)
"""Coefficients that err together."""
_MIN_ERROR = 0.25


@dataclass(frozen=True, kw_only=True)
class TimedPlan:
    """A plan and how long its step takes.

    Args:
        plan: with its report.
        predicted_ms: of a step.
        measured_ms: of a step on the slowest rank, one for each round.
        ratio: to the first plan's times, round by round, in the median.
    """

    plan: ShardingPlan
    predicted_ms: float
    measured_ms: tuple[float, ...]
    ratio: float


def different_plans(
    tables: Mapping[str, TableLoad],
    topology: Topology,
    *,
    batch_size: int,
    profile: Profile,
    count: int = 4,
    limits: SolveLimits | None = None,
) -> list[ShardingPlan]:
    """The planner's plan and others that may be faster, in the order of their cost.

    Args:
        tables: by name.
        topology: the ranks.
        batch_size: samples per rank in a step.
        profile: time coefficients. Its fit error says how far they may be off, at least 25%.
        count: most plans.
        limits: per search.

    Returns:
        At most ``count`` plans. No two differ in the numbers of ranks and hosts alone. All are priced by
        ``profile``.
    """
    if count < 1:
        raise ConfigError(f"count is {count}. Give a number of plans, at least 1")
    error = max(_MIN_ERROR, profile.errors.get("worst_percent", 0.0) / 100)
    planner = Planner(tables, topology, batch_size=batch_size, profile=profile)
    first = best_plan(planner, limits)
    best_plans = [first]
    for part in _PARTS:
        for factor in (1 + error, 1 / (1 + error)):
            wrong = replace(profile, **{name: factor * getattr(profile, name) for name in part})
            other = best_plan(Planner(tables, topology, batch_size=batch_size, profile=wrong), limits)
            if _held(other) not in map(_held, best_plans):
                assert first.report is not None and other.report is not None, "the planner reports on its plans"
                labels = {each.name: each.cut for each in other.report.tables}
                why = dict.fromkeys(labels, ("", f"best if {part[0]} and the like are {factor:.2f} times as much"))
                best_plans.append(planner.reported(other, bound=first.report.bound_ms, labels=labels, others=why))
    model = CostModel(profile=profile, topology=topology, batch_size=batch_size)
    return [first, *sorted(best_plans[1:], key=lambda plan: predicted_ms(model, tables, plan))][:count]


def time_plans(
    tables: Mapping[str, TableLoad],
    plans: Sequence[ShardingPlan],
    *,
    batch_size: int,
    profile: Profile,
    device: str = "cpu",
    rounds: int = 15,
) -> list[TimedPlan]:
    """Time plans in turn on ranks of this machine, started for it.

    Args:
        tables: of the plans. They have to fit this machine.
        plans: for ranks of this machine.
        batch_size: samples per rank.
        profile: for the predicted times.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL).
        rounds: in each, every plan makes some steps.

    Returns:
        The plans, the fastest first.
    """
    times = measure_plans(tables, plans, batch_size=batch_size, device=device, rounds=rounds)
    model = CostModel(profile=profile, topology=plans[0].topology, batch_size=batch_size)
    timed_plans = [
        TimedPlan(
            plan=plan,
            predicted_ms=predicted_ms(model, tables, plan),
            measured_ms=each,
            ratio=median(time / first for time, first in zip(each, times[0], strict=True)),
        )
        for plan, each in zip(plans, times, strict=True)
    ]
    return sorted(timed_plans, key=lambda timed: timed.ratio)


def _held(plan: ShardingPlan) -> Hashable:
    """The contents of ranks and hosts, whatever their numbers are."""
    held: dict[int, set[object]] = {}
    for layout in plan.tables:
        for shard in layout.shards:
            held.setdefault(shard.rank, set()).add(replace(shard, rank=0))
    hosts = Counter(
        frozenset(Counter(frozenset(held.get(rank, ())) for rank in plan.topology.host_ranks(host)).items())
        for host in range(plan.topology.hosts)
    )
    return frozenset(hosts.items())
