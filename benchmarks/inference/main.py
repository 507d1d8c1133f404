"""Latency and throughput of one rank's inference: eager, scripted, compiled by AOTInductor, and TorchRec's modules.

All variants are the same DLRM with the same weights, in one process, called in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchrec
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.serve import load_package, package, quantize

TABLES, DIM, DENSE = 26, 32, 13
PEER = "torchrec int8"


def unsharded(rows: int) -> DLRM:
    """The model, its first half of the tables with one optimizer and the rest with another: two lookup groups."""
    torch.manual_seed(0)
    bags = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(name=f"t{n}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{n}"])
            for n in range(TABLES)
        ]
    )
    for number, table in enumerate(bags.embedding_bags.values()):
        cls = torch.optim.SGD if number < TABLES // 2 else torch.optim.Adagrad
        torchrec.optim.apply_optimizer_in_backward(cls, table.parameters(), {"lr": 0.1})
    return DLRM(
        embedding_bag_collection=bags,
        dense_in_features=DENSE,
        dense_arch_layer_sizes=[64, DIM],
        over_arch_layer_sizes=[64, 1],
    ).eval()


def batches(rows: int, size: int, count: int) -> list[tuple[Tensor, KeyedJaggedTensor]]:
    """Batches of one id per table, uniform over its rows."""
    draw = torch.Generator().manual_seed(size)
    keys = [f"f{number}" for number in range(TABLES)]
    found = []
    for _ in range(count):
        ids = torch.randint(rows, (TABLES * size,), generator=draw)
        features = KeyedJaggedTensor(keys=keys, values=ids, lengths=torch.ones(TABLES * size, dtype=torch.int32))
        found.append((torch.randn(size, DENSE, generator=draw), features))
    return found


def compiled(model: shardrec.ShardedModel, folder: Path) -> Callable[..., Tensor]:
    """The model as a package, called as the others are."""
    path = package(model, folder / "model.pt2", batches(2, 2, 1)[0])
    run = load_package(path)

    def forward(dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        found: Tensor = run(features.values(), features.lengths(), dense)
        return found

    return forward


def variants(rows: int, folder: Path) -> dict[str, Callable[..., Tensor]]:
    """What is compared, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = quantize_inference_model(copy.deepcopy(unsharded(rows)))
        sharded = shardrec.shard(unsharded(rows)).eval()
        int8 = quantize(sharded, "int8")
        return {
            "eager": sharded,
            "scripted": shardrec.script(sharded),
            "AOTInductor": compiled(sharded, folder),
            "int8": int8,
            "int8, scripted": shardrec.script(int8),
            "int8, AOTInductor": compiled(int8, folder),
            PEER: peer,
        }


def check(models: dict[str, Callable[..., Tensor]], batch: tuple[Tensor, KeyedJaggedTensor]) -> None:
    """All variants must compute the same, quantized ones nearly."""
    expected = models["eager"](*batch)
    for name, model in models.items():
        difference = float((model(*batch) - expected).abs().max())
        limit = 1e-5 if "int8" not in name else 1e-2
        assert difference <= limit, f"{name} differs by {difference}"


def measure(models: dict[str, Callable[..., Tensor]], inputs: list[Any], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each call, the variants taking turns call by call."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        for batch in inputs[:3]:
            model(*batch)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for batch in inputs:
            for name, model in models.items():
                start = time.perf_counter()
                model(*batch)
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def quantile(times: list[float], q: float) -> float:
    """By rank, so that no time is made up."""
    return sorted(times)[min(len(times) - 1, int(q * len(times)))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each batch size")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        models = variants(options.rows, Path(folder))
    table = Table(
        title=f"{TABLES} tables of {options.rows:,} × {DIM}, {options.threads} thread(s), torch {torch.__version__}"
    )
    for heading in ("batch", "variant", "p50 ms", "p99 ms", "samples/s", f"{PEER} / this, p50"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    results = []
    with torch.no_grad():
        for size in options.batches:
            inputs = batches(options.rows, size, 16)
            check(models, inputs[0])
            times = measure(models, inputs, options.seconds)
            peer = quantile(times[PEER], 0.5)
            for name, each in times.items():
                p50, p99 = quantile(each, 0.5), quantile(each, 0.99)
                results.append({"batch": size, "variant": name, "p50_ms": p50, "p99_ms": p99, "calls": len(each)})
                table.add_row(
                    str(size), name, f"{p50:.3f}", f"{p99:.3f}", f"{1000 * size / p50:,.0f}", f"{peer / p50:.2f}"
                )
    if options.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "results": results}))
    else:
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
