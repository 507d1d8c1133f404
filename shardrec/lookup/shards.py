"""The lookup of a rank's shards: ids in, pooled columns out, weights updated in backward.

Shapes: S slots of this rank, B_all the samples of all ranks, N ids, D pooled columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.route import Slot
from shardrec.layout import Shard
from shardrec.lookup.backward import looked_up
from shardrec.lookup.bank import RowGradient, TableBank
from shardrec.lookup.groups import GroupMode, LookupGroup
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.lookup.rows import RowOptimizer
from shardrec.lookup.rows_operator import RowsLookup
from shardrec.lookup.scripted import DenseTables, NoTables, kernel_module
from shardrec.lookup.whole_rows import WholeRows

__all__ = ["ShardLookup", "dense_lookup"]


@dataclass(kw_only=True)
class _Member:
    """One group's part on this rank; ``bank`` is None where the rank holds none of its shards."""

    group: LookupGroup
    shards: tuple[Shard, ...]
    slots: tuple[Slot, ...]
    bank: TableBank | None
    rows: RowOptimizer | None
    whole_rows: WholeRows | None
    parameters: tuple[nn.Parameter, ...] = ()


class ShardLookup:
    """This rank's shards and their kernels.

    Args:
        groups: all the groups of the module, alike on every rank.
        slots: this rank's slots, group after group.
        collectives: of the group that the embeddings are sharded over.
        device: where the shards live.
        pooled: sum each bag; else give a row per id, for groups of one width each.

    Attributes:
        shards: this rank's shards, group after group.
    """

    def __init__(
        self,
        groups: Sequence[LookupGroup],
        slots: Sequence[Slot],
        collectives: Collectives,
        device: torch.device,
        *,
        pooled: bool = True,
    ) -> None:
        self._members = [
            _member(group, tuple(slot for slot in slots if slot.group == index), collectives, device, pooled)
            for index, group in enumerate(groups)
        ]
        self.shards = tuple(shard for member in self._members for shard in member.shards)
        self._placeholder = torch.zeros(0, device=device, requires_grad=True)
        self._width = sum(map(_width, self._members))

    def weight(self, shard: Shard) -> Tensor:
        """(rows, cols) weights of one of this rank's shards, a view of the kernel's memory."""
        member, table = self._find(shard)
        assert member.bank is not None, "a member with shards has a bank"
        return member.bank.weights[table]

    def states(self, shard: Shard) -> dict[str, Tensor]:
        """The fused optimizer's states of one shard, by name, as views: (rows, cols), or (rows,) if rowwise."""
        member, table = self._find(shard)
        assert member.bank is not None, "a member with shards has a bank"
        return (member.rows.states() if member.rows is not None else member.bank.states())[table]

    def step_counts(self) -> dict[str, int]:
        """Per table, how many updates its optimizer has made, where this rank counts them (Adam); else 0."""
        counts: dict[str, int] = {}
        for member in self._members:
            for layout in member.group.layouts:
                # A table with stripes of several widths may be in several groups, and have no shard here in some.
                counts[layout.name] = max(counts.get(layout.name, 0), _steps(member))
        return counts

    def load_step_counts(self, counts: Mapping[str, int]) -> None:
        """Set what :meth:`step_counts` gave; tables that share a kernel share their largest count."""
        for member in self._members:
            count = max((counts.get(layout.name, 0) for layout in member.group.layouts), default=0)
            if member.rows is not None:
                member.rows.step_count = count
            elif member.bank is not None:
                member.bank.step_count = count

    def set_learning_rate(self, optimizer: FusedOptimizer, lr: float) -> None:
        """Use ``lr`` for the groups that were given ``optimizer``, from the next look-up on."""
        for member in self._members:
            if member.group.optimizer != optimizer:
                continue
            if member.rows is not None:
                member.rows.lr = lr
            elif member.bank is not None:
                member.bank.set_learning_rate(lr)

    def own_parameters(self, parameters: dict[Shard, nn.Parameter]) -> None:
        """Tell the lookup which parameters take the gradients of the shards without a fused optimizer."""
        for member in self._members:
            if member.group.mode is GroupMode.DENSE:
                member.parameters = tuple(parameters[shard] for shard in member.shards)

    def __call__(self, ids: ShardInput, room: Callable[[int], Tensor] | None = None) -> Tensor:
        """(B_all, D) float32 pooled columns, group after group.

        Args:
            ids: what to look up.
            room: makes the (n,) memory of the result.
        """
        batch = sum(ids.batch_sizes)
        if (
            room is not None
            and self._width
            and all(one.bank is None or one.bank.writes_in_place for one in self._members)
        ):
            whole = room(batch * self._width).view(batch, self._width)
            edges = [0, *accumulate(_width(member) for member in self._members)]
            spans = list(pairwise(edges))
            parts = self._rows(ids, [_columns(whole, *span) for span in spans])
            joined: Tensor = _Joined.apply([whole], spans, *parts)  # type: ignore[no-untyped-call]
            return joined
        pooled = self.rows(ids)
        if not pooled:
            return self._placeholder.new_zeros((batch, 0))
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    def rows(self, ids: ShardInput) -> list[Tensor]:
        """Per group, (B_all, D_group) pooled columns, or (n, w) rows without pooling."""
        return self._rows(ids, None)

    def _rows(self, ids: ShardInput, places: Sequence[Tensor] | None) -> list[Tensor]:
        """:meth:`rows`, with the place of each group's pooled columns, if all the banks write in place."""
        starts = [0, *accumulate(ids.group_ids)]
        slot = 0
        found = []
        for index, member in enumerate(self._members):
            count = len(member.slots)
            span = slice(starts[index], starts[index + 1])
            part = _GroupInput(
                ids=ids.ids[span],
                lengths=ids.lengths[slot : slot + count],
                weights=None if ids.weights is None else ids.weights[span],
                out=None if places is None or not count else places[index],
            )
            slot += count
            found.append(self._look_up(member, part, sum(ids.batch_sizes)))
        return found

    def _look_up(self, member: _Member, part: _GroupInput, batch: int) -> Tensor:
        if member.bank is None and member.whole_rows is None:
            empty = self._placeholder.new_zeros(_empty_shape(member, batch))
            return empty.requires_grad_() if torch.is_grad_enabled() else empty
        if member.group.mode is GroupMode.FUSED:
            assert member.bank is not None, "only whole-row groups go on without a bank"
            return member.bank.look_up(part.ids, part.lengths, part.weights, part.out)
        if member.group.mode is GroupMode.DENSE:
            assert member.bank is not None, "only whole-row groups go on without a bank"
            return dense_lookup(member.bank, part.ids, part.lengths, part.weights, member.parameters, part.out)
        bank, learn, inputs = member.bank, partial(_learn, member), [self._placeholder]
        if bank is None:
            empty = self._placeholder.new_zeros(_empty_shape(member, batch))
            return looked_up(lambda *_: empty, lambda *_: None, learn, part.ids, part.lengths, part.weights, inputs)
        return looked_up(
            bank.look_up, bank.weight_gradient, learn, part.ids, part.lengths, part.weights, inputs, part.out
        )

    def scripted(self, *, training: bool) -> tuple[nn.ModuleList, list[int]]:
        """The lookups for TorchScript, one module per group, and the number of this rank's slots in each.

        Args:
            training: update the tables in backward, all of them; else those whose optimizer is not the kernel's alone
                (without a fused one, or one that counts steps) are only looked up.
        """
        modules = [self._scripted(member, training) for member in self._members]
        return nn.ModuleList(modules), [len(member.slots) for member in self._members]

    def _scripted(self, member: _Member, training: bool) -> nn.Module:
        # fbgemm takes the number of the step as a constant: a kernel that needs it is called by Python while it trains.
        counts = member.group.optimizer is not None and member.group.optimizer.counts_steps
        by_python = counts or member.group.mode in (GroupMode.ROWS, GroupMode.WHOLE_ROWS)
        if by_python and training and (member.bank is not None or member.whole_rows is not None):

            def look_up(ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
                return self._look_up(member, _GroupInput(ids=ids, lengths=lengths, weights=weights), lengths.size(1))

            return RowsLookup(look_up, self)
        if member.bank is None:
            return NoTables(member.group.width or 0, self._placeholder.device)
        if member.group.mode is GroupMode.DENSE or member.bank.kernel is None:
            weights = member.parameters or [nn.Parameter(one, requires_grad=False) for one in member.bank.weights]
            return DenseTables(weights, member.bank.slot_tables, pooled=member.bank.pooled)
        return kernel_module(member.bank, updates=not counts)

    def _find(self, shard: Shard) -> tuple[_Member, int]:
        for member in self._members:
            if shard in member.shards:
                return member, member.shards.index(shard)
        raise KeyError(f"{shard} is not held here")


@dataclass(frozen=True, kw_only=True)
class _GroupInput:
    """A group's part of the input: ``ids`` (N,), ``lengths`` (S, B_all), ``weights`` (N,) or None; ``out`` for what
    is looked up, or None."""

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None
    out: Tensor | None = None


def _member(
    group: LookupGroup, slots: tuple[Slot, ...], collectives: Collectives, device: torch.device, pooled: bool
) -> _Member:
    shards = group.local_shards(collectives.rank)
    number = {shard: index for index, shard in enumerate(shards)}
    fused = group.optimizer if group.mode is GroupMode.FUSED else None
    bank = None
    if shards:
        shapes = [(shard.rows, shard.cols) for shard in shards]
        tables = [number[slot.shard] for slot in slots]
        bank = TableBank(shapes, tables, fused, device, pooled=pooled, dtype=group.dtype)
    in_rows = group.mode in (GroupMode.ROWS, GroupMode.WHOLE_ROWS)
    rows = None
    if in_rows and bank is not None:
        assert group.optimizer is not None, "a group that updates by rows has an optimizer"
        rows = RowOptimizer(bank.classes, len(shards), group.optimizer)
    whole = WholeRows(group.layouts, shards, collectives) if group.mode is GroupMode.WHOLE_ROWS else None
    return _Member(group=group, shards=shards, slots=slots, bank=bank, rows=rows, whole_rows=whole)


def _width(member: _Member) -> int:
    """Pooled columns of a group on this rank."""
    return sum(slot.shard.cols for slot in member.slots)


def _columns(whole: Tensor, start: int, end: int) -> Tensor:
    """Some columns of a dense matrix, as a tensor of its own: autograd does not see that it is part of another."""
    found = whole.new_empty(0)
    return found.set_(
        whole.untyped_storage(), whole.storage_offset() + start, (whole.size(0), end - start), whole.stride()
    )


class _Joined(torch.autograd.Function):
    """Columns that lie side by side in one matrix already, as that matrix: ``cat`` without its copy."""

    @staticmethod
    def forward(ctx: FunctionCtx, whole: list[Tensor], spans: list[tuple[int, int]], *parts: Tensor) -> Tensor:
        ctx.spans = spans  # type: ignore[attr-defined]
        return whole[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient[:, start:end] for start, end in ctx.spans)


def _empty_shape(member: _Member, batch: int) -> tuple[int, int]:
    """Of a group's rows on a rank without shards: no columns, or without pooling no rows."""
    return (batch, 0) if member.group.width is None else (0, member.group.width)


def _steps(member: _Member) -> int:
    if member.rows is not None:
        return member.rows.step_count
    return 0 if member.bank is None else member.bank.step_count


def _learn(
    member: _Member, ids: Tensor, lengths: Tensor, weights: Tensor | None, gradient: Tensor
) -> Sequence[Tensor | None]:
    """Update the rows that were looked up with the member's :class:`RowOptimizer`; without a bank, tell the others."""
    gradients: Sequence[RowGradient] = []
    if member.bank is not None:
        gradients = member.bank.row_gradients(ids, lengths, weights, gradient)
    if member.rows is not None:
        gradients = member.rows.decayed(gradients)
    squares = None
    if member.whole_rows is not None:
        squares = member.whole_rows.mean_squares(member.bank, gradients)
    if member.rows is not None:
        member.rows.step(gradients, squares)
    return [None]


def dense_lookup(
    bank: TableBank,
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    parameters: Sequence[nn.Parameter],
    out: Tensor | None = None,
) -> Tensor:
    """A lookup that gives each table's parameter a dense gradient, summed in float32, in the parameter's dtype.

    Args:
        bank: forward-only bank, one table per parameter, whose memory the parameters share.
        ids: (N,).
        lengths: (S, B).
        weights: (N,) or None.
        parameters: one (rows, cols) parameter per table of the bank.
        out: as :meth:`TableBank.look_up` takes it.

    Returns:
        (B, D) float32.
    """

    def learn(ids: Tensor, lengths: Tensor, weights: Tensor | None, gradient: Tensor) -> list[Tensor | None]:
        per_table: list[Tensor | None] = [None] * len(bank.shapes)
        for cls, whole in zip(bank.classes, bank.dense_gradients(ids, lengths, weights, gradient), strict=True):
            dense = whole.to(bank.dtype)
            for position, table in enumerate(cls.tables):
                per_table[table] = dense[cls.bases[position] : cls.bases[position + 1]]
        return per_table

    return looked_up(bank.look_up, bank.weight_gradient, learn, ids, lengths, weights, parameters, out)
