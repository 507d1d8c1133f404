"""A DLRM step on one device by every executor: time, memory, waits of the host, graph breaks, a CUDA graph, a profile.

Run by ``benchmarks.gpu.main``, in a process of its own. What each part finds is written as soon as it is known, so that
a process that is stopped loses one part.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from benchmarks.harness.batches import BatchMaker
from benchmarks.harness.layouts import cut_plan
from benchmarks.harness.module import unsharded_module
from benchmarks.harness.timing.clock import time_steps, warm_up
from benchmarks.harness.timing.dense import DENSE_LR, DenseInputs, click_model, dense_parameters
from benchmarks.harness.timing.plans import TABLES_OF_DLRM, renamed
from benchmarks.harness.timing.sides.dense import DensePart
from benchmarks.harness.workload import parse_tables
from shardrec.launch.ranks import RankInfo
from shardrec.layout import Topology

__all__ = ["PARTS", "Step", "is_wait", "main", "new_parser"]

_WARM_UP, _OTHER_SIZES = 4, 4


class Step:
    """A training step of a sharded DLRM on one rank.

    Args:
        options: of the command.
        compiled: ``"boundary"`` or ``"traced"`` (:func:`shardrec.annotate_for_dynamo`). None for eager mode.
    """

    def __init__(self, options: argparse.Namespace, compiled: str | None = None) -> None:
        device = torch.device(options.device)
        self.rank_info = RankInfo(rank=0, world_size=1, device=device, threads=torch.get_num_threads())
        tables = parse_tables([options.workload], max_rows=options.max_rows)
        collection: Any = unsharded_module(tables, pooled=True, weighted=False, optimizer="rowwise_adagrad")
        torch.manual_seed(0)
        # Without a planner, which needs a solver's libraries.
        plan = renamed(cut_plan(tables, "table_wise", Topology(ranks_per_host=1)), TABLES_OF_DLRM)
        self.model: nn.Module = shardrec.shard(click_model(collection, device), plan, device=device)
        self._inputs = DenseInputs(options.batch, self.rank_info)
        self._optimizer = torch.optim.SGD(dense_parameters(self.model), lr=DENSE_LR)
        maker = BatchMaker(tables, batch_size=options.batch, ids="zipf", seed=0)
        self.batches = [maker.draw(0, number).to(device) for number in range(_WARM_UP)]
        # Batches of other sizes, as the last one of an epoch is.
        sizes = [max(2, options.batch - 1 - number) for number in range(_OTHER_SIZES)]
        self.others = [BatchMaker(tables, batch_size=size, ids="zipf", seed=0).draw(0, 0).to(device) for size in sizes]
        self._run: nn.Module = self.model
        if compiled is not None:
            shardrec.annotate_for_dynamo(self.model, mode=compiled)  # type: ignore[arg-type]
            self._run = torch.compile(self.model, fullgraph=compiled == "traced")

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Forward, loss, backward and the dense optimizer."""
        size = features.stride()
        self._optimizer.zero_grad(set_to_none=True)
        logits: Tensor = self._run(self._inputs.values[:size], features)
        binary_cross_entropy_with_logits(logits.squeeze(1), self._inputs.labels[:size]).backward()
        self._optimizer.step()
        return logits

    def time(self, steps: int) -> float:
        """Milliseconds: the median after a warm-up."""
        warm_up(self, self.batches, self.rank_info.device)
        inputs = [self.batches[number % len(self.batches)] for number in range(steps)]
        return median(time_steps(self, inputs, self.rank_info.device))


def eager(options: argparse.Namespace) -> dict[str, Any]:
    """Time, peak memory, and where the host waits for the device in a step."""
    step = Step(options)
    found: dict[str, Any] = {"ms": step.time(options.steps)}
    if step.rank_info.device.type != "cuda":
        return found
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(step.batches[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in caught if is_wait(str(one.message))]
    found["waits"] = [f"{Path(one.filename).name}:{one.lineno}" for one in waits]
    found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def is_wait(warning: str) -> bool:
    """Whether torch warns that the host waits, and not that its sync debug mode is a prototype."""
    return "synchronizing" in warning and "prototype" not in warning


def _compiled(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    step = Step(options, mode)
    found: dict[str, Any] = {"ms": step.time(options.steps)}
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = {reason.splitlines()[0]: count for reason, count in counters["graph_break"].items()}
    for features in step.others:
        step(features)
    found["graphs_for_other_batch_sizes"] = counters["stats"]["unique_graphs"] - found["graphs"]
    return found


def boundary(options: argparse.Namespace) -> dict[str, Any]:
    """torch.compile with the lookups eager: time, graphs and breaks, and the graphs that other batch sizes add."""
    return _compiled(options, "boundary")


def traced(options: argparse.Namespace) -> dict[str, Any]:
    """torch.compile without a break, compared in the same way."""
    return _compiled(options, "traced")


def cuda_graph(options: argparse.Namespace) -> dict[str, Any]:
    """The dense part, forward and backward, launched kernel by kernel and as a CUDA graph."""
    device = torch.device(options.device)
    rank_info = RankInfo(rank=0, world_size=1, device=device, threads=1)
    tables = parse_tables([options.workload], max_rows=options.max_rows)
    collection: Any = unsharded_module(tables, pooled=True, weighted=False, optimizer="sgd")
    part: Any = DensePart(click_model(collection, device))
    inputs = DenseInputs(options.batch, rank_info)
    pooled = torch.rand(options.batch, len(tables), tables[0].dim, device=device, requires_grad=True)

    def step(run: Callable[[Tensor, Tensor], Tensor]) -> None:
        logits = run(inputs.values, pooled)
        binary_cross_entropy_with_logits(logits.squeeze(1), inputs.labels).backward()

    def time_of(run: Callable[[Tensor, Tensor], Tensor]) -> float:
        warm_up(step, [run] * _WARM_UP, device)
        return median(time_steps(step, [run] * options.steps, device))

    found = {"kernels_ms": time_of(part)}
    if device.type == "cuda":
        found["graph_ms"] = time_of(torch.cuda.make_graphed_callables(part, (inputs.values, pooled)))
    return found


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """A Chrome trace of three steps, beside the JSON, and the operators that take the most time."""
    step = Step(options)
    step.time(3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_cuda = step.rank_info.device.type == "cuda"
    activities += [torch.profiler.ProfilerActivity.CUDA] * on_cuda
    with torch.profiler.profile(activities=activities) as recorded:
        for features in step.batches[:3]:
            step(features)
        if on_cuda:
            torch.cuda.synchronize()
    path = Path(options.out).with_name("trace.json.gz")
    recorded.export_chrome_trace(str(path))
    key = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    most = sorted(recorded.key_averages(), key=lambda one: -getattr(one, key))[:10]
    return {"trace": path.name, "microseconds": {one.key: round(getattr(one, key) / 3, 1) for one in most}}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "eager": eager,
    "boundary": boundary,
    "traced": traced,
    "cuda_graph": cuda_graph,
    "profile": profile,
}
"""By name, in the order of the run."""


def new_parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--workload", default="criteo_128")
    parser.add_argument("--max-rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/programs.json"))
    parser.add_argument("--resume", action="store_true", help="leave out the parts that --out has")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the parts, and write what they find."""
    options = new_parser().parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if options.resume and options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    for name in options.parts:
        if name in found and "error" not in found[name]:
            continue
        gc.collect()
        try:
            found[name] = PARTS[name](options)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"}
        print(f"{name}: {found[name]}", flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
