"""Sharded modules, and ``shard`` which makes them out of a model."""

from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.convert import shard
from shardrec.modules.model import ShardedModel

__all__ = ["ShardedEmbeddingBagCollection", "ShardedModel", "shard"]
