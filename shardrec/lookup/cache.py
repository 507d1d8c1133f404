"""The device's cache of rows that are in the host's memory (tier ``"cached"``), which fbgemm's kernel keeps.

::

    prefetch    side stream    rows of the next batch into the cache
    look_up     main stream    rows of the batch into the cache, if it was not prefetched; rows read there
    backward    main stream    rows updated in the cache, or in the host's memory if they found no place
    settle      main stream    updated rows back into the host's memory

[Note: places in the cache]
The kernel notes in a forward where in the cache each row is, and writes there in the backward. Meanwhile another
forward, or a prefetch, may have given the place to another row. fbgemm has locks for this, and a queue of what was
prefetched, first in, first out, which an evaluation between two steps would take from. Here, places are found again
just before they are used: before each backward, and before the forward of a batch that was prefetched, which is known
by its ids. A row that has lost its place by then is read and updated in the host's memory. Streams wait for each other,
so that nothing moves in the cache while rows are read or written there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MOST_PREFETCHED = 4
"""Calls that are remembered as prefetched. If a model makes more calls in a forward, the first are loaded again."""
_STATISTICS = ("calls", "ids", "distinct", "misses", "rows_without_place", "ids_without_place")


class RowCache:
    """Looks rows up through the cache of a kernel.

    Args:
        kernel: fbgemm's, with tables in ``EmbeddingLocation.MANAGED_CACHING``.
        device: CUDA.
    """

    def __init__(self, kernel: Any, device: torch.device) -> None:
        self._kernel = kernel
        self._device = device
        # By address and number of ids, which are held until they are looked up: no other call has that address.
        self._prefetched: dict[tuple[int, int], Tensor] = {}
        self._is_dirty = False
        # The stream of forwards and backwards. The end of the last forward on it, unless something came after it.
        self._stream, self._read = torch.cuda.current_stream(device), None
        self._loaded: Any = None  # the end of the last prefetch

    def prefetch(self, key: Tensor, ids: Tensor, offsets: Tensor) -> None:
        """Load the rows of a later :meth:`look_up` with the same arguments, on the current stream."""
        if not ids.numel():
            return
        stream = torch.cuda.current_stream(self._device)
        if self._read is None:
            stream.wait_stream(self._stream)
        else:
            stream.wait_event(self._read)
        self._keep_statistics(stream)
        self._kernel.prefetch(ids, offsets)
        self._kernel.timesteps_prefetched.clear()
        self._kernel.lxu_cache_locations_list.clear()
        self._loaded = stream.record_event()
        self._prefetched[key.data_ptr(), key.numel()] = key
        while len(self._prefetched) > _MOST_PREFETCHED:
            self._prefetched.pop(next(iter(self._prefetched)))

    def look_up(self, key: Tensor, ids: Tensor, offsets: Tensor, id_weights: Tensor | None) -> Tensor:
        """What the kernel gives for the other arguments. ``key`` (N,) are the ids as :meth:`prefetch` got them."""
        kernel = self._kernel
        stream = self._joined()
        self._keep_statistics(stream)
        if self._prefetched.pop((key.data_ptr(), key.numel()), None) is not None:
            kernel.timesteps_prefetched.append(kernel.timestep)
            kernel.lxu_cache_locations_list.append(self._places(ids, offsets))
            # Where this says that no row lacked a place when rows were last loaded, the kernel takes each to have one.
            kernel.local_uvm_cache_stats.fill_(1)
        values: Tensor = kernel(ids, offsets, id_weights)
        places = kernel.lxu_cache_locations
        self._stream, self._read = stream, stream.record_event()

        def find_anew(gradient: Tensor) -> None:
            self._joined()
            self._places(ids, offsets, places)
            self._read, self._is_dirty = None, True

        if values.requires_grad:
            values.register_hook(find_anew)
        return values

    def settle(self, *, to_write: bool) -> None:
        """Have the host's memory hold all rows until the next forward, and wait for the device. ``to_write``: rows will
        be written there, so that the cache is emptied."""
        if not (self._is_dirty or to_write):
            return
        self._stream, self._read = self._joined(), None
        if self._is_dirty:
            self._kernel.flush()
        if to_write:
            self._kernel.reset_cache_states()
            self._prefetched.clear()
        self._is_dirty = False
        self._stream.synchronize()

    def statistics(self) -> dict[str, int]:
        """Since the start: calls. Their ids. Per call, the distinct rows, the rows of these that were not in the cache,
        and those for which it had no place, with their ids. Waits for the device."""
        self._joined()
        return dict(zip(_STATISTICS, self._kernel.get_uvm_cache_stats().tolist(), strict=True))

    def _keep_statistics(self, stream: Any) -> None:
        """Have the sums so far last until ``stream`` has read them: a load there adds to them out of place, and lets go
        of memory that is of the stream of the load before."""
        self._kernel.get_uvm_cache_stats().record_stream(stream)

    def _joined(self) -> Any:
        """The current stream, which waits for the prefetches."""
        stream = torch.cuda.current_stream(self._device)
        if self._loaded is not None:
            stream.wait_event(self._loaded)
        return stream

    def _places(self, ids: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
        """(N,) int32: where each id's row is in the cache, -1 for nowhere. Written to ``out`` if it is given."""
        kernel = self._kernel
        rows = torch.ops.fbgemm.linearize_cache_indices(kernel.cache_hash_size_cumsum, ids, offsets)
        places: Tensor = torch.ops.fbgemm.lxu_cache_lookup(
            rows, kernel.lxu_cache_state, kernel.total_cache_hash_size, lxu_cache_locations_output=out
        )
        return places
