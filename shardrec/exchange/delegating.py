"""A process group in Python whose collectives are those of another one, as the base of groups that change some.

[Note: the lock and the mutex]
torch calls a collective that a subclass in Python does not override with the interpreter's lock held. gloo's worker
takes that lock to drop a reference to Python while it holds the mutex of its queue, for which the collective then
waits: a deadlock. A method that calls the same of the other group lets the lock go, so every collective has one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["DelegatingGroup"]

# Those which torch looks for in Python, by the names of 2.13 and before.
_COLLECTIVES = (
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall_base",
    "barrier",
    "broadcast",
    "recv",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "send",
)


class DelegatingGroup(dist.ProcessGroup):
    """All of its collectives are another group's.

    Args:
        base: the process group of the same ranks.

    Attributes:
        base: the same.
    """

    def __init__(self, base: dist.ProcessGroup) -> None:
        # torch's stubs know the constructor with a store only.
        super().__init__(base.rank(), base.size())  # type: ignore[call-arg]
        self.base = base
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for device in base._device_types:
            self._register_backend(device, kind, base._get_backend(device))
        self._set_default_backend(kind)


def _of_the_base(name: str) -> Callable[..., dist.Work]:
    def collective(self: DelegatingGroup, *args: Any, **kwargs: Any) -> dist.Work:
        work: dist.Work = getattr(self.base, name)(*args, **kwargs)
        return work

    collective.__name__ = name
    return collective


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(DelegatingGroup, _name, _of_the_base(_name))
