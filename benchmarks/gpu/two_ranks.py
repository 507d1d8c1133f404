"""Two ranks over NCCL that share one device: the values of one rank, exchanges of nothing, a rank that dies, and ranks
that make no backward, and then go on or stay away.

NCCL takes two ranks for a device only if they seem to be on two hosts (shardrec.launch.ranks.SHARE_DEVICES), and so
sends through sockets: times say nothing. On the CPU the same runs over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import PeerError
from shardrec.launch.ranks import SHARE_DEVICES, RankInfo, joined_run
from shardrec.layout import ShardingPlan, Topology, cuts

__all__ = ["main", "new_parser"]

_RANKS, _ROWS, _DIM, _SAMPLES = 2, 60, 8, 6
_NAMES = ("t0", "t1", "t2", "t3")
_LIMIT_S = 150.0
_AFTER = 3  # steps before the rank dies, or makes no backward
_ACTIONS = ("parity", "kill", "stay away", "go on")


def _module() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=_ROWS, embedding_dim=_DIM, feature_names=[name]) for name in _NAMES
    ]
    module = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1, "eps": 1e-8})
    return module


def _plan(ranks: int) -> ShardingPlan:
    layouts = (
        cuts.row_wise("t0", _ROWS, _DIM, ranks=[0, ranks - 1]),
        cuts.column_wise("t1", _ROWS, _DIM, ranks=[0, ranks - 1]),
        cuts.table_wise("t2", _ROWS, _DIM, rank=0),
        cuts.table_wise("t3", _ROWS, _DIM, rank=ranks - 1),
    )
    return ShardingPlan(topology=Topology(ranks_per_host=ranks), tables=layouts)


def _batch(step: int, rank: int, kind: str) -> KeyedJaggedTensor:
    """A rank's batch. ``"one side"``: rank 0's ids are all for shards of rank 1, which has none."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(_NAMES), _SAMPLES), generator=generator, dtype=torch.int32)
    if kind == "one side":
        lengths[:3] = 0
        lengths *= rank == 0
    lengths *= kind != "no ids"
    values = torch.randint(0, _ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(_NAMES), values, lengths=lengths.flatten(), stride=_SAMPLES)


def _as_rank(device: str, action: str) -> dict[str, Any]:
    limit = 30.0 if action in ("parity", "kill") else 10.0 if device == "cuda" else 2.0
    with joined_run(device, 1, timeout=limit, alone=True) as rank_info:
        return _parity(rank_info) if action == "parity" else _fail(rank_info, action)


def _parity(rank_info: RankInfo) -> dict[str, Any]:
    """Outputs per rank beside those of one rank on the CPU that has the batches of both."""
    model = shardrec.shard(_module(), _plan(_RANKS), device=rank_info.device)
    group = dist.new_group([rank_info.rank], use_local_synchronization=True)
    alone = shardrec.shard(_module(), _plan(1), device="cpu", group=group)
    worst: dict[str, float] = {}
    for step, kind in enumerate(("ids", "no ids", "one side", "ids", "one side", "ids")):
        batches = [_batch(step, rank, kind) for rank in range(_RANKS)]
        found: Tensor = model(batches[rank_info.rank].to(rank_info.device)).values()
        parts = [one.lengths().view(len(_NAMES), _SAMPLES) for one in batches]
        ids = [part for key in _NAMES for part in (one[key].values() for one in batches)]
        lengths = torch.cat(parts, dim=1).flatten()
        whole = KeyedJaggedTensor(list(_NAMES), torch.cat(ids), lengths=lengths, stride=_RANKS * _SAMPLES)
        expected: Tensor = alone(whole).values()
        mine = slice(rank_info.rank * _SAMPLES, (rank_info.rank + 1) * _SAMPLES)
        error = float((found.detach().cpu() - expected[mine].detach()).abs().max())
        worst[kind] = max(worst.get(kind, 0.0), error)
        found.sum().backward()
        (expected.sum() / _RANKS).backward()
    return {"largest difference": worst, "passed": max(worst.values()) < 1e-5}


def _fail(rank_info: RankInfo, action: str) -> dict[str, Any]:
    """Rank 1 dies between two steps, or makes no backward. How long rank 0 takes to say so."""
    model = shardrec.shard(_module(), _plan(_RANKS), device=rank_info.device)
    began = time.monotonic()
    try:
        for step in range(100 * _AFTER):
            fails = step == _AFTER and not rank_info.is_lead
            if fails and action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            loss = model(_batch(step, rank_info.rank, "ids").to(rank_info.device)).values().sum()
            if fails and action == "stay away":
                time.sleep(_LIMIT_S)
            if not fails:
                loss.backward()
    except PeerError as error:
        seconds, named = time.monotonic() - began, error.ranks == (1,) or action == "go on"
        _tell({"error": str(error).splitlines()[0], "seconds": round(seconds, 2), "passed": named})
        os._exit(0)  # the group cannot be left in order
    return {"passed": False}


def _tell(found: dict[str, Any]) -> None:
    print("FOUND " + json.dumps(found), flush=True)


def _run(device: str, action: str) -> dict[str, Any]:
    """What rank 0 tells."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), SHARE_DEVICES: "1"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(_RANKS)}
    command = [sys.executable, "-m", "benchmarks.gpu.two_ranks", "--device", device, "--as-rank", action]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    try:
        printed = [ranks[0].communicate(timeout=_LIMIT_S)[0]]
        if action == "stay away":
            ranks[1].kill()
        printed += [one.communicate(timeout=_LIMIT_S)[0] for one in ranks[1:]]
    except subprocess.TimeoutExpired:
        return {"passed": False, "error": f"not done after {_LIMIT_S:g} s"}
    finally:
        for one in ranks:
            one.kill()
    told = [json.loads(line[6:]) for text in printed for line in text.splitlines() if line.startswith("FOUND ")]
    if len(told) in {"parity": (_RANKS,), "go on": (1, 2)}.get(action, (1,)):
        return {**told[0], "passed": all(one["passed"] for one in told)}
    return {"passed": False, "error": "\n".join(text[-1500:] for text in printed)}


def new_parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/two_ranks.json"))
    parser.add_argument("--as-rank", choices=_ACTIONS, help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run all of them, and write what they find; 1 if one of them fails."""
    options = new_parser().parse_args(arguments)
    if options.as_rank:
        _tell(_as_rank(options.device, options.as_rank))
        return 0
    found = {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for action in _ACTIONS:
        found[action] = _run(options.device, action)
        print(f"{action}: {found[action]}", flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not all(one["passed"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
