"""Plans as data: shards, layouts, cuts and the plan that holds them, and descriptions of tables and machines.

Importing it imports no torch: the functions of a model's tables are imported at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardrec._late_imports import names_from
from shardrec.layout import cuts
from shardrec.layout.machine import Machine
from shardrec.layout.plan import ShardingPlan, TableChange
from shardrec.layout.presets import detect_machine, host_memory, preset
from shardrec.layout.table_layout import COLUMN_UNIT, Shard, Stripe, TableLayout, tier_fault
from shardrec.layout.topology import Topology

if TYPE_CHECKING:
    from shardrec.layout.discover import table_configs, table_shapes

__all__ = [
    "COLUMN_UNIT",
    "Machine",
    "Shard",
    "ShardingPlan",
    "Stripe",
    "TableChange",
    "TableLayout",
    "Topology",
    "cuts",
    "detect_machine",
    "host_memory",
    "preset",
    "table_configs",
    "table_shapes",
    "tier_fault",
]

_HOMES, __getattr__ = names_from(__name__, {"shardrec.layout.discover": "table_configs table_shapes"})
