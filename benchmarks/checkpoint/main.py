"""Saving and loading a sharded model: shardrec's checkpoints beside torch.distributed.checkpoint, in one run.

Both sides write the same model from the same processes, in turns, to the same disk, both wait until their files are on
it, and both keep the checkpoint before until the new one is complete. What torch.distributed.checkpoint gets is the
model's state_dict and the fused optimizers' states.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.checkpoint.manifest import read_manifest
from shardrec.checkpoint.state import model_tensors
from shardrec.launch.ranks import RankInfo
from shardrec.launch.run import on_new_ranks
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules.table import as_one_tensor

STATUS = Path("/proc/self/status")


class Model(nn.Module):
    """Bags and a layer.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{number}",
                    num_embeddings=options.rows,
                    embedding_dim=options.dim,
                    feature_names=[f"f{number}"],
                )
                for number in range(options.tables)
            ]
        )
        self.top = nn.Linear(options.tables * options.dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        value: torch.Tensor = self.top(self.bags(features).values())
        return value


def build(options: argparse.Namespace, cut: str) -> shardrec.ShardedModel:
    """The model, every table by one cut, with Adagrad fused."""
    torch.manual_seed(0)
    model, world_size = Model(options), dist.get_world_size()
    _apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.1})
    names = [f"bags.t{number}" for number in range(options.tables)]
    everyone = list(range(world_size))
    layouts = {
        "table_wise": lambda number: cuts.table_wise(
            names[number], options.rows, options.dim, rank=number % world_size
        ),
        "row_wise": lambda number: cuts.row_wise(names[number], options.rows, options.dim, ranks=everyone),
        "column_wise": lambda number: cuts.column_wise(names[number], options.rows, options.dim, ranks=everyone),
    }
    tables = tuple(layouts[cut](number) for number in range(options.tables))
    plan = ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=tables)
    return shardrec.shard(model, plan)


def train(model: shardrec.ShardedModel, options: argparse.Namespace, samples: int = 256) -> None:
    """A step, so that the states are not all alike. The ids are Zipf's, with an exponent of 1.05."""
    keys = [f"f{number}" for number in range(options.tables)]
    often = torch.arange(1, options.rows + 1).double() ** -1.05
    ids = torch.multinomial(often, len(keys) * samples, replacement=True)
    features = KeyedJaggedTensor(keys=keys, values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))
    model(features).sum().backward()


def everything(model: shardrec.ShardedModel) -> dict[str, Any]:
    """The same values for torch.distributed.checkpoint."""
    values = dict(model.state_dict())
    bags = model.module.bags
    for name, optimizer in bags.fused_optimizers().items():
        table = bags.tables()[name]
        for state in optimizer.states:
            values[f"fused.{name}.{state}"] = as_one_tensor(table.layout, bags.fused_state(name, state), table.group)
    return values


def peak() -> int:
    """Highest resident memory since :func:`reset_peak`, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Returns the memory from which a new peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def timed(work: Callable[[], Any]) -> tuple[float, float, int]:
    """Seconds between two barriers, the processor's of all ranks, and bytes above what was resident before."""
    dist.barrier()
    before, begin, cpu = reset_peak(), time.perf_counter(), time.process_time()
    work()
    spent = torch.tensor(time.process_time() - cpu)
    dist.all_reduce(spent)
    return time.perf_counter() - begin, spent.item(), peak() - before


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds, and bytes of extra memory, of each side's saves and loads in turns."""
    model = build(options, options.saved)
    other = build(options, options.loaded)
    train(model, options)
    train(other, options)
    held = sum(part.values.nbytes for one in model_tensors(model).values() for part in one.parts if part.saved)
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, held)
    found: dict[str, Any] = {"bytes": sum(sizes), "most_of_a_rank": max(sizes)}
    pending: list[Any] = []
    written: list[int] = []

    def save_changes() -> None:
        shardrec.save_checkpoint(folder / "changes", model, incremental=10**6)

    def save_theirs() -> None:
        dcp.save(everything(model), checkpoint_id=folder / "theirs new")
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "theirs", ignore_errors=True)
            (folder / "theirs new").rename(folder / "theirs")

    def load_theirs() -> None:
        # Into the model's own memory, which these tensors share.
        dcp.load(everything(other), checkpoint_id=folder / "theirs")

    def save_behind() -> None:
        pending.append(shardrec.save_checkpoint(folder / "behind", model, wait=False))

    sides = {
        "shardrec save": lambda: shardrec.save_checkpoint(folder / "ours", model),
        "shardrec save, incremental": save_changes,
        "dcp save": save_theirs,
        "shardrec save, wait=False": save_behind,
        "shardrec load": lambda: shardrec.load_checkpoint(folder / "ours", other),
        "dcp load": load_theirs,
    }
    for turn in range(options.turns + 1):
        # Each after each: the pages that one side sets free are the other's.
        for name, work in list(sides.items())[:: -1 if turn % 2 else 1]:
            if name.endswith("incremental"):
                train(model, options, options.samples)
            seconds, cpu, extra = timed(work)
            if name.endswith("incremental") and dist.get_rank() == 0:
                written.append(sum(file.size for file in read_manifest(folder / "changes").files))
            # Of the first save behind the training, its memory is new. The first of a chain writes all.
            if turn or name.endswith(("False", "incremental")):
                rank_info = found.setdefault(name if turn else f"{name}, first", {"s": [], "cpu": [], "extra": []})
                rank_info["s"].append(seconds)
                rank_info["cpu"].append(cpu)
                rank_info["extra"].append(extra)
            while pending:
                pending.pop().wait()
    return {**found, "written": written}


def on_a_rank(rank_info: RankInfo, options: argparse.Namespace) -> dict[str, Any]:
    """One rank's part."""
    warnings.filterwarnings("ignore")
    return measure(options, options.folder / "files")


def shown(found: dict[str, Any]) -> None:
    """A table."""
    print(f"{found['bytes'] / 2**20:.0f} MiB, {found['most_of_a_rank'] / 2**20:.0f} MiB of a rank at most")
    later = [f"{one / 2**20:.1f}" for one in found["written"]]
    print(f"incremental: {', '.join(later)} MiB, one save after the other")
    whole = statistics.median(found["shardrec save"]["s"])
    for name, one in found.items():
        if isinstance(one, dict):
            middle = statistics.median(one["s"])
            spread = f"({min(one['s']):.3f} to {max(one['s']):.3f})"
            rate = f"{found['bytes'] / 2**20 / middle:7.0f} MiB/s" if "False" not in name else " " * 13
            share = f"  {middle / whole:6.1%} of a save" if "False" in name else ""
            extra = f"{statistics.median(one['extra']) / 2**20:6.0f} MiB extra"
            cpu = f"CPU {statistics.median(one['cpu']):6.3f} s"
            print(f"  {name:34} {middle:7.3f} s {spread:18} {rate}  {cpu}  {extra}{share}")


def main() -> None:
    """Start the ranks and show what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4096, help="of a rank, between two incremental saves")
    parser.add_argument("--saved", default="row_wise", choices=["table_wise", "row_wise", "column_wise"])
    parser.add_argument("--loaded", default="row_wise", choices=["table_wise", "row_wise", "column_wise"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint"))
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    found = on_new_ranks(on_a_rank, options, nproc=options.ranks, threads=options.threads, debug=True)
    print(f"load after: {os.getloadavg()[0]:.1f}")
    shown(found)
    shutil.rmtree(options.folder / "files")


if __name__ == "__main__":
    main()
