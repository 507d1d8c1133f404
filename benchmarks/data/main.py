"""Rows a second of the data path beside those that a training step takes, in turns in one run. See README.md."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from pyarrow import csv

from shardrec.launch.ranks import RankInfo
from shardrec.launch.run import on_new_ranks
from shardrec.modules import shard
from shardrec.pipeline.train import TrainPipeline
from shardrec.planner import plan
from shardrec.trainer.data import ClickBatch, write_criteo_tsv, write_parquet
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.losses import batch_loss
from shardrec.trainer.run.model import build_model, dense_optimizer, fuse_optimizer
from shardrec.trainer.run.prefetch import Prefetcher
from shardrec.trainer.run.source import Source

SHOP = """
label: bought
features:
  - {name: user, kind: id, rows: 100_000}
  - {name: item, kind: id, rows: 20_000}
  - {name: brand, kind: id, rows: 1_000}
  - {name: country, kind: id, vocabulary: [DE, FR, US, BR, IN]}
  - {name: tags, kind: weighted, rows: 200, weights: scores}
  - {name: history, kind: sequence, rows: 20_000, max_length: 20}
  - {name: price, kind: dense, transform: log}
  - {name: rating, kind: dense, mean: 3.5}
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A file, read by 2 ranks.

    Args:
        data: name of the columns.
        format: of the file.
        mib: of the file.
        reading: rows a second of the data path alone, over both ranks.
        stepping: of training steps on batches in memory.
        training: of training steps on the file, read ahead on a thread as ``shardrec train`` does.
        kept: median over the rounds of the rate of training over that of steps in the same round.
        generated: the same over that of training on as many generated rows. None of other columns.
        reading_cpu: processor time of rank 0, microseconds for each of the file's rows.
        stepping_cpu: CPU seconds of the same.
    """

    data: str
    format: str
    mib: float
    reading: float
    stepping: float
    training: float
    kept: float
    generated: float | None
    reading_cpu: float
    stepping_cpu: float


def write_shop(path: Path, count: int, seed: int = 0) -> None:
    """Rows of texts, lists and numbers, as Parquet or, lists as texts, as CSV."""
    draws = np.random.default_rng(seed)
    items = draws.zipf(1.2, count) % 20_000

    def lists(most: int, make: Callable[[int], str]) -> list[list[str]]:
        return [[make(int(one)) for one in draws.integers(0, 1000, size)] for size in draws.integers(0, most, count)]

    tags = lists(5, lambda number: f"tag-{number % 200}")
    columns: dict[str, object] = {
        "bought": draws.integers(0, 2, count),
        "user": [f"user-{number:08x}" for number in draws.integers(0, 200_000, count)],
        "item": [f"item-{number}" for number in items],
        "brand": [f"brand-{number % 1200}" for number in items],
        "country": draws.choice(["DE", "FR", "US", "BR", "IN", "JP"], count),
        "tags": tags,
        "scores": [[f"{score:.3f}" for score in draws.random(len(bag))] for bag in tags],
        "history": lists(30, lambda number: f"item-{number}"),
        "price": draws.lognormal(2, 1, count).round(2),
        "rating": draws.random(count).round(2) * 5,
    }
    if path.suffix == ".parquet":
        scores = pa.array([list(map(float, bag)) for bag in columns["scores"]], pa.list_(pa.float32()))  # type: ignore[attr-defined]
        pq.write_table(pa.table({**columns, "scores": scores}), path)
        return
    texts = {name: ["|".join(bag) for bag in columns[name]] for name in ("tags", "scores", "history")}  # type: ignore[attr-defined]
    csv.write_csv(pa.table({**columns, **texts}), path)


def measured(rank_info: RankInfo, data: str, features: str | None, batch: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, and processor seconds of this rank, for all rows of the file."""
    config = TrainConfig(data=data, valid=data, features=features, batch_size=batch)  # all rows are trained on
    source = Source(config, rank_info)
    model = build_model(config, source.data.schema)
    fuse_optimizer(model, config)
    sharded = shard(model, plan(model, batch_size=batch, sample_batches=source.sampled(4)))
    optimizers = (dense_optimizer(sharded, config), sharded.fused_optimizer)

    def read(batches: Iterable[ClickBatch]) -> None:
        for _ in batches:
            pass

    def train(batches: Iterable[ClickBatch]) -> None:
        read(
            TrainPipeline(
                sharded,
                optimizers,
                batches,
                loss_fn=lambda model, batch: (batch_loss(config.learning.loss, model, batch), batch.size),
                depth=0,
                device=rank_info.device,
            )
        )

    def train_from(rows: Source) -> None:
        with Prefetcher(rows.train_batches()) as batches:
            train(batches)

    kept = list(source.train_batches())
    train(islice(kept, 10))
    works = {
        "reading": lambda: read(source.train_batches()),
        "stepping": lambda: train(kept),
        "training": lambda: train_from(source),
    }
    if features is None:
        generated = Source(TrainConfig(samples=source.train_rows, batch_size=batch), rank_info)
        works["generated"] = lambda: train_from(generated)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, work in works.items():
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            work()
            dist.barrier()
            found.setdefault(name, []).append(time.perf_counter() - start)
            found.setdefault(f"{name} cpu", []).append(time.process_time() - cpu)
    return found


def main() -> None:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=2048, help="rows of a step on each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "shop.yaml")
        spec.write_text(SHOP)
        cases = (
            ("Criteo", None, "parquet", write_parquet),
            ("Criteo", None, "tsv", write_criteo_tsv),
            ("shop", str(spec), "parquet", write_shop),
            ("shop", str(spec), "csv", write_shop),
        )
        print(
            "| data | file | MiB | read, rows/s | steps, rows/s | both, rows/s | both / steps | both / generated "
            "| read, µs | step, µs |"
        )
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for name, features, kind, write in cases:
            path = Path(folder, f"{name}.{kind}")
            write(path, given.rows)
            times = on_new_ranks(measured, str(path), features, given.batch, given.rounds, nproc=2)
            rates = {part: given.rows / median(times[part]) for part in ("reading", "stepping", "training")}
            row = Row(
                data=name,
                format=kind,
                mib=path.stat().st_size / 2**20,
                kept=median(s / t for s, t in zip(times["stepping"], times["training"], strict=True)),
                generated=median(g / t for g, t in zip(times["generated"], times["training"], strict=True))
                if features is None
                else None,
                reading_cpu=median(times["reading cpu"]) / given.rows * 1e6,
                stepping_cpu=median(times["stepping cpu"]) / given.rows * 1e6,
                **rates,
            )
            found.append(row)
            beside = "" if row.generated is None else f"{row.generated:.2f}"
            print(
                f"| {name} | {kind} | {row.mib:.0f} | {row.reading:,.0f} | {row.stepping:,.0f} | {row.training:,.0f} | "
                f"{row.kept:.2f} | {beside} | {row.reading_cpu:.1f} | {row.stepping_cpu:.1f} |",
                flush=True,
            )
            path.unlink()
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
