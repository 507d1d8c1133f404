"""Processor time of reading beside a scan, bytes decoded by each rank, and how well rows are mixed. See README.md."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch

from benchmarks.data.main import SHOP, write_shop
from shardrec.trainer.data import Feature, FeatureSpec, FileClickData, criteo_spec, load_spec, write_parquet
from shardrec.trainer.data.convert import convert

BATCH = 2048


def cpu(work: Callable[[], object]) -> float:
    """Processor seconds of all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def scan(path: Path, spec: FeatureSpec) -> None:
    """Decode the spec's columns, on one thread, and do nothing with them."""
    for _ in ds.dataset(path).to_batches(columns=list(spec.sources), use_threads=False):
        pass


def read(data: FileClickData) -> None:
    """All batches, of one rank."""
    for _ in data.train_batches(0, 1, BATCH):
        pass


def beside_a_scan(path: Path, spec: FeatureSpec, rounds: int) -> None:
    """Print rows a processor second, in alternation."""
    rows = pq.read_metadata(path).num_rows
    data = FileClickData([path], spec, holdout=0.0)
    times = [(cpu(lambda: scan(path, spec)), cpu(lambda: read(data))) for _ in range(rounds + 1)][1:]
    scanned, ours = (rows / median(column) for column in zip(*times, strict=True))
    ratio = median(one / other for one, other in times)
    group = pq.read_metadata(path).row_group(0).num_rows
    print(f"| {path.stem} | {group:,} | {scanned:,.0f} | {ours:,.0f} | {ratio:.2f} |", flush=True)


def bytes_decoded(path: Path, spec: FeatureSpec) -> None:
    """Print the share of all bytes that each rank decodes."""
    data = FileClickData([path], spec, holdout=0.0)
    read(data)
    total = data.decoded_bytes
    for world_size in (1, 2, 4):
        shares = []
        for rank in range(world_size):
            for _ in data.train_batches(rank, world_size, 4 * BATCH // world_size):
                pass
            shares.append(data.decoded_bytes / total)
        print(f"| {path.stem} | {world_size} | {', '.join(f'{share:.3f}' for share in shares)} |", flush=True)


def mixing(folder: Path, rows: int) -> None:
    """Print how far rows that lie together in the files are still together in an epoch."""
    import pyarrow as pa

    path = folder / "numbers.parquet"
    pq.write_table(
        pa.table({"label": np.arange(rows) % 2, "number": np.arange(rows)}), path, row_group_size=rows // 256
    )
    spec = FeatureSpec(features=(Feature(name="number", kind="id", rows=rows, ids="number"),))
    orders = {"full permutation": np.random.default_rng(0).permutation(rows)}
    for name, shuffle in (("order of the files", 0), ("--shuffle 10000", 10_000), ("--shuffle 100000", 100_000)):
        data = FileClickData([path], spec, holdout=0.0, shuffle=shuffle)
        orders[name] = np.concatenate([batch.sparse.values().numpy() for batch in data.train_batches(0, 1, BATCH)])
    for name, order in orders.items():
        position = abs(np.corrcoef(np.arange(rows), order)[0, 1])
        means = np.array([part.mean() for part in np.split(order[: rows // BATCH * BATCH], rows // BATCH)])
        spread = means.std() / (rows / np.sqrt(12 * BATCH))
        pairs = np.mean(np.abs(np.diff(order)) < 10)
        print(f"| {name} | {position:.3f} | {spread:.2f} | {pairs:.4f} |", flush=True)


def main() -> None:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shop = folder / "shop.yaml"
        shop.write_text(SHOP)
        cases = []
        for data, spec, write in (
            ("Criteo", criteo_spec(max_embeddings=20_000), write_parquet),
            ("shop", load_spec(shop), write_shop),
        ):
            write(folder / "one.parquet", given.rows)
            for groups in (64, 4):
                path = folder / f"{groups}" / f"{data}.parquet"
                path.parent.mkdir(exist_ok=True)
                convert(str(folder / "one.parquet"), spec, path, group_rows=given.rows // groups)
                cases.append((path, spec))
        print("| columns | rows of a group | bare scan, rows/s | batches, rows/s | ratio |\n|---|---:|---:|---:|---:|")
        for path, spec in cases:
            beside_a_scan(path, spec, given.rounds)
        cases = cases[::2]
        print("\n| columns | ranks | share of the bytes that each decodes |\n|---|---:|---|")
        for path, spec in cases:
            bytes_decoded(path, spec)
        print(
            "\n| order | correlation of position | spread of batch means | neighbours within 10 rows |\n"
            "|---|---:|---:|---:|"
        )
        mixing(folder, given.rows)


if __name__ == "__main__":
    main()
