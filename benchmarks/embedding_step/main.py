"""A training step of sharded embeddings alone, shardrec and TorchRec in turn in the same processes; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.layout import TableLayout, cuts

CUTS = ("table_wise", "row_wise", "column_wise")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tables and batches.

    Args:
        cut: how every table is cut.
        batch_size: samples per rank.
        tables: number of tables.
        rows: rows of each.
        dim: columns of each.
        pooling: ids per sample and table.
    """

    cut: str
    batch_size: int
    tables: int = 26
    rows: int = 100_000
    dim: int = 64
    pooling: int = 1


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per step of one side, one entry per round."""

    side: str
    mode: str
    milliseconds: tuple[float, ...]


def collection(workload: Workload) -> EmbeddingBagCollection:
    """The unsharded collection, the same on every rank."""
    torch.manual_seed(0)
    made = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=workload.rows, embedding_dim=workload.dim, feature_names=[f"f{i}"]
            )
            for i in range(workload.tables)
        ]
    )
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.02})
    return made


def layouts(workload: Workload, world_size: int) -> tuple[TableLayout, ...]:
    """Every table cut alike; tables go round the ranks."""
    shape = (workload.rows, workload.dim)
    ranks = range(world_size)
    match workload.cut:
        case "table_wise":
            return tuple(cuts.table_wise(f"t{i}", *shape, rank=i % world_size) for i in range(workload.tables))
        case "row_wise":
            return tuple(cuts.row_wise(f"t{i}", *shape, ranks=ranks) for i in range(workload.tables))
        case _:
            return tuple(cuts.column_wise(f"t{i}", *shape, ranks=ranks) for i in range(workload.tables))


def ours(workload: Workload) -> nn.Module:
    """The collection sharded by shardrec."""
    world_size = dist.get_world_size()
    topology = shardrec.Topology(ranks_per_host=world_size)
    plan = shardrec.ShardingPlan(topology=topology, tables=layouts(workload, world_size))
    return shardrec.shard(collection(workload), plan)


def theirs(workload: Workload) -> nn.Module:
    """The collection sharded by TorchRec's DistributedModelParallel, with the same cut and the same kernels."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    world_size = dist.get_world_size()
    module = collection(workload)
    sharder = EmbeddingBagCollectionSharder()
    make: Callable[[int], Any] = {
        "table_wise": lambda index: table_wise(rank=index % world_size, compute_kernel="fused"),
        "row_wise": lambda index: row_wise(compute_kernel="fused"),
        "column_wise": lambda index: column_wise(ranks=list(range(world_size)), compute_kernel="fused"),
    }[workload.cut]
    per_table = {f"t{index}": make(index) for index in range(workload.tables)}
    plan = construct_module_sharding_plan(
        module, per_table, sharder=sharder, local_size=world_size, world_size=world_size, device_type="cpu"
    )
    group = dist.group.WORLD
    assert group is not None, "the process group is initialised"
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"": plan}),
        sharders=[sharder],
    )


def batches(workload: Workload, count: int = 4) -> list[KeyedJaggedTensor]:
    """Uniform ids, different on each rank."""
    torch.manual_seed(1 + dist.get_rank())
    bags = workload.tables * workload.batch_size
    return [
        KeyedJaggedTensor(
            keys=[f"f{i}" for i in range(workload.tables)],
            values=torch.randint(workload.rows, (bags * workload.pooling,)),
            lengths=torch.full((bags,), workload.pooling, dtype=torch.int32),
        )
        for _ in range(count)
    ]


def step(model: nn.Module, batch: KeyedJaggedTensor, gradient: Tensor) -> None:
    """Forward, backward and the fused update."""
    model(batch).values().backward(gradient)


def forward(model: nn.Module, batch: KeyedJaggedTensor, gradient: Tensor) -> None:
    """Forward alone."""
    with torch.no_grad():
        model(batch).values()


def measure(
    model: nn.Module, run: Callable[[nn.Module, KeyedJaggedTensor, Tensor], None], inputs: Sequence[Any], steps: int
) -> float:
    """Milliseconds per step, of the slowest rank."""
    data, gradient = inputs
    dist.barrier()
    begin = time.perf_counter()
    for index in range(steps):
        run(model, data[index % len(data)], gradient)
    dist.barrier()
    return (time.perf_counter() - begin) / steps * 1e3


def run_rank(rank: int, world_size: int, port: int, workload: Workload, rounds: int, steps: int, out: str) -> None:
    """Measure one workload as one rank; rank 0 writes the timings to ``out``."""
    warnings.filterwarnings("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    sides = {"shardrec": ours(workload), "torchrec": theirs(workload)}
    gradient = torch.randn(workload.batch_size, workload.tables * workload.dim)
    inputs = (batches(workload), gradient)
    found: dict[tuple[str, str], list[float]] = {}
    for mode, run in (("forward", forward), ("step", step)):
        for model in sides.values():
            measure(model, run, inputs, steps)
        for _ in range(rounds):
            for side, model in sides.items():
                found.setdefault((side, mode), []).append(measure(model, run, inputs, steps))
    if rank == 0:
        timings = [Timing(side=side, mode=mode, milliseconds=tuple(ms)) for (side, mode), ms in found.items()]
        Path(out).write_text(json.dumps([asdict(timing) for timing in timings]), encoding="utf-8")
    dist.destroy_process_group()


def ratio(peer: Sequence[float], mine: Sequence[float]) -> str:
    """Peer over mine, round by round: median (least to most)."""
    each = sorted(a / b for a, b in zip(peer, mine, strict=True))
    return f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def main() -> None:
    """Run the workloads, show the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--cuts", nargs="+", choices=CUTS, default=list(CUTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/embedding_step.json"))
    options = parser.parse_args()
    table = Table(title=f"milliseconds per step, {options.ranks} gloo ranks of 1 thread, 26 tables of 64 columns")
    for heading in ("cut", "batch per rank", "", "shardrec", "torchrec", "torchrec / shardrec"):
        table.add_column(heading, justify="right")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for number, (cut, size) in enumerate((cut, size) for cut in options.cuts for size in options.batch_sizes):
        workload = Workload(cut=cut, batch_size=size)
        part = options.out.with_suffix(".part")
        arguments = (options.ranks, 29600 + number, workload, options.rounds, options.steps, str(part))
        mp.spawn(run_rank, args=arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call,attr-defined]
        timings = {(entry["side"], entry["mode"]): entry["milliseconds"] for entry in json.loads(part.read_text())}
        part.unlink()
        for mode in ("forward", "step"):
            mine, peer = timings["shardrec", mode], timings["torchrec", mode]
            median = [f"{statistics.median(side):.1f}" for side in (mine, peer)]
            table.add_row(cut, str(size), mode, *median, ratio(peer, mine))
            results.append({**asdict(workload), "mode": mode, "shardrec_ms": mine, "torchrec_ms": peer})
    malloc = {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")}
    environment = {"python": sys.version.split()[0], "torch": torch.__version__, "cpu": platform.machine(), **malloc}
    options.out.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
