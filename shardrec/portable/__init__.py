"""The sharded forward in operators of torch and fbgemm alone: what runs where shardrec is not installed.

The second spelling of the forward, beside the live one in :mod:`shardrec.exchange` and :mod:`shardrec.modules`, for
saved TorchScript files, torch.export and AOTInductor. It only infers: tables are looked up where they lie and take no
gradient. It has what docs/executors.md says, and refuses the rest with the reason.

::

    input.py        checks and cuts a batch, header and payload
    twin.py         what both twins have: the lookups of this rank's shards, the all-to-all of float rows
    bags.py         a sharded embedding bag collection
    sequences.py    a sharded embedding collection
    frozen_ids.py   maps of dynamic ids, which learn no more
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["twins"]


def twins() -> dict[type[nn.Module], Callable[[Any, bool], nn.Module]]:
    """What TorchScript sees in place of a module, by the module's class, if the program is to run anywhere."""
    from shardrec.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
    from shardrec.portable.bags import PortableBags
    from shardrec.portable.sequences import PortableSequences

    return {ShardedEmbeddingBagCollection: PortableBags, ShardedEmbeddingCollection: PortableSequences}
