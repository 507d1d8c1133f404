"""A model that serves."""

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
    """What :func:`shardrec.serve.quantize` returns. Behaves as the model it holds; runs without gradients.

    Args:
        module: the model, its collections served ones.
        plan: where the tables are.
        context: shared by the served collections.
        formats: how each table is kept, by its name in the plan.
    """

    def __init__(
        self, module: nn.Module, plan: ShardingPlan, context: ModelContext, formats: Mapping[str, WeightFormat]
    ) -> None:
        # Nothing is trained, so that there is nothing to average over the ranks.
        super().__init__(module.requires_grad_(False), plan, context, None)
        self.formats = dict(formats)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without gradients.

        Raises:
            InputError: on every rank at the same step, if the input of any is faulty.
        """
        with torch.no_grad():
            return super().forward(*args, **kwargs)

    def table_bytes(self) -> int:
        """Bytes of the tables' rows on this rank."""
        return sum(rows.numel() for collection in self._sharded for rows in served_memory(collection).values())
