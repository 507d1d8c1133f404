"""Throughput and latency of the C++ program: 1 to 8 threads that ask one loaded model, one request after the other."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from examples.cpp_serving.build import BuildError, build, run
from examples.cpp_serving.export import Saved, export, requests

__all__ = ["main", "measure"]

REQUESTS = 64


def measure(
    program: Path, saved: Saved, lines: str, clients: list[int], seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """What the program says of each number of clients, the median of the rounds by throughput.

    Args:
        program: built.
        saved: a model.
        lines: requests.
        clients: numbers of threads that ask.
        seconds: of each measurement.
        rounds: of all the numbers in turn.

    Raises:
        BuildError: if the program fails.
    """
    found: list[list[dict[str, Any]]] = [[] for _ in clients]
    for _ in range(rounds):
        for number, of in zip(clients, found, strict=True):
            options = ["--clients", str(number), "--seconds", str(seconds)]
            of.append(json.loads(run(program, saved.path, lines, *options)))
    return [sorted(of, key=lambda one: one["per_second"])[len(of) // 2] for of in found]


def main() -> int:
    """0 if all was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "build", help="where to build and save")
    parser.add_argument("--files", nargs="+", default=["int8.pt", "int8.pt2"])
    parser.add_argument("--samples", type=int, default=16, help="of a request")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = list(requests([options.samples] * REQUESTS))
    lines = "".join(one.line() + "\n" for one in asked)
    try:
        program = build(options.folder)
        models = {saved.path.name: saved for saved in export(options.folder / "models", asked[:1])}
        print(f"{'file':12}{'clients':>8}{'requests/s':>12}{'samples/s':>12}{'p50 ms':>9}{'p99 ms':>9}")
        for name in options.files:
            for one in measure(program, models[name], lines, options.clients, options.seconds, options.rounds):
                rate = one["per_second"]
                print(
                    f"{name:12}{one['clients']:8}{rate:12,.0f}{rate * options.samples:12,.0f}"
                    f"{one['p50_ms']:9.3f}{one['p99_ms']:9.3f}"
                )
    except BuildError as error:
        print(f"cpp-example: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
