"""The report about tables that do not fit: which ones, by how much, and the remedies."""

from __future__ import annotations

from math import ceil, inf
from typing import NoReturn

from shardrec.errors import ConfigError, PlanError
from shardrec.layout import Topology
from shardrec.planner.constraint import constraints_by_table
from shardrec.planner.planner import Planner
from shardrec.planner.solve import solve
from shardrec.planner.solve.problem import FIRST_PLAN

_GIB = 2**30
_MAX_RANKS = 4096
_ACCURACY = 0.005


def refuse(planner: Planner) -> NoReturn:
    """Raise the PlanError about a problem for which no plan was found.

    Raises:
        PlanError: always.
    """
    capacity, ranks = planner.capacity, planner.topology.world_size
    uneven = bool((planner.capacities < capacity).any())
    needs = {
        name: min(
            candidate.option.everywhere.memory[0] * ranks
            + sum(gang.count * item.memory[0] for gang in candidate.option.gangs for item in gang.items)
            for candidate in candidates
        )
        for name, candidates in planner.candidates.items()
    }
    total = sum(needs.values())
    faults = [
        f"the tables do not fit: they take at least {_size(total)} with optimizer state and buffers, and "
        f"{ranks} rank{'s' * (ranks > 1)} of {'up to ' * uneven}{_size(capacity)} have "
        f"{_size(planner.capacities.sum())}. The largest are "
        + ", ".join(f"{name!r} ({_size(needs[name])})" for name in sorted(needs, key=lambda name: -needs[name])[:5])
    ]
    for name, candidates in planner.candidates.items():
        least = min(
            max([item.memory[0] for gang in c.option.gangs for item in gang.items], default=0.0)
            + c.option.everywhere.memory[0]
            for c in candidates
        )
        if least > capacity:
            cuts = ", ".join(dict.fromkeys(candidate.cut for candidate in candidates))
            faults.append(
                f"table {name!r}: its smallest shard takes {_size(least)} by the cuts allowed ({cuts}); "
                f"{_relax(planner, name)}"
            )
    remedies = []
    memory = least_capacity(planner)
    if memory is not None:
        remedies.append(f"{_size(memory, up=True)} on each rank")
    more = _fewest_ranks(planner)
    if more is not None:
        remedies.append(f"{more} ranks of {_size(capacity)}")
    if planner.constraints and (memory is None or memory > capacity) and _fits(planner.changed(constraints=None)):
        remedies += [f"no constraint on {name!r}" for name in _binding(planner)] or ["no constraints at all"]
    raise PlanError(faults, remedies)


def least_capacity(planner: Planner) -> float | None:
    """The least memory of a rank, to half a percent, for which a plan was found. None if none does."""
    unlimited = solve(planner.problem(inf), FIRST_PLAN)
    if unlimited is None:
        return None
    low, high = 0.0, max(memory[0] for memory in unlimited.memory)
    while high - low > _ACCURACY * high:
        middle = (low + high) / 2
        solution = solve(planner.problem(middle), FIRST_PLAN)
        if solution is None:
            low = middle
        else:
            high = max(memory[0] for memory in solution.memory)
    return ceil(high)


def _fewest_ranks(planner: Planner) -> int | None:
    """The fewest ranks, in whole hosts, for which a plan was found."""
    old = planner.topology

    def fits(hosts: int) -> bool:
        topology = Topology(hosts=hosts, ranks_per_host=old.ranks_per_host, machine=old.machine)
        try:
            larger = planner.changed(topology=topology)
        except ConfigError:
            return False
        return _fits(larger, planner.capacity)

    low, high = old.hosts, 2 * old.hosts
    while not fits(high):
        low, high = high, 2 * high
        if high * old.ranks_per_host > _MAX_RANKS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * old.ranks_per_host


def _binding(planner: Planner) -> list[str]:
    """The constraints without any one of which a plan was found."""
    limits = dict(planner.constraints or {})
    rest = {name: {other: limits[other] for other in limits if other != name} for name in limits}
    return [name for name in limits if _fits(planner.changed(constraints=rest[name]))]


def _fits(planner: Planner, capacity: float | None = None) -> bool:
    return solve(planner.problem(capacity), FIRST_PLAN) is not None


def _relax(planner: Planner, name: str) -> str:
    cuts = {candidate.cut for candidate in planner.candidates[name]}
    if "row_wise" not in cuts:
        return "allow row_wise"
    limit = constraints_by_table(planner.tables, planner.constraints, planner.topology.world_size).get(name)
    fewer = limit is not None and 0 < len(limit.ranks) < planner.topology.world_size
    return "allow it more ranks" if fewer else "use more ranks"


def _size(size: float, *, up: bool = False) -> str:
    """For people. ``up``: rounded upwards."""
    unit, name, digits = (_GIB, "GiB", 2) if size >= _GIB / 100 else (2**20, "MiB", 3)
    number = ceil(size / unit * 10**digits) / 10**digits if up else size / unit
    return f"{number:,.{digits}f} {name}"
