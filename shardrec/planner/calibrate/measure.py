"""Timing on ranks that are started for it: each workload's step, and bare collectives over sizes."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from shardrec.planner.calibrate.workload import Workload, step_plan

if TYPE_CHECKING:
    import torch

__all__ = ["Measured", "measure"]

_SIZES = (0, 4096, 65_536, 524_288, 4_194_304)
"""Floats that a rank sends to all ranks together, or reduces."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Times of one number of ranks.

    Args:
        world: ranks.
        steps: milliseconds of each workload's step.
        all_to_all: (bytes that leave a rank, milliseconds).
        all_reduce: (bytes of the tensor, milliseconds).
    """

    world: int
    steps: tuple[float, ...]
    all_to_all: tuple[tuple[float, float], ...] = ()
    all_reduce: tuple[tuple[float, float], ...] = ()


def measure(workloads: Sequence[Workload], world: int, *, device: str = "cpu", repeats: int = 7) -> Measured:
    """Start ranks on this machine, one thread each on the CPU, and time the workloads.

    Args:
        workloads: for so many ranks.
        world: ranks.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, a device for each rank).
        repeats: steps that are timed; the median counts.
    """
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="shardrec-calibrate-") as folder:
        out = Path(folder) / "times.json"
        jobs = [asdict(workload) for workload in workloads]
        mp.spawn(_rank, args=(world, device, jobs, repeats, folder), nprocs=world)
        times = json.loads(out.read_text(encoding="utf-8"))
    return Measured(
        world=world,
        steps=tuple(times["steps"]),
        all_to_all=tuple(map(tuple, times["all_to_all"])),
        all_reduce=tuple(map(tuple, times["all_reduce"])),
    )


def _rank(rank: int, world: int, device: str, jobs: list[dict[str, Any]], repeats: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    workloads = [Workload(**job) for job in jobs]
    found: dict[str, list[object]] = {"steps": [], "all_to_all": [], "all_reduce": []}
    for workload in workloads:
        found["steps"].append(_time(_stepper(workload, world, where), repeats, where))
    if world > 1:
        for size in _SIZES:
            each = size // world
            send = torch.zeros(each * world, device=where)
            receive = torch.empty_like(send)
            sent = 4 * each * (world - 1)
            found["all_to_all"].append((sent, _time(_all_to_all(send, receive), 3 * repeats, where)))
            found["all_reduce"].append((4 * send.numel(), _time(_all_reduce(send), 3 * repeats, where)))
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _stepper(workload: Workload, world: int, device: torch.device) -> Callable[[], None]:
    import torch
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    import shardrec

    torch.manual_seed(0)
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{index}",
                num_embeddings=workload.rows,
                embedding_dim=workload.dim,
                feature_names=[f"f{index}"],
                data_type=DataType.FP16 if workload.half else DataType.FP32,
            )
            for index in range(workload.tables)
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    model = shardrec.shard(collection, step_plan(workload, world), device=device)
    bags = workload.tables * workload.batch
    batches = [
        KeyedJaggedTensor(
            keys=[f"f{index}" for index in range(workload.tables)],
            values=torch.randint(workload.rows, (bags * workload.pooling,), device=device),
            lengths=torch.full((bags,), workload.pooling, dtype=torch.int32, device=device),
        )
        for _ in range(3)
    ]
    gradient = torch.randn(workload.batch, workload.tables * workload.dim, device=device)
    calls = iter(range(10**9))

    def step() -> None:
        model(batches[next(calls) % len(batches)]).values().backward(gradient)

    return step


def _all_to_all(send: torch.Tensor, receive: torch.Tensor) -> Callable[[], None]:
    import torch.distributed as dist

    return lambda: dist.all_to_all_single(receive, send)


def _all_reduce(tensor: torch.Tensor) -> Callable[[], None]:
    import torch.distributed as dist

    return lambda: dist.all_reduce(tensor)


def _time(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Milliseconds of the median run, on the slowest rank."""
    import torch
    import torch.distributed as dist

    times = []
    for number in range(repeats + 2):
        dist.barrier()
        begin = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append((perf_counter() - begin) * 1e3)
    slowest = torch.tensor(median(times), dtype=torch.float32, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
