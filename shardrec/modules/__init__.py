"""Sharded modules, and ``shard`` which makes them out of a model."""

from shardrec.modules.anomaly import detect_anomaly
from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.convert import shard
from shardrec.modules.drop_in import DistributedModelParallel
from shardrec.modules.model import ShardedModel
from shardrec.modules.replicated_model import ReplicatedModel
from shardrec.modules.sequences import ShardedEmbeddingCollection

__all__ = [
    "DistributedModelParallel",
    "ReplicatedModel",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedModel",
    "detect_anomaly",
    "shard",
]
