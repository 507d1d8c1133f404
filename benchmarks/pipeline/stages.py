"""What stages gain: skips straight beside skips threaded through, and the idle share beside the schedule's formula."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.pipeline import Pipeline
from shardrec.pipeline.skip import pop, skippable, stash

__all__ = ["bubbles", "skips"]

SAMPLES = 2048
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


def skips(steps: int) -> dict[str, tuple[float, int]]:
    """Median milliseconds of a step, and bytes that the stage between sends and receives in one."""
    straight = nn.Sequential(Wide(), nn.Linear(NARROW, NARROW), nn.Linear(NARROW, NARROW), Take())
    threaded = nn.Sequential(Begin(), Threaded(nn.Linear(NARROW, NARROW)), Threaded(nn.Linear(NARROW, NARROW)), End())
    pipelines = {
        name: Pipeline(model, [1, 2, 1], group=dist.group.WORLD, chunks=4)
        for name, model in (("straight", straight), ("threaded", threaded))
    }
    x = torch.randn(SAMPLES, NARROW, requires_grad=True)
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(steps):
        for name, pipeline in pipelines.items():
            dist.barrier()
            begin = time.perf_counter()
            pipeline.step(x, loss_fn=lambda output, _: output.square().mean())
            seconds[name].append(time.perf_counter() - begin)
    found = {}
    for name, pipeline in pipelines.items():
        sent = torch.tensor([sum(pipeline.sent_bytes.values()) // steps, pipeline.sent_bytes.get(1, 0) // steps])
        every = [torch.zeros_like(sent) for _ in range(3)]
        dist.all_gather(every, sent)
        through = int(every[1][0] + every[0][1] + every[2][1])
        found[name] = (1e3 * statistics.median(seconds[name][3:]), through)
    return found


def bubbles(steps: int) -> list[tuple[int, float, float]]:
    """Micro-batches, idle share measured (median), and the formula's."""
    stages = dist.get_world_size()
    rows = []
    for chunks in (2, 4, 8):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4 * stages)))
        pipeline = Pipeline(model, [4] * stages, group=dist.group.WORLD, chunks=chunks, checkpoint="never")
        shares = []
        for _ in range(steps):
            with pipeline.record() as timeline:
                pipeline.step(torch.randn(8192, 512), loss_fn=lambda output, _: output.square().mean())
            shares.append(timeline.idle_share)
        rows.append((chunks, statistics.median(shares[2:]), (stages - 1) / (chunks + stages - 1)))
    return rows
