"""The sharded forward in operators of torch and fbgemm alone: what runs where shardrec is not installed.

The second spelling of the forward, beside the live one in :mod:`shardrec.exchange` and :mod:`shardrec.modules`, for
saved TorchScript files, torch.export and AOTInductor. It only infers: tables are looked up where they lie and take no
gradient. It has what docs/scripting.md says, and refuses the rest with the reason.

::

    portable_input.py       checks and cuts a batch, header and payload
    portable_module.py      what both twins have: the lookups of this rank's shards, the all-to-all of float rows
    portable_bags.py        a sharded embedding bag collection
    portable_sequences.py   a sharded embedding collection
    frozen_ids.py           maps of dynamic ids, which learn no more
"""

from __future__ import annotations

from torch import nn

from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.sequences import ShardedEmbeddingCollection
from shardrec.portable.portable_bags import PortableBags
from shardrec.portable.portable_sequences import PortableSequences

__all__ = ["portable_twin"]


def portable_twin(module: nn.Module) -> nn.Module | None:
    """The portable twin of a sharded collection. None for any other module, because its own twin is portable.

    Called by :mod:`shardrec.scripting`, by way of :mod:`shardrec._late_imports`.
    """
    if isinstance(module, ShardedEmbeddingBagCollection):
        return PortableBags(module)
    if isinstance(module, ShardedEmbeddingCollection):
        return PortableSequences(module)
    return None
