"""What a step costs: coefficients, tables, and the time and memory of their shards."""

from shardrec.planner.cost.cost_model import COMPONENTS, MEMORY, Cost, CostModel
from shardrec.planner.cost.histogram import Histogram
from shardrec.planner.cost.profile import Profile
from shardrec.planner.cost.table_load import Growth, TableLoad

__all__ = ["COMPONENTS", "MEMORY", "Cost", "CostModel", "Growth", "Histogram", "Profile", "TableLoad"]
