"""What a step looked like."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardrec.pipeline import Pipeline, PipelineError, Timeline
from shardrec.pipeline.timeline import Span
from tests.ranks import ranks


def span(stage: int, name: str, start: float, end: float, kind: str = "compute") -> Span:
    return Span(stage=stage, name=name, kind=kind, start=start, end=end)


def test_shares() -> None:
    timeline = Timeline([span(0, "F0", 0, 1), span(1, "F0", 0, 1, "wait"), span(1, "F0", 1, 2)])
    assert timeline.seconds == 2
    assert timeline.idle_share == pytest.approx(0.5)


@pytest.mark.parametrize(
    "read",
    [
        lambda timeline, path: timeline.seconds,
        lambda timeline, path: timeline.idle_share,
        lambda timeline, path: timeline.save_trace(path),
        lambda timeline, path: timeline.save_png(path),
    ],
)
def test_a_timeline_without_a_step_says_so(read: Callable[[Timeline, Path], object], tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="nothing was recorded: run a step inside"):
        read(Timeline([]), tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_step_is_recorded_and_drawn(tmp_path: Path) -> None:
    pipeline = Pipeline(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], chunks=3)
    with pipeline.record() as timeline:
        pipeline.step(torch.ones(3, 1), loss_fn=lambda output, _: output.sum())
    computed = sorted((one.stage, one.name) for one in timeline.spans if one.kind == "compute")
    assert computed == sorted((stage, f"{kind}{batch}") for stage in range(2) for kind in "FB" for batch in range(3))
    assert 0 <= timeline.idle_share < 1
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(timeline.spans)
    timeline.save_png(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 5000
    pipeline.step(torch.ones(3, 1), loss_fn=lambda output, _: output.sum())
    assert len(timeline.spans) == 24


def test_ranks_get_the_spans_of_all() -> None:
    def run() -> list[tuple[int, str, str]]:
        pipeline = Pipeline(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], group=dist.group.WORLD, chunks=2)
        with pipeline.record() as timeline:
            pipeline.step(torch.ones(3, 1), loss_fn=lambda output, _: output.sum())
        return sorted((one.stage, one.kind, one.name) for one in timeline.spans)

    one, other = ranks(2, run)
    assert one == other
    assert (0, "send", "F1 to 1") in one
    assert (1, "send", "B0 to 0") in one


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_spans_are_those_of_its_work_and_not_of_the_host_s() -> None:
    pipeline = Pipeline(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))), [8], devices=["cuda"], chunks=2)
    x = torch.ones(8192, 4096, device="cuda")
    for _ in range(2):
        with pipeline.record() as timeline:
            began = time.time()
            pipeline.step(x, loss_fn=lambda output, _: output.sum())
            torch.cuda.synchronize()
            passed = time.time() - began
    assert 0.5 * passed < timeline.seconds < 1.1 * passed
