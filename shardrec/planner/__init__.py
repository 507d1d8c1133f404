"""The planner: from a model's tables to a sharding plan, with its cost, a proven bound and its reasons.

Its names are imported at their first use, because the solver imports numpy and HiGHS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrec._late_imports import names_from
from shardrec._versions import check_extra

if TYPE_CHECKING:
    from shardrec.planner.constraint import Constraint, constraints_of
    from shardrec.planner.cost import CostModel, Growth, Histogram, Profile, TableLoad
    from shardrec.planner.make_plan import plan, plan_tables, replan
    from shardrec.planner.price import predicted_phases
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
    "constraints_of",
    "explain",
    "from_torchrec",
    "plan",
    "plan_tables",
    "predicted_phases",
    "replan",
    "to_html",
    "to_png",
    "to_torchrec",
]

_HOMES, _load = names_from(
    __name__,
    {
        "shardrec.planner.constraint": "Constraint constraints_of",
        "shardrec.planner.cost": "CostModel Growth Histogram Profile TableLoad",
        "shardrec.planner.make_plan": "plan plan_tables replan",
        "shardrec.planner.price": "predicted_phases",
        "shardrec.planner.report.html": "to_html",
        "shardrec.planner.report.png": "to_png",
        "shardrec.planner.report.text": "explain",
        "shardrec.planner.solve": "SolveLimits",
        "shardrec.planner.torchrec_plan": "constraints_from_torchrec from_torchrec to_torchrec",
    },
)


def __getattr__(name: str) -> Any:
    if _HOMES.get(name, "").rpartition(".")[2] in ("make_plan", "price", "solve"):
        check_extra("planner")
    return _load(name)
