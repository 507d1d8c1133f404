"""Lookup groups: the tables that share a kernel call, and how each group is updated.

===============  =======================================================================================
mode             how the weights are updated
===============  =======================================================================================
``FUSED``        the lookup's kernel, in backward
``ROWS``         :class:`~shardrec.lookup.row_optimizers.RowOptimizer`, in backward or at the step: optimizers
                 without an exact kernel, and all where updates wait for the step
``WHOLE_ROWS``   the same, with the mean square of whole rows: row-wise states of tables cut by columns
``DENSE``        by whoever owns the parameters' gradients: tables without an optimizer in backward
===============  =======================================================================================

Tables of a group have one dtype. The grouping depends on the plan, the optimizers and the dtypes only, so all ranks
number the groups in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil

import torch

from shardrec.errors import PlanError
from shardrec.layout import Shard, TableLayout
from shardrec.lookup.fbgemm_kernel import has_fused_kernel
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind


class GroupMode(Enum):
    """How a group's weights are updated."""

    FUSED = "fused"
    ROWS = "rows"
    WHOLE_ROWS = "whole rows"
    DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class LookupTable:
    """A table of the module.

    Args:
        layout: its shards.
        optimizer: that it was given by ``apply_optimizer_in_backward``, if any.
        dtype: of its weights: float32, float16 or bfloat16.
        at_step: whether this optimizer updates it in its step, and not in backward.
    """

    layout: TableLayout
    optimizer: FusedOptimizer | None
    dtype: torch.dtype = torch.float32
    at_step: bool = False


@dataclass(frozen=True, kw_only=True)
class LookupGroup:
    """Tables looked up together.

    Args:
        mode: how their weights are updated.
        optimizer: their optimizer. None if and only if the mode is ``DENSE``.
        layouts: the tables, in module order.
        width: columns of the group's shards, if they have one width; else None.
        dtype: of the weights.
        at_step: they are updated by the optimizer's step, not in backward.
        tier: where their rows are.
    """

    mode: GroupMode
    optimizer: FusedOptimizer | None
    layouts: tuple[TableLayout, ...]
    width: int | None = None
    dtype: torch.dtype = torch.float32
    at_step: bool = False
    tier: str = "device"

    def local_shards(self, rank: int) -> tuple[Shard, ...]:
        """The shards of this group that ``rank`` holds."""
        shards = (shard for layout in self.layouts for shard in layout.on_rank(rank))
        return tuple(shard for shard in shards if self.width in (None, shard.cols))

    def cache_rows(self, rank: int) -> int:
        """The rows that the cache of ``rank`` has room for. 0 without a cache."""
        factors = {layout.name: layout.load_factor for layout in self.layouts if self.tier == "cached"}
        return sum(ceil(factors.get(shard.table, 0.0) * shard.rows) for shard in self.local_shards(rank))


def group_tables(
    tables: Iterable[LookupTable], device: torch.device, *, by_width: bool = False
) -> tuple[LookupGroup, ...]:
    """Group the sharded tables. Replicated ones are left out.

    Args:
        tables: in module order.
        device: decides which optimizers have a kernel.
        by_width: shards of different widths go into different groups.

    Raises:
        PlanError: for row-wise states of a table whose stripes would be in different groups, for LAMB and stripes, and
            for a tier that the table's optimizer cannot have.
    """
    members: dict[tuple[LookupGroup, int], list[TableLayout]] = {}
    for table in tables:
        if table.layout.replicated:
            continue
        mode = _mode(table, device)
        widths: dict[int | None, None] = {None: None}
        if by_width:
            widths = dict.fromkeys(stripe.col_end - stripe.col_start for stripe in table.layout.stripes())
        if mode is GroupMode.WHOLE_ROWS and len(widths) > 1:
            raise PlanError(
                f"table {table.layout.name!r} is cut into column stripes of {', '.join(map(str, widths))} columns. "
                "row-wise states on sequence embeddings take stripes of one width: cut it evenly"
            )
        tier = _tier(table, mode, device)
        # All rows of a cache are as wide as the widest.
        widest = max(stripe.col_end - stripe.col_start for stripe in table.layout.stripes()) * (tier == "cached")
        for width in widths:
            group = LookupGroup(
                mode=mode,
                optimizer=table.optimizer,
                layouts=(),
                width=width,
                dtype=table.dtype,
                at_step=table.at_step,
                tier=tier,
            )
            members.setdefault((group, widest), []).append(table.layout)
    return tuple(replace(group, layouts=tuple(layouts)) for (group, _), layouts in members.items())


def _tier(table: LookupTable, mode: GroupMode, device: torch.device) -> str:
    """Where the rows are: on the CPU in its memory, whatever the plan says."""
    tier = table.layout.tier
    if tier == "device" or device.type != "cuda":
        return "device"
    if mode is not GroupMode.FUSED:
        raise PlanError(
            f"table {table.layout.name!r} is in tier {tier!r}, which takes an optimizer that fbgemm's kernels run in "
            "backward, on float32 or float16, and for row-wise states uncut columns: give it one, or plan it in tier "
            "'device'"
        )
    return tier


def _mode(table: LookupTable, device: torch.device) -> GroupMode:
    if table.optimizer is None:
        return GroupMode.DENSE
    widths = [stripe.col_end - stripe.col_start for stripe in table.layout.stripes()]
    if len(widths) > 1 and table.optimizer.kind is OptimizerKind.LAMB:
        raise PlanError(
            f"table {table.layout.name!r} is cut into column stripes of {', '.join(map(str, widths))} columns; LAMB "
            "takes the norms of whole rows: cut the table by rows"
        )
    if len(widths) > 1 and table.optimizer.row_states:
        return GroupMode.WHOLE_ROWS
    if table.at_step or not has_fused_kernel(table.optimizer, device, table.dtype, widths):
        return GroupMode.ROWS
    return GroupMode.FUSED
