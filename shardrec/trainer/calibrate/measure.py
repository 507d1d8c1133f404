"""Timing on ranks that are started for it: each workload's step, and bare collectives over sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

from shardrec.launch import on_new_ranks
from shardrec.planner import TableLoad
from shardrec.trainer.calibrate.workload import Workload, step_plan, table_loads

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from shardrec.launch import RankInfo
    from shardrec.layout import ShardingPlan

_SIZES = (0, 4096, 65_536, 524_288, 4_194_304)
"""Floats that a rank sends to all ranks together, or reduces."""
_PASSES = 4
"""Passes over the workloads. The quietest counts, because a disturbance may last for many workloads."""
_QUIET = 0.1
"""Quantile of the times of equal steps that counts. Passes differ less in it than in the median, which depends more on
what else the machine does: by 8% instead of 14% (standard deviation; two ranks, two cores)."""
_MIN_MS = 100.0
"""Time that the steps of a workload take together in a pass: a disturbance lasts longer than a few small steps."""
_MAX_REPEATS = 16
"""Times as many steps as asked for, at most, to come to that."""
_BATCHES = 3
"""Batches that the steps take in turn."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Times of one number of ranks.

    Args:
        world: ranks.
        steps: milliseconds of each workload's step.
        forward: the part of it until the outputs are there.
        all_to_all: (bytes that leave a rank, milliseconds).
        all_reduce: (bytes of the tensor, milliseconds).
    """

    world: int
    steps: tuple[float, ...]
    forward: tuple[float, ...]
    all_to_all: tuple[tuple[float, float], ...] = ()
    all_reduce: tuple[tuple[float, float], ...] = ()


def measure(workloads: Sequence[Workload], world: int, *, device: str = "cpu", repeats: int = 7) -> Measured:
    """Start ranks on this machine, one thread each on the CPU, and time the workloads.

    Args:
        workloads: made for this number of ranks.
        world: ranks.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, a device for each rank).
        repeats: steps that are timed at least, in passes through the workloads. The quietest pass counts.
    """
    return on_new_ranks(_time_workloads, tuple(workloads), repeats, nproc=world, device=device)


def _features(tables: Mapping[str, TableLoad]) -> dict[str, list[str]]:
    """``"<table>.0"``, ``"<table>.1"`` and so on, by table."""
    return {name: [f"{name}.{index}" for index in range(load.features)] for name, load in tables.items()}


def _time_workloads(rank_info: RankInfo, workloads: Sequence[Workload], repeats: int) -> Measured:
    import torch
    import torch.distributed as dist

    world, where = rank_info.world_size, rank_info.device
    times: list[list[tuple[float, float]]] = [[] for _ in workloads]
    for _ in range(_PASSES):
        for workload, seen in zip(workloads, times, strict=True):
            forward = sharded_forward(table_loads(workload), step_plan(workload, world), workload.batch, where)
            seen.append(time_step(forward, -(-repeats // _PASSES), where, _MIN_MS))
    # The same on every rank: the times are the slowest rank's.
    quiet = [min(seen, key=lambda each: each[1]) for seen in times]
    all_to_all: list[tuple[float, float]] = []
    all_reduce: list[tuple[float, float]] = []
    for size in _SIZES if world > 1 else ():
        each = size // world
        send = torch.zeros(each * world, device=where)
        receive = torch.empty_like(send)
        exchange, reduce = partial(dist.all_to_all_single, receive, send), partial(dist.all_reduce, send)
        all_to_all.append((4 * each * (world - 1), _time(exchange, 3 * repeats, where)))
        all_reduce.append((4 * send.numel(), _time(reduce, 3 * repeats, where)))
    return Measured(
        world=world,
        steps=tuple(step for _, step in quiet),
        forward=tuple(forward for forward, _ in quiet),
        all_to_all=tuple(all_to_all),
        all_reduce=tuple(all_reduce),
    )


def sharded_forward(
    tables: Mapping[str, TableLoad],
    plan: ShardingPlan,
    batch_size: int,
    device: torch.device,
    batches: Sequence[KeyedJaggedTensor] = (),
) -> Callable[[], Callable[[], None]]:
    """Forward of one sharded collection of these tables, of drawn ids by default. It returns the backward."""
    import torch
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    from shardrec import shard  # with torch and fbgemm-gpu

    torch.manual_seed(torch.distributed.get_rank())
    features = _features(tables)
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=load.num_embeddings,
                embedding_dim=load.embedding_dim,
                feature_names=features[name],
                data_type=DataType.FP16 if load.weight_bytes == 2 else DataType.FP32,
            )
            for name, load in tables.items()
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    model = shard(collection, plan, device=device)
    used = batches or _drawn(tables, batch_size, device)
    columns = sum(load.embedding_dim * load.features for load in tables.values())
    gradient = torch.randn(batch_size, columns, device=device)
    calls = iter(range(10**9))

    def forward() -> Callable[[], None]:
        values = model(used[next(calls) % len(used)]).values()
        return lambda: values.backward(gradient)

    return forward


def _drawn(tables: Mapping[str, TableLoad], batch_size: int, device: torch.device) -> list[KeyedJaggedTensor]:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys, batches = [key for of_table in _features(tables).values() for key in of_table], []
    for _ in range(_BATCHES):
        ids, sizes = [], []
        for load in tables.values():
            for pooling in load.poolings:
                ids.append(torch.randint(load.num_embeddings, (batch_size * round(pooling),), device=device))
                sizes.append(torch.full((batch_size,), round(pooling), dtype=torch.int32, device=device))
        batches.append(KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=torch.cat(sizes)))
    return batches


def _time(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds of a quiet run, on the slowest rank."""

    def forward() -> Callable[[], None]:
        run()
        return lambda: None

    return time_step(forward, repeats, device)[1]


def time_step(
    forward: Callable[[], Callable[[], None]], repeats: int, device: torch.device, least_ms: float = 0.0
) -> tuple[float, float]:
    """Milliseconds of a quiet forward, and of a quiet step, each on the slowest rank.

    Args:
        forward: returns the backward.
        repeats: steps that are timed, besides two that are not.
        device: of the ranks.
        least_ms: more steps are timed until they take so long, within ``_MAX_REPEATS``.
    """
    import torch
    import torch.distributed as dist

    def once() -> tuple[float, float]:
        dist.barrier()
        clock = _Clock(device)
        backward = forward()
        first = clock.mark()
        backward()
        step = clock.mark()
        clock.wait()
        return first(), step()

    def slowest(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
        quantiles = torch.quantile(torch.tensor(times, device=device), _QUIET, dim=0)
        dist.all_reduce(quantiles, op=dist.ReduceOp.MAX)
        forward_ms, step_ms = quantiles.tolist()
        return forward_ms, step_ms

    once()
    # The same number on all ranks: the slowest rank determines it.
    _, about = slowest([once()])
    repeats = max(repeats, min(_MAX_REPEATS * repeats, ceil(least_ms / max(about, 1e-3))))
    return slowest([once() for _ in range(repeats)])


class _Clock:
    """Milliseconds since it was made: by the host's clock on the CPU, by the stream's on CUDA, where nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begin = device, perf_counter()
        self._start = _event(device) if device.type == "cuda" else None

    def mark(self) -> Callable[[], float]:
        """The time of this moment, to be asked for after :meth:`wait`."""
        if self._start is None:
            passed = (perf_counter() - self._begin) * 1e3
            return lambda: passed
        start, event = self._start, _event(self._device)
        return lambda: start.elapsed_time(event)

    def wait(self) -> None:
        """Until all marks have been passed."""
        if self._start is not None:
            import torch

            torch.cuda.synchronize(self._device)


def _event(device: torch.device) -> torch.cuda.Event:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
