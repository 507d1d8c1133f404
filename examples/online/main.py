"""A model that learns from clicks as they arrive, and three servers: ``python -m examples.online.main``.

::

    producer: .0042.parquet ──► scored by the servers ──► 0042.parquet ──► trainer, 2 ranks ──► published/
              labels unknown    frozen, exports, deltas   labels known     a point for each file   │
                                             ▲─────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from examples.online.columns import SPEC

__all__ = ["main", "run"]


def run(
    out: Path, *, seconds: int = 36, rows: int = 4096, warm_up: int = 24, export_s: int = 15, seed: int = 0
) -> dict[str, float]:
    """Train and serve.

    Args:
        out: folder for everything, which is not there yet.
        seconds: of serving. A file of rows arrives each second, and the model turns by a right angle in 60.
        rows: of a file.
        warm_up: files before that, of the first model.
        export_s: seconds from one full export to the next.
        seed: of the clicks.

    Returns:
        The mean AUC over the files served, of each server, the trainer and the true probabilities.
    """
    (out / "incoming").mkdir(parents=True)
    (out / "features.yaml").write_text(SPEC, encoding="utf-8")
    trainer = _start_trainer(out)
    try:
        from examples.online.servers import serve  # with torch, while the trainer loads it, too

        return serve(out, trainer, seconds=seconds, rows=rows, warm_up=warm_up, export_s=export_s, seed=seed)
    finally:
        trainer.kill()
        trainer.wait()


def _start_trainer(out: Path) -> subprocess.Popen[bytes]:
    options = {
        "--data": f"feed:{out / 'incoming'}",
        "--features": out / "features.yaml",
        "--out": out / "run",
        "--publish": out / "published",
        "--publish-every": "0.025m",
        "--feed-idle": 5,
        "--streams": 1,
        "--event-every": 1,
        "--nproc": 2,
        "--threads": 1,
        "--batch-size": 256,
        "--model": "deepfm",
        "--embedding-lr": 0.1,
        "--lr": 0.005,
    }
    command = [
        sys.executable,
        "-m",
        "shardrec.trainer.cli",
        "train",
        *(str(part) for pair in options.items() for part in pair),
    ]
    with (out / "trainer.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def main() -> None:
    """Run the example, and print what it came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/online"), help="a folder that is not there yet (runs/online)"
    )
    parser.add_argument("--seconds", type=int, default=36, help="of serving (36)")
    parser.add_argument("--seed", type=int, default=0, help="of the clicks (0)")
    given = parser.parse_args()
    if given.out.exists():
        raise SystemExit(f"{given.out} is there: remove it, or give another folder (--out)")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    means = run(given.out, seconds=given.seconds, seed=given.seed)
    for name, mean in sorted(means.items(), key=lambda item: -item[1]):
        print(f"AUC {mean:.4f}  {name}")
    print(
        f"deltas are {means['trainer'] - means['deltas']:+.4f} behind the trainer; plot in {given.out / 'online.png'}"
    )


if __name__ == "__main__":
    main()
