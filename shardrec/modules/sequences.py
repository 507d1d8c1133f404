"""A sharded ``EmbeddingCollection``: a row for each id, in the order of the ids, with its tables spread over the ranks.

Shapes: B samples of this rank, N_f ids of a feature, D columns of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from shardrec.exchange.dedup import DistinctIds
from shardrec.layout import ShardingPlan
from shardrec.lookup.groups import group_tables
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.live_twins import LiveSequences
from shardrec.modules.storage import Storage
from shardrec.pending import LazyAwaitable, LazyGetItemMixin
from shardrec.step.context import ModelContext
from shardrec.step.records import InFlight
from shardrec.step.sequence_rows import SequenceKey, SequenceOutput
from shardrec.step.step import Step


class SequenceEmbeddings(LazyGetItemMixin[str, JaggedTensor], LazyAwaitable[dict[str, JaggedTensor]]):
    """A dict of JaggedTensors with an all-to-all that is in progress or about to begin. Its first use waits, also
    ``pending["f"]``.

    Args:
        call: gives the (N, D) rows of the cut tables' lookups and the output's entries.
        step: of the model.
        need_indices: give each JaggedTensor its ids as weights.
    """

    _step: Step
    _need_indices: bool

    def __init__(self, call: InFlight, step: Step, *, need_indices: bool) -> None:
        vars(self).update(_call=call, _step=step, _need_indices=need_indices)  # not by LazyAwaitable.__setattr__

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        call: InFlight = vars(self).pop("_call")
        rows, entries = self._step.value(call)
        if call.mode.is_current:
            return self._jagged(rows, entries)
        with call.mode.entered():
            return self._jagged(rows, entries)

    def _jagged(self, rows: Tensor, entries: Sequence[SequenceKey]) -> dict[str, JaggedTensor]:
        parts = iter(rows.split([entry.ids.numel() for entry in entries if entry.replica is None]))
        return {
            entry.name: JaggedTensor(
                values=next(parts) if entry.replica is None else entry.replica,
                lengths=entry.lengths,
                weights=entry.ids if self._need_indices else None,
            )
            for entry in entries
        }


class ShardedEmbeddingCollection(ShardedCollection):
    """An EmbeddingCollection with tables that are cut over the ranks of a process group.

    Takes a KeyedJaggedTensor of the local batch and returns a lazily awaited dict of JaggedTensors, as the unsharded
    module does, rows in the order of the ids under every cut. If each feature has its own batch size and there are
    inverse indices, each sample of the full batch gets the rows of its bag, as from TorchRec's sharded module (the
    unsharded one ignores inverse indices). It makes one header, one payload and one output all-to-all in forward and
    one all-to-all in backward. Gradients are means over the ranks.

    Args:
        dedup: send and look up each distinct id of a table once per batch. A single rank on CUDA, which sends nothing,
            does so only for dynamic ids and tables of tier ``"host"``.

    Its other arguments, and its errors, are those of :class:`ShardedEmbeddingBagCollection`.
    """

    _holder = "embeddings"
    _by_width = True
    embeddings: nn.ModuleDict

    def __init__(
        self,
        module: EmbeddingCollection | ShardedEmbeddingCollection,
        plan: ShardingPlan,
        *,
        path: str = "",
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        context: ModelContext | None = None,
        storage: Storage | None = None,
        dedup: bool = True,
    ) -> None:
        self.dedup: bool = getattr(module, "dedup", dedup)  # before the lookups are made
        super().__init__(module, plan, path=path, device=device, group=group, context=context, storage=storage)

    def _read(self, module: Any) -> None:
        self._need_indices: bool = module.need_indices()
        self._embedding_dim: int = module.embedding_dim()
        self._names_by_table: list[list[str]] = module.embedding_names_by_table()

    def _build_lookups(self) -> None:
        collectives = self.context.collectives
        self.groups = groups = group_tables(self._lookup_tables.values(), self.device, by_width=self._by_width)
        lookups = self._make_lookups(groups, chain.from_iterable(self._names_by_table))
        sharded = [lookup for lookup in lookups if not lookup.layout.replicated]
        dynamic = any(lookup.dynamic for lookup in lookups)
        on_host = any(lookup.layout.tier == "host" for lookup in lookups)
        self.finds_distinct = self.dedup and (
            dynamic or on_host or distinct_ids_pay(self.device, collectives.world_size)
        )
        if self.finds_distinct:
            by_table = {lookup.layout.name: lookup for lookup in sharded}
            self.sent_lookups = tuple(replace(lookup, feature=name, output=name) for name, lookup in by_table.items())
        else:
            self.sent_lookups = tuple(sharded)
        self.dedup_lookups = [(lookup.feature, lookup.layout.name) for lookup in sharded]
        limits = [(lookup.feature, lookup.layout.num_embeddings) for lookup in self.sent_lookups]
        distinct = DistinctIds(self.dedup_lookups, limits, self.device, dynamic) if self.finds_distinct else None
        route = self._make(groups, lookups, self.sent_lookups, weighted=False, pooled=False, distinct=distinct)
        self.output_layout = SequenceOutput(
            route,
            lookups,
            self.sent_lookups,
            self.replica_number,
            group_widths=[group.width or 0 for group in groups],
            dim=self._embedding_dim,
            rank=collectives.rank,
            device=self.device,
            dtype=self.output_dtype,
            mean_over=collectives.mean_over,
        )
        self._plan_step(self.output_layout, lookups)

    def _pending(self, call: InFlight) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return SequenceEmbeddings(call, self.context.step, need_indices=self._need_indices)

    def scripted_twin(self) -> nn.Module:
        """What TorchScript of this process sees in this module's place; :mod:`shardrec.portable` has another."""
        return LiveSequences(
            self,
            self.embeddings,
            partial(_flat_rows, need_ids=self._need_indices),
            self.lookups,
            width=self._embedding_dim,
            need_indices=self._need_indices,
        )

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of the unsharded collection."""
        return self._configs

    def embedding_dim(self) -> int:
        """Columns of every table."""
        return self._embedding_dim

    def need_indices(self) -> bool:
        """Whether each JaggedTensor has its ids as weights."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output keys per table."""
        return self._names_by_table


def distinct_ids_pay(device: torch.device, world_size: int) -> bool:
    """Whether distinct ids are worth finding. On one rank nothing travels, and a GPU reads repeated rows of its memory
    faster than it finds distinct ids (benchmarks/gpu)."""
    return device.type != "cuda" or world_size > 1


def _flat_rows(output: tuple[Tensor, list[SequenceKey]], *, need_ids: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (N, D) and ids, (N,) or none, of all the lookups one after the other, and their numbers (L,)."""
    rows, entries = output
    counts = [entry.ids.numel() for entry in entries]
    if any(entry.replica is not None for entry in entries):
        parts = iter(rows.split([entry.ids.numel() for entry in entries if entry.replica is None]))
        rows = torch.cat([next(parts) if entry.replica is None else entry.replica for entry in entries])
    ids = torch.cat([entry.ids for entry in entries]) if need_ids else entries[0].ids[:0]
    return rows, ids, torch.tensor(counts)
