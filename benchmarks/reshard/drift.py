"""A plan that follows the data: ``model.replan`` on tables whose bags grow longer, beside the plan of the beginning.

Two models with equal tables train on the same batches, in turns, in one process per rank. At first bags of all tables
are equally long. Then those of the tables that the first plan has on one rank are hot, then those on the next. One
model is replanned as each phase begins.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.launch.ranks import RankInfo
from shardrec.launch.run import on_new_ranks

SAMPLED = 4
"""Batches that the planner sees, which the models train on, too."""


class Model(nn.Module):
    """Bags and a layer.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{number}", num_embeddings=options.rows, embedding_dim=options.dim, feature_names=[f"f{number}"]
            )
            for number in range(options.tables)
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.top = nn.Linear(options.tables * options.dim, 1)
        apply_optimizer_in_backward(RowWiseAdagrad, self.bags.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        value: torch.Tensor = self.top(self.bags(features).values())
        return value


def batches_of(options: argparse.Namespace, hot: set[int], seed: int) -> list[KeyedJaggedTensor]:
    """Batches of this rank: Poisson lengths about a mean, which is longer for tables that are hot. Even ids."""
    draws = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    means = [options.hot if number in hot else options.pooling for number in range(options.tables)]
    batches = []
    for _ in range(SAMPLED):
        rates = torch.tensor(means, dtype=torch.float32).repeat_interleave(options.batch_size)
        lengths = torch.poisson(rates, generator=draws).int()
        ids = torch.randint(options.rows, (int(lengths.sum()),), generator=draws)
        keys = [f"f{number}" for number in range(options.tables)]
        batches.append(KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths))
    return batches


def timed(model: shardrec.ShardedModel, batches: list[KeyedJaggedTensor]) -> tuple[float, float]:
    """Milliseconds of a step, and of the processor on the rank that takes most."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        model(batch).sum().backward()
    spent = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    wall, slowest = (1e3 * spent / len(batches)).tolist()
    return wall, slowest


def on_a_rank(rank_info: RankInfo, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank's part: figures of each phase."""
    warnings.filterwarnings("ignore")
    models = []
    batches = batches_of(options, set(), 0)
    plan = shardrec.plan(Model(options), batch_size=options.batch_size, sample_batches=batches_of(options, set(), 0))
    plan = shardrec.ShardingPlan.from_json(dist_first(plan.to_json()))
    for _ in range(2):
        torch.manual_seed(0)
        models.append(shardrec.shard(Model(options), plan))
    fixed, follows = models
    phases = []
    for phase in range(dist.get_world_size() + 1):
        hot = {number for number in range(options.tables) if holds(plan, number, phase - 1)}
        batches = batches_of(options, hot, phase)
        timed(fixed, batches)
        timed(follows, batches)
        begin = time.perf_counter()
        change = follows.replan(batches, steps=options.steps)
        spent = time.perf_counter() - begin
        turns: list[list[tuple[float, float]]] = [[], []]
        for turn in range(options.turns + 1):
            for model, figures in zip((fixed, follows), turns, strict=True):
                figure = timed(model, batches)
                if turn:  # the first has memory that is new
                    figures.append(figure)
        phases.append({"hot": len(hot), "change": change and change[2:], "spent": spent, "turns": turns})
    return phases


def dist_first(value: Any) -> Any:
    """The first rank's value."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def holds(plan: shardrec.ShardingPlan, number: int, rank: int) -> bool:
    """Whether a rank holds all of a table."""
    return {shard.rank for shard in plan.by_name[f"bags.t{number}"].shards} == {rank}


def shown(phases: list[dict[str, Any]]) -> None:
    """A table."""
    print(
        "| hot tables | fixed, ms | follows, ms | recovered | of the slowest rank's processor | predicted | MiB moved "
        "| replan, s | of it the move, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for phase in phases:
        fixed, follows = phase["turns"]
        wall, cpu = (
            1 - statistics.median(theirs[place] / ours[place] for ours, theirs in zip(fixed, follows, strict=True))
            for place in range(2)
        )
        ms = [statistics.median(wall for wall, _ in figures) for figures in (fixed, follows)]
        old_ms, new_ms, moved, pause_ms = phase["change"] or (1.0, 1.0, 0.0, 0.0)
        print(
            f"| {phase['hot']} | {ms[0]:.1f} | {ms[1]:.1f} | {wall:.0%} | {cpu:.0%} | {1 - new_ms / old_ms:.0%} | "
            f"{moved / 2**20:.0f} | {phase['spent']:.2f} | {pause_ms / 1e3:.2f} |"
        )


def main() -> None:
    """See the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tables", type=int, default=16)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--pooling", type=float, default=4.0, help="mean ids of a bag")
    parser.add_argument("--hot", type=float, default=24.0, help="the same of a hot table")
    parser.add_argument("--steps", type=float, default=10_000, help="in which a move has to pay for itself")
    parser.add_argument("--turns", type=int, default=12, help="of four steps each, in a phase")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    shown(on_new_ranks(on_a_rank, options, nproc=options.ranks, threads=1, debug=True))


if __name__ == "__main__":
    main()
