"""A sharded model for inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardrec.exchange.context import ModelContext
from shardrec.layout import ShardingPlan
from shardrec.modules import ShardedModel
from shardrec.serve.format import WeightFormat
from shardrec.serve.lookup import served_memory

__all__ = ["ServedModel"]


class ServedModel(ShardedModel):
    """The model that :func:`shardrec.serve.quantize` returns: called like the trained one, without gradients.

    Args:
        module: the model, with served collections.
        plan: the sharding plan of the tables.
        context: context shared by the served collections.
        formats: format of each table, by the table's name in the plan.
    """

    def __init__(
        self, module: nn.Module, plan: ShardingPlan, context: ModelContext, formats: Mapping[str, WeightFormat]
    ) -> None:
        # Nothing is trained, so no gradients are averaged over the ranks.
        super().__init__(module.requires_grad_(False), plan, context, None)
        self.formats = dict(formats)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without gradients.

        Raises:
            InputError: on every rank at the same step, if any rank's input is invalid.
        """
        with torch.no_grad():
            return super().forward(*args, **kwargs)

    def table_bytes(self) -> int:
        """Bytes of the tables' rows on this rank."""
        return sum(rows.numel() for collection in self._sharded for rows in served_memory(collection).values())
