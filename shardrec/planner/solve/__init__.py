"""Assignment of tables to ranks: a problem in, the best assignment found and a proven bound out."""

from shardrec.planner.solve.problem import Option, Part, Piece, Problem, Solution, SolveLimits
from shardrec.planner.solve.solver import solve

__all__ = ["Option", "Part", "Piece", "Problem", "Solution", "SolveLimits", "solve"]
