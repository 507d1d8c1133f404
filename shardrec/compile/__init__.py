"""torch.compile and torch.export of sharded models.

::

    annotate.py    what torch.compile does at a sharded module: a graph break, or its twin in the graph
    boundary.py    the graph break, and the values that cross it
    traced.py      the twin that torch.compile takes into its graph
    agreement.py   operator: the ranks exchange their headers, and fail together
    lookups.py     operators: look up tables, and update them in backward
    columns.py     operators: exchange pooled rows, and their gradients
    fakes.py       shapes of fbgemm's operators, for tracers
    step.py        dynamo's settings while a traced model runs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardrec.compile.annotate import CompileMode, annotate_for_dynamo, unannotate

__all__ = ["CompileMode", "annotate_for_dynamo", "unannotate"]


def __getattr__(name: str) -> Any:
    # The sharded modules import boundary.py, and annotate.py imports the sharded modules.
    if name in __all__:
        from shardrec.compile import annotate

        return getattr(annotate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
