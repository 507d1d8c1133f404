"""What TorchScript sees in place of a sharded module, if the program is to run anywhere."""

from __future__ import annotations

from torch import nn

from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.sequences import ShardedEmbeddingCollection
from shardrec.portable.portable_bags import PortableBags
from shardrec.portable.portable_sequences import PortableSequences

__all__ = ["portable_twin"]


def portable_twin(module: nn.Module, parallel_lookups: bool) -> nn.Module | None:
    """The portable twin of a sharded collection; None for another module, whose own twin is portable.

    Called by :mod:`shardrec.scripting`, by way of :mod:`shardrec._late_imports`.
    """
    if isinstance(module, ShardedEmbeddingBagCollection):
        return PortableBags(module, parallel_lookups)
    if isinstance(module, ShardedEmbeddingCollection):
        return PortableSequences(module, parallel_lookups)
    return None
