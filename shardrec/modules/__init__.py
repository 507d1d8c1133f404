"""Sharded modules, and ``shard`` which makes them out of a model."""

from shardrec.modules.annotate import annotate_for_dynamo, unannotate
from shardrec.modules.anomaly import detect_anomaly
from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.clipping import clip_grad_norm_, clip_grad_value_
from shardrec.modules.drop_in import DistributedModelParallel
from shardrec.modules.sequences import ShardedEmbeddingCollection
from shardrec.modules.servers import Servers
from shardrec.modules.shard import shard
from shardrec.modules.sharded_model import ShardedModel

__all__ = [
    "DistributedModelParallel",
    "Servers",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedModel",
    "annotate_for_dynamo",
    "clip_grad_norm_",
    "clip_grad_value_",
    "detect_anomaly",
    "shard",
    "unannotate",
]
