"""New process groups of some ranks of another, which their members make.

[Note: names of groups]
Members of a new group meet at keys of the store that begin with its name. ``new_group`` with
``use_local_synchronization=True`` derives it from the ranks and the number of groups that the calling process is in.
Where members are in different numbers of groups, each waits under another name until the time limit; and a group that
is made after one of the same ranks was destroyed has that one's name, and finds its keys. So the name is made here, of
the group around it, the ranks, and how many groups of these ranks were made before. ``new_group`` takes no name. It
calls one function for it. A function that knows the name set by a thread replaces it.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardrec.exchange.peers import peers
from shardrec.exchange.transport import timeout_s

_MADE: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""How many groups were made of these ranks, by the group around them."""


class _Named(threading.local):
    """The name of the next group that this thread makes."""

    name: str | None = None

    def hash_ranks(self, ranks: list[int]) -> str:
        return _HASH_RANKS(ranks) if self.name is None else self.name


_NAMED, _HASH_RANKS = _Named(), distributed_c10d._hash_ranks_to_str
distributed_c10d._hash_ranks_to_str = _NAMED.hash_ranks


def subgroup(
    whole: dist.ProcessGroup, ranks: Iterable[int], device: torch.device, *, what: str, backend: str | None = None
) -> dist.ProcessGroup:
    """A new group of some ranks of ``whole``, with its time limit. Only the members call this.

    Args:
        whole: the group that they are in.
        ranks: of ``whole``.
        device: of the tensors that ``whole`` is for.
        what: name of the operation, for errors.
        backend: default: the backend of ``whole``.

    Raises:
        PeerError: if a member does not come.
    """
    members = tuple(sorted(dist.get_global_rank(whole, rank) for rank in ranks))
    made = _MADE.setdefault(whole, Counter())
    key = f"{whole.group_name} {members} {made[members]}"
    with peers(whole, what):
        _NAMED.name = hashlib.sha1(key.encode(), usedforsecurity=False).hexdigest()
        try:
            group: dist.ProcessGroup = dist.new_group(
                list(members),
                # A new group would take the backend's default, not its parent's.
                timeout=timedelta(seconds=timeout_s(whole, device)),
                backend=backend or dist.get_backend(whole),
                use_local_synchronization=True,
            )
        finally:
            _NAMED.name = None
    made[members] += 1
    return group


def end_with(owner: object, group: dist.ProcessGroup | None) -> None:
    """End a group that :func:`subgroup` made, with its threads and connections, when its owner is garbage.

    A group of NCCL stays: all its ranks must end one together, and garbage is collected at other times on each.
    """
    if group is not None and "nccl" not in dist.get_backend_config(group):
        weakref.finalize(owner, _end, group).atexit = False


def _end(group: dist.ProcessGroup) -> None:
    if group in distributed_c10d._world.pg_map:  # until torch ends all groups
        dist.destroy_process_group(group)
