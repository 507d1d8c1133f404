"""Publishing a model while it trains, and following it while it answers: rates, what a step waits for, latencies.

One process and one rank, so that the CPU seconds of each side are its own: first a trainer makes steps and publishes
each few of them, then a served model answers requests while the versions appear one after the other, and so does the
C++ program of examples/cpp_serving. Requests with and without versions alternate in one run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from examples.cpp_serving.build import build as build_program
from examples.cpp_serving.build import missing_tool, start
from shardrec.checkpoint.manifest import read_manifest
from shardrec.serve import Follower, ServedModel, quantize, save
from shardrec.serve.published import version_name, versions_in

CPP_BUILD = Path(__file__).parents[2] / "examples" / "cpp_serving" / "build"


class Model(nn.Module):
    """Bags and three layers.

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
        columns = options.tables * options.dim
        self.top = nn.Sequential(nn.Linear(columns, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        value: torch.Tensor = self.top(self.bags(features).values())
        return value


def batch(options: argparse.Namespace, samples: int, generator: torch.Generator) -> KeyedJaggedTensor:
    """One id per feature and sample, by about Zipf's law with exponent 1.05."""
    uniform = torch.rand(options.tables * samples, generator=generator)
    ids = (options.rows ** uniform.pow(1.05)).long().clamp(max=options.rows) - 1
    ids = (ids * 7919) % options.rows
    return KeyedJaggedTensor(
        keys=[f"f{number}" for number in range(options.tables)],
        values=ids,
        lengths=torch.ones(options.tables * samples, dtype=torch.int32),
    )


def build(options: argparse.Namespace) -> shardrec.ShardedModel:
    """The model on one rank, with rowwise Adagrad fused."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    torch.manual_seed(0)
    model = Model(options)
    _apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.05})
    return shardrec.shard(model)


def publish(options: argparse.Namespace, weights: str, folder: Path) -> None:
    """Train and publish, and print the rates."""
    model, generator = build(options), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.01)
    publisher = shardrec.Publisher(model, folder, weights, keep_bases=100)
    step_ms: list[float] = []

    def step() -> None:
        features = batch(options, options.batch, generator)
        begin = time.perf_counter()
        optimizer.zero_grad()
        (model(features) - 0.1).square().mean().backward()
        optimizer.step()
        step_ms.append(1000 * (time.perf_counter() - begin))

    step()
    begin = time.perf_counter()
    publisher.publish()
    base_s = time.perf_counter() - begin
    stalls, wholes, cpus = [], [], []
    for _ in range(options.versions):
        for _ in range(options.steps):
            step()
        begin, cpu = time.perf_counter(), time.process_time()
        pending = publisher.publish(wait=False)
        stalls.append(time.perf_counter() - begin)
        pending.wait()
        wholes.append(time.perf_counter() - begin)
        cpus.append(time.process_time() - cpu)
    (base, _), *deltas = (written(folder, version) for version in range(1, options.versions + 2))
    size, rows = (statistics.median(numbers) for numbers in zip(*deltas, strict=True))
    all_rows, stall, whole = options.tables * options.rows, statistics.median(stalls), statistics.median(wholes)
    print(
        f"| {weights} | {all_rows / base_s / 1e6:.1f} M rows/s, {base / base_s / 2**20:.0f} MiB/s "
        f"| {rows:,.0f} rows ({rows / all_rows:.1%}), {size / 2**20:.1f} MiB "
        f"| {1000 * stall:.0f} ms (step: {statistics.median(step_ms):.0f} ms) "
        f"| {1000 * whole:.0f} ms, {statistics.median(cpus):.2f} CPU s "
        f"| {rows / whole / 1e6:.2f} M rows/s, {size / whole / 2**20:.0f} MiB/s |",
        flush=True,
    )


def written(folder: Path, version: int) -> tuple[int, int]:
    """Bytes and rows that a version has written."""
    manifest = read_manifest(folder, version_name(version))
    own = {number for number, file in enumerate(manifest.all_files) if f".{version:012}." in file.name}
    size = sum(manifest.all_files[number].size for number in own)
    parts = [part for name, tensor in manifest.tensors.items() if ".bags." in name for part in tensor.parts]
    return size, sum(rows.length for part in parts for rows in part.changes if rows.file in own)


def follow(options: argparse.Namespace, weights: str, source: Path, folder: Path) -> None:
    """Follow what was published while requests are answered, and print rates and latencies."""
    served = quantize(build(options), weights)
    versions = hidden(source, folder)
    follower = Follower(served, served.formats, folder, interval=0.02)

    def show(version: int) -> None:
        reveal(source, folder, version)

    show(versions[0])
    begin = time.perf_counter()
    follower.poll()
    base_s = time.perf_counter() - begin
    served.follower = follower
    half = len(versions) // 2
    applied_s = []
    for version in versions[1:half]:
        show(version)
        begin = time.perf_counter()
        follower.poll()
        applied_s.append(time.perf_counter() - begin)
    assert (follower.version, follower.faults) == (versions[half - 1], 0)
    follower.start()
    quiet: list[float] = []
    busy: list[float] = []
    for version in versions[half:]:  # in turns, each as long
        requests(options, served, quiet)
        timer = threading.Timer(0.01, show, (version,))
        timer.start()
        requests(options, served, busy)
        timer.join()
        assert (follower.version, follower.faults) == (version, 0), "the window is too short for a delta"
    follower.close()
    size, rows = (
        statistics.median(numbers)
        for numbers in zip(*(written(source, version) for version in versions[1:half]), strict=True)
    )
    apply_s, all_rows = statistics.median(applied_s), options.tables * options.rows
    ((p50, p99, worst), (busy_p50, busy_p99, busy_worst)) = (
        (statistics.median(times), statistics.quantiles(times, n=100)[98], max(times)) for times in (quiet, busy)
    )
    print(
        f"| {weights} | {all_rows / base_s / 1e6:.1f} M rows/s "
        f"| {1000 * apply_s:.0f} ms, {rows / apply_s / 1e6:.2f} M rows/s, {size / apply_s / 2**20:.0f} MiB/s "
        f"| {p50:.2f} / {p99:.2f} / {worst:.1f} ms | {busy_p50:.2f} / {busy_p99:.2f} / {busy_worst:.1f} ms "
        f"| {busy_p99 / p99:.2f} ({len(busy):,} requests) |",
        flush=True,
    )


def hidden(source: Path, folder: Path) -> list[int]:
    """Make a folder with the data of what was published, but none of the versions, which are returned."""
    folder.mkdir()
    for data in source.glob("data-*"):
        (folder / data.name).symlink_to(data)
    return versions_in([path.name for path in source.iterdir()])


def reveal(source: Path, folder: Path, version: int) -> None:
    """Show a version in such a folder."""
    shutil.copy(source / version_name(version), folder / "partial")
    (folder / "partial").rename(folder / version_name(version))


def follow_in_cpp(options: argparse.Namespace, weights: str, source: Path, folder: Path) -> None:
    """The same requests to the C++ program, and the medians of its windows."""
    versions = hidden(source, folder)
    half = len(versions) // 2
    reveal(source, folder, versions[half - 1])
    file = save(
        quantize(build(options), weights), folder / "model.pt", features=[f"f{n}" for n in range(options.tables)]
    )
    generator, lines = torch.Generator().manual_seed(2), []
    for _ in range(50):
        features = batch(options, options.samples, generator)
        lines.append(json.dumps({"values": features.values().tolist(), "lengths": features.lengths().tolist()}) + "\n")
    load = ("--clients", "1", "--seconds", str(options.window), "--windows", str(2 * (len(versions) - half)))
    program = start(build_program(CPP_BUILD), file, "--follow", str(folder), "--interval", "0.02", *load)
    assert program.stdin is not None and program.stdout is not None
    program.stdin.writelines(lines)
    program.stdin.close()
    quiet, busy = [], []
    for version in versions[half:]:
        quiet.append(json.loads(program.stdout.readline()))
        reveal(source, folder, version)
        busy.append(json.loads(program.stdout.readline()))
        last = busy[-1]["last"]
        assert (last["version"], last["faults"]) == (version, 0), "the window is too short for a delta"
    assert program.wait() == 0
    texts, p99 = [], []
    for windows in (quiet, busy):
        p50, p99_ms = (statistics.median(window[name] for window in windows) for name in ("p50_ms", "p99_ms"))
        texts.append(f"{p50:.2f} / {p99_ms:.2f} / {max(window['worst_ms'] for window in windows):.1f} ms")
        p99.append(p99_ms)
    count = sum(window["requests"] for window in busy)
    print(f"| {weights} | {texts[0]} | {texts[1]} | {p99[1] / p99[0]:.2f} ({count:,} requests) |", flush=True)


def requests(options: argparse.Namespace, served: ServedModel, times: list[float]) -> None:
    """Answer requests of a few samples, one after the other, for a window of time."""
    generator = torch.Generator().manual_seed(2)
    batches = [batch(options, options.samples, generator) for _ in range(50)]
    end, number = time.perf_counter() + options.window, 0
    while time.perf_counter() < end:
        begin = time.perf_counter()
        served(batches[number % 50])
        times.append(1000 * (time.perf_counter() - begin))
        number += 1


def main() -> None:
    """Parse the options, and print two tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024, help="samples of a training step")
    parser.add_argument("--steps", type=int, default=2, help="training steps between two versions")
    parser.add_argument("--versions", type=int, default=16, help="deltas; half of them are applied under requests")
    parser.add_argument("--samples", type=int, default=64, help="samples of a request")
    parser.add_argument("--window", type=float, default=1.0, help="seconds of requests with a version, and without")
    parser.add_argument("--weights", nargs="+", default=["fp32", "fp16", "int8"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        print(
            "| published | a base | a delta | a step waits | until it is complete | rate |\n|---|---|---|---|---|---|"
        )
        for weights in options.weights:
            publish(options, weights, Path(temporary) / weights)
        print(
            "\n| served | a base | a delta | without versions: p50 / p99 / most | with one a window | p99 ratio |\n"
            "|---|---|---|---|---|---|"
        )
        for weights in options.weights:
            follow(options, weights, Path(temporary) / weights, Path(temporary) / f"{weights} shown")
        if missing_tool() is not None:
            print(f"\nnot served from C++: {missing_tool()}")
            return
        print(
            "\n| served from C++ | without versions: p50 / p99 / most | with one a window | p99 ratio |\n"
            "|---|---|---|---|"
        )
        for weights in options.weights:
            follow_in_cpp(options, weights, Path(temporary) / weights, Path(temporary) / f"{weights} in C++")


if __name__ == "__main__":
    main()
