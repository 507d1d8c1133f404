"""The planner: from a model's tables to a sharding plan, with its cost, a proven bound and its reasons.

Its names are imported at their first use, because the solver imports numpy and HiGHS.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardrec._versions import check_extra

if TYPE_CHECKING:
    from shardrec.planner.constraint import Constraint
    from shardrec.planner.cost import CostModel, Growth, Histogram, Profile, TableLoad
    from shardrec.planner.make_plan import plan, plan_tables, replan
    from shardrec.planner.report.html import to_html
    from shardrec.planner.report.png import to_png
    from shardrec.planner.report.text import explain
    from shardrec.planner.solve import SolveLimits
    from shardrec.planner.torchrec_plan import constraints_from_torchrec, from_torchrec, to_torchrec

__all__ = [
    "Constraint",
    "CostModel",
    "Growth",
    "Histogram",
    "Profile",
    "SolveLimits",
    "TableLoad",
    "constraints_from_torchrec",
    "explain",
    "from_torchrec",
    "plan",
    "plan_tables",
    "replan",
    "to_html",
    "to_png",
    "to_torchrec",
]

_HOMES = {
    "Constraint": "constraint",
    "CostModel": "cost",
    "Growth": "cost",
    "Histogram": "cost",
    "Profile": "cost",
    "SolveLimits": "solve",
    "TableLoad": "cost",
    "constraints_from_torchrec": "torchrec_plan",
    "explain": "report.text",
    "from_torchrec": "torchrec_plan",
    "plan": "make_plan",
    "plan_tables": "make_plan",
    "replan": "make_plan",
    "to_html": "report.html",
    "to_png": "report.png",
    "to_torchrec": "torchrec_plan",
}


def __getattr__(name: str) -> Any:
    if _HOMES.get(name) in ("make_plan", "solve"):
        check_extra("planner")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
