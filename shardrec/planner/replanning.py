"""A better plan that moves few bytes: from the old plan, one table at a time, the move that gains most."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, TableLayout
from shardrec.planner.cost import CostModel, TableLoad
from shardrec.planner.cut_option import Candidate, add_option, lay_out
from shardrec.planner.planner import Planner
from shardrec.planner.price import predicted_ms, priced_layout
from shardrec.planner.solve import SolveLimits, solve
from shardrec.planner.solve.encode import Floats
from shardrec.planner.solve.problem import Place

_NORM = 60
_MAX_MOVES = 500
_COPIES = 2
"""Times that a byte which moves is written, each taken to be as slow as a byte of an exchange."""


class Replanned(NamedTuple):
    """A change of the plan of a model that trains.

    Attributes:
        old: the plan before.
        new: the plan now.
        old_ms: predicted time of a step under the old plan, with the ids that were seen; without the dense part.
        new_ms: the same under the new plan.
        moved_bytes: of weights and optimizer states that ranks receive.
        pause_ms: time of the move; as predicted, until it was made.
    """

    old: ShardingPlan
    new: ShardingPlan
    old_ms: float
    new_ms: float
    moved_bytes: float
    pause_ms: float

    def __str__(self) -> str:
        """The moved bytes and the predicted gain, as a line."""
        names = [change.name for change in self.old.diff(self.new)]
        shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        return (
            f"moved {len(names)} table{'s' * (len(names) > 1)} ({shown}), {self.moved_bytes / 2**20:,.1f} MiB, in "
            f"{self.pause_ms / 1e3:.2f} s: the tables' part of a step is predicted to take {self.new_ms:.2f} ms in "
            f"place of {self.old_ms:.2f}"
        )


def replan_tables(
    planner: Planner, old: ShardingPlan, *, max_moved_bytes: float, limits: SolveLimits | None = None
) -> ShardingPlan:
    """See :func:`shardrec.planner.replan`.

    Args:
        planner: of the same tables and ranks.
        old: the plan in use.
        max_moved_bytes: that ranks may have to receive.
        limits: when to stop the search for the plan that is free to move anything, and after it that for moves.
    """
    if not max_moved_bytes >= 0:
        raise ConfigError(f"max_moved_bytes is {max_moved_bytes}. Give a number of bytes, at least 0")
    if any(table.tier == "cached" for table in old.tables):
        planner = planner.changed(spills=True)
    free = solve(planner.problem(), limits)
    bound = 0.0 if free is None else free.bound
    if free is not None:
        anew = planner.finished(free)
        if moved_bytes(planner.tables, old, *anew.tables) <= max_moved_bytes:
            return anew
    moves, begin = _Moves(planner, old, max_moved_bytes), time.thread_time()
    for _ in range(_MAX_MOVES):
        if time.thread_time() - begin > (limits or SolveLimits()).seconds or not moves.best():
            break
    layouts = tuple(moves.layouts[table.name] for table in old.tables)
    bare = ShardingPlan(topology=old.topology, tables=layouts)
    return planner.reported(bare, free, bound=bound, labels=moves.labels)


def paying_plan(
    planner: Planner, old: ShardingPlan, *, steps: float, min_gain: float, limits: SolveLimits | None = None
) -> Replanned | None:
    """A plan with a step that is shorter by the part ``min_gain``, and a move that takes no longer than this part of
    ``steps`` steps. None if the old plan is to stay. Args: of :meth:`shardrec.ShardedModel.replan` and
    :func:`replan_tables`."""
    model, tables = planner.model, planner.tables
    links = (model.profile.exchange_byte_ns, (old.topology.hosts > 1) * model.profile.host_exchange_byte_ns, 1e-9)
    byte_ms, old_ms = _COPIES * max(links) * 1e-6, predicted_ms(model, tables, old)
    new = replan_tables(planner, old, max_moved_bytes=min_gain * old_ms * steps / byte_ms, limits=limits)
    new_ms = predicted_ms(model, tables, new)
    size = moved_bytes(tables, old, *new.tables)
    change = Replanned(old, new, old_ms, new_ms, size, size * byte_ms)
    return change if old.diff(new) and old_ms - new_ms >= min_gain * old_ms else None


def moved_bytes(tables: Mapping[str, TableLoad], old: ShardingPlan, *layouts: TableLayout) -> float:
    """Bytes of weights and optimizer state that ranks have to receive to go from a plan to other layouts of tables."""
    moved = 0.0
    for new in layouts:
        table = tables[new.name]
        per_weight = table.weight_bytes + table.state_bytes + table.row_state_bytes / table.embedding_dim
        moved += per_weight * old.by_name[new.name].moved_numel(new, old.world_size)
    return moved


class _Moves:
    """The plan as it changes."""

    def __init__(self, planner: Planner, old: ShardingPlan, budget: float) -> None:
        self.planner, self.old, self.budget = planner, old, budget
        self.model: CostModel = planner.model
        self.limits = planner.capacities
        self.layouts = {table.name: table for table in old.tables}
        self.labels: dict[str, str] = {}
        self.moved = dict.fromkeys(self.layouts, 0.0)
        self.shares = {name: self._price(name, layout) for name, layout in self.layouts.items()}
        self.loads: Floats = sum((loads for loads, _ in self.shares.values()), np.zeros(old.world_size))
        self.memory: Floats = sum((memory for _, memory in self.shares.values()), np.zeros(old.world_size))

    def best(self) -> bool:
        """Make the move that lowers the ranks' loads most per byte, among the tables of the most loaded ranks."""
        over = np.maximum(self.memory - self.limits, 0).sum()
        now = self._norm(self.loads)
        best_move: tuple[float, str, TableLayout, str] | None = None
        worst = int((self.memory - self.limits if over else self.loads).argmax())
        for name in self.layouts:
            if not self.shares[name][0][worst] > 0:
                continue
            rest_loads = self.loads - self.shares[name][0]
            rest_memory = self.memory - self.shares[name][1]
            for candidate in self.planner.candidates[name]:
                layout = self._placed(name, candidate, rest_loads, rest_memory)
                cost = moved_bytes(self.planner.tables, self.old, layout)
                if sum(self.moved.values()) - self.moved[name] + cost > self.budget:
                    continue
                loads, memory = self._price(name, layout)
                still_over = np.maximum(rest_memory + memory - self.limits, 0).sum()
                gain = now - self._norm(rest_loads + loads)
                if still_over > over or (still_over == over and gain <= 1e-9 * now):
                    continue
                score = (1e6 * (over - still_over) + gain) / max(cost - self.moved[name], 1.0)
                if best_move is None or score > best_move[0]:
                    best_move = score, name, layout, candidate.option.label
        if best_move is None:
            return False
        _, name, layout, label = best_move
        loads, memory = self._price(name, layout)
        self.loads += loads - self.shares[name][0]
        self.memory += memory - self.shares[name][1]
        self.shares[name], self.layouts[name], self.labels[name] = (loads, memory), layout, label
        self.moved[name] = moved_bytes(self.planner.tables, self.old, layout)
        return True

    def _norm(self, loads: Floats) -> float:
        top = float(loads.max())
        return top * float(((loads / top) ** _NORM).sum()) ** (1 / _NORM) if top > 0 else 0.0

    def _price(self, name: str, layout: TableLayout) -> tuple[Floats, Floats]:
        everywhere, shards = priced_layout(self.model, self.planner.tables[name], layout)
        loads = np.full(self.old.world_size, everywhere.ms)
        memory = np.full(self.old.world_size, everywhere.bytes)
        for rank, cost in shards:
            loads[rank] += cost.ms
            memory[rank] += cost.bytes
        return loads, memory

    def _placed(self, name: str, candidate: Candidate, loads: Floats, memory: Floats) -> TableLayout:
        """A candidate with each gang where the load is least and the memory is enough."""
        places = add_option(candidate.option, loads.copy(), memory.copy(), self.limits)
        table = self.planner.tables[name]
        return lay_out(name, table, candidate, self._near(name, table, candidate, places), self.old.world_size)

    def _near(self, name: str, table: TableLoad, candidate: Candidate, places: Sequence[Place]) -> Sequence[Place]:
        """The same ranks, with equal blocks left on the ranks that already hold them."""
        if len(places) < 2 or len(candidate.option.gangs) != 1 or len(places[0]) != 1:
            return places
        old = self.old.by_name[name]
        left = list(places)
        shards = lay_out(name, table, candidate, places, self.old.world_size).shards
        ordered: list[Place | None] = [None] * len(shards)
        for index, shard in enumerate(shards):
            at_home = [
                place
                for place in left
                if any(
                    other.row_start <= shard.row_start < other.row_end
                    and other.col_start <= shard.col_start < other.col_end
                    for other in old.on_rank(place[0])
                )
            ]
            if at_home:
                ordered[index] = at_home[0]
                left.remove(at_home[0])
        return [place if place is not None else left.pop(0) for place in ordered]
