"""Training steps of DLRM and DCN-v2, eager, compiled in each mode and scripted, and TorchRec's, in one run.

All sides live in the same two processes and take turns, step by step, so that what disturbs the machine disturbs all.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.launch.ranks import RankInfo
from shardrec.launch.run import on_new_ranks
from shardrec.layout import ShardingPlan, Topology, cuts

DENSE = 13
Step = Callable[[Tensor, KeyedJaggedTensor, Tensor], None]


def build(name: str, options: argparse.Namespace) -> nn.Module:
    """The model, alike on every rank and side."""
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}", num_embeddings=options.rows, embedding_dim=options.dim, feature_names=[f"f{number}"]
            )
            for number in range(options.tables)
        ]
    )
    _apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, bags.parameters(), {"lr": 0.02, "eps": 1e-8})
    dense, over = [256, 128, options.dim], [256, 128, 1]
    if name == "dlrm":
        return DLRM(bags, DENSE, dense, over)
    return DLRM_DCN(bags, DENSE, dense, over, 3, 64)


def batches(options: argparse.Namespace, rank: int) -> list[tuple[Tensor, KeyedJaggedTensor, Tensor]]:
    """Batches with differing numbers of ids, made before the clock starts."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for _ in range(8):
        lengths = torch.randint(0, 2 * options.pooling + 1, (options.tables * options.batch,), generator=generator)
        values = torch.randint(options.rows, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor(
            keys=[f"f{number}" for number in range(options.tables)], values=values, lengths=lengths.to(torch.int32)
        )
        dense = torch.rand(options.batch, DENSE, generator=generator)
        labels = torch.randint(2, (options.batch,), generator=generator).float()
        made.append((dense, features, labels))
    return made


def training_step(model: nn.Module, dense_parameters: Iterable[nn.Parameter]) -> Step:
    """Forward, loss, backward and the dense optimizer."""
    optimizer = torch.optim.SGD(dense_parameters, lr=0.01)

    def step(dense: Tensor, features: KeyedJaggedTensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(dense, features).squeeze(1), labels).backward()
        optimizer.step()

    return step


def ours(name: str, options: argparse.Namespace, mode: str | None, transport: str = "auto") -> Step:
    """shardrec, eager (``mode`` None), compiled, or "scripted"."""
    model = build(name, options)
    world_size = dist.get_world_size()
    path = "sparse_arch.embedding_bag_collection"
    plan = ShardingPlan(
        topology=Topology(ranks_per_host=world_size),
        tables=tuple(
            cuts.table_wise(f"{path}.t{number}", options.rows, options.dim, rank=number % world_size)
            for number in range(options.tables)
        ),
    )
    sharded = shardrec.shard(model, plan, transport=transport)  # type: ignore[arg-type]
    run: Any = sharded
    if mode == "scripted":
        run = DistributedDataParallel(shardrec.script(sharded))
    elif mode is not None:
        shardrec.annotate_for_dynamo(sharded, mode=mode)  # type: ignore[arg-type]
        run = torch.compile(sharded, fullgraph=mode == "traced")
    return training_step(run, sharded.dense_parameters())


def switch_tracing(on: bool) -> None:
    """The switches that TorchRec's own tests turn on before they compile."""
    import torchrec.distributed.comm_ops
    import torchrec.pt2.checks

    torchrec.distributed.comm_ops.set_use_sync_collectives(on)
    torchrec.pt2.checks.set_use_torchdynamo_compiling_path(on)
    torch._dynamo.config.capture_scalar_outputs = on
    torch._dynamo.config.capture_dynamic_output_shape_ops = on
    torch._dynamo.config.force_unspec_int_unbacked_size_like_on_torchrec_kjt = on
    if hasattr(torch._dynamo.config, "ignore_logging_functions"):
        loggers = {logging.Logger.debug, logging.Logger.info, logging.Logger.warning}
        torch._dynamo.config.ignore_logging_functions = loggers if on else set()


def theirs(name: str, options: argparse.Namespace, compiled: str | None) -> Step:
    """TorchRec's DistributedModelParallel: eager (None), as its own tests compile it ("full"), or with breaks."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner import Topology as PeerTopology

    model = build(name, options)
    world_size = dist.get_world_size()
    constraints = {
        f"t{number}": ParameterConstraints(sharding_types=["table_wise"]) for number in range(options.tables)
    }
    planner = EmbeddingShardingPlanner(
        topology=PeerTopology(world_size, "cpu", local_world_size=world_size), constraints=constraints
    )
    sharders: Any = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    # Its tests compile without DistributedDataParallel, whose logger dynamo does not know.
    parallel = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
        init_data_parallel=compiled != "full",
    )
    run: Any = parallel
    if compiled == "full":
        switch_tracing(True)
    if compiled is not None:
        run = torch.compile(parallel, fullgraph=compiled == "full")
    dense = [parameter for key, parameter in parallel.named_parameters() if "embedding_bags" not in key]
    return training_step(run, dense)


SIDES: dict[str, Callable[[str, argparse.Namespace], Step]] = {
    "eager": lambda name, options: ours(name, options, None),
    "boundary": lambda name, options: ours(name, options, "boundary"),
    "traced": lambda name, options: ours(name, options, "traced"),
    "scripted": lambda name, options: ours(name, options, "scripted"),
    "eager, process group": lambda name, options: ours(name, options, None, "group"),
    "traced, process group": lambda name, options: ours(name, options, "traced", "group"),
    "scripted, process group": lambda name, options: ours(name, options, "scripted", "group"),
    "TorchRec eager": lambda name, options: theirs(name, options, None),
    "TorchRec compiled, with breaks": lambda name, options: theirs(name, options, "breaks"),
    # Last: it changes switches for the whole process, and may leave a rank in the middle of a step.
    "TorchRec compiled, fullgraph": lambda name, options: theirs(name, options, "full"),
}


def one_line(error: BaseException) -> str:
    """The first two lines of what went wrong."""
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"


def everywhere(error: str) -> str:
    """The first error of any rank. Every rank calls this."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, error)
    return next((one for one in found if one), "")


def measure(name: str, options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Seconds of each side's steps, or why it has none."""
    data = batches(options, rank)
    steps: dict[str, Step] = {}
    result: dict[str, Any] = {}
    for side in options.sides:
        begin, error = time.perf_counter(), ""
        torch._dynamo.utils.counters.clear()
        try:
            step = SIDES[side](name, options)
            for number in range(4):
                step(*data[number])
        except Exception as failed:
            error = one_line(failed)
        error = everywhere(error)
        if rank == 0:
            print(f"{name}, {side}: {error or 'runs'}", flush=True)
        if error:
            switch_tracing(False)
            result[side] = {"error": error}
        else:
            steps[side] = step
            counters = torch._dynamo.utils.counters
            result[side] = {
                "first_steps_s": time.perf_counter() - begin,
                "graphs": counters["stats"]["unique_graphs"],
                "breaks": sum(counters["graph_break"].values()),
                "ms": [],
                "cpu_ms": [],
            }
    for number in range(options.steps):
        for side, step in steps.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            step(*data[number % len(data)])
            cpu = time.process_time() - cpu
            dist.barrier()
            result[side]["ms"].append(1000 * (time.perf_counter() - begin))
            result[side]["cpu_ms"].append(1000 * cpu)
    return result


def on_a_rank(rank_info: RankInfo, options: argparse.Namespace) -> dict[str, Any]:
    """One rank's part."""
    warnings.filterwarnings("ignore")
    # The sides share the code of the model, and so dynamo's list of what it compiled for it.
    torch._dynamo.config.recompile_limit = 64
    found = {}
    for name in options.models:
        torch._dynamo.reset()
        found[name] = measure(name, options, rank_info.rank)
        if rank_info.is_lead:
            (options.out / f"{name}.json").write_text(json.dumps(found[name]))
    return found


def shown(result: dict[str, Any]) -> None:
    """A table."""
    base = statistics.median(result["eager"]["ms"]) if "eager" in result else None
    for side, found in result.items():
        if "error" in found:
            print(f"  {side:32} does not run: {found['error']}")
            continue
        low, middle, high = statistics.quantiles(found["ms"], n=4)
        ratio = f"{middle / base:5.2f}" if base else ""
        spread = f"({low:.2f} to {high:.2f})"
        cpu = f"CPU {min(found['cpu_ms']):.2f} ms"
        compiled = f"{found['graphs']} graphs, {found['breaks']} breaks met, first steps {found['first_steps_s']:.0f} s"
        print(f"  {side:32} {middle:8.2f} ms {spread:20} {ratio}  {cpu}  {compiled}")


def main() -> None:
    """Start the ranks and show what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["dlrm", "dcn"], choices=["dlrm", "dcn"])
    compared = ["eager", "boundary", "traced", "TorchRec eager", "TorchRec compiled, fullgraph"]
    parser.add_argument("--sides", nargs="+", default=compared, choices=list(SIDES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--pooling", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/compile"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    found = on_new_ranks(on_a_rank, options, nproc=options.ranks, threads=options.threads, debug=True)
    print(f"load after: {os.getloadavg()[0]:.1f}")
    for name in options.models:
        print(name)
        shown(found[name])


if __name__ == "__main__":
    main()
