"""``shardrec serve-embeddings``: one embedding server, its shards from the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardrec.trainer.cli.flags import Debug


def serve_embeddings_command(
    model: Annotated[str, typer.Argument(help="package.module:function that makes the model.", metavar="MODEL")],
    store: Annotated[str, typer.Option(help="Store of the job: file:///path or tcp://host:port.")],
    rank: Annotated[int, typer.Option(help="Rank of the plan whose shards to serve.", min=0)] = 0,
    servers: Annotated[str, typer.Option(help="Names of all servers, separated by commas.")] = "server0",
    name: Annotated[
        str | None, typer.Option(help="Name of this server (default: the one at --rank in --servers)")
    ] = None,
    trainers: Annotated[int, typer.Option(help="Number of trainers.", min=1)] = 1,
    plan: Annotated[Path | None, typer.Option(help="Plan of the tables (default: the checkpoint's)")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint, or folder of checkpoints, to begin from the last one.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse updates.")] = False,
    capacity: Annotated[
        int, typer.Option(help="Most requests that wait for the server. A further request is refused.", min=1)
    ] = 256,
    window_ms: Annotated[float, typer.Option(help="Milliseconds to wait for more lookups after the first.", min=0)] = 0,
    max_requests: Annotated[int, typer.Option(help="Most requests that are looked up together.", min=1)] = 64,
    interface: Annotated[str, typer.Option(help="Network interface to listen on.")] = "lo",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the other processes.", min=1)] = 300,
    restarts: Annotated[
        int, typer.Option(help="Times that a killed server is started again from the last checkpoint.", min=0)
    ] = 0,
    debug: Debug = False,
) -> None:
    """Serve one rank's shards of a model's tables over RPC, until a trainer ends the job.

    MODEL is package.module:function, which makes the unsharded model. On one host no other user can call the server.
    --interface names the network between several hosts, which must belong to the job alone.

    Example: shardrec serve-embeddings my.package:make_model --store file:///shared/job/store --plan plan.json

    """
    from shardrec import ConfigError
    from shardrec.rpc import supervise

    names = servers.split(",")
    if name is None and rank >= len(names):
        raise ConfigError(f"--rank is {rank} and --servers names {len(names)}. Name each server, or give --name")
    if restarts and checkpoint is None:
        raise ConfigError("--restarts continues from the last checkpoint: give --checkpoint")
    options = {
        "model": model,
        "rank": rank,
        "plan": plan,
        "store": store,
        "server": {
            "checkpoint": checkpoint,
            "servers": names if name is None else None,
            "read_only": read_only,
            "capacity": capacity,
            "window_s": window_ms / 1000,
            "max_requests": max_requests,
        },
        "world": {
            "trainers": trainers,
            "servers": names,
            "name": name or names[rank],
            "interface": interface,
            "timeout_s": timeout,
        },
    }
    if restarts:
        supervise(_serve, options, restarts=restarts, debug=debug)
    else:
        _serve(options)


def _serve(options: dict[str, Any]) -> None:
    from shardrec import ShardingPlan
    from shardrec.rpc import load_server, named_function, open_store, serve

    model = named_function(options["model"])()
    plan = None if options["plan"] is None else ShardingPlan.load(options["plan"])
    server = load_server(model, options["rank"], plan=plan, **options["server"])
    serve(server, open_store(options["store"], options["world"]["timeout_s"]), **options["world"])
