"""Another plan while training goes on: ``model.reshard`` beside a save, a model that is sharded anew, and a load.

Both sides go from the same plan to the same other one and back, in turns, in one process per rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.launch.ranks import RankInfo
from shardrec.launch.run import on_new_ranks
from shardrec.layout import ShardingPlan, Topology, cuts

STATUS = Path("/proc/self/status")
CHANGES = ("one table to another rank", "all tables to another rank", "row-wise to column-wise")


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
        # Values are drawn where the tables are, as those of a large model.
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.top = nn.Linear(options.tables * options.dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        value: torch.Tensor = self.top(self.bags(features).values())
        return value


def plan_of(options: argparse.Namespace, change: str, side: int) -> ShardingPlan:
    """The old plan of a change (side 0), or the new one."""
    size = dist.get_world_size()
    tables = []
    for number in range(options.tables):
        place = f"bags.t{number}", options.rows, options.dim
        if change == "row-wise to column-wise":
            cut = cuts.column_wise if side else cuts.row_wise
            tables.append(cut(*place, ranks=list(range(size))))
        else:
            moves = side and (not number or change.startswith("all"))
            tables.append(cuts.table_wise(*place, rank=(number + moves) % size))
    return ShardingPlan(topology=Topology(ranks_per_host=size), tables=tuple(tables))


def build(options: argparse.Namespace, plan: ShardingPlan) -> shardrec.ShardedModel:
    """The model, with Adagrad fused."""
    torch.manual_seed(0)
    model = Model(options)
    _apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.1})
    return shardrec.shard(model, plan)


def train(model: shardrec.ShardedModel, options: argparse.Namespace, samples: int = 512) -> None:
    """A step."""
    keys = [f"f{number}" for number in range(options.tables)]
    ids = torch.randint(options.rows, (len(keys) * samples,))
    features = KeyedJaggedTensor(keys=keys, values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))
    model(features).sum().backward()


def resident(line: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the highest since it was reset."""
    text = next(text for text in STATUS.read_text().splitlines() if text.startswith(line))
    return int(text.split()[1]) * 1024


def timed(work: Any) -> tuple[float, float, int]:
    """Seconds until the last rank is done, the processor's of all ranks, and bytes above what was resident before."""
    gc.collect()  # the other side's models have gone
    Path("/proc/self/clear_refs").write_text("5")
    dist.barrier()
    before, begin, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    work()
    spent = torch.tensor(time.process_time() - cpu)
    dist.all_reduce(spent)
    return time.perf_counter() - begin, spent.item(), resident("VmHWM") - before


def on_a_rank(rank_info: RankInfo, options: argparse.Namespace) -> dict[str, Any]:
    """One rank's part: seconds, processor seconds and extra bytes of each side's changes, by change."""
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    for change in CHANGES:
        plans = [plan_of(options, change, side) for side in range(2)]
        model = build(options, plans[0])
        train(model, options)
        moved = 8 * sum(one.moved_numel for one in plans[0].diff(plans[1]))  # a weight and a state, 4 bytes each
        sides: dict[str, list[tuple[float, float, int]]] = {"step": [], "reshard": [], "save, shard, load": []}
        for turn in range(options.turns + 1):
            plan = plans[1 - turn % 2]

            def save_and_load(plan: ShardingPlan = plan, model: Any = model) -> None:
                shardrec.save_checkpoint(options.folder / "checkpoint", model)
                other = build(options, plan)
                shardrec.load_checkpoint(options.folder / "checkpoint", other)

            works = {
                "save, shard, load": save_and_load,
                "reshard": lambda plan=plan, model=model: model.reshard(plan),
                "step": lambda model=model: train(model, options),
            }
            for name, work in works.items():
                figures = timed(work)
                if turn:  # the first has memory that is new
                    sides[name].append(figures)
        found[change] = {"moved": moved, **sides}
        del model
    return found


def shown(found: dict[str, Any], options: argparse.Namespace) -> None:
    """A table."""
    size = options.tables * options.rows * options.dim * 8 / 2**20
    print(f"{size:.0f} MiB with the states, {options.ranks} ranks")
    print(
        "| change | MiB moved | reshard, s | MiB/s | in steps | save, shard, load, s | times | CPU, times | extra MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for change, sides in found.items():
        (ours, our_cpu, extra), (theirs, their_cpu, _), (step, _, _) = (
            tuple(statistics.median(one[place] for one in sides[name]) for place in range(3))
            for name in ("reshard", "save, shard, load", "step")
        )
        moved = sides["moved"] / 2**20
        print(
            f"| {change} | {moved:.0f} | {ours:.3f} | {moved / ours:.0f} | {ours / step:.1f} | {theirs:.2f} | "
            f"{theirs / ours:.1f} | {their_cpu / our_cpu:.1f} | {extra / 2**20:.0f} |"
        )


def main() -> None:
    """See the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6, help="changes of plan that are measured, there and back")
    parser.add_argument("--folder", type=Path, default=Path("runs/reshard"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    shown(on_new_ranks(on_a_rank, options, nproc=options.ranks, threads=1, debug=True), options)
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
