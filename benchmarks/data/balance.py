"""What balancing the ranks' work could win: Zipf lengths on SASRec, rows as dealt and by cost in turns. See README.md.

Each global batch is trained on twice: with neighbouring rows on each rank, as ``shardrec train`` deals them, and with
its rows assigned by predicted cost, longest first, equally many to each rank.

Legend: B rows of a global batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.exchange.safe_pickle import gather
from shardrec.launch.ranks import joined_run
from shardrec.launch.run import run_on_ranks
from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.sequence import SASRec
from shardrec.trainer.run.losses import with_own_loss

ITEMS, DIM, BLOCKS, NEGATIVES = 20_000, 64, 2, 1024
WARM_UP = 4


def costs_of(lengths_B: NDArray[np.int64], widths: list[int]) -> NDArray[np.float64]:
    """Multiply-adds per row: linear layers and loss by token, attention by pairs of padded positions."""
    padded_B = np.array(widths)[np.searchsorted(widths, lengths_B)]
    return np.asarray(lengths_B * (BLOCKS * 6 * DIM**2 + NEGATIVES * DIM) + BLOCKS * 2 * DIM * padded_B**2)


def dealt(costs_B: NDArray[np.float64], ranks: int) -> list[NDArray[np.int64]]:
    """Neighbouring rows for each rank."""
    return np.array_split(np.arange(len(costs_B)), ranks)


def balanced(costs_B: NDArray[np.float64], ranks: int) -> list[NDArray[np.int64]]:
    """Longest first, to the rank with the least work of those that still lack rows."""
    loads, rows = np.zeros(ranks), [[] for _ in range(ranks)]
    for row in np.argsort(-costs_B, kind="stable"):
        lacking = [rank for rank in range(ranks) if len(rows[rank]) < -(-len(costs_B) // ranks)]
        rank = min(lacking, key=lambda rank: loads[rank])
        rows[rank].append(row)
        loads[rank] += costs_B[row]
    return [np.sort(np.array(numbers, dtype=np.int64)) for numbers in rows]


def measure(options: Mapping[str, Any]) -> list[list[list[float]]]:
    """Of every rank, for each assignment: (steps, 2) processor seconds and largest over mean predicted cost."""
    with joined_run("cpu", 1, alone=True) as rank_info:
        tables = {"tables": ("item", "item"), "num_embeddings": (ITEMS, ITEMS)}
        schema = ClickSchema(dense_names=(), sparse_names=("history", "item"), **tables)
        model = with_own_loss(SASRec(schema, dim=DIM, max_length=options["longest"], dropout=0.1), "sasrec")
        widths = model.widths
        apply_optimizer_in_backward(torch.optim.Adagrad, model.items.parameters(), {"lr": 0.01})
        dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("items.")]
        sharded, optimizer = shardrec.shard(model), torch.optim.Adam(dense, lr=1e-3)
        draws = np.random.default_rng(1)
        chances = 1 / np.arange(1, options["longest"] + 1) ** options["exponent"]
        records: list[list[list[float]]] = [[], []]
        for step in range(options["steps"] + WARM_UP):
            lengths_B = draws.choice(options["longest"], options["rows"], p=chances / chances.sum()) + 1
            *histories, next_B = np.split(
                draws.zipf(1.2, lengths_B.sum() + options["rows"]) % (ITEMS - 1) + 1, np.cumsum(lengths_B)
            )
            costs_B = costs_of(lengths_B, widths)
            for side in (0, 1) if step % 2 else (1, 0):
                parts = (dealt, balanced)[side](costs_B, rank_info.world_size)
                mine = parts[rank_info.rank]
                ids = torch.from_numpy(np.concatenate([*(histories[row] for row in mine), next_B[mine]]))
                lengths = torch.from_numpy(np.r_[lengths_B[mine], np.ones(len(mine), np.int64)])
                sparse = KeyedJaggedTensor(["history", "item"], ids, lengths=lengths)
                dist.barrier()
                start = time.process_time()
                loss = sharded(torch.empty(len(mine), 0), sparse, torch.ones(len(mine)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seconds = time.process_time() - start
                sums = [costs_B[part].sum() for part in parts]
                if step >= WARM_UP:
                    records[side].append([seconds, float(max(sums) / np.mean(sums))])
        return gather(records)


def main() -> None:
    """Print a line of the table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=256, help="of a global batch")
    parser.add_argument("--longest", type=int, default=50, help="items of a history")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law of lengths")
    parser.add_argument("--steps", type=int, default=40)
    options = vars(parser.parse_args())
    for ranks in options["ranks"]:
        records = np.array(run_on_ranks(measure, options, nproc=ranks))  # (ranks, assignments, steps, 2)
        seconds, predicted = records[..., 0], records[0, ..., 1].mean(1)
        uneven = (seconds.max(0) / seconds.mean(0)).mean(1)
        slowest = seconds.max(0)
        ratio = median(slowest[1] / slowest[0])
        print(
            f"| {ranks} | {options['rows']} | {options['longest']} | {options['exponent']} | {predicted[0]:.2f}, "
            f"{predicted[1]:.2f} | {uneven[0]:.2f}, {uneven[1]:.2f} | {1e3 * mean(slowest[0]):.0f} | {ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
