"""Steps that ``shardrec bench`` has no case for, of shardrec and TorchRec in turn on one device.

::

    sequences   rows of each id, and of each distinct id, of Zipf-distributed ids
    blocks      tables in eight blocks of rows on the one rank, beside whole ones (shardrec alone)
    adam, fp16  bags with another optimizer, or 16-bit tables
    tiers       Zipf-distributed ids of tables on the device, behind a cache of a fifth of the rows, and on the host
    dynamic     ids that have rows already, beside plain ids (shardrec alone)
    pipelines   a DLRM fed from the host, by the plain loop and by each library's pipeline

On one rank neither library averages gradients: TorchRec's model has no DDP, as shardrec's has none.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import CacheParams, ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from benchmarks.harness.batches import BatchMaker
from benchmarks.harness.layouts import cut_plan
from benchmarks.harness.module import unsharded_module
from benchmarks.harness.timing.clock import time_steps, warm_up
from benchmarks.harness.timing.dense import DENSE_LR, DenseInputs, click_model, dense_parameters
from benchmarks.harness.timing.plans import TABLES_OF_DLRM, renamed
from benchmarks.harness.workload import WorkloadTable, parse_tables
from shardrec.launch.ranks import RankInfo
from shardrec.launch.run import on_new_ranks
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.pipeline import TrainPipeline
from shardrec.planner.torchrec_plan import to_torchrec

__all__ = ["VARIANTS", "main", "new_parser"]

Steps = dict[str, Callable[[], object]]
"""By name, what makes a step."""

_BATCHES = 4


class _Maker:
    """Makes the models and batches of a variant."""

    def __init__(self, rank_info: RankInfo, options: dict[str, Any]) -> None:
        self.rank_info, self.device = rank_info, rank_info.device
        self.batch_size, self.max_rows = options["batch"], options["max_rows"]

    def criteo(self) -> tuple[WorkloadTable, ...]:
        return parse_tables(["criteo_128"], max_rows=self.max_rows)

    def batches(self, tables: tuple[WorkloadTable, ...], ids: str = "uniform") -> list[Any]:
        maker = BatchMaker(tables, batch_size=self.batch_size, ids=ids, seed=0)
        return [maker.draw(0, number) for number in range(_BATCHES)]

    def shardrec(self, module: nn.Module, plan: ShardingPlan, **options: Any) -> nn.Module:
        return shardrec.shard(module, plan, device=self.device, **options)

    def torchrec(
        self, module: nn.Module, plan: ShardingPlan, sharder: Any = None, load_factor: float | None = None
    ) -> nn.Module:
        group = dist.group.WORLD
        assert group is not None, "a rank that measures is in a process group"
        paths = {layout.name: layout.name.rpartition(".")[0] for layout in plan.tables}
        their_plan = to_torchrec(plan, device=self.device.type, paths=paths)
        if load_factor is not None:
            for of_module in their_plan.plan.values():
                for table in of_module.values():  # type: ignore[attr-defined]
                    table.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
                    table.cache_params = CacheParams(load_factor=load_factor)
        model: nn.Module = DistributedModelParallel(
            module,
            env=ShardingEnv.from_process_group(group),
            device=self.device,
            plan=their_plan,
            sharders=[sharder or EmbeddingBagCollectionSharder()],
            init_data_parallel=False,
        )
        return model

    def step(self, model: nn.Module, batches: list[Any]) -> Callable[[], object]:
        """Forward and backward of embeddings, with the fused update. The gradient is there already."""
        given: Iterator[Any] = cycle([one.to(self.device) for one in batches])
        gradients: list[Tensor] = []

        def step() -> None:
            batch = next(given)
            # A new one, as a reader makes it: one that was used keeps its offsets and the numbers of its ids.
            output = model(
                KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths(), stride=self.batch_size)
            )
            values = output.values()
            parts = [values] if isinstance(values, Tensor) else [one.values() for one in values]
            if not gradients:
                gradients.extend(torch.rand_like(one) for one in parts)
            torch.autograd.backward(parts, gradients)

        return step


def sequences(maker: _Maker) -> Steps:
    """Rows of each id."""
    tables = parse_tables([f"8x{min(1_000_000, maker.max_rows)}x64x16"], max_rows=maker.max_rows)
    plan, batches = cut_plan(tables, "table_wise", Topology(ranks_per_host=1)), maker.batches(tables, "zipf")
    steps: Steps = {}
    for name, dedup in (("distinct", True), ("each", False)):
        module = lambda: unsharded_module(tables, pooled=False, weighted=False, optimizer="rowwise_adagrad")  # noqa: E731
        steps[f"shardrec, {name}"] = maker.step(maker.shardrec(module(), plan, dedup=dedup), batches)
        if dedup and maker.device.type == "cpu":
            continue  # TorchRec finds distinct ids on CUDA alone
        steps[f"torchrec, {name}"] = maker.step(
            maker.torchrec(module(), plan, EmbeddingCollectionSharder(use_index_dedup=dedup)), batches
        )
    return steps


def blocks(maker: _Maker) -> Steps:
    """Eight local blocks of rows."""
    tables, topology = maker.criteo(), Topology(ranks_per_host=1)
    whole, batches = cut_plan(tables, "table_wise", topology), maker.batches(tables)
    cut = tuple(
        cuts.row_wise(one.name, one.rows, one.dim, ranks=[0] * 8) if one.rows >= 8 else whole.by_name[one.name]
        for one in tables
    )
    plans = {"whole": whole, "eight blocks": ShardingPlan(topology=topology, tables=cut)}
    return {
        name: maker.step(maker.shardrec(_bags(tables, "rowwise_adagrad"), plan), batches)
        for name, plan in plans.items()
    }


def adam(maker: _Maker) -> Steps:
    """Bags updated by Adam; on the CPU TorchRec has none."""
    return _both(maker, lambda tables: _bags(tables, "adam"), with_torchrec=maker.device.type == "cuda")


def fp16(maker: _Maker) -> Steps:
    """Bags of 16-bit tables."""

    def module(tables: tuple[WorkloadTable, ...]) -> Any:
        made = _bags(tables, "rowwise_adagrad")
        for config, table in zip(made.embedding_bag_configs(), made.embedding_bags.values(), strict=True):
            config.data_type = DataType.FP16
            table.weight.data = table.weight.data.to(torch.float16)
        return made

    return _both(maker, module)


def tiers(maker: _Maker) -> Steps:
    """Tables behind caches of a fifth of their rows in both libraries. Shardrec's on the device and the host, too."""
    tables = maker.criteo()
    whole, batches = cut_plan(tables, "table_wise", Topology(ranks_per_host=1)), maker.batches(tables, "zipf")
    steps: Steps = {}
    for name, placed in (
        ("device", {}),
        ("cached", {"tier": "cached", "load_factor": 0.2}),
        ("host", {"tier": "host"}),
    ):
        layouts = tuple(replace(one, **placed) for one in whole.tables)  # type: ignore[arg-type]
        model = maker.shardrec(_bags(tables, "rowwise_adagrad"), replace(whole, tables=layouts))
        steps[f"shardrec, {name}"] = maker.step(model, batches)
    if maker.device.type == "cuda":
        module = _bags(tables, "rowwise_adagrad")
        steps["torchrec, cached"] = maker.step(maker.torchrec(module, whole, load_factor=0.2), batches)
    return steps


def dynamic(maker: _Maker) -> Steps:
    """Ids that have rows after the first steps, and plain ids."""
    tables = parse_tables([f"8x{min(1_000_000, maker.max_rows)}x64x16"], max_rows=maker.max_rows)
    plan, batches = cut_plan(tables, "table_wise", Topology(ranks_per_host=1)), maker.batches(tables, "zipf")
    options = {one.name: shardrec.DynamicIds() for one in tables}
    return {
        name: maker.step(maker.shardrec(_bags(tables, "rowwise_adagrad"), plan, dynamic_ids=ids), batches)
        for name, ids in (("plain", {}), ("dynamic", options))
    }


def _bags(tables: tuple[WorkloadTable, ...], optimizer: str) -> Any:
    return unsharded_module(tables, pooled=True, weighted=False, optimizer=optimizer)


def _both(maker: _Maker, module: Callable[[tuple[WorkloadTable, ...]], Any], with_torchrec: bool = True) -> Steps:
    tables = maker.criteo()
    plan, batches = cut_plan(tables, "table_wise", Topology(ranks_per_host=1)), maker.batches(tables)
    steps: Steps = {"shardrec": maker.step(maker.shardrec(module(tables), plan), batches)}
    if with_torchrec:
        steps["torchrec"] = maker.step(maker.torchrec(module(tables), plan), batches)
    return steps


class _ClickTrain(nn.Module):
    """As TorchRec's pipelines call it: from a batch to (loss, output)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch.dense_features, batch.sparse_features)
        loss = binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels)
        return loss, loss.detach()


def pipelines(maker: _Maker) -> Steps:
    """A DLRM, each batch of which is copied from the host."""
    tables, device = maker.criteo(), maker.device
    plan = renamed(cut_plan(tables, "table_wise", Topology(ranks_per_host=1)), f"model.{TABLES_OF_DLRM}")
    host = DenseInputs(maker.batch_size, RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1))
    given = [Batch(host.values, one, host.labels) for one in maker.batches(tables)]
    if device.type == "cuda":
        given = [batch.pin_memory() for batch in given]

    def model_of(library: Callable[..., nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = library(_ClickTrain(click_model(_bags(tables, "rowwise_adagrad"), device)), plan)
        return model, torch.optim.SGD(dense_parameters(model), lr=DENSE_LR)

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        batches = cycle(given)

        def step() -> None:
            batch = next(batches).to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            model(batch)[0].backward()
            optimizer.step()

        return step

    steps: Steps = {}
    steps["shardrec, plain"] = plain(*model_of(maker.shardrec))
    steps["torchrec, plain"] = plain(*model_of(maker.torchrec))
    steps["shardrec, TrainPipeline"] = TrainPipeline(*model_of(maker.shardrec), cycle(given)).__next__
    model, optimizer = model_of(maker.torchrec)
    pipeline, batches = TrainPipelineSparseDist(model, optimizer, device), cycle(given)
    steps["torchrec, TrainPipelineSparseDist"] = lambda: pipeline.progress(batches)
    return steps


VARIANTS: dict[str, Callable[[_Maker], Steps]] = {
    "sequences": sequences,
    "pipelines": pipelines,
    "blocks": blocks,
    "adam": adam,
    "fp16": fp16,
    "tiers": tiers,
    "dynamic": dynamic,
}
"""By name, in the order of the run."""


def _measure(rank_info: RankInfo, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step, a median for each round, and the first side's time over each other's."""
    device = rank_info.device
    steps = VARIANTS[name](_Maker(rank_info, options))
    times: dict[str, list[float]] = {side: [] for side in steps}
    for number in range(options["rounds"]):
        sides = list(steps)
        first = number % len(sides)  # each round begins with another
        for side in sides[first:] + sides[:first]:
            run = lambda _, side=side: steps[side]()  # noqa: E731
            warm_up(run, [None] * 2, device)
            times[side].append(median(time_steps(run, [None] * options["steps"], device)))
    base = median(next(iter(times.values())))
    return {
        "ms": {side: [round(one, 4) for one in found] for side, found in times.items()},
        "over_the_first": {side: round(median(found) / base, 3) for side, found in times.items()},
    }


def new_parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--max-rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/variants.json"))
    parser.add_argument("--resume", action="store_true", help="leave out what --out has")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Time them, each in a process of its own, and write each as soon as it is known."""
    options = new_parser().parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if options.resume and options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    given = {name: getattr(options, name) for name in ("max_rows", "batch", "steps", "rounds")}
    for name in options.variants:
        if name in found and "error" not in found[name]:
            continue
        gc.collect()
        try:
            found[name] = on_new_ranks(_measure, name, given, nproc=1, device=options.device, debug=True)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip()[-600:]}"}
        print(f"{name}: {found[name]}", flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
