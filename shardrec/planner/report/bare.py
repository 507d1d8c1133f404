"""A plan without a report as a table for people (rich): one that was made by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from shardrec.layout.shard import TableLayout

if TYPE_CHECKING:
    from shardrec.layout.plan import ShardingPlan

__all__ = ["bare_table", "ranks_text"]

_BYTES_PER_WEIGHT = 4


def bare_table(plan: ShardingPlan) -> Table:
    """One line per table and one per rank; memory counts fp32 weights without optimizer state."""
    world = plan.world_size
    table = Table(
        title=f"Sharding plan: {len(plan.tables)} tables on {world} rank{'s' * (world > 1)}",
        caption=_rank_loads(plan),
        caption_justify="left",
    )
    table.add_column("table")
    for heading in ("rows", "dim", "MiB"):
        table.add_column(heading, justify="right")
    table.add_column("cut")
    table.add_column("ranks")
    for layout in plan.tables:
        size = layout.num_embeddings * layout.embedding_dim * _BYTES_PER_WEIGHT / 2**20
        table.add_row(
            layout.name,
            f"{layout.num_embeddings:,}",
            str(layout.embedding_dim),
            f"{size:,.2f}",
            layout.cut.replace("_", "-"),
            ranks_text(layout),
        )
    return table


def ranks_text(layout: TableLayout) -> str:
    """The ranks of a table: all, a range, or a list."""
    if layout.replicated:
        return "all"
    ranks = layout.ranks
    if len(ranks) > 4 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _rank_loads(plan: ShardingPlan) -> str:
    loads = [plan.local_numel(rank) * _BYTES_PER_WEIGHT / 2**20 for rank in range(plan.world_size)]
    if len(loads) > 8:
        return f"embedding MiB per rank: {min(loads):,.1f} to {max(loads):,.1f}"
    return "embedding MiB per rank: " + ", ".join(f"{rank}: {load:,.1f}" for rank, load in enumerate(loads))
