"""A sharded model for inference."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan
from shardrec.modules import ShardedModel
from shardrec.pending import wait
from shardrec.serve.lookup import served_memory
from shardrec.serve.row_bytes import WeightFormat
from shardrec.step.context import ModelContext

if TYPE_CHECKING:
    from shardrec.serve.follower import Follower


class ServedModel(ShardedModel):
    """The model that :func:`shardrec.serve.quantize` returns: called like the trained one, without gradients.

    Args:
        module: the model, with served collections.
        plan: the sharding plan of the tables.
        context: context shared by the served collections.
        formats: format per table, by the table's name in the plan.
    """

    def __init__(
        self, module: nn.Module, plan: ShardingPlan, context: ModelContext, formats: Mapping[str, WeightFormat]
    ) -> None:
        # Nothing is trained, so no gradients are averaged over the ranks.
        super().__init__(module.requires_grad_(False), plan, context, None)
        self.formats = dict(formats)
        self.follower: Follower | None = None
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without gradients.

        Raises:
            InputError: on every rank at the same step, if any rank's input is invalid.
        """
        with torch.no_grad(), self.reading():
            value = super().forward(*args, **kwargs)
            # Of a model that follows, a pending value must not be looked up after the next version is applied.
            return value if self.follower is None else tree_map(wait, value)

    def follow(self, source: str | Path, *, interval: float = 1.0) -> Follower:
        """Apply the versions that a :class:`shardrec.Publisher` publishes, from now on, between calls of the model.

        The last version is applied before this returns, if there is one. A thread then looks for further ones.

        Args:
            source: the publisher's folder or URL.
            interval: seconds between two looks.

        Returns: The follower, which has the version and counts faults. Its ``close()`` ends it. A damaged or
            missing version is a warning, and the model keeps the last good one.

        Raises:
            ConfigError: if the model is on several ranks, follows already, or is not the published one: other tables,
                formats or dense part.
        """
        from shardrec.serve.follower import Follower  # with all of shardrec.checkpoint

        follows = self.follower is not None and not self.follower.closed
        if self.group is not None or follows:
            reason = (
                "follows already: close() the follower first" if follows else "is on several ranks: serve it on one"
            )
            raise ConfigError(f"this model cannot follow {source}, for it {reason}")
        follower = Follower(self, self.formats, source, interval=interval)
        follower.start()
        self.follower = follower
        return follower

    def reading(self) -> AbstractContextManager[None]:
        """Inside, in one thread at a time, no version is applied to a model that follows: calls see the same one."""
        return nullcontext() if self.follower is None else self.follower.reading()

    def table_bytes(self) -> int:
        """Bytes of the tables' rows on this rank."""
        return sum(rows.numel() for collection in self._sharded for rows in served_memory(collection).values())
