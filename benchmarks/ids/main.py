"""Dynamic ids beside the hashing trick, on a stream whose ids drift and on Criteo's raw sample; and what mapping costs.

Both tables have equally many rows. A batch is predicted before it is trained on, so that the area under the curve is
that of ids as they come. The first batches, in which nothing is known, do not count.
"""

from __future__ import annotations

import argparse
import lzma
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.exchange.hashing import home_rows, mixed
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel
from shardrec.trainer.data.metrics import area_under_roc

DIM = 8
VARIANTS = {
    "lfu": shardrec.DynamicIds(evict="lfu"),
    "lru": shardrec.DynamicIds(evict="lru"),
    "score": shardrec.DynamicIds(evict="score"),
    "score, 2nd use": shardrec.DynamicIds(evict="score", admit_after=2),
}


class Clicks(nn.Module):
    """A logit per sample: one weight vector on the rows of its ids.

    Args:
        rows: of the table.
        features: ids of a sample.
    """

    def __init__(self, rows: int, features: int) -> None:
        super().__init__()
        keys = [f"f{number}" for number in range(features)]
        config = EmbeddingBagConfig(name="ids", num_embeddings=rows, embedding_dim=DIM, feature_names=keys)
        config.init_fn = lambda values: nn.init.normal_(values, std=0.01)
        self.bags = EmbeddingBagCollection(tables=[config])
        self.top = nn.Linear(features * DIM, 1)
        _apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, self.bags.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B,)."""
        logits: Tensor = self.top(self.bags(features).values()).squeeze(1)
        return logits


def sharded(rows: int, features: int, options: shardrec.DynamicIds | None) -> ShardedModel:
    """On one rank."""
    torch.manual_seed(0)
    plan = ShardingPlan(topology=Topology(), tables=(cuts.table_wise("bags.ids", rows, DIM, rank=0),))
    return shardrec.shard(Clicks(rows, features), plan, dynamic_ids=None if options is None else {"ids": options})


def drifting(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids (B, 1) and clicks (B,): items by a Zipf law, of which a share is replaced each day. Each has a taste."""
    rng = torch.Generator().manual_seed(1)
    weights = torch.arange(1, options.items + 1, dtype=torch.float64).pow(-1.05)
    items = torch.arange(options.items)
    newest = options.items
    for day in range(options.days):
        if day:
            gone = torch.randperm(options.items, generator=rng)[: int(options.items * options.drift)]
            items[gone] = torch.arange(newest, newest + len(gone))
            newest += len(gone)
        for _ in range(options.batches):
            ids = mixed(items[torch.multinomial(weights, options.batch, replacement=True, generator=rng)])
            taste = (home_rows(mixed(ids), torch.tensor(2**20)) / 2**20 - 0.5) * 5
            yield ids.unsqueeze(1), (torch.rand(options.batch, generator=rng) < (taste - 1).sigmoid()).float()


def criteo(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids (B, 26) and clicks (B,) of the raw sample, hexadecimal, each column's ids its own."""
    folder = Path(os.environ.get("SHARDREC_DATA", "../shared/data")) / "criteo_raw_sample"
    with lzma.open(folder / "kaggle_head.tsv.xz", "rt") as file:
        lines = [line.rstrip("\n").split("\t") for line in file]
    numbers = [[int(one or "0", 16) + (column << 32) for column, one in enumerate(line[14:40])] for line in lines]
    ids, clicks = torch.tensor(numbers), torch.tensor([float(line[0]) for line in lines])
    yield from zip(mixed(ids).split(64), clicks.split(64), strict=True)


def auc(stream: Iterator[tuple[Tensor, Tensor]], rows: int, options: shardrec.DynamicIds | None, skip: int) -> float:
    """Of the batches after the first ``skip``, each predicted before it is learned."""
    model: ShardedModel | None = None
    labels, scores = [], []
    for number, (ids, clicks) in enumerate(stream):
        features = ids.size(1)
        if model is None:
            model = sharded(rows, features, options)
            dense = torch.optim.Adagrad(model.top.parameters(), lr=0.05)
        values = home_rows(ids, torch.tensor(rows)) if options is None else ids
        batch = KeyedJaggedTensor(
            keys=[f"f{feature}" for feature in range(features)],
            values=values.t().reshape(-1),
            lengths=torch.ones(ids.numel(), dtype=torch.int32),
        )
        logits = model(batch)
        if number >= skip:
            labels.append(clicks)
            scores.append(logits.detach())
        nn.functional.binary_cross_entropy_with_logits(logits, clicks).backward()
        dense.step()
        dense.zero_grad()
    return area_under_roc(torch.cat(labels).numpy(), torch.cat(scores).numpy())


def compare(options: argparse.Namespace) -> None:
    """Print a table of areas under the curve."""
    print("| rows | hashing trick | " + " | ".join(VARIANTS) + " |")
    print("|" + "---|" * (2 + len(VARIANTS)))
    for rows in options.rows:
        found = []
        for variant in (None, *VARIANTS.values()):
            stream = criteo(options) if options.what == "criteo" else drifting(options)
            skip = 4 if options.what == "criteo" else 3 * options.batches
            found.append(auc(stream, rows, variant, skip))
        print(f"| {rows:,} | " + " | ".join(f"{one:.4f}" for one in found) + " |", flush=True)


def measure(options: argparse.Namespace) -> None:
    """Print what a table's lookup and step take with plain rows and with ids, in turns: Zipf ids, a map at 90% load."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    known = mixed(torch.arange(int(options.rows[0] * 0.9)))
    order = torch.randperm(len(known), generator=rng)
    weights = torch.arange(1, len(known) + 1, dtype=torch.float64).pow(-1.05)
    collections = {}
    for name in ("plain", "ids"):
        config = EmbeddingBagConfig(
            name="ids", num_embeddings=options.rows[0], embedding_dim=options.dim, feature_names=["f0"]
        )
        module = nn.Module()
        module.bags = EmbeddingBagCollection(tables=[config])
        _apply_optimizer_in_backward(torch.optim.SGD, module.bags.parameters(), {"lr": 0.1})
        plan = ShardingPlan(topology=Topology(), tables=(cuts.table_wise("bags.ids", *_shape(config), rank=0),))
        dynamic = {"ids": shardrec.DynamicIds()} if name == "ids" else None
        (collections[name],) = shardrec.shard(module, plan, dynamic_ids=dynamic)._sharded
    maps = collections["ids"].id_maps
    maps.step = 1
    (of_ids,) = maps.maps.values()
    of_ids.look_up(known, torch.empty(len(known), dtype=torch.int32), step=1, assign_new_ids=True)
    count = options.batch * options.pooling
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(options.turns):
        chosen = order[torch.multinomial(weights, count, replacement=True, generator=rng)]
        for name in ("plain", "ids") if turn % 2 else ("ids", "plain"):
            lengths = torch.full((options.batch,), options.pooling, dtype=torch.int32)
            batch = KeyedJaggedTensor(keys=["f0"], values=chosen if name == "plain" else known[chosen], lengths=lengths)
            start = time.process_time()
            values = collections[name](batch).values()
            looked_up = time.process_time()
            values.backward(torch.ones_like(values))
            times.setdefault((name, "forward"), []).append(looked_up - start)
            times.setdefault((name, "forward and backward"), []).append(time.process_time() - start)
    print(f"{count:,} ids, {options.rows[0]:,} rows of {options.dim}, CPU time, medians of {options.turns} turns:")
    for what in ("forward", "forward and backward"):
        plain, mapped = times["plain", what], times["ids", what]
        ratio = statistics.median(one / other for one, other in zip(mapped, plain, strict=True))
        both = [f"{statistics.median(one) * 1e3:.2f} ms" for one in (plain, mapped)]
        print(f"{what}: plain {both[0]}, with ids {both[1]}, ratio {ratio:.2f}")


def _shape(config: EmbeddingBagConfig) -> tuple[int, int]:
    return config.num_embeddings, config.embedding_dim


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["drift", "criteo", "time"], nargs="?", default="drift")
    parser.add_argument("--rows", type=int, nargs="+", help="of the table (default: 2,000 and 8,000; time: 1,000,000)")
    parser.add_argument("--items", type=int, default=20_000, help="ids that are current")
    parser.add_argument("--drift", type=float, default=0.2, help="share of them replaced each day")
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--batches", type=int, default=20, help="of a day")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--pooling", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--turns", type=int, default=31)
    options = parser.parse_args()
    options.rows = options.rows or ([1_000_000] if options.what == "time" else [2000, 8000])
    measure(options) if options.what == "time" else compare(options)


if __name__ == "__main__":
    main()
