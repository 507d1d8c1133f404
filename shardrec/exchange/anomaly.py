"""Find NaN and Inf in the step that produces them: in rows before they travel, and in gradients before tables are
updated.

The check reads values on the host and ends with an exchange of messages, so that all ranks raise the same error at the
same place. It is for debugging (:func:`shardrec.detect_anomaly`), like ``torch.autograd.detect_anomaly``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardrec.exchange.context import StepContext
from shardrec.exchange.route import Lookup

__all__ = ["note_rows", "watch_gradient"]


def segment_with_anomaly(values: Tensor, sizes: Sequence[int], dim: int) -> tuple[int, str] | None:
    """The first segment with a value that is not finite, and that value as text; None if all are finite.

    Arguments are those of :func:`note_rows`.
    """
    finite = values.isfinite()
    bad = finite.all(dim=1 - dim).logical_not().nonzero()
    if not len(bad):
        return None
    place = int(bad[0])
    first = values.select(dim, place)[finite.select(dim, place).logical_not()][0]
    ends = list(accumulate(sizes))
    return next(number for number, end in enumerate(ends) if place < end), f"{first.item():g}"


def note_rows(values: Tensor, sizes: Sequence[int], dim: int, context: StepContext, tables: Sequence[str]) -> None:
    """Note rows that are not finite, for the ranks to raise together.

    Args:
        values: (n, D) that were looked up.
        sizes: of the segments, along ``dim``.
        dim: 0 or 1.
        context: of the model.
        tables: of the segments.
    """
    anomaly = segment_with_anomaly(values, sizes, dim)
    if anomaly is not None:
        number, value = anomaly
        context.anomalies.append(
            f"what was looked up in table {tables[number]!r} has {value}: its rows, or the weights of the ids; load a "
            "checkpoint from before, and lower the learning rate or clip the gradients"
        )


def watch_gradient(
    values: Tensor, sizes: Sequence[int], dim: int, context: StepContext, lookups: Sequence[Lookup]
) -> None:
    """Check the gradient of ``values`` in backward, if there is one.

    Args:
        values: (n, D) output of a module.
        sizes: of its segments, along ``dim``.
        dim: 0 or 1.
        context: of the model.
        lookups: of the segments.
    """
    if not values.requires_grad:
        return

    @torch.no_grad()
    def look(gradient: Tensor) -> None:
        anomaly = segment_with_anomaly(gradient, sizes, dim)
        if anomaly is not None:
            number, value = anomaly
            context.anomalies.append(
                f"the gradient of feature {lookups[number].feature!r} of table {lookups[number].layout.name!r} has "
                f"{value}; no table was updated: look at the loss and the dense layers"
            )
        if context.collectives.world_size == 1:
            context.raise_anomalies()

    values.register_hook(look)
