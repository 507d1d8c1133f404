"""A planning problem: tables, ranks and prices, the options per table, and the plan of a solution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology
from shardrec.layout.presets import default_machine
from shardrec.layout.report import PlanReport, TableReport
from shardrec.planner.constraint import Constraint, constraints_by_table
from shardrec.planner.cost import COMPONENTS, MEMORY, CostModel, Profile, TableLoad
from shardrec.planner.cut_option import Candidate, lay_out
from shardrec.planner.cut_options import CandidateMaker
from shardrec.planner.price import overhead_ms, priced_plan
from shardrec.planner.report.alternatives import next_best
from shardrec.planner.solve import Gang, Item, Option, Problem, Solution
from shardrec.planner.solve.encode import Floats

_MANY = 3000
"""Tables that differ, beyond which they are not cut into the smallest shards."""
_MIN_SHARE = 0.02
"""The smallest shard then, against a rank's load and memory."""
_LACKING = " memory that a rank lacks"
"""Name of an entry that is a table to the solver only. Names of a model's tables do not begin with a space."""


class Planner:
    """Tables, ranks and prices, and the problem made of them.

    Args:
        tables: by name.
        topology: the ranks.
        batch_size: samples per rank in a step.
        constraints: by table name or pattern.
        profile: time coefficients. Default: the coefficients of the topology's machine.
        device: ``"cpu"`` or ``"cuda"``, for the machine of a topology without one. Default: CUDA where torch sees it.
        spills: whether tables without a constraint on it may be in tier ``"cached"``.
    """

    def __init__(
        self,
        tables: Mapping[str, TableLoad],
        topology: Topology,
        *,
        batch_size: int,
        constraints: Mapping[str, Constraint] | None = None,
        profile: Profile | None = None,
        device: str | None = None,
        spills: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        self.tables = dict(tables)
        self.topology = topology
        self.constraints = constraints
        self.machine = topology.machine or default_machine(device)
        self.profile = profile or Profile.of_machine(self.machine)
        self.model = CostModel(profile=self.profile, topology=topology, batch_size=batch_size)
        limits = constraints_by_table(self.tables, constraints, topology.world_size)
        tiers = ("device", *["cached"] * spills) if self.machine.kind == "cuda" else ()
        least = self._least_shard() if len({*self.tables.values()}) > _MANY else None
        maker = CandidateMaker(self.model, least, tiers)
        # By name: the plan does not depend on the order of the tables.
        self.candidates: dict[str, tuple[Candidate, ...]] = {
            name: maker.candidates(name, self.tables[name], limits.get(name, Constraint()))
            for name in sorted(self.tables)
        }

    def changed(self, **others: Any) -> Planner:
        """The same tables and prices with another ``topology``, or other ``constraints``."""
        arguments = {"topology": self.topology, "constraints": self.constraints, "device": self.machine.kind} | others
        return Planner(self.tables, batch_size=self.model.batch_size, profile=self.profile, **arguments)

    def _least_shard(self) -> tuple[float, float]:
        """A share of a rank's mean load, and of its memory."""
        loads = (
            self.model.shard(table, rows=table.num_embeddings, cols=table.embedding_dim, share=1.0).ms
            for table in self.tables.values()
        )
        return _MIN_SHARE * sum(loads) / self.topology.world_size, _MIN_SHARE * self.capacity

    @property
    def capacities(self) -> Floats:
        """(R,) bytes per rank."""
        return np.array(self.topology.rank_memory or [self.machine.table_memory] * self.topology.world_size)

    @property
    def capacity(self) -> float:
        """Bytes of the rank that has most."""
        return float(self.capacities.max())

    def problem(self, capacity: float | None = None) -> Problem:
        """The problem for the solver, with another capacity of every rank if one is given.

        In the solver all ranks have the memory of the largest rank. The memory that other ranks lack is an additional
        table, whose one option has an item with this number of bytes for each rank, at its place.
        """
        # Tables with the same candidates have the same options: one object.
        options = {id(each): tuple(candidate.option for candidate in each) for each in self.candidates.values()}
        problem = Problem(
            ranks=self.topology.world_size,
            capacity=(self.capacity if capacity is None else capacity,),
            tables={name: options[id(candidates)] for name, candidates in self.candidates.items()},
        )
        if capacity is not None or self.topology.rank_memory is None:
            return problem
        return _with_lacking(problem, self.capacity - self.capacities)

    def finished(self, solution: Solution) -> ShardingPlan:
        """The plan of a solution, with its report."""
        chosen = {name: options[solution.choice[name]] for name, options in self.candidates.items()}
        places, world = solution.places, self.topology.world_size
        layouts = tuple(lay_out(name, load, chosen[name], places[name], world) for name, load in self.tables.items())
        labels = {name: candidate.option.label for name, candidate in chosen.items()}
        bare = ShardingPlan(topology=self.topology, tables=layouts)
        others = next_best(self.candidates, solution, self.capacity)
        return self.reported(bare, solution, bound=solution.bound, labels=labels, others=others)

    def reported(
        self,
        bare: ShardingPlan,
        solution: Solution | None = None,
        *,
        bound: float,
        labels: Mapping[str, str] | None = None,
        others: Mapping[str, tuple[str, str]] | None = None,
    ) -> ShardingPlan:
        """A plan with its report: priced as it is laid out. The solution says why the search ended."""
        ranks, per_table = priced_plan(self.model, self.tables, bare)
        cost, labels, others = max(each.ms for each in ranks), labels or {}, others or {}
        report = PlanReport(
            batch_size=self.model.batch_size,
            profile=self.profile.name,
            source=self.profile.source,
            cost_ms=cost,
            bound_ms=min(bound, cost),
            overhead_ms=overhead_ms(self.model, self.tables, bare),
            timed_out=solution is not None and solution.timed_out,
            exhausted=solution is not None and solution.exhausted,
            capacity=self.capacity,
            components=COMPONENTS,
            times=tuple(each.times for each in ranks),
            uses=MEMORY,
            memory=tuple(each.memory for each in ranks),
            host_bytes=tuple(each.host_bytes for each in ranks),
            tables=tuple(
                TableReport(
                    name=layout.name,
                    cut=labels.get(layout.name, layout.cut),
                    ms=per_table[layout.name].ms,
                    bytes=per_table[layout.name].bytes,
                    next_cut=others.get(layout.name, ("", ""))[0],
                    reason=others.get(layout.name, ("", "kept as it was"))[1],
                )
                for layout in bare.tables
            ),
        )
        return ShardingPlan(topology=bare.topology, tables=bare.tables, report=report)


def _with_lacking(problem: Problem, lacking: Floats) -> Problem:
    ranks = tuple(range(problem.ranks))
    items = tuple(Item(memory=(size,)) for size in lacking.tolist())
    option = Option(label=_LACKING, everywhere=Item(), gangs=(Gang(items=items, places=(ranks,)),))
    return replace(problem, tables={**problem.tables, _LACKING: (option,)})
