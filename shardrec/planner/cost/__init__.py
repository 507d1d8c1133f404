"""What a step costs: coefficients, tables, and the time and memory of their shards."""

from shardrec.planner.cost.model import COMPONENTS, MEMORY, Cost, CostModel
from shardrec.planner.cost.profile import Profile
from shardrec.planner.cost.table import Growth, TableLoad

__all__ = ["COMPONENTS", "MEMORY", "Cost", "CostModel", "Growth", "Profile", "TableLoad"]
