"""New process groups of some ranks of another, which their members make.

[Note: names of groups]
Members of a new group meet at keys of the store that begin with its name. ``new_group`` with
``use_local_synchronization=True`` derives it from the ranks and the number of groups that the calling process is in.
Where members are in different numbers of groups, each waits under another name until the time limit; and a group that
is made after one of the same ranks was destroyed has that one's name, and finds its keys. So the name is made here, of
the group around it, the ranks, and how many groups of these ranks were made before. ``new_group`` takes no name; it
calls one function for it, which is replaced for that call.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardrec.exchange.peers import peers
from shardrec.exchange.transport import timeout_s

__all__ = ["subgroup"]

_MADE: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""How many groups of these ranks this process has made of a group."""


def subgroup(
    whole: dist.ProcessGroup, ranks: Iterable[int], device: torch.device, *, what: str, backend: str | None = None
) -> dist.ProcessGroup:
    """A new group of some ranks of ``whole``, with its time limit; only the members call this.

    Args:
        whole: the group that they are in.
        ranks: of ``whole``.
        device: of the tensors that ``whole`` is for.
        what: the members do, for errors.
        backend: default: that of ``whole``.

    Raises:
        PeerError: if a member does not come.
    """
    members = tuple(dist.get_global_rank(whole, rank) for rank in ranks)
    made = _MADE.setdefault(whole, Counter())
    made[members] += 1
    name = hashlib.sha1(f"{whole.group_name} {members} {made[members]}".encode(), usedforsecurity=False).hexdigest()
    name_of_torch = distributed_c10d._hash_ranks_to_str
    with peers(whole, what):
        distributed_c10d._hash_ranks_to_str = lambda ranks: name
        try:
            group: dist.ProcessGroup = dist.new_group(
                list(members),
                # A new group would take the backend's default, not its parent's.
                timeout=timedelta(seconds=timeout_s(whole, device)),
                backend=backend or dist.get_backend(whole),
                use_local_synchronization=True,
            )
        finally:
            distributed_c10d._hash_ranks_to_str = name_of_torch
    return group
