"""Embedding tables on servers: parameter servers for training and for serving, over ``torch.distributed.rpc``.

::

    trainer                                             server
    ids cut by the plan's route ── lookup ──────────►   queue ─► what waits is one fused lookup ─► each Future completed
    rows assembled              ◄────────────────────┘
    gradients of the rows       ── update ──────────►   all trainers' gradients of a step are one fused update
    backward continues          ◄────────────────────┘

A trainer's modules are the sharded ones. They are given another object for the collectives
(:mod:`shardrec.rpc.trainer_collectives`), and another storage (:mod:`shardrec.rpc.remote_storage`). See docs/rpc.md.
"""

from shardrec.rpc.remote_model import RemoteModel
from shardrec.rpc.server import EmbeddingServer
from shardrec.rpc.server_process import load_server, named_function, open_store, serve, supervise
from shardrec.rpc.world import RpcWorld

__all__ = [
    "EmbeddingServer",
    "RemoteModel",
    "RpcWorld",
    "load_server",
    "named_function",
    "open_store",
    "serve",
    "supervise",
]
