"""``shardrec.detect_anomaly``: find the table where NaN or Inf comes from.

Around each step: what lookups give is looked at before it travels, and the gradients of their values before a table is
updated. A check reads on the host and ends with an exchange of words, so that all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardrec.errors import AnomalyError, ConfigError
from shardrec.exchange.headers import Headers
from shardrec.lookup.replicated import ReplicatedLookup
from shardrec.modules.collection import ShardedCollection
from shardrec.step.context import ModelContext
from shardrec.step.look_up import LookedUp
from shardrec.step.records import InFlight, StepPlan


@contextmanager
def detect_anomaly(model: nn.Module) -> Iterator[None]:
    """Raise at the step in which rows of a table, or their gradients, are NaN or Inf, on every rank.

    Rows are checked before they are sent to the requesting rank, and gradients before any table is updated, so that the
    tables are unchanged. Each check waits for the device and costs two small all-to-alls: use it for debugging, like
    ``torch.autograd.detect_anomaly``, which names the dense operator. Every rank must enter this context. It checks
    eager calls, and ``torch.compile`` in boundary mode. It does not check a scripted program, and raises for a traced
    one.

    Args:
        model: sharded.

    Raises:
        ConfigError: if nothing in the model is sharded.
        AnomalyError: inside, from forward or backward. Names the table, the feature and the rank.
    """
    collections = [child for child in model.modules() if isinstance(child, ShardedCollection)]
    if not collections:
        raise ConfigError(f"{type(model).__name__} holds no sharded collection. Shard it with shardrec.shard first")
    watches = {context: _Watch(context) for context in {collection.context for collection in collections}}
    before = [(collection, collection.step_plan) for collection in collections]
    for collection, plan in before:
        if plan.replicas is not None:
            replicas = _WatchedReplicas(collection, plan.replicas, watches[collection.context])
            collection.step_plan = replace(plan, replicas=cast(ReplicatedLookup, replicas))
    try:
        yield
    finally:
        for collection, plan in before:
            collection.step_plan = plan
        for watch in watches.values():
            watch.close()
    for watch in watches.values():
        watch.raise_unchecked()


class _Watch:
    """The anomalies of one model that this rank has seen, and no rank has raised yet."""

    def __init__(self, context: ModelContext) -> None:
        self._headers, self._everyone = context.headers, context.everyone
        self._life_cycle = context.life_cycle
        self._anomalies: list[str] = []
        self._life_cycle.rows_looked_up.append(self._watch_rows)
        self._life_cycle.value_made.append(self._watch_gradient)
        self._life_cycle.gradients_go_back.append(self.check_gradients)
        self._life_cycle.tables_update.insert(0, self.check_gradients)  # of replicated tables, which need no exchange

    def close(self) -> None:
        """Watch no more."""
        self._life_cycle.rows_looked_up.remove(self._watch_rows)
        self._life_cycle.value_made.remove(self._watch_gradient)
        self._life_cycle.gradients_go_back.remove(self.check_gradients)
        self._life_cycle.tables_update.remove(self.check_gradients)

    def raise_unchecked(self) -> None:
        """Raise what this rank has seen since the last check, for example in an evaluation of replicated tables."""
        if self._anomalies:
            raise AnomalyError(f"rank {self._everyone.collectives.rank}: {'; '.join(self._anomalies)}")

    def check_gradients(self) -> None:
        """:meth:`check`, in backward, on the ranks of all replicas."""
        self.check(self._everyone)

    def check(self, headers: Headers) -> None:
        """Raise what any rank found, on every rank of ``headers``.

        Raises:
            AnomalyError: the same on every rank.
        """
        anomalies, self._anomalies = self._anomalies, []
        messages = headers.all_gather_text("; ".join(anomalies))
        if any(messages):
            raise AnomalyError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text))

    def note_rows(self, values: Tensor, sizes: Sequence[int], dim: int, tables: Sequence[str]) -> None:
        """Note (n, D) rows that are not finite, of segments of some ``sizes`` along ``dim``, one per table."""
        anomaly = _first_anomaly(values.detach(), sizes, dim)
        if anomaly is not None:
            number, value = anomaly
            self._anomalies.append(
                f"what was looked up in table {tables[number]!r} has {value}: its rows, or the weights of the ids. "
                "Load a checkpoint from before, and lower the learning rate or clip the gradients"
            )

    def _watch_rows(self, plan: StepPlan, looked_up: LookedUp) -> None:
        """Look at the rows of this rank's shards. The ranks raise together."""
        slots, rows = plan.input.route.slots[plan.input.rank], looked_up.rows
        if plan.output.pools:
            self.note_rows(rows[0], [slot.shard.cols for slot in slots], 1, [slot.shard.table for slot in slots])
        else:
            sizes = looked_up.received.lengths.sum(dim=1).tolist()
            for group, of_group in enumerate(rows):
                here = [number for number, slot in enumerate(slots) if slot.group == group]
                tables = [slots[number].shard.table for number in here]
                self.note_rows(of_group, [sizes[number] for number in here], 0, tables)
        self.check(self._headers)

    def _watch_gradient(self, call: InFlight, value: Any) -> None:
        """Have the gradient of a call's value looked at when it comes, if it does."""
        values, sizes, dim, lookups = call.step.output.differentiable(value)
        if not values.requires_grad:
            return

        @torch.no_grad()
        def look(gradient: Tensor) -> None:
            anomaly = _first_anomaly(gradient, sizes, dim)
            if anomaly is not None:
                lookup, value = lookups[anomaly[0]], anomaly[1]
                self._anomalies.append(
                    f"the gradient of feature {lookup.feature!r} of table {lookup.layout.name!r} has {value}; no table "
                    "was updated: look at the loss and the dense layers"
                )
            if self._headers.collectives.world_size == 1:
                self.check_gradients()

        values.register_hook(look)


class _WatchedReplicas:
    """The lookup of a collection's replicated tables. Its rows are checked, and a fault is raised at the next check."""

    def __init__(self, collection: ShardedCollection, lookup: ReplicatedLookup, watch: _Watch) -> None:
        self._lookup, self._watch = lookup, watch
        self._layouts = [lookup.layout for lookup in collection.lookups if lookup.layout.replicated]
        self._tables = list(collection.replica_number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lookup, name)

    def __call__(self, *arguments: Any) -> Tensor:
        pooled: Tensor = self._lookup(*arguments)
        sizes = [layout.embedding_dim for layout in self._layouts]
        self._watch.note_rows(pooled, sizes, 1, [layout.name for layout in self._layouts])
        return pooled

    def rows(self, table: int, ids: Tensor) -> Tensor:
        rows = self._lookup.rows(table, ids)
        self._watch.note_rows(rows, [ids.numel()], 0, [self._tables[table]])
        return rows


def _first_anomaly(values: Tensor, sizes: Sequence[int], dim: int) -> tuple[int, str] | None:
    """The first segment with a value that is not finite, and that value in words. None if all are finite.

    Arguments as for :meth:`_Watch.note_rows`.
    """
    finite = values.isfinite()
    bad = finite.all(dim=1 - dim).logical_not().nonzero()
    if not len(bad):
        return None
    place = int(bad[0])
    first = values.select(dim, place)[finite.select(dim, place).logical_not()][0]
    ends = list(accumulate(sizes))
    return next(number for number, end in enumerate(ends) if place < end), f"{first.item():g}"
