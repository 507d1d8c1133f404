"""One way to cut a table: as an option of the solver, and laid out on the ranks that it chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from shardrec.layout import Shard, TableLayout
from shardrec.planner.cost import TableLoad
from shardrec.planner.solve.encode import Floats, Ints
from shardrec.planner.solve.problem import Option, Place


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to cut a table.

    Args:
        cut: name of the cut.
        widths: columns per stripe.
        edges: first row per row block, and the rows of the table.
        option: the same for the solver.
        on_all: whether it has an equal block on each rank, as part of the option's common load.
        holders: number of ranks of a place that hold a shard, the first ones; 0: all of them.
        pinned: the layout, if a constraint gave it.
        tier: where the rows are.
        load_factor: of tier ``"cached"``.
    """

    cut: str
    widths: tuple[int, ...]
    edges: tuple[int, ...]
    option: Option
    on_all: bool = False
    holders: int = 0
    pinned: TableLayout | None = None
    tier: str = "device"
    load_factor: float = 0.0


def lay_out(name: str, table: TableLoad, candidate: Candidate, places: Sequence[Place], world: int) -> TableLayout:
    """The layout of a candidate after its gangs were placed."""
    rows, cols = table.num_embeddings, table.embedding_dim
    if candidate.pinned is not None:
        shards = tuple(replace(shard, table=name) for shard in candidate.pinned.shards)
        return replace(candidate.pinned, name=name, shards=shards)
    if candidate.cut == "data_parallel":
        return TableLayout(name=name, num_embeddings=rows, embedding_dim=cols, replicated=True, cut="data_parallel")
    holders = candidate.holders or world
    ranks = list(range(world)) if candidate.on_all else [rank for place in places for rank in place[:holders]]
    columns = [0, *accumulate(candidate.widths)]
    rectangles = [(*block, *stripe) for stripe in pairwise(columns) for block in pairwise(candidate.edges)]
    return TableLayout(
        name=name,
        num_embeddings=rows,
        embedding_dim=cols,
        cut=candidate.cut,
        tier=candidate.tier,
        load_factor=candidate.load_factor,
        shards=tuple(
            Shard(table=name, row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rank)
            for (top, bottom, left, right), rank in zip(rectangles, ranks, strict=True)
        ),
    )


def add_option(option: Option, loads: Floats, memory: Floats, limits: Floats) -> list[Place]:
    """Add an option to the ranks' loads (R,) and bytes (R,), each gang where these are least over the limits (R,), and
    of such places where the slowest rank is fastest. Returns the places."""
    loads += option.everywhere.load
    memory += option.everywhere.memory[0]
    chosen = []
    for gang in option.gangs:
        ranks = _ranks_of(gang.places)
        time = np.array([[item.load] for item in gang.items])
        size = np.array([[item.memory[0]] for item in gang.items])
        for _ in range(gang.count):
            score = (loads[ranks] + time).max(axis=0)
            if memory.max() + size.max() > limits.min():
                over = np.maximum(memory[ranks] + size - limits[ranks], 0).max(axis=0)
                score[over > over.min()] = np.inf
            place = int(score.argmin())
            np.add.at(loads, ranks[:, place], time[:, 0])
            np.add.at(memory, ranks[:, place], size[:, 0])
            chosen.append(gang.places[place])
    return chosen


@lru_cache(1024)
def _ranks_of(places: tuple[Place, ...]) -> Ints:
    """(items, P) the rank per item at each place. There are few sets of places, which many gangs share."""
    return np.array(places).T.copy()
