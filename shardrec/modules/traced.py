"""The form of a sharded module that torch.compile runs in traced mode: its operators (:mod:`shardrec.modules.live`)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._torchscript import plain
from shardrec.lookup.fakes import register_fakes
from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.live import LiveBags, LiveSequences
from shardrec.modules.sequences import ShardedEmbeddingCollection

__all__ = ["Traced", "compiled_twin"]

Sharded = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


class Traced(nn.Module):
    """A sharded module as a tracer takes it: gives the value, a KeyedTensor or a dict of JaggedTensors.

    Args:
        twin: of operators.
    """

    def __init__(self, twin: LiveBags | LiveSequences) -> None:
        super().__init__()
        self.twin: Any = plain(twin)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Look up the local batch."""
        return self.twin.traced(features)


def compiled_twin(collection: Sharded) -> Traced:
    """The twin that torch.compile traces; trains the collection's tables."""
    # For what a user traces beside it: fbgemm's modules, and twins made for other executors.
    register_fakes()
    if isinstance(collection, ShardedEmbeddingBagCollection):
        return Traced(LiveBags(collection))
    return Traced(LiveSequences(collection))
