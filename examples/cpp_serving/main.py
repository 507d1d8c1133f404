"""Export a model, build the C++ program, ask it, and compare its answers with Python's. See README.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from examples.cpp_serving.build import BuildError, build, run
from examples.cpp_serving.export import Request, Saved, export, requests

__all__ = ["compare", "load", "main"]

SIZES = [1, 2, 7, 32, 1, 64]
TOLERANCE = 1e-6
CLIENTS = [1, 2, 4, 8]


def compare(program: Path, saved: Saved, asked: list[Request]) -> float:
    """The largest difference between the program's answers and Python's.

    Raises:
        BuildError: if the program fails, or refuses a request.
    """
    lines = run(program, saved.path, "".join(one.line() + "\n" for one in asked)).splitlines()
    if len(lines) != len(asked):
        raise BuildError(f"the program answered {len(lines)} of {len(asked)} requests")
    largest = 0.0
    for line, expected in zip(lines, saved.answers, strict=True):
        answer = json.loads(line)
        if "output" not in answer:
            raise BuildError(f"the program refused a request: {answer}")
        found = torch.tensor(answer["output"], dtype=torch.float32)
        largest = max(largest, float((found - expected).abs().max()))
    return largest


def load(program: Path, saved: Saved, asked: list[Request], clients: int, seconds: float) -> dict[str, float]:
    """The program's measurements with this number of clients: ``requests_per_second``, ``p50_ms`` and ``p99_ms``."""
    lines = "".join(one.line() + "\n" for one in asked)
    return json.loads(run(program, saved.path, lines, "--clients", str(clients), "--seconds", str(seconds)))


def main() -> int:
    """0 if all answers are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "build", help="where to build and save")
    parser.add_argument("--load", type=float, metavar="SECONDS", help="then measure so long with 1, 2, 4 and 8 clients")
    options = parser.parse_args()
    folder = options.folder
    # As many threads as the program has, so that sums are made in the same order.
    torch.set_num_threads(1)
    asked = list(requests(SIZES))
    try:
        print("building the C++ program, which takes minutes the first time", flush=True)
        program = build(folder)
        wrong = 0
        print("exporting a model as TorchScript and as packages of machine code, which are compiled", flush=True)
        files = export(folder / "models", asked)
        print(f"{'file':12}{'bytes of rows':>15}{'largest difference, C++ to Python':>36}")
        for saved in files:
            largest = compare(program, saved, asked)
            allowed = TOLERANCE if saved.name == "float" else 0.0
            verdict = "" if largest <= allowed else f"  more than {allowed:g}"
            wrong += largest > allowed
            print(f"{saved.path.name:12}{saved.table_bytes:15,}{largest:36g}{verdict}")
        if options.load and not wrong:
            print(f"\n{'file':12}{'clients':>8}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}")
            for saved in files:
                for clients in CLIENTS:
                    found = load(program, saved, asked, clients, options.load)
                    speed, p50, p99 = (found[key] for key in ("requests_per_second", "p50_ms", "p99_ms"))
                    print(f"{saved.path.name:12}{clients:8}{speed:12,.0f}{p50:9.3f}{p99:9.3f}")
    except BuildError as error:
        print(f"cpp-example: {error}", file=sys.stderr)
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
