"""Training steps of a DLRM: the plain loop, TrainPipeline at each depth, and TorchRec's, on the same plan and batches.

Each takes a few steps in a row (what is under way at the end of a step must not arrive while another one computes) and
then the next one's turn comes, so that the machine's load meets all alike. The first step of a turn is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from benchmarks.pipeline.link import Link, linked, torch_linked
from shardrec.exchange.transport import Transport
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.pipeline import TrainPipeline
from shardrec.planner.torchrec_plan import to_torchrec

__all__ = ["Row", "Workload", "compare"]

TABLES, ROWS, DENSE = 26, 10_000, 13
_TURN = 5
"""Steps of a turn, the first not counted."""


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    Args:
        batch: samples of a rank.
        dim: columns per table.
        pooling: ids of each bag.
    """

    batch: int
    dim: int
    pooling: int


@dataclass(frozen=True)
class Row:
    """A side's steps: medians of the turns, means of the ranks.

    Args:
        side: who made them.
        step_ms: time of a step.
        ids_wait_ms: of it, waiting for ids and headers.
        rows_wait_ms: of it, waiting for rows and their gradients.
        ids_link_ms: what the step's ids and headers took on the link.
        rows_link_ms: what its rows and their gradients took.
        ids_seen_ms: what was not hidden of ``ids_link_ms``.
        rows_seen_ms: what was not hidden of ``rows_link_ms``.
        busy: processor time of a rank over time.
    """

    side: str
    step_ms: float
    ids_wait_ms: float
    rows_wait_ms: float
    ids_link_ms: float
    rows_link_ms: float
    ids_seen_ms: float
    rows_seen_ms: float
    busy: float


class ClickTrain(nn.Module):
    """A DLRM that looks up before its bottom layers and uses the rows behind them. Returns (loss, loss)."""

    def __init__(self, bags: EmbeddingBagCollection, dim: int) -> None:
        super().__init__()
        self.bags = bags
        self.dim = dim
        self.bottom = DenseArch(DENSE, [512, 256, dim])
        self.interaction = InteractionArch(TABLES)
        self.over = OverArch(dim + TABLES * (TABLES + 1) // 2, [512, 256, 1])

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch.sparse_features)
        dense = self.bottom(batch.dense_features)
        logits = self.over(self.interaction(dense, pooled.values().view(-1, TABLES, self.dim)))
        loss = binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels)
        return loss, loss.detach()


def compare(workload: Workload, new_link: Callable[[], Link], rounds: int) -> list[Row]:
    """Time all the sides. Every rank calls it and gets all the rows."""
    data = _batches(workload)
    sides: dict[str, _Side] = {}
    for transport, words in (("auto", "shared memory"), ("group", "process group")):
        for depth in (0, 1, 2):
            name = f"TrainPipeline, depth {depth}" if depth else "plain loop"
            sides[f"shardrec, {words}: {name}"] = _shardrec(workload, data, new_link(), transport, depth)
    sides["TorchRec: plain loop"] = _torchrec(workload, data, new_link(), pipelined=False)
    sides["TorchRec: TrainPipelineSparseDist"] = _torchrec(workload, data, new_link(), pipelined=True)
    turns: dict[str, list[Tensor]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            turns[name].append(_turn(side))
    return [Row(name, *torch.stack(found[1:]).median(0).values.tolist()) for name, found in turns.items()]


@dataclass(frozen=True)
class _Side:
    step: Callable[[], object]
    link: Link
    inside: Callable[[], AbstractContextManager[None]] = nullcontext


def _turn(side: _Side) -> Tensor:
    """A turn's numbers, in the order of :class:`Row`, means of the ranks."""
    link = side.link
    with side.inside():
        side.step()
        dist.barrier()
        for seconds_of in (link.waited, link.travelled, link.seen):
            seconds_of.clear()
        cpu, begin = time.process_time(), time.perf_counter()
        for _ in range(_TURN - 1):
            side.step()
        seconds, busy = time.perf_counter() - begin, time.process_time() - cpu
    waits = [one[kind] for one in (link.waited, link.travelled, link.seen) for kind in ("ids", "rows")]
    found = torch.tensor([1e3 * one / (_TURN - 1) for one in (seconds, *waits)] + [busy / seconds])
    dist.all_reduce(found)
    return found / dist.get_world_size()


def _batches(workload: Workload) -> list[Batch]:
    """Uniform ids, as many in each bag."""
    size, pooling = workload.batch, workload.pooling
    generator = torch.Generator().manual_seed(dist.get_rank())
    made = []
    for _ in range(8):
        lengths = torch.full((TABLES * size,), pooling, dtype=torch.int32)
        values = torch.randint(0, ROWS, (TABLES * size * pooling,), generator=generator)
        ids = KeyedJaggedTensor([f"f{one}" for one in range(TABLES)], values, lengths=lengths, stride=size)
        labels = torch.rand(size, generator=generator).round()
        made.append(Batch(torch.randn(size, DENSE, generator=generator), ids, labels))
    return made


def _model(device: str, dim: int) -> tuple[ClickTrain, ShardingPlan]:
    """The model, and a plan that gives whole tables to the ranks in turn."""
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"t{one}", num_embeddings=ROWS, embedding_dim=dim, feature_names=[f"f{one}"])
            for one in range(TABLES)
        ],
        device=torch.device(device),
    )
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    size = dist.get_world_size()
    layouts = tuple(cuts.table_wise(f"bags.t{one}", ROWS, dim, rank=one % size) for one in range(TABLES))
    return ClickTrain(bags, dim), ShardingPlan(topology=Topology(ranks_per_host=size), tables=layouts)


def _dense(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for name, one in model.named_parameters() if "embedding_bags" not in name], lr=0.1)


def _shardrec(workload: Workload, data: Sequence[Batch], link: Link, transport: Transport, depth: int) -> _Side:
    model = shardrec.shard(*_model("cpu", workload.dim), transport=transport)
    linked(link, model.context.collectives)
    steps = TrainPipeline(model, _dense(model), cycle(data), depth=depth)
    return _Side(steps.__next__, link)


def _torchrec(workload: Workload, data: Sequence[Batch], link: Link, *, pipelined: bool) -> _Side:
    model, plan = _model("meta", workload.dim)
    cpu, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None, "ranks are in a process group"
    sharded: Any = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=cpu,
        plan=to_torchrec(plan, device="cpu", paths={one.name: "bags" for one in plan.tables}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    optimizer, batches = _dense(sharded), cycle(data)
    pipeline = TrainPipelineSparseDist(sharded, optimizer, cpu)

    def plain() -> None:
        optimizer.zero_grad(set_to_none=True)
        sharded(next(batches))[0].backward()
        optimizer.step()

    step = (lambda: pipeline.progress(batches)) if pipelined else plain
    return _Side(step, link, lambda: torch_linked(link))
