"""Plans as data: shards, layouts, cuts, and the plan that holds them."""

from shardrec.layout import cuts
from shardrec.layout.machine import Machine
from shardrec.layout.plan import ShardingPlan, TableChange
from shardrec.layout.shard import COLUMN_UNIT, Shard, Stripe, TableLayout, tier_fault
from shardrec.layout.topology import Topology

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
    "tier_fault",
]
