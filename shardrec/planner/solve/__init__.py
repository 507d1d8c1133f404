"""Assignment of tables to ranks: a problem in, the best assignment found and a proven bound out."""

from shardrec.planner.solve.problem import Gang, Item, Option, Problem, Solution, SolveLimits
from shardrec.planner.solve.solver import solve

__all__ = ["Gang", "Item", "Option", "Problem", "Solution", "SolveLimits", "solve"]
