"""The planner: from a model's tables to a sharding plan."""

from shardrec.planner.constraint import Constraint
from shardrec.planner.make import plan

__all__ = ["Constraint", "plan"]
