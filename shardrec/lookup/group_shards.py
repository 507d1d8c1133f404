"""A bank is the shards of one lookup group on this rank, which one kernel call looks up.

The kernel comes from :mod:`shardrec.lookup.native_kernel` if it supports the tables. Otherwise it is fbgemm's.

Shapes: T local tables (shards), S slots, B_all samples, N ids, D columns of all the slots, U distinct rows.

fbgemm's module keeps all the weights in one flat tensor. A bank that is used forward only has its tables laid out in it
by width, so that the tables of one width are also one matrix. Row-by-row optimizers address its rows::

    flat   | t1 (500 × 16) | t3 (90 × 16) | t2 (40 × 8) |
    class    width 16: matrix (590, 16)     width 8: matrix (40, 8)

Weights without a kernel in fbgemm (bfloat16, a number of columns that is not a multiple of 4) lie in a tensor of the
same form, and are looked up by torch operators, or float32 ones on the CPU by the native kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from shardrec import native
from shardrec.exchange.cut import chunked
from shardrec.lookup.backward import Kept, LookupGradient
from shardrec.lookup.cache import RowCache
from shardrec.lookup.fbgemm_kernel import DirectCall, has_kernel, kernel_states, make_kernel
from shardrec.lookup.native_kernel import NativeKernel, native_kernel, with_neighbouring_columns
from shardrec.lookup.optimizers import FusedOptimizer

_MAX_INT32 = 2**31 - 1
_FLOATS_AT_ONCE = 2**24
"""Bytes of the rows or gradients of single ids, which are made for a few ids at a time, because long bags take much
memory."""


@dataclass(frozen=True, kw_only=True)
class WidthClass:
    """The tables of one width as one matrix.

    Args:
        width: columns w.
        tables: numbers of the tables, in order.
        bases: per table, its first row in the matrix. One more entry for the end.
        weight: (rows, w), a view of the bank's memory, in its dtype.
        slot_bases: (S,) int64, the first matrix row of each slot's table. -1 for slots of another width.
    """

    width: int
    tables: tuple[int, ...]
    bases: tuple[int, ...]
    weight: Tensor
    slot_bases: Tensor


@dataclass(frozen=True, kw_only=True)
class RowGradient:
    """The gradient of one width class, which is ``scale`` times ``values``.

    Args:
        rows: (U,) distinct, ascending matrix rows.
        values: (U, w) float32.
        squares: (U,) sum of the squares per row of ``values``, if it is known.
        scale: () float32 that is still to be multiplied. None for 1.
    """

    rows: Tensor
    values: Tensor
    squares: Tensor | None = None
    scale: Tensor | None = None

    def square_sums(self) -> Tensor:
        """(U,) sum of each row's squares."""
        squares = self.values.square().sum(dim=1) if self.squares is None else self.squares
        return squares if self.scale is None else squares * self.scale.square()

    def scaled(self) -> RowGradient:
        """The same, with ``values`` that are multiplied."""
        return self if self.scale is None else RowGradient(rows=self.rows, values=self.values * self.scale)

    def times(self, factor: Tensor) -> RowGradient:
        """The same, to be multiplied by a () float32 factor."""
        return replace(self, scale=factor if self.scale is None else factor * self.scale)


def summed(rows: Tensor, values: Tensor, cls: WidthClass) -> RowGradient:
    """The gradients ``values`` (n, w) float32 of the matrix rows ``rows`` (n,). Gradients of equal rows are added in
    order."""
    if rows.device.type == "cpu" and native.has_operators():
        one_slot = torch.zeros(1, dtype=torch.int64)
        lengths = torch.tensor([[rows.numel()]], dtype=torch.int32)
        rows, values, squares = torch.ops.shardrec.sum_gradient(
            [rows], [lengths], [], [values], one_slot, one_slot, cls.width, False, cls.bases[-1]
        )
        return RowGradient(rows=rows, values=values, squares=squares)
    size = cls.bases[-1], cls.width
    # Sorted stably, so that a row's sum has the order of its gradients.
    joined = torch.sparse_coo_tensor(rows.unsqueeze(0), values, size, check_invariants=False).coalesce()
    return RowGradient(rows=joined.indices()[0], values=joined.values())


@dataclass(frozen=True, kw_only=True)
class _ClassIds:
    """The n ids of one width class: matrix row, slot, sample and weight per id.

    ``places`` (n,) are their indices among all ids. None if they are all ids.
    """

    rows: Tensor
    places: Tensor | None
    slots: Tensor
    samples: Tensor
    id_weights: Tensor | None

    def pieces(self, width: int) -> Iterator[tuple[slice, _ClassIds]]:
        """A few ids at a time (with ``width`` floats for each), and their indices among the n."""
        size = max(1, _FLOATS_AT_ONCE // width)
        for start in range(0, self.rows.numel(), size):
            span = slice(start, start + size)
            places, id_weights = (None if tensor is None else tensor[span] for tensor in (self.places, self.id_weights))
            of_ids = {"rows": self.rows[span], "slots": self.slots[span], "samples": self.samples[span]}
            yield span, _ClassIds(places=places, id_weights=id_weights, **of_ids)


class TableBank:
    """Local tables and their kernel.

    Args:
        shapes: (rows, columns) per local table. At least one.
        slot_tables: per slot, the number of its table. The ids and the pooled columns have the same order.
        optimizer: fused into the kernel's backward. None for a bank used forward only.
        device: CPU or CUDA.
        pooled: look up sums of bags; else one row per id, which takes tables of one width.
        dtype: of the weights: float32, float16 or, without ``optimizer``, bfloat16.
        placed: with ``optimizer`` on CUDA, where the rows are, as :func:`make_kernel` takes it.

    Attributes:
        weights: per table, its (rows, columns) weights, a view of the bank's memory.
        classes: the same memory by width.
        columns: (S,) int64, the first output column per slot.
        lr: the fused optimizer's present learning rate.
        step_count: updates made by a fused Adam.
        cache: of tier ``"cached"``. The ``weights`` lack its contents. Otherwise None.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        slot_tables: Sequence[int],
        optimizer: FusedOptimizer | None,
        device: torch.device,
        *,
        pooled: bool = True,
        dtype: torch.dtype = torch.float32,
        **placed: Any,
    ) -> None:
        self.pooled = pooled
        self.dtype = dtype
        self.shapes = tuple(shapes)
        self.slot_tables = tuple(slot_tables)
        self.optimizer = optimizer
        self.device = device
        self.step_count = 0
        self.lr = 0.0 if optimizer is None else optimizer.lr
        order = list(range(len(shapes)))
        if optimizer is None:
            order.sort(key=lambda table: -shapes[table][1])
        place = {table: position for position, table in enumerate(order)}
        self._place = place
        in_order = [self.shapes[table] for table in order]
        self.kernel: Any = None
        if has_kernel(device, dtype, (columns for _, columns in shapes)):
            features = [place[table] for table in slot_tables]
            self.kernel = make_kernel(in_order, features, optimizer, device, pooled=pooled, dtype=dtype, **placed)
            flat = self.kernel.weights_dev if device.type == "cuda" else self.kernel.weights_host
            stored = self.kernel.split_embedding_weights()
        else:
            assert optimizer is None, "a dtype without a kernel lacks a fused optimizer"
            flat = torch.empty(sum(rows * cols for rows, cols in in_order), dtype=dtype, device=device)
            parts = flat.split([rows * cols for rows, cols in in_order])
            stored = [part.view(shape) for part, shape in zip(parts, in_order, strict=True)]
        self.weights: list[Tensor] = [stored[place[table]] for table in range(len(shapes))]
        self.classes = self._classes(order, flat.detach())
        self.cache = RowCache(self.kernel, device) if placed.get("cache_rows") else None
        self._call = DirectCall(self.kernel) if self.kernel is not None and self.cache is None else None
        widths = [self.shapes[table][1] for table in self.slot_tables]
        self.columns = torch.tensor([0, *accumulate(widths)][:-1], dtype=torch.int64, device=device)
        # fbgemm's backward numbers the rows of all tables in the ids' dtype.
        self._takes_int32 = device.type == "cuda" and sum(rows for rows, _ in shapes) <= _MAX_INT32
        self._native: NativeKernel | None = None
        if native.has_kernels():
            self._native = native_kernel(
                self.shapes, self.slot_tables, self.weights, self.states(), optimizer, pooled=pooled
            )

    def states(self) -> list[dict[str, Tensor]]:
        """Per table, the kernel's optimizer states by name (views). Empty dicts without fused optimizer."""
        if self.optimizer is None:
            return [{} for _ in self.shapes]
        states = kernel_states(self.kernel, self.optimizer)
        return [states[self._place[table]] for table in range(len(self.shapes))]

    @property
    def writes_in_place(self) -> bool:
        """Whether :meth:`look_up` takes memory to write to."""
        return self._native is not None and self.pooled

    def look_up(
        self,
        ids: Tensor,
        lengths: Tensor,
        id_weights: Tensor | None,
        out: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Sums of rows, or the rows, without a graph.

        Args:
            ids: (N,) rows of each slot's table, slot after slot. Contiguous, as the other arguments are.
            lengths: (S, B_all) int32, ids per bag.
            id_weights: (N,) float32 or None.
            out: (B_all, D) float32 to write the sums to, if :attr:`writes_in_place`. Its rows need not be contiguous.
            offsets: (S·B_all + 1,) of the ids' dtype, sums of the lengths. Default: they are added up.

        Returns:
            (B_all, D) float32, or (N, w) without pooling. ``out`` if it is given.
        """
        if self._native is not None:
            return self._native.look_up(ids, lengths, id_weights if self.pooled else None, out)
        assert out is None, "only kernels of our own write in place"
        if self.kernel is None:
            return self._look_up_in_torch(ids, lengths, id_weights)
        with torch.no_grad():
            return self._look_up_by_kernel(ids, lengths, id_weights, offsets)

    def look_up_to_update(
        self,
        ids: Tensor,
        lengths: Tensor,
        id_weights: Tensor | None,
        out: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Kept]:
        """:meth:`look_up`, and the arguments of :meth:`update` beside the gradient of the result."""
        if self._native is not None:
            return self._native.look_up(ids, lengths, id_weights if self.pooled else None, out), (self.lr, None)
        with torch.enable_grad():
            values = self._look_up_by_kernel(ids, lengths, id_weights, offsets)
        return values.detach(), (self.lr, values)

    def update(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None, gradient: Tensor, kept: Kept) -> None:
        """Make one step of the fused optimizer. Arguments as for :class:`LookupGradient`."""
        lr, values = kept
        if self._native is not None:
            self._native.update(ids, lengths, id_weights if self.pooled else None, gradient, lr)
            return
        if values is None:
            with torch.enable_grad():
                values = self._look_up_by_kernel(ids, lengths, id_weights)
        values.backward(gradient, retain_graph=True)

    def update_together(self, lookups: Sequence[LookupGradient]) -> None:
        """:meth:`update` once with the gradients of several lookups, and the learning rate of the last one."""
        lookup = self._joined(lookups)
        self.update(lookup.ids, lookup.lengths, lookup.id_weights, lookup.gradient, (lookup.lr, None))

    def _joined(self, lookups: Sequence[LookupGradient]) -> LookupGradient:
        """Several lookups as one, of the samples of all."""
        slots = [
            torch.arange(len(lookup.lengths), device=self.device).repeat_interleave(
                lookup.lengths.sum(dim=1), output_size=lookup.ids.numel()
            )
            for lookup in lookups
        ]
        order = torch.cat(slots).argsort(stable=True)
        id_weights = [lookup.id_weights for lookup in lookups if lookup.id_weights is not None]
        gradient = torch.cat([lookup.gradient for lookup in lookups])
        return LookupGradient(
            ids=torch.cat([lookup.ids for lookup in lookups])[order],
            lengths=torch.cat([lookup.lengths for lookup in lookups], dim=1),
            id_weights=torch.cat(id_weights).detach()[order] if id_weights else None,
            gradient=gradient if self.pooled else gradient[order],
            lr=lookups[-1].lr,
        )

    def _look_up_by_kernel(
        self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None, offsets: Tensor | None = None
    ) -> Tensor:
        """:meth:`look_up` by fbgemm. Its own backward updates the weights."""
        arguments = *self._kernel_ids(ids, lengths, offsets), id_weights
        counts_steps = self.optimizer is not None and self.optimizer.counts_steps
        if torch.is_inference_mode_enabled():
            # fbgemm registers its training kernels for autograd only, which inference mode leaves out.
            with torch.inference_mode(False), torch.no_grad():
                return self._look_up_by_kernel(ids, lengths, id_weights, offsets)
        if self._call is not None:
            pooled = self._call(*arguments, self.step_count + 1 if counts_steps else 0)
        else:
            assert self.cache is not None, "a kernel without a cache is called directly"
            if counts_steps:
                # The kernel would count each forward as a step of Adam. A forward without a backward must not count.
                self.kernel.iter.fill_(self.step_count)
                self.kernel.iter_cpu.fill_(self.step_count)
            pooled = self.cache.look_up(ids, *arguments)
        if counts_steps and pooled.requires_grad:
            pooled.register_hook(self._count_step)
        return pooled

    def prefetch(self, ids: Tensor, lengths: Tensor) -> None:
        """Load the rows of a :meth:`look_up` to come into the cache, on the current stream."""
        if self.cache is not None:
            self.cache.prefetch(ids, *self._kernel_ids(ids, lengths))

    def _kernel_ids(self, ids: Tensor, lengths: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ids and offsets as fbgemm's kernel takes them."""
        if offsets is None or not self.pooled:
            if self.device.type == "cuda" and not self.pooled:
                lengths = chunked(lengths, ids.numel())
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.reshape(-1))
        if not self._takes_int32 or ids.dtype is not torch.int32:
            ids = ids.to(torch.int64)
        return ids, offsets.to(ids.dtype)

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from the next look-up on."""
        if lr != self.lr and self.kernel is not None:
            self.kernel.set_learning_rate(lr)
            self.lr = lr

    def _count_step(self, gradient: Tensor) -> None:
        self.step_count += 1

    def operands(self, lookups: Sequence[LookupGradient]) -> list[list[Tensor]]:
        """Ids, lengths, weights of the ids and gradients of some backwards, as the C++ operators take them."""
        return [
            [lookup.ids.contiguous() for lookup in lookups],
            [lookup.lengths.to(torch.int32).contiguous() for lookup in lookups],
            [lookup.id_weights for lookup in lookups if lookup.id_weights is not None],
            [with_neighbouring_columns(lookup.gradient) for lookup in lookups],
        ]

    def row_gradients(self, lookups: Sequence[LookupGradient]) -> list[RowGradient]:
        """The gradient of each distinct row, per width class, added up over backwards, in their order. At least one."""
        row_gradients = []
        if self.device.type == "cpu" and native.has_operators():
            operands = self.operands(lookups)
            for cls in self.classes:
                rows, values, squares = torch.ops.shardrec.sum_gradient(
                    *operands, cls.slot_bases, self.columns, cls.width, self.pooled, cls.bases[-1]
                )
                row_gradients.append(RowGradient(rows=rows, values=values, squares=squares))
            return row_gradients
        for lookup in lookups:
            parts = self._ids_by_class(lookup.ids, lookup.lengths, lookup.id_weights)
            for number, (cls, part) in enumerate(zip(self.classes, parts, strict=True)):
                rows, place_n = torch.unique(part.rows, sorted=True, return_inverse=True)
                values = lookup.gradient.new_zeros((rows.numel(), cls.width))
                self._add_gradients(values, place_n, cls, part, lookup.gradient)
                if number < len(row_gradients):
                    before = row_gradients[number]
                    row_gradients[number] = summed(
                        torch.cat([before.rows, rows]), torch.cat([before.values, values]), cls
                    )
                else:
                    row_gradients.append(RowGradient(rows=rows, values=values))
        return row_gradients

    def dense_gradients(
        self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None, gradient: Tensor
    ) -> list[Tensor]:
        """Per width class, the gradient (rows, w) of its matrix. Arguments as of :class:`LookupGradient`."""
        whole = [gradient.new_zeros(cls.weight.shape) for cls in self.classes]
        if gradient.device.type == "cpu":
            lookup = LookupGradient(ids=ids, lengths=lengths, id_weights=id_weights, gradient=gradient)
            for sums, part in zip(whole, self.row_gradients([lookup]), strict=True):
                sums.index_copy_(0, part.rows, part.values)
            return whole
        # Without computing the distinct rows: the host would wait for their number.
        for sums, cls, of_cls in zip(whole, self.classes, self._ids_by_class(ids, lengths, id_weights), strict=True):
            self._add_gradients(sums, of_cls.rows, cls, of_cls, gradient)
        return whole

    def parameter_gradients(
        self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None, gradient: Tensor
    ) -> list[Tensor]:
        """(rows, cols) gradient per table, in its dtype. Arguments as of :class:`LookupGradient`."""
        per_table: dict[int, Tensor] = {}
        for cls, whole in zip(self.classes, self.dense_gradients(ids, lengths, id_weights, gradient), strict=True):
            dense = whole.to(self.dtype)
            for table, (start, end) in zip(cls.tables, pairwise(cls.bases), strict=True):
                per_table[table] = dense[start:end]
        return [per_table[table] for table in range(len(self.shapes))]

    def _add_gradients(self, sums: Tensor, places: Tensor, cls: WidthClass, part: _ClassIds, gradient: Tensor) -> None:
        """Add the gradient of each of a width class's ids to the row of ``sums`` (U, w) at its place (n,)."""
        for span, piece in part.pieces(cls.width):
            values = self._bag_gradient(cls, piece, span, gradient)
            if piece.id_weights is not None:
                values = values * piece.id_weights.unsqueeze(1)
            sums.index_add_(0, places[span], values)

    def id_weight_gradient(self, ids: Tensor, lengths: Tensor, gradient: Tensor) -> Tensor:
        """(N,) gradient of the ids' weights. Arguments as of :class:`LookupGradient`."""
        if self._native is not None and self.pooled:
            return self._native.id_weight_gradient(ids.contiguous(), lengths.to(torch.int32).contiguous(), gradient)
        if self.cache is not None:
            self.cache.settle(to_write=False)
        gradients = gradient.new_zeros(ids.numel())
        for cls, part in zip(self.classes, self._ids_by_class(ids, lengths, None), strict=True):
            products = gradient.new_empty(part.rows.numel())
            for span, piece in part.pieces(cls.width):
                values = self._bag_gradient(cls, piece, span, gradient)
                products[span] = (values * cls.weight.index_select(0, piece.rows)).sum(dim=1)
            if part.places is None:
                return products
            gradients.index_copy_(0, part.places, products)
        return gradients

    def _bag_gradient(self, cls: WidthClass, part: _ClassIds, span: slice, gradient: Tensor) -> Tensor:
        """(n, w) gradient of each id's bag (or row). Without pooling, ``span`` are the ids' indices."""
        if not self.pooled:
            return gradient[span]
        # Every run of w neighbours in memory. A bag's columns are such a run.
        runs = gradient.reshape(-1).unfold(0, cls.width, 1) if gradient.numel() else gradient.view(0, cls.width)
        return runs.index_select(0, part.samples * gradient.size(1) + self.columns[part.slots])

    def _look_up_in_torch(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None) -> Tensor:
        """:meth:`look_up` of a bank without a kernel. No gradient comes back through it."""
        batch, slots = lengths.size(1), len(self.slot_tables)
        sums: dict[int, Tensor] = {}  # by width
        for cls, part in zip(self.classes, self._ids_by_class(ids, lengths, id_weights), strict=True):
            if not self.pooled:
                return cls.weight.index_select(0, part.rows).to(torch.float32)
            pooled = torch.zeros((batch * slots, cls.width), dtype=torch.float32, device=ids.device)
            for _, piece in part.pieces(cls.width):
                values = cls.weight.index_select(0, piece.rows).to(torch.float32)
                if piece.id_weights is not None:
                    values.mul_(piece.id_weights.unsqueeze(1))
                pooled.index_add_(0, piece.samples * slots + piece.slots, values)
            sums[cls.width] = pooled.view(batch, slots, cls.width)
            if len(self.classes) == 1:
                return pooled.view(batch, slots * cls.width)
        return torch.cat([sums[self.shapes[table][1]][:, slot] for slot, table in enumerate(self.slot_tables)], dim=1)

    def _ids_by_class(self, ids: Tensor, lengths: Tensor, id_weights: Tensor | None) -> Iterator[_ClassIds]:
        """The ids of each width class, in the order of ``classes``. Shapes as :meth:`look_up` takes them."""
        batch = lengths.size(1)
        bags = torch.arange(lengths.numel(), device=ids.device)
        bag_N = bags.repeat_interleave(lengths.reshape(-1).to(torch.int64), output_size=ids.numel())
        # Without samples there are no ids, and 0 cannot be a divisor.
        slot_N, sample_N = bag_N // max(batch, 1), bag_N % max(batch, 1)
        for cls in self.classes:
            slots, samples, ids_n, id_weights_n, places = slot_N, sample_N, ids, id_weights, None
            if len(self.classes) > 1:
                places = (cls.slot_bases[slot_N] >= 0).nonzero().squeeze(1)
                slots, samples, ids_n = slot_N[places], sample_N[places], ids[places]
                id_weights_n = None if id_weights is None else id_weights[places]
            rows = ids_n.to(torch.int64) + cls.slot_bases[slots]
            yield _ClassIds(rows=rows, places=places, slots=slots, samples=samples, id_weights=id_weights_n)

    def _classes(self, order: Sequence[int], flat: Tensor) -> tuple[WidthClass, ...]:
        classes = []
        start = 0
        for width, same in groupby(order, lambda table: self.shapes[table][1]):
            tables = tuple(same)
            bases = (0, *accumulate(self.shapes[table][0] for table in tables))
            base_of = dict(zip(tables, bases, strict=False))
            slot_bases = [base_of.get(table, -1) for table in self.slot_tables]
            end = start + bases[-1] * width
            classes.append(
                WidthClass(
                    width=width,
                    tables=tables,
                    bases=bases,
                    weight=flat[start:end].view(bases[-1], width),
                    slot_bases=torch.tensor(slot_bases, dtype=torch.int64, device=self.device),
                )
            )
            start = end
        return tuple(classes)
