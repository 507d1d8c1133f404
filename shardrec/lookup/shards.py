"""The lookup of a rank's shards: ids in, pooled columns out, weights updated in backward or by the step.

Shapes: S slots of this rank, B_all the samples of all ranks, N ids, D pooled columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import Collectives
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.route import Slot
from shardrec.layout import Shard
from shardrec.lookup.backward import Kept, LookupGradient
from shardrec.lookup.deferred import DeferredGradients
from shardrec.lookup.group_shards import RowGradient, TableBank
from shardrec.lookup.groups import GroupMode, LookupGroup
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.lookup.row_optimizers import RowOptimizer
from shardrec.lookup.scripted import NoTables, Tables
from shardrec.lookup.whole_rows import WholeRows

LookupInputs: TypeAlias = Sequence[Tensor | None]
"""Ids, lengths and weights of ids per lookup group, one group after the other."""


class _LocalGroup:
    """One group's part on this rank.

    Args:
        group: of tables.
        slots: this rank's, of the group.
        collectives: of the group that the embeddings are sharded over.
        device: where the shards live.
        pooled: sum each bag; else give a row per id.

    Attributes:
        shards: this rank's, in the order of the bank's tables.
        bank: None if the rank holds none of the group's shards.
        rows: the row-by-row optimizer, for groups that no kernel updates; else None.
        updater: ``rows`` or ``bank``: has the optimizer's states and counts its steps. None without a bank.
        whole_rows: the exchange of mean squares of whole rows, if the group needs it.
        width: pooled columns of the group on this rank.
        parameters: of the shards, where they take dense gradients.
        deferred: what :meth:`step` will apply, if the group is updated by it.
        gradients: of the running backward, while they wait for others. See [Note: one update in a backward].
    """

    def __init__(
        self, group: LookupGroup, slots: tuple[Slot, ...], collectives: Collectives, device: torch.device, pooled: bool
    ) -> None:
        self.group = group
        self.slots = slots
        self.shards = group.local_shards(collectives.rank)
        self.width = sum(slot.shard.cols for slot in slots)
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.bank: TableBank | None = None
        self.rows: RowOptimizer | None = None
        self.cache_rows = group.cache_rows(collectives.rank)
        if self.shards:
            number = {shard: index for index, shard in enumerate(self.shards)}
            shapes = [(shard.rows, shard.cols) for shard in self.shards]
            tables = [number[slot.shard] for slot in slots]
            fused = group.optimizer if group.mode is GroupMode.FUSED else None
            placed = {"tier": group.tier, "cache_rows": self.cache_rows} if group.tier != "device" else {}
            self.bank = TableBank(shapes, tables, fused, device, pooled=pooled, dtype=group.dtype, **placed)
            if group.mode in (GroupMode.ROWS, GroupMode.WHOLE_ROWS):
                assert group.optimizer is not None, "a group that updates by rows has an optimizer"
                self.rows = RowOptimizer(self.bank.classes, len(self.shards), group.optimizer)
        self.updater = self.rows or self.bank
        self.whole_rows: WholeRows | None = None
        if group.mode is GroupMode.WHOLE_ROWS:
            self.whole_rows = WholeRows(group.layouts, self.shards, self.bank, collectives, device)
        self.deferred: DeferredGradients | None = None
        if group.at_step and group.optimizer is not None:
            self.deferred = DeferredGradients(self.bank)
        self.gradients: list[LookupGradient] = []
        self._is_alone = collectives.world_size == 1
        self._nothing = NoTables(group.width or 0, device)

    def under(self, group: LookupGroup, slots: tuple[Slot, ...], rank: int) -> _LocalGroup | None:
        """The same tables, states and parameters in a group of another plan. None if they are others on this rank."""
        same = replace(group, layouts=self.group.layouts) == self.group and group.local_shards(rank) == self.shards
        same = same and [slot.shard for slot in slots] == [slot.shard for slot in self.slots]
        if not same or (self.whole_rows is not None and group != self.group) or self.bank is None:
            return None
        if group.cache_rows(rank) != self.cache_rows:
            return None
        kept = copy(self)
        kept.group, kept.slots = group, slots
        return kept

    def look_up(
        self,
        ids: Tensor,
        lengths: Tensor,
        id_weights: Tensor | None,
        out: Tensor | None,
        offsets: Tensor | None,
        *,
        to_update: bool,
    ) -> tuple[Tensor, Kept]:
        """As :meth:`TableBank.look_up`. ``to_update``: :meth:`add_gradient` may follow."""
        if self.bank is None:
            return self._nothing(ids, lengths, id_weights), (0.0, None)
        if to_update and self.group.mode is GroupMode.FUSED:
            return self.bank.look_up_to_update(ids, lengths, id_weights, out, offsets)
        return self.bank.look_up(ids, lengths, id_weights, out, offsets), (0.0, None)

    def add_gradient(
        self,
        ids: Tensor,
        lengths: Tensor,
        id_weights: Tensor | None,
        gradient: Tensor,
        kept: Kept,
        *,
        is_last: bool,
        updates: bool,
    ) -> list[Tensor | None]:
        """Update the tables, or have :meth:`step` do it. Gives the gradients of :attr:`parameters`.

        Args:
            ids: of a lookup, like the next arguments.
            lengths: as above.
            id_weights: as above.
            gradient: of its result.
            kept: what it has kept.
            is_last: no lookup of these tables will follow in this backward; without it, the gradient is kept.
            updates: as for :meth:`ShardLookup.add_gradients`.
        """
        mode, bank = self.group.mode, self.bank
        if mode is GroupMode.DENSE:
            if bank is None or not any(parameter.requires_grad for parameter in self.parameters):
                return [None] * len(self.parameters)
            return list(bank.parameter_gradients(ids, lengths, id_weights, gradient))
        if not updates or (bank is None and self.whole_rows is None):
            return []
        if mode is GroupMode.FUSED and is_last and not self.gradients:
            assert bank is not None, "without one there is nothing to update"
            bank.update(ids, lengths, id_weights, gradient, kept)
            return []
        if self._is_alone if self.deferred is not None else not is_last:
            gradient = gradient.clone()  # it may be the caller's memory, or the transport's
        lookup = LookupGradient(ids=ids, lengths=lengths, id_weights=id_weights, gradient=gradient, lr=kept[0])
        if self.deferred is not None:
            self.deferred.add(lookup)
            return []
        self.gradients.append(lookup)
        if is_last:
            self.update_kept()
        return []

    def update_kept(self) -> None:
        """Make one update of the gradients that were kept."""
        lookups, self.gradients = self.gradients, []
        if lookups:
            self._apply(lookups)

    def _apply(self, lookups: Sequence[LookupGradient]) -> None:
        """Make one update of the rows that were looked up."""
        if self.group.mode is GroupMode.FUSED:
            assert self.bank is not None, "a fused group has a bank"
            self.bank.update_together(lookups)
            return
        gradients = DeferredGradients(self.bank)
        for lookup in lookups:
            gradients.add(lookup)
        self._update(gradients)

    def step(self) -> None:
        """Apply the gradients that backward has left, if there are any. Every rank calls it."""
        if self.deferred is not None and self.deferred.backwards:
            self._update(self.deferred)

    def _update(self, deferred: DeferredGradients) -> None:
        """Update rows. A rank without a bank still tells the others about its missing part of whole rows."""
        if self.bank is not None and self.rows is not None and self.whole_rows is None and self.rows.reads_lookups:
            lookups = deferred.take_lookups()
            if lookups:
                self.rows.step_from_lookups(self.bank, lookups)
                return
        gradients: Sequence[RowGradient] = deferred.take()
        squares = None
        if self.rows is not None:
            gradients = self.rows.decayed(gradients)
        if self.whole_rows is not None:
            squares = self.whole_rows.mean_squares(gradients)
        if self.rows is not None:
            self.rows.step(gradients, squares)

    def scripted(self) -> nn.Module:
        """The lookup for TorchScript. See :meth:`ShardLookup.scripted`."""
        if self.bank is None:
            return self._nothing
        if self.bank.cache is not None:
            names = ", ".join(repr(layout.name) for layout in self.group.layouts)
            raise ConfigError(
                f"a program of its own reads rows where they are, and rows of tables {names} are also in a cache. "
                "Plan them in tier 'device' or 'host', or quantize the model first"
            )
        return Tables(self.bank.weights, self.bank.slot_tables, pooled=self.bank.pooled)


class ShardLookup:
    """This rank's shards and their kernels.

    Args:
        groups: all groups of the module, the same on every rank.
        slots: this rank's slots, group after group.
        collectives: of the group that the embeddings are sharded over.
        device: where the shards live.
        pooled: sum each bag; else give a row per id, for groups of one width each.
        before: the lookup under another plan. Its groups with the same shards on this rank are kept.

    Attributes:
        shards: this rank's shards, group after group.
        parameters: of those that take dense gradients.
        reads_by_offsets: whether a lookup reads ids in the bags only, so that some may be in none.
        is_open: keep all gradients for :meth:`update_kept`.
    """

    def __init__(
        self,
        groups: Sequence[LookupGroup],
        slots: Sequence[Slot],
        collectives: Collectives,
        device: torch.device,
        *,
        pooled: bool = True,
        before: ShardLookup | None = None,
    ) -> None:
        known = () if before is None else before._local_groups
        self._local_groups: list[_LocalGroup] = []
        for index, group in enumerate(groups):
            of_group = tuple(slot for slot in slots if slot.group == index)
            kept = next(filter(None, (local.under(group, of_group, collectives.rank) for local in known)), None)
            self._local_groups.append(kept or _LocalGroup(group, of_group, collectives, device, pooled))
        self._tables = {
            shard: (local.bank, local.updater, number)
            for local in self._local_groups
            if local.bank is not None and local.updater is not None
            for number, shard in enumerate(local.shards)
        }
        self.shards = tuple(self._tables)
        self._device = device
        self._width = sum(local.width for local in self._local_groups)
        banks = [local.bank for local in self._local_groups]
        self._writes_in_place = bool(self._width) and all(bank is None or bank.writes_in_place for bank in banks)
        self.reads_by_offsets = all(bank is None or bank.kernel is not None for bank in banks)
        self._nodes: list[ref[Any]] = []
        self.is_open = False
        self.parameters: list[nn.Parameter] = []

    def weight(self, shard: Shard) -> Tensor:
        """(rows, cols) weights of one of this rank's shards, a view of the kernel's memory."""
        bank, _, number = self._tables[shard]
        return bank.weights[number]

    def settle(self, shards: Iterable[Shard | None], *, to_write: bool) -> None:
        """Have weights of this rank's shards be where :meth:`weight` says, to read them or ``to_write`` them, until the
        next forward. Other shards are left out."""
        wanted = set(shards)
        for local in self._local_groups:
            if local.bank is not None and local.bank.cache is not None and wanted.intersection(local.shards):
                local.bank.cache.settle(to_write=to_write)

    def prefetch(self, received: Callable[[], ShardInput]) -> None:
        """Load the rows of a call to come into caches, on the current stream. Without ids, nothing is received."""
        if any(local.cache_rows for local in self._local_groups):
            for local, ids, lengths, _ in self._inputs(received()):
                if local.bank is not None:
                    local.bank.prefetch(ids, lengths)

    def cache_statistics(self) -> Iterator[tuple[tuple[str, ...], dict[str, int]]]:
        """Per cache, the tables with rows of this rank in it, and :meth:`RowCache.statistics`."""
        for local in self._local_groups:
            if local.bank is not None and local.bank.cache is not None:
                yield tuple(dict.fromkeys(shard.table for shard in local.shards)), local.bank.cache.statistics()

    def states(self, shard: Shard) -> dict[str, Tensor]:
        """The fused optimizer's states of one shard, by name, as views: (rows, cols), or (rows,) if rowwise."""
        _, updater, number = self._tables[shard]
        return updater.states()[number]

    def step_counts(self) -> dict[str, int]:
        """Per table, how many updates its optimizer has made, where this rank counts them (Adam), or 0."""
        counts: dict[str, int] = {}
        for local in self._local_groups:
            steps = 0 if local.updater is None else local.updater.step_count
            for layout in local.group.layouts:
                # A table with stripes of several widths may be in several groups, and lack a shard here in some.
                counts[layout.name] = max(counts.get(layout.name, 0), steps)
        return counts

    def load_step_counts(self, counts: Mapping[str, int]) -> None:
        """Set the counts that :meth:`step_counts` returned. Tables that share a kernel share their largest count."""
        for local in self._local_groups:
            if local.updater is not None:
                local.updater.step_count = max(counts.get(layout.name, 0) for layout in local.group.layouts)

    def set_learning_rate(self, optimizer: FusedOptimizer, lr: float) -> None:
        """Use ``lr`` for the groups with ``optimizer``: from the next look-up on where kernels update in backward, and
        at the next update of the others."""
        for local in self._local_groups:
            if local.group.optimizer != optimizer:
                continue
            if local.rows is not None:
                local.rows.lr = lr
            elif local.bank is not None:
                local.bank.set_learning_rate(lr)

    def step(self) -> None:
        """Update the tables with the gradients that backward has left. Every rank calls it."""
        for member in self._local_groups:
            member.step()

    def row_optimizers(self) -> list[RowOptimizer]:
        """The optimizers of groups that a kernel does not update."""
        return [member.rows for member in self._local_groups if member.rows is not None]

    def deferred(self) -> list[DeferredGradients]:
        """What :meth:`step` will apply, by group."""
        return [member.deferred for member in self._local_groups if member.deferred is not None]

    def drop_rows(self, shard: Shard, rows: Tensor) -> None:
        """Drop the gradients that no step has applied to some rows (E,) of one of this rank's shards."""
        for member in self._local_groups:
            number = member.shards.index(shard) if shard in member.shards else None
            if number is not None and member.deferred is not None:
                member.deferred.drop_rows(number, rows)
            elif number is not None and member.parameters and (gradient := member.parameters[number].grad) is not None:
                gradient.index_fill_(0, rows.to(gradient.device), 0)

    def own_parameters(self, parameters: dict[Shard, nn.Parameter]) -> None:
        """Tell the lookup which parameters take the gradients of the shards without a fused optimizer."""
        for local in self._local_groups:
            if local.group.mode is GroupMode.DENSE:
                local.parameters = tuple(parameters[shard] for shard in local.shards)
        self.parameters = [parameter for local in self._local_groups for parameter in local.parameters]

    def look_up(
        self, shard_input: ShardInput, allocate: Callable[[int], Tensor] | None = None, *, to_update: bool = False
    ) -> tuple[Tensor, LookupInputs, list[Kept]]:
        """Look up sums of bags, without a graph.

        Args:
            shard_input: the ids to look up.
            allocate: returns (n,) float32 memory for the result. Default: a new tensor.
            to_update: whether :meth:`add_gradients` may follow.

        Returns:
            (B_all, D) float32 pooled columns, group after group, and the arguments of :meth:`add_gradients`.
        """
        groups, batch = self._local_groups, shard_input.lengths.size(1)
        whole = None
        if allocate is not None and self._writes_in_place:
            whole = allocate(batch * self._width).view(batch, self._width)
        if len(groups) == 1:
            inputs = shard_input.ids, shard_input.lengths, shard_input.weights
            pooled, kept = groups[0].look_up(*inputs, whole, shard_input.offsets, to_update=to_update)
            return pooled, inputs, [kept]
        if whole is not None:
            spans = pairwise(accumulate((local.width for local in groups), initial=0))
            outs = [whole[:, start:end] for start, end in spans]
            return whole, *self._rows(shard_input, outs, to_update=to_update)[1:]
        rows, of_groups, lookups = self.rows(shard_input, to_update=to_update)
        if not rows:
            return torch.zeros((batch, 0), dtype=torch.float32, device=self._device), of_groups, lookups
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1), of_groups, lookups

    def rows(
        self, shard_input: ShardInput, *, to_update: bool = False
    ) -> tuple[list[Tensor], LookupInputs, list[Kept]]:
        """:meth:`look_up` by group: (B_all, D_group) pooled columns, or (n, w) rows without pooling."""
        return self._rows(shard_input, [None] * len(self._local_groups), to_update=to_update)

    def add_gradients(
        self,
        inputs: LookupInputs,
        lookups: Sequence[Kept],
        gradients: Sequence[Tensor],
        *,
        is_last: bool,
        updates: bool = True,
    ) -> list[Tensor | None]:
        """Update the tables, or have :meth:`step` do it. Gives the gradients of :attr:`parameters`.

        Args:
            inputs: of the groups' lookups.
            lookups: by group, what was kept.
            gradients: by group, of the rows or pooled columns; with pooling, the columns of all groups may be one
                tensor.
            is_last: no look-up of these tables will follow in this backward.
            updates: whether fused optimizers take the gradients; not in a backward for some inputs alone, such as
                ``torch.autograd.grad`` with respect to the weights of ids.
        """
        of_parameters: list[Tensor | None] = []
        if not lookups:
            return of_parameters
        if len(gradients) != len(lookups):
            gradients = gradients[0].split([local.width for local in self._local_groups], dim=1)
        tensors: Iterator[Any] = iter(inputs)
        for local, kept, gradient in zip(self._local_groups, lookups, gradients, strict=True):
            ids, lengths, id_weights = next(tensors), next(tensors), next(tensors)
            of_parameters += local.add_gradient(
                ids, lengths, id_weights, gradient, kept, is_last=is_last, updates=updates
            )
        return of_parameters

    def id_weight_gradient(self, inputs: LookupInputs, gradient: Tensor) -> Tensor:
        """(N,) gradient of the ids' weights, from the gradient of the pooled columns. Before the tables are updated."""
        tensors: Iterator[Any] = iter(inputs)
        gradients = []
        parts = gradient.split([local.width for local in self._local_groups], dim=1)
        for local, part in zip(self._local_groups, parts, strict=True):
            ids, lengths, _ = next(tensors), next(tensors), next(tensors)
            if local.bank is not None:
                gradients.append(local.bank.id_weight_gradient(ids, lengths, part))
        return torch.cat(gradients) if gradients else gradient.new_zeros(0)

    def begin_lookup(self, node: Any) -> None:
        """A node of autograd's graph will give gradients. See [Note: one update in a backward]."""
        if torch._C._current_graph_task_id() == -1:
            for local in self._local_groups:
                if local.gradients:  # of a backward that raised
                    local.gradients.clear()
        if self._nodes:
            self._nodes = [*filter(ref.__call__, self._nodes)]
        self._nodes.append(ref(node))

    def is_last_lookup(self, node: Any) -> bool:
        """Called in the backward of a node: whether this backward will reach no other node of :meth:`begin_lookup`."""
        node.backward = backward = torch._C._current_graph_task_id()
        if self.is_open:
            return False
        if len(self._nodes) == 1:
            return True
        others = [other for other in (reference() for reference in self._nodes) if other is not None]
        return not any(
            getattr(other, "backward", -1) != backward and torch._C._will_engine_execute_node(other) for other in others
        )

    def update_kept(self) -> None:
        """Make the update of the gradients that were kept for a further lookup in this backward."""
        for local in self._local_groups:
            local.update_kept()

    def _rows(
        self, shard_input: ShardInput, outs: Sequence[Tensor | None], *, to_update: bool
    ) -> tuple[list[Tensor], LookupInputs, list[Kept]]:
        """:meth:`rows`, with the memory of each group's pooled columns, if all banks write in place."""
        rows, lookups, inputs = [], [], list[Tensor | None]()
        for (local, ids, lengths, id_weights), out in zip(self._inputs(shard_input), outs, strict=True):
            looked_up, kept = local.look_up(ids, lengths, id_weights, out, None, to_update=to_update)
            rows.append(looked_up)
            lookups.append(kept)
            inputs += (ids, lengths, id_weights)
        return rows, inputs, lookups

    def _inputs(self, shard_input: ShardInput) -> Iterator[tuple[_LocalGroup, Tensor, Tensor, Tensor | None]]:
        """Each group with its ids, lengths and weights of ids."""
        slots = accumulate((len(local.slots) for local in self._local_groups), initial=0)
        edges = zip(pairwise(accumulate(shard_input.group_ids, initial=0)), pairwise(slots), strict=True)
        for local, ((start, end), (first, last)) in zip(self._local_groups, edges, strict=True):
            id_weights = None if shard_input.weights is None else shard_input.weights[start:end]
            yield local, shard_input.ids[start:end], shard_input.lengths[first:last], id_weights

    def scripted(self) -> tuple[nn.ModuleList, list[int]]:
        """The lookups for TorchScript, one module per group, and the number of this rank's slots in each."""
        modules = [local.scripted() for local in self._local_groups]
        return nn.ModuleList(modules), [len(local.slots) for local in self._local_groups]
