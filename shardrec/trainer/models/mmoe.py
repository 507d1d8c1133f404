"""MMoE: experts that all tasks share, mixed for each task by a gate of its own.

"Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", Ma et al., 2018: what PLE is
with one level, of shared experts alone.
"""

from __future__ import annotations

from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import Share, Size, Sizes
from shardrec.trainer.models.ple import PLE

__all__ = ["MMoE"]


class MMoE(PLE):
    """See the file's text.

    Args:
        experts: number of experts, whose layers are ``hidden``.
        tower: widths of a task's layers before its columns of the output.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        experts: Size = 4,
        hidden: Sizes = (128, 64),
        tower: Sizes = (32,),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            schema,
            dim=dim,
            levels=1,
            experts=0,
            shared=experts,
            hidden=hidden,
            tower=tower,
            dropout=dropout,
            batch_norm=batch_norm,
        )
