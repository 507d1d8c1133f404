"""What a run asks of its plan, as the options have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardrec import ConfigError

if TYPE_CHECKING:
    from shardrec import Constraint

__all__ = ["parse_constraint"]


def parse_constraint(text: str) -> tuple[str, Constraint]:
    """``'t_*=row_wise,column_wise@0,1'`` as (pattern of plan names, what it asks for); ``@`` is before ranks.

    Raises:
        ConfigError: for another form, an unknown cut, or ranks of a table that every rank has.
    """
    # Imported here because the planner's package is only wanted by runs with a constraint.
    from shardrec import Constraint

    pattern, equals, right = text.rpartition("=")
    cuts_text, _, ranks_text = right.partition("@")
    cuts = tuple(cut.strip().replace("-", "_") for cut in cuts_text.split(",") if cut.strip())
    ranks = [rank.strip() for rank in ranks_text.split(",") if rank.strip()]
    if not equals or not pattern or not (cuts or ranks) or not all(rank.isdecimal() for rank in ranks):
        raise ConfigError(
            f"constraint (--constraint) is {text!r}: give TABLE=CUT[,CUT][@RANK,RANK], such as 't_*=row_wise'"
        )
    try:
        return pattern, Constraint(cuts=cuts, ranks=tuple(map(int, ranks)))
    except ConfigError as error:
        raise ConfigError(f"constraint (--constraint) is {text!r}: {error}") from None
