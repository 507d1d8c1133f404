"""fbgemm's lookups on CUDA, with a cache and without, of which its CPU build does the work."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor

from shardrec.lookup import fbgemm_kernel as kernels
from shardrec.lookup.fbgemm_kernel import DirectCall
from tests.cuda_double.device import ACTIVE, CPU, Race, to_device
from tests.cuda_double.operators import rows_of_ids

__all__ = ["WAYS", "CachedKernelDouble", "KernelDouble"]

WAYS = 2
"""Of a set of the cache."""
_make_kernel = kernels.make_kernel


class KernelDouble:
    """fbgemm's kernel for CUDA, of which its CPU build does the work.

    Args:
        kernel: on the CPU.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.look_up = DirectCall(kernel)
        self.weights_dev = to_device(kernel.weights_host.detach())
        self.iter, self.iter_cpu = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    @staticmethod
    def make(shapes: Any, tables: Any, optimizer: Any, device: torch.device, **options: Any) -> Any:
        """As :func:`shardrec.lookup.fbgemm_kernel.make_kernel` does."""
        assert device.type != "cuda" or max(columns for _, columns in shapes) <= 2048, "max_D is 2048 at most"
        rows, _ = options.pop("cache_rows", 0), options.pop("tier", "")
        kernel = _make_kernel(shapes, tables, optimizer, CPU, **options)
        if device.type != "cuda":
            return kernel
        return CachedKernelDouble(kernel, -(-rows // WAYS)) if rows else KernelDouble(kernel)

    def split_embedding_weights(self) -> list[Any]:
        return [to_device(one) for one in self.kernel.split_embedding_weights()]

    def split_optimizer_states(self) -> list[Any]:
        return [tuple(to_device(state) for state in states) for states in self.kernel.split_optimizer_states()]

    @property
    def embedding_specs(self) -> Any:
        return self.kernel.embedding_specs

    def set_learning_rate(self, lr: float) -> None:
        self.kernel.set_learning_rate(lr)

    @staticmethod
    def direct_call(kernel: Any) -> Any:
        """As :class:`shardrec.lookup.fbgemm_kernel.DirectCall`."""
        return kernel if isinstance(kernel, KernelDouble) else DirectCall(kernel)

    def __call__(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, update: int = 0) -> Any:
        """Reads as many ids as the offsets say, as CUDA's kernel does."""
        assert ids.dtype is offsets.dtype, "the kernel needs offsets of the ids' dtype"
        ACTIVE[-1].issue("lookup", (ids, offsets, weights))
        ACTIVE[-1].index_dtypes.add(ids.dtype)
        if self.kernel.pooling_mode is PoolingMode.NONE and offsets.numel() > 1:
            ACTIVE[-1].longest_loop = max(ACTIVE[-1].longest_loop, int(offsets.inner.diff().max()))
        return _Lookup.apply(self, ids, offsets, weights, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]


class CachedKernelDouble(KernelDouble):
    """A kernel with a cache: an update in the cache poisons the row behind it, until it is flushed or evicted.

    The CPU's kernel computes with rows that are put into its memory from the cache, or from behind it, by the places
    that the call was told, right or wrong.

    Attributes:
        loads: rows that were put into the cache.
        populated: batches for which it was looked which rows to load.
    """

    def __init__(self, kernel: Any, sets: int) -> None:
        super().__init__(kernel)
        specs = kernel.embedding_specs
        sizes = [rows * columns for rows, columns, *_ in specs]
        flat = torch.zeros(sum(sizes)).split(sizes)  # one memory, as of the kernel
        self.behind = [part.view(spec[:2]) for part, spec in zip(flat, specs, strict=True)]
        self.first = [0, *accumulate(rows for rows, *_ in specs)]
        self.total_cache_hash_size = self.first[-1]
        bases = [self.first[table] for table in kernel.feature_table_map]
        self.cache_hash_size_cumsum = to_device(torch.tensor([*bases, self.first[-1]]))
        self.lxu_cache_state = to_device(torch.full((sets, WAYS), -1))
        self.stamps = torch.zeros(sets, WAYS, dtype=torch.int64)
        self.cache = torch.full((sets * WAYS, max(columns for _, columns, *_ in specs)), torch.nan)
        self.timestep, self.loads, self.populated = 1, 0, 0
        self.local_uvm_cache_stats = to_device(torch.zeros(6, dtype=torch.int32))
        self.uvm_cache_stats: Any = to_device(torch.zeros(6, dtype=torch.int64))
        self.timesteps_prefetched: list[int] = []
        self.lxu_cache_locations_list: list[Any] = []
        self.lxu_cache_locations: Any = None

    def split_embedding_weights(self) -> list[Any]:
        return [to_device(one) for one in self.behind]

    def prefetch(self, ids: Any, offsets: Any) -> None:
        double, state = ACTIVE[-1], self.lxu_cache_state.inner
        double.touch(self.lxu_cache_state)
        self.timestep += 1
        self.timesteps_prefetched.append(self.timestep)
        self.populated += 1
        rows = rows_of_ids(self.cache_hash_size_cumsum.inner, ids.inner, offsets.inner)
        distinct = rows.unique().tolist()
        self.local_uvm_cache_stats.inner.zero_()
        for row in distinct:
            self.stamps[row % len(state)][state[row % len(state)] == row] = self.timestep
        for row in distinct:
            ways, stamps = state[row % len(state)], self.stamps[row % len(state)]
            way = int(stamps.argmin())
            if (ways == row).any():
                continue
            if stamps[way] == self.timestep:
                self.local_uvm_cache_stats.inner[4] += 1
                continue
            if ways[way] >= 0:
                self._write_back(row % len(state), way)
            ways[way], stamps[way] = row, self.timestep
            table, number = self._of(row)
            held = self.behind[table][number]
            self.cache[row % len(state) * WAYS + way, : len(held)] = held
            self.loads += 1
        self.lxu_cache_locations_list.append(double.places(rows, self.lxu_cache_state))
        self._count()

    def flush(self) -> None:
        ACTIVE[-1].touch(self.lxu_cache_state)
        for cache_set, way in (self.lxu_cache_state.inner >= 0).nonzero().tolist():
            self._write_back(cache_set, way)

    def reset_cache_states(self) -> None:
        ACTIVE[-1].touch(self.lxu_cache_state)
        self.lxu_cache_state.inner.fill_(-1)
        self.stamps.zero_()
        self.timestep = 1

    def get_uvm_cache_stats(self) -> Any:
        ACTIVE[-1].touch(self.lxu_cache_state)  # of a later prefetch than it is of
        return self.uvm_cache_stats

    def _count(self) -> None:
        """Add to the statistics, out of place: the sums so far are let go of while this stream is yet to read them."""
        double, before = ACTIVE[-1], self.uvm_cache_stats
        if before.written[0] is not double.stream and double.stream not in before.readers:
            raise Race("statistics are let go of that another stream has made, whose memory is that stream's")
        self.uvm_cache_stats = to_device(torch.tensor([self.populated, 0, 0, self.loads, 0, 0]))

    def __call__(self, ids: Any, offsets: Any, weights: Tensor | None, update: int = 0) -> Any:
        if not self.timesteps_prefetched:
            self.prefetch(ids, offsets)
        self.timesteps_prefetched.pop(0)
        self.lxu_cache_locations = self.lxu_cache_locations_list.pop(0)
        return super().__call__(ids, offsets, weights)

    def load(self, rows: Tensor, places: Any) -> None:
        ACTIVE[-1].touch(self.lxu_cache_state)
        memory = [one.data for one in self.kernel.split_embedding_weights()]
        for row, place in zip(rows.tolist(), places.inner.tolist(), strict=True):
            table, number = self._of(row)
            width = memory[table].size(1)
            memory[table][number] = self.behind[table][number] if place < 0 else self.cache[place, :width]

    def store(self, rows: Tensor, places: Any) -> None:
        memory = [one.data for one in self.kernel.split_embedding_weights()]
        for row, place in zip(rows.tolist(), places.inner.tolist(), strict=True):
            table, number = self._of(row)
            if place < 0:
                self.behind[table][number] = memory[table][number]
            else:
                self.cache[place, : memory[table].size(1)] = memory[table][number]
                self.behind[table][number] = torch.nan

    def _of(self, row: int) -> tuple[int, int]:
        table = bisect_right(self.first, row) - 1
        return table, row - self.first[table]

    def _write_back(self, cache_set: int, way: int) -> None:
        table, number = self._of(int(self.lxu_cache_state.inner[cache_set, way]))
        held = self.behind[table][number]
        held.copy_(self.cache[cache_set * WAYS + way, : len(held)])


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, double: Any, ids: Any, offsets: Any, weights: Any, _: Tensor) -> Any:
        count = int(offsets.inner[-1])
        ctx.double, ctx.rows = double, None
        if isinstance(double, CachedKernelDouble):
            ctx.rows = rows_of_ids(double.cache_hash_size_cumsum.inner, ids.inner[:count], offsets.inner)
            ctx.places = double.lxu_cache_locations
            lacking = int((ctx.places.inner < 0).sum())
            assert not lacking or double.local_uvm_cache_stats.inner[4], "the kernel would read outside of the cache"
            double.load(ctx.rows, ctx.places)
        assert count <= ids.numel(), "the kernel would read past the ids"
        given = (
            None if weights is None else weights.inner[:count].detach().clone().requires_grad_(weights.requires_grad)
        )
        with torch.enable_grad():
            found = double.look_up(ids.inner[:count], offsets.inner, given)
        ctx.found, ctx.given = found, given
        return to_device(found.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if ctx.rows is not None:
            ctx.double.load(ctx.rows, ctx.places)
        ctx.found.backward(gradient.inner)
        if ctx.rows is not None:
            ctx.double.store(ctx.rows, ctx.places)
        of_weights = ctx.given.grad if ctx.given is not None and ctx.given.requires_grad else None
        return None, None, None, None if of_weights is None else to_device(of_weights), torch.zeros(())
