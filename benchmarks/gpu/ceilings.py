"""What the device can do, which other figures are shares of: copies, random rows, copies from the host, launches."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness.timing.clock import time_steps, warm_up
from benchmarks.harness.timing.probe import probe
from shardrec.launch.ranks import RankInfo
from shardrec.launch.run import on_new_ranks

__all__ = ["ceilings", "main", "new_parser"]

_HOST_BYTES = {"cpu": 2**20, "cuda": 2**28}
_SIDE = {"cpu": 256, "cuda": 8192}
_LAUNCHES = 1000


def ceilings(rank_info: RankInfo) -> dict[str, float]:
    """Bytes per second of copies (read and written), of random rows read and changed, and of a copy from pinned memory.
    Microseconds of a kernel with next to nothing to do. Float operations per second of a product in bfloat16."""
    device, kind = rank_info.device, rank_info.device.type
    found = probe({}, rank_info)
    pinned = torch.ones(_HOST_BYTES[kind] // 4, pin_memory=kind == "cuda")
    there, small = torch.empty_like(pinned, device=device), torch.zeros(1, device=device)
    left = torch.rand(_SIDE[kind], _SIDE[kind], device=device).to(torch.bfloat16)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1)

    return {
        "copy": found["memory"],
        "gather": found["gather"],
        "scatter": found["scatter"],
        "from_host": pinned.nbytes / _seconds(lambda: there.copy_(pinned, non_blocking=True), device),
        "launch_us": 1e6 * _seconds(launches, device) / _LAUNCHES,
        "product": 2 * _SIDE[kind] ** 3 / _seconds(lambda: left @ left, device),
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call: the median of seven."""
    warm_up(lambda _: work(), [None] * 2, device)
    return median(time_steps(lambda _: work(), [None] * 7, device)) / 1e3


def new_parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/ceilings.json"))
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure them, and write them as JSON."""
    options = new_parser().parse_args(arguments)
    found = on_new_ranks(ceilings, nproc=1, device=options.device, threads=None, debug=True)
    for name, value in found.items():
        print(f"{name}: {value:.4g}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
