"""What pipelines gain: ``torchrun --nproc-per-node 2 benchmarks/pipeline/main.py`` (3 processes for the skips).

- TrainPipeline at each depth beside the plain loop, their steps in turn, so that the machine's load meets all alike.
- Skips straight beside skips threaded through the stages between (3 ranks): bytes and time.
- The idle share of a step beside the schedule's formula, for 2 to 8 micro-batches.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.pipeline import Pipeline, TrainPipeline
from shardrec.pipeline.schedule import bubble
from shardrec.pipeline.skip import pop, skippable, stash

TABLES, ROWS, DIM, DENSE, SAMPLES, POOLING = 26, 10_000, 32, 13, 2048, 4
STEPS = int(os.environ.get("STEPS", "40"))


def click_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A DLRM whose tables are cut by rows, and the optimizer of its dense part."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{one}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{one}"])
        for one in range(TABLES)
    ]
    bags = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    model = DLRM(bags, DENSE, [128, DIM], [128, 1])
    size = dist.get_world_size()
    path = "sparse_arch.embedding_bag_collection"
    layouts = tuple(cuts.row_wise(f"{path}.t{one}", ROWS, DIM, ranks=range(size)) for one in range(TABLES))
    sharded = shardrec.shard(model, ShardingPlan(topology=Topology(ranks_per_host=size), tables=layouts))
    dense = [one for name, one in sharded.named_parameters() if "embedding_bags" not in name]
    return sharded, torch.optim.SGD(dense, lr=0.1)


def batches(count: int) -> list[tuple[Tensor, KeyedJaggedTensor, Tensor]]:
    """Uniform ids, ``POOLING`` in each bag."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    made = []
    for _ in range(count):
        lengths = torch.full((TABLES * SAMPLES,), POOLING, dtype=torch.int32)
        values = torch.randint(0, ROWS, (TABLES * SAMPLES * POOLING,), generator=generator)
        ids = KeyedJaggedTensor([f"f{one}" for one in range(TABLES)], values, lengths=lengths, stride=SAMPLES)
        labels = torch.rand(SAMPLES, generator=generator).round()
        made.append((torch.randn(SAMPLES, DENSE, generator=generator), ids, labels))
    return made


def loss_fn(model: nn.Module, batch: tuple[Tensor, KeyedJaggedTensor, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch[0], batch[1]).squeeze(1), batch[2])


def train_pipeline() -> dict[int, float]:
    """Median milliseconds of a step at each depth; the steps of the depths in turn."""
    data = batches(8)
    loops = {}
    for depth in (0, 1, 2):
        model, optimizer = click_model()
        endless = (data[step % len(data)] for step in range(10**9))
        loops[depth] = TrainPipeline(model, optimizer, endless, loss_fn=loss_fn, depth=depth)
    seconds: dict[int, list[float]] = {depth: [] for depth in loops}
    for _ in range(STEPS + 5):
        for depth, loop in loops.items():
            dist.barrier()
            begin = time.perf_counter()
            next(loop)
            seconds[depth].append(time.perf_counter() - begin)
    return {depth: 1e3 * statistics.median(of_depth[5:]) for depth, of_depth in seconds.items()}


WIDE, NARROW = 2048, 64


@skippable(stash=["wide"])
class Wide(nn.Module):
    """Stashes many columns and hands few on."""

    def forward(self, input: Tensor) -> Generator[stash, Any, Tensor]:
        yield stash("wide", input.repeat(1, WIDE // NARROW))
        return input


@skippable(pop=["wide"])
class Take(nn.Module):
    """Adds up what was stashed."""

    def forward(self, input: Tensor) -> Generator[pop, Any, Tensor]:
        wide = yield pop("wide")
        return input + wide.view(len(input), -1, NARROW).sum(1)


class Threaded(nn.Module):
    """A layer through which the wide tensor is handed on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(input[0]), input[1]


class Begin(nn.Module):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input, input.repeat(1, WIDE // NARROW)


class End(nn.Module):
    def forward(self, input: tuple[Tensor, Tensor]) -> Tensor:
        return input[0] + input[1].view(len(input[0]), -1, NARROW).sum(1)


def skips() -> dict[str, tuple[float, int]]:
    """Median milliseconds of a step, and bytes that the stage between sends and receives in one."""
    straight = nn.Sequential(Wide(), nn.Linear(NARROW, NARROW), nn.Linear(NARROW, NARROW), Take())
    threaded = nn.Sequential(Begin(), Threaded(nn.Linear(NARROW, NARROW)), Threaded(nn.Linear(NARROW, NARROW)), End())
    pipelines = {
        name: Pipeline(model, [1, 2, 1], group=dist.group.WORLD, chunks=4)
        for name, model in (("straight", straight), ("threaded", threaded))
    }
    x = torch.randn(SAMPLES, NARROW, requires_grad=True)
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(STEPS):
        for name, pipeline in pipelines.items():
            dist.barrier()
            begin = time.perf_counter()
            pipeline.step(x, loss_fn=lambda output, _: output.square().mean())
            seconds[name].append(time.perf_counter() - begin)
    found = {}
    for name, pipeline in pipelines.items():
        sent = torch.tensor([sum(pipeline.sent_bytes.values()) // STEPS, pipeline.sent_bytes.get(1, 0) // STEPS])
        every = [torch.zeros_like(sent) for _ in range(3)]
        dist.all_gather(every, sent)
        through = int(every[1][0] + every[0][1] + every[2][1])
        found[name] = (1e3 * statistics.median(seconds[name][3:]), through)
    return found


def bubbles() -> list[tuple[int, float, float]]:
    """Micro-batches, idle share measured (median), and the formula's."""
    stages = dist.get_world_size()
    rows = []
    for chunks in (2, 4, 8):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4 * stages)))
        pipeline = Pipeline(model, [4] * stages, group=dist.group.WORLD, chunks=chunks, checkpoint="never")
        shares = []
        for _ in range(12):
            with pipeline.record() as timeline:
                pipeline.step(torch.randn(8192, 512), loss_fn=lambda output, _: output.square().mean())
            shares.append(timeline.idle_share)
        rows.append((chunks, statistics.median(shares[2:]), bubble(stages, chunks)))
    return rows


def main() -> None:
    """Measure, and print on the first rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    lines = []
    if dist.get_world_size() == 3:
        lines += [f"skip {name}: {ms:.1f} ms, {sent} bytes through stage 1" for name, (ms, sent) in skips().items()]
    else:
        lines += [f"depth {depth}: {ms:.1f} ms" for depth, ms in train_pipeline().items()]
        lines += [f"{chunks} micro-batches: idle {seen:.2f}, formula {due:.2f}" for chunks, seen, due in bubbles()]
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
