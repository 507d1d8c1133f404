"""Embedding servers under load, with and without async_execution, and a training step against collectives.

``load``: 8 clients (threads of 2 processes) ask one server for pooled rows as fast as it answers. The two ways take
turns in one run: the server's own, which merges what waits, and a plain function, which looks up in the RPC thread that
runs it. ``step``: 2 trainers with 2 servers, and the same model sharded over the 2 trainers, take turns step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed import rpc
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.launch.run import run_on_ranks
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.rpc import EmbeddingServer, RpcWorld
from shardrec.rpc.messages import Answer, Connections, Part, call, check_parts

TABLES, DIM, PROCESSES, THREADS = 26, 32, 2, 4
WAYS = {"async_execution": call}


class Bags(nn.Module):
    """Pooled tables by themselves, in one or several collections, with fused rowwise Adagrad."""

    def __init__(self, rows: int, data_type: DataType = DataType.FP32, collections: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t{n}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{n}"], data_type=data_type
            )
            for n in range(TABLES)
        ]
        self.bags = nn.ModuleList(
            torchrec.EmbeddingBagCollection(tables=tables[one::collections]) for one in range(collections)
        )
        cls = torchrec.optim.RowWiseAdagrad
        torchrec.optim.apply_optimizer_in_backward(cls, self.bags.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        lookups = [bags(features) for bags in self.bags]
        return torch.cat([lookup.values() for lookup in lookups], dim=1)


def _bags(options: argparse.Namespace) -> Bags:
    """Of the load test in half precision, as tables that are served are. Those that train in single."""
    is_load = options.part == "load"
    data_type = DataType[options.dtype.upper()] if is_load else DataType.FP32
    return Bags(options.rows, data_type, _collections(options))


def _collections(options: argparse.Namespace) -> int:
    collections: int = options.collections if options.part == "load" else 1
    return collections


def batch(rows: int, size: int, seed: int) -> KeyedJaggedTensor:
    """One id per sample and table, uniform over its rows."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (TABLES * size,), generator=draw)
    keys, lengths = [f"f{n}" for n in range(TABLES)], torch.ones(TABLES * size, dtype=torch.int32)
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, stride=size)


def plan(rows: int, servers: int, collections: int = 1) -> ShardingPlan:
    """Table-wise, in turn."""
    paths = [f"bags.{n % collections}.t{n}" for n in range(TABLES)]
    tables = tuple(cuts.table_wise(path, rows, DIM, rank=n % servers) for n, path in enumerate(paths))
    return ShardingPlan(topology=Topology(ranks_per_host=servers), tables=tables)


_SERVER: list[EmbeddingServer] = []


def blocking_call(method: str, parts: list[Part]) -> Answer:
    """A lookup without async_execution: the RPC thread makes it, for this request alone."""
    (server,) = _SERVER
    with torch.no_grad():
        return True, server._look_up([check_parts(parts, server._collections)])[0]


WAYS["blocking"] = blocking_call


def serve(options: argparse.Namespace, world: RpcWorld, rank: int, servers: int) -> None:
    """A server until the run ends."""
    window_s = options.window_ms / 1000 if servers == 1 else 0.0
    server = EmbeddingServer(
        _bags(options), plan(options.rows, servers, _collections(options)), rank, window_s=window_s
    )
    _SERVER.append(server)
    world.serve()
    server.close()


def client(options: argparse.Namespace, world: RpcWorld, number: int) -> list[dict[str, Any]]:
    """What the threads of a client process measured, round after round and way after way."""
    found = []
    barrier = dist.PrefixStore("barrier", world._store)
    with world.joined():
        alone = dist.new_group([number], use_local_synchronization=True)
        layout = plan(options.rows, 1, options.collections)
        model: Any = shardrec.shard(_bags(options), layout, servers=shardrec.Servers(world.servers), group=alone)
        requests = [_request(model, batch(options.rows, options.batch, seed)) for seed in range(16)]
        for turn in range(options.rounds):
            for way, function in WAYS.items():
                _meet(barrier, f"{turn}/{way}")
                before = model.server_statistics()[0]
                _meet(barrier, f"{turn}/{way}/go")
                times: list[float] = []
                end = time.perf_counter() + options.seconds
                threads = [
                    threading.Thread(target=_ask, args=(world.servers[0], function, requests, end, times))
                    for _ in range(THREADS)
                ]
                for one in threads:
                    one.start()
                for one in threads:
                    one.join()
                _meet(barrier, f"{turn}/{way}/end")
                after = model.server_statistics()[0]
                merged = {key: after[key] - before[key] for key in ("requests", "lookups")}
                found.append({"way": way, "turn": turn, "times": times, **merged})
        _meet(barrier, "done")
        if number == 0:
            world.end()
    return found


def _request(model: Any, features: KeyedJaggedTensor) -> list[Part]:
    """What a forward asks the server for."""
    found: list[list[Part]] = []
    servers: Connections = model._collectives.servers
    unchanged = servers.call

    def note(server: int, method: str, *arguments: Any) -> Any:
        found.append(arguments[0])
        return unchanged(server, method, *arguments)

    servers.call = note  # type: ignore[method-assign]
    with torch.no_grad():
        model(features)
    servers.call = unchanged  # type: ignore[method-assign]
    return found[0]


def _ask(server: str, function: Any, requests: list[list[Part]], end: float, times: list[float]) -> None:
    number = threading.get_ident()
    while (begin := time.perf_counter()) < end:
        number += 1
        answer = rpc.rpc_sync(server, function, args=("lookup", requests[number % len(requests)]))
        assert answer[0], answer
        times.append(time.perf_counter() - begin)


def _meet(store: dist.Store, key: str) -> None:
    if store.add(key, 1) == PROCESSES:
        store.set(f"{key}/all", "1")
    store.wait([f"{key}/all"])


def trainer(options: argparse.Namespace, world: RpcWorld, number: int) -> dict[str, list[float]]:
    """Milliseconds of the steps with servers and by collectives, in turn."""
    with world.joined():
        models = {
            "servers, staleness 0": shardrec.shard(
                Bags(options.rows), plan(options.rows, 2), servers=shardrec.Servers(world.servers)
            ),
            "collectives": shardrec.shard(Bags(options.rows), plan(options.rows, 2)),
        }
        found: dict[str, list[float]] = {way: [] for way in models}
        for step in range(options.steps):
            features = batch(options.rows, options.step_batch, 2 * step + number)
            for way, model in models.items():
                dist.barrier()
                begin = time.perf_counter()
                model(features).sum().backward()
                found[way].append(1000 * (time.perf_counter() - begin))
        dist.barrier()
        if number == 0:
            world.end()
    return found


def _role(options: dict[str, Any]) -> list[Any]:
    """One process of a part: the first are the trainers, the others the servers. What the trainers found."""
    torch.set_num_threads(1)
    rank, settings = int(os.environ["RANK"]), argparse.Namespace(**options)
    store = dist.FileStore(f"{settings.folder}/{settings.part}", -1)
    role, number = ("trainer", rank) if rank < PROCESSES else ("server", rank - PROCESSES)
    if role == "trainer":
        own = dist.PrefixStore("gloo", store)
        dist.init_process_group("gloo", store=own, rank=number, world_size=PROCESSES)
    world = RpcWorld(store, trainers=PROCESSES, servers=settings.servers, name=f"{role}{number}", threads=16)
    if role == "server":
        serve(settings, world, number, settings.servers)
        return []
    found = (client if settings.part == "load" else trainer)(settings, world, number)
    store.set(f"found{number}", json.dumps(found))
    return [json.loads(store.get(f"found{one}")) for one in range(PROCESSES)]


def _run(options: argparse.Namespace, part: str, servers: int, folder: str) -> list[Any]:
    given = {**vars(options), "part": part, "servers": servers, "folder": folder}
    found: list[Any] = run_on_ranks(_role, given, nproc=PROCESSES + servers)
    return found


def main() -> None:
    """Run both parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=16, help="samples of a request")
    parser.add_argument("--dtype", default="fp16", choices=["fp16", "bf16", "fp32"], help="of the tables under load")
    parser.add_argument("--collections", type=int, default=1, help="among which the tables under load are divided")
    parser.add_argument("--window-ms", type=float, default=0.0, help="that a server under load waits for more requests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each way in a round")
    parser.add_argument("--step-batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = _run(options, "load", 1, folder)
        steps = _run(options, "step", 2, folder) if options.steps else []
    clients = PROCESSES * THREADS
    case = f"{options.batch} samples, {options.dtype}, {options.collections} collections"
    print(f"load average {os.getloadavg()[0]:.1f}; {clients} clients, {case}")
    print("| way | requests/s, median of the rounds | p50 ms | p99 ms | lookups / requests |\n|---|---|---|---|---|")
    rates: dict[str, list[float]] = {}
    for way in WAYS:
        rounds = [
            [one for of in load for one in of if (one["way"], one["turn"]) == (way, turn)]
            for turn in range(options.rounds)
        ]
        rates[way] = [sum(len(one["times"]) for one in each) / options.seconds for each in rounds]
        times = sorted(1000 * t for each in rounds for one in each for t in one["times"])
        asked, made = (sum(each[0][key] for each in rounds) for key in ("requests", "lookups"))
        ratio = f"{made / asked / options.collections:.2f}" if asked else "1"
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        print(f"| {way} | {statistics.median(rates[way]):.0f} | {p50:.2f} | {p99:.2f} | {ratio} |")
    ratios = [a / b for a, b in zip(rates["async_execution"], rates["blocking"], strict=True)]
    print(f"\nthroughput, async_execution / blocking, round by round: {', '.join(f'{one:.2f}' for one in ratios)}")
    if not steps:
        return
    print(f"\n2 trainers, {options.step_batch} samples each\n| way | step ms, median |\n|---|---|")
    for way in steps[0]:
        print(f"| {way} | {statistics.median(steps[0][way][5:]):.2f} |")
    pairs = [a / b for a, b in zip(*steps[0].values(), strict=True)][5:]
    print(f"\nservers / collectives, step by step, median: {statistics.median(pairs):.2f}")


if __name__ == "__main__":
    main()
