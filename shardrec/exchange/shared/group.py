"""Shared memory under the name of a process group, for programs that are made of operators.

TorchScript, compiled graphs and exported programs reach a collective by a name: ``_c10d_functional.all_to_all_single``
looks up the process group that is registered under it and calls that. Here such a group is a Python object whose
all-to-all goes through the windows of :mod:`shardrec.exchange.shared.collectives`, from any thread. All its other
collectives are those of the process group beside it (see [Note: the lock and the mutex]).

::

    all_to_all_single   the parts for the peers are written into this rank's windows, and announced: nothing waits
    wait_tensor         waits for the peers' messages, and copies what they say into the output

[Note: who forgets an exchange]
torch keeps what a collective is to do at its end in a list, by the memory of its output, until somebody waits. Where
nobody ever does, the entry stays, and would keep what the peers have lent. So the entry knows its output's memory by a
weak reference; with the memory goes what was pending.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _register_process_group, _unregister_process_group

from shardrec.errors import PeerError
from shardrec.exchange.collectives import Collectives, Pending
from shardrec.exchange.delegating import DelegatingGroup

__all__ = ["SharedGroup"]

_NUMBERS = count()
_WHAT = "all-to-all"
"""An operator says no word for what it sends."""


class SharedGroup(DelegatingGroup):
    """A process group whose all-to-alls on the CPU go through shared memory.

    It is registered until ``collectives`` are gone; who makes it keeps it for as long.

    Args:
        collectives: do the work.
        base: the process group of the same ranks.

    Attributes:
        registered_name: for ``torch.ops._c10d_functional``; no other group of this process has or had it.
    """

    def __init__(self, collectives: Collectives, base: dist.ProcessGroup) -> None:
        super().__init__(base)
        self._collectives = weakref.ref(collectives)
        self.registered_name = f"{base.group_name}-shared-{next(_NUMBERS)}"
        name = cast(Any, self.registered_name)  # torch's stubs have a type of its own for it
        _register_process_group(name, self)
        weakref.finalize(collectives, _unregister_process_group, name).atexit = False

    def alltoall_base(  # of the overloads, C++ calls this one
        self,
        output: Tensor,
        values: Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        options: object = None,
    ) -> Work:
        """Begin an all-to-all.

        Args:
            output: (sum(receive), ...) contiguous; the work's end makes it valid.
            values: (sum(send), ...), to rank 0 first; may be written to when this returns.
            receive: sizes along dim 0, from each rank; empty for equal ones.
            send: sizes along dim 0, to each rank; empty for equal ones.
            options: of torch; there is no use for them here.

        Raises:
            PeerError: if another rank is gone.
        """
        collectives = self._collectives()
        assert collectives is not None, "a group is registered for as long as its collectives live"
        into = _elements(output, receive, collectives.world_size)
        out = _elements(values, send, collectives.world_size)
        rank = collectives.rank
        if sum(into) != output.numel() or sum(out) != values.numel() or into[rank] != out[rank]:
            raise ValueError(
                f"rank {rank}: an all-to-all from {tuple(values.shape)} split in {list(send)} to {tuple(output.shape)} "
                f"split in {list(receive)} does not add up; give sizes along dim 0 that do"
            )
        parts = list(values.detach().reshape(-1).split(out))
        flat = output.detach().view(-1)
        kept = parts[rank]
        parts[rank], into[rank] = values.new_empty(0), 0
        # In two pieces each, which are copied: what lies in a room already would be read there, while its owner may
        # write to it.
        pending = collectives.send([[part[:0], part] for part in parts], into, _WHAT)
        # After the peers have been told, who may be waiting.
        start = sum(into[:rank])
        flat[start : start + kept.numel()].copy_(kept)
        return _Arriving(pending, flat, into, rank, kept.numel())

    # The name that C++ calls since torch 2.13.
    all_to_all_single = alltoall_base  # type: ignore[assignment]


class _Arriving(Work):
    """What torch keeps of an all-to-all until it is waited for.

    Args:
        pending: parts from the peers.
        flat: (n,) the output, without a history.
        sizes: of the parts from each rank; 0 from this one.
        rank: of this process.
        own: elements that this rank has put there itself.
    """

    def __init__(self, pending: Pending, flat: Tensor, sizes: list[int], rank: int, own: int) -> None:
        super().__init__()
        storage = flat.untyped_storage()
        self._storage = weakref.ref(storage)
        self._kept = [pending]
        weakref.finalize(storage, self._kept.clear).atexit = False
        self._dtype, self._first = flat.dtype, flat.storage_offset()
        self._sizes = sizes
        self._rank, self._own = rank, own

    def wait(self, timeout: Any = None) -> bool:
        """Put what comes into the output; once. The limit is that of the process group's timeout.

        Raises:
            PeerError: if another rank is gone or did not answer in time.
        """
        storage = self._storage()
        if storage is None:
            raise PeerError(f"rank {self._rank}: the output of an all-to-all is gone, and cannot be waited for")
        if not self._kept:
            return True
        place = self._first
        for rank, part in enumerate(self._kept.pop().wait()):
            if part.numel():
                target = torch.empty(0, dtype=self._dtype).set_(storage, place, (part.numel(),))  # type: ignore[call-overload]
                target.copy_(part)
            place += self._own if rank == self._rank else self._sizes[rank]
        return True


def _elements(tensor: Tensor, sizes: Sequence[int], world_size: int) -> list[int]:
    """Elements of each rank's part of a tensor that is split along dim 0."""
    if not sizes:
        return [tensor.numel() // world_size] * world_size
    row = tensor.shape[1:].numel()
    return [size * row for size in sizes]
