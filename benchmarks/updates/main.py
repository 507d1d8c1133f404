"""Tables updated by the step beside tables updated in backward.

``torchrun --nproc-per-node 2 -m benchmarks.updates.main``

Both models live in the same processes and take turns, A B B A, on the same batches. What is compared, of each workload,
layout and batch size:

- ``step / backward``: one backward and one update.
- ``accumulate 4``: four backward calls and one update, against four of each, per sample.
- ``clip``: one backward and one update with ``clip_grad_norm_`` in between, against the same without, both by the step.
- ``clip alone``: the time inside ``clip_grad_norm_``, as a part of a step in backward. The gradients of equal rows are
  added up there, which the update then need not do.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles

import torch
import torch.distributed as dist
import torchrec
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from benchmarks.harness.batches import BatchMaker
from benchmarks.harness.layouts import cut_plan
from benchmarks.harness.workload import WorkloadTable, parse_tables
from shardrec.layout import Topology
from shardrec.modules import ShardedModel

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
ACCUMULATED = 4


class Side:
    """A model and how it is trained.

    Args:
        tables: of the workload.
        layout: how they are cut.
        optimizer: of the tables.
        update: when they are updated.
    """

    def __init__(self, tables: Sequence[WorkloadTable], layout: str, optimizer: str, update: str) -> None:
        torch.manual_seed(0)
        configs = [
            EmbeddingBagConfig(
                name=table.name, num_embeddings=table.rows, embedding_dim=table.dim, feature_names=[table.feature]
            )
            for table in tables
        ]
        model = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        _apply_optimizer_in_backward(OPTIMIZERS[optimizer], model.parameters(), {"lr": 0.01})
        plan = cut_plan(tables, layout, Topology(ranks_per_host=dist.get_world_size()))
        self.model: ShardedModel = shardrec.shard(model, plan, update=update)  # type: ignore[arg-type]
        self.optimizer = self.model.fused_optimizer
        self.clip_s: list[float] = []

    def step(self, batches: Sequence[KeyedJaggedTensor], *, clip: bool = False) -> None:
        """A backward for each batch, and an update."""
        self.optimizer.zero_grad()
        for batch in batches:
            self.model(batch).values().sum().backward()
        if clip:
            began = time.perf_counter()
            shardrec.clip_grad_norm_(self.model, 1.0)
            self.clip_s.append(time.perf_counter() - began)
        self.optimizer.step()


def compare(sides: Sequence[Callable[[], None]], turns: int, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of a call of the first side, and ratios of the second's, one for each pair of turns."""

    def timed(side: Callable[[], None], calls: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            side()
        mean = torch.tensor([(time.perf_counter() - began) / calls])
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    for side in sides:
        timed(side, 3)
    calls = max(2, int(seconds / timed(sides[0], 3)))
    times, ratios = [], []
    for turn in range(turns):
        pair = [0.0, 0.0]
        for number in (0, 1) if turn % 2 else (1, 0):
            pair[number] = timed(sides[number], calls)
        times.append(pair[0])
        ratios.append(pair[1] / pair[0])
    return times, ratios


def shown(ratios: Sequence[float]) -> str:
    """Median and quartiles."""
    low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"


def row(tables: Sequence[WorkloadTable], sides: Sequence[Side], size: int, options: argparse.Namespace) -> str:
    """The figures of a workload, for batches of ``size`` samples a rank, as cells of the table."""
    maker = BatchMaker(tables, batch_size=size, ids="zipf", seed=0)
    batches = [maker.draw(dist.get_rank(), number) for number in range(ACCUMULATED)]
    in_backward, at_step = sides

    def one_by_one(side: Side, *, clip: bool = False) -> None:
        for batch in batches:
            side.step([batch], clip=clip)

    times, ratios = compare([partial(one_by_one, side) for side in sides], options.turns, options.seconds)
    _, accumulated = compare(
        [partial(one_by_one, in_backward), partial(at_step.step, batches)], options.turns, options.seconds
    )
    at_step.clip_s.clear()
    clipping = [partial(one_by_one, at_step, clip=clip) for clip in (False, True)]
    _, clipped = compare(clipping, options.turns, options.seconds)
    step_s = median(times) / ACCUMULATED
    alone = f"{median(at_step.clip_s) / step_s:.1%}"
    return " | ".join([f"{step_s * 1e3:.1f}", shown(ratios), shown(accumulated), shown(clipped), alone])


def main() -> None:
    """Measure, and print a table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", default=["criteo", "multi_hot"])
    parser.add_argument("--layout", nargs="+", default=["table_wise", "row_wise"])
    parser.add_argument("--optimizer", nargs="+", default=["rowwise_adagrad"], choices=list(OPTIMIZERS))
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 4096], help="samples of a rank")
    parser.add_argument("--rows", type=int, default=100_000, help="most rows of a table")
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a turn")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    def show(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    columns = ["workload", "layout", "optimizer", "batch", "backward, ms", "step / backward", "accumulate 4", "clip"]
    show(f"| {' | '.join(columns)} | clip alone |")
    show("|---|---|---|---:|---:|---|---|---|---:|")
    for workload in options.workload:
        tables = parse_tables([workload], max_rows=options.rows)
        for layout in options.layout:
            for optimizer in options.optimizer:
                sides = [Side(tables, layout, optimizer, update) for update in ("backward", "step")]
                for size in options.batch:
                    show(f"| {workload} | {layout} | {optimizer} | {size:,} | {row(tables, sides, size, options)} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
