"""Embedding tables on servers: parameter servers for training and for serving, over ``torch.distributed.rpc``.

::

    trainer                                             server
    ids cut by the plan's route ── lookup ──────────►   queue ─► what waits is one fused lookup ─► each Future completed
    rows assembled              ◄────────────────────┘
    gradients of the rows       ── update ──────────►   all trainers' gradients of a step are one fused update
    backward goes on            ◄────────────────────┘

A trainer's modules are the sharded ones; what differs is the object that stands for the collectives
(:mod:`shardrec.rpc.collectives`). See docs/rpc.md.
"""

from shardrec.rpc.collections import RemoteEmbeddingBagCollection, RemoteEmbeddingCollection
from shardrec.rpc.model import RemoteModel
from shardrec.rpc.server import EmbeddingServer
from shardrec.rpc.world import RpcWorld

__all__ = [
    "EmbeddingServer",
    "RemoteEmbeddingBagCollection",
    "RemoteEmbeddingCollection",
    "RemoteModel",
    "RpcWorld",
]
