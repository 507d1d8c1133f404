"""Lookup groups: the tables that share a kernel call, and how each group learns.

===============  =======================================================================================
mode             how the weights are updated
===============  =======================================================================================
``FUSED``        fbgemm's kernel, in backward
``ROWS``         :class:`~shardrec.lookup.rows.RowOptimizer`, in backward: optimizers without a kernel on the device
``WHOLE_ROWS``   the same, with the mean square of whole rows: rowwise Adagrad on tables cut by columns
``DENSE``        by whoever owns the parameters' gradients: tables without an optimizer in backward
===============  =======================================================================================

The grouping depends on the plan and the optimizers only, so that all ranks number the groups alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from shardrec.layout import Shard, TableLayout
from shardrec.lookup.kernels import has_fused_kernel
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind

__all__ = ["GroupMode", "LookupGroup", "LookupTable", "group_tables"]


class GroupMode(Enum):
    """How a group's weights are updated."""

    FUSED = "fused"
    ROWS = "rows"
    WHOLE_ROWS = "whole rows"
    DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class LookupTable:
    """A table of the module: its layout, and the optimizer it was given in backward, if any."""

    layout: TableLayout
    optimizer: FusedOptimizer | None


@dataclass(frozen=True, kw_only=True)
class LookupGroup:
    """Tables looked up together.

    Args:
        mode: how they learn.
        optimizer: which optimizer; None if and only if the mode is ``DENSE``.
        layouts: the tables, in module order.
    """

    mode: GroupMode
    optimizer: FusedOptimizer | None
    layouts: tuple[TableLayout, ...]

    def local_shards(self, rank: int) -> tuple[Shard, ...]:
        """The shards of this group that ``rank`` holds."""
        return tuple(shard for layout in self.layouts for shard in layout.on_rank(rank))


def group_tables(tables: Sequence[LookupTable], device: torch.device) -> tuple[LookupGroup, ...]:
    """Group the sharded tables; replicated ones are left out.

    Args:
        tables: in module order.
        device: decides which optimizers have a kernel.
    """
    members: dict[tuple[GroupMode, FusedOptimizer | None], list[TableLayout]] = {}
    for table in tables:
        if not table.layout.replicated:
            members.setdefault((_mode(table, device), table.optimizer), []).append(table.layout)
    return tuple(
        LookupGroup(mode=mode, optimizer=optimizer, layouts=tuple(layouts))
        for (mode, optimizer), layouts in members.items()
    )


def _mode(table: LookupTable, device: torch.device) -> GroupMode:
    if table.optimizer is None:
        return GroupMode.DENSE
    if table.optimizer.kind is OptimizerKind.ROWWISE_ADAGRAD and len(table.layout.stripes()) > 1:
        return GroupMode.WHOLE_ROWS
    if not has_fused_kernel(table.optimizer, device):
        return GroupMode.ROWS
    return GroupMode.FUSED
