"""Export a model, build the C++ program, ask it, and compare its answers with Python's; see README.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from examples.cpp_serving.build import BuildError, build, run
from examples.cpp_serving.export import Request, Saved, export, requests

__all__ = ["compare", "main"]

SIZES = [1, 2, 7, 32, 1, 64]
TOLERANCE = 1e-6


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


def main() -> int:
    """0 if all answers are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "build", help="where to build and save")
    folder = parser.parse_args().folder
    # As many threads as the program has, so that sums are made in the same order.
    torch.set_num_threads(1)
    asked = list(requests(SIZES))
    try:
        program = build(folder)
        wrong = 0
        print(f"{'file':12}{'bytes of rows':>15}{'largest difference, C++ to Python':>36}")
        for saved in export(folder / "models", asked):
            largest = compare(program, saved, asked)
            allowed = TOLERANCE if saved.name == "float" else 0.0
            verdict = "" if largest <= allowed else f"  more than {allowed:g}"
            wrong += largest > allowed
            print(f"{saved.path.name:12}{saved.table_bytes:15,}{largest:36g}{verdict}")
    except BuildError as error:
        print(f"cpp-example: {error}", file=sys.stderr)
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
