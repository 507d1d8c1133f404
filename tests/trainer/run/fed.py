"""Runs on feeds, with the rows of their steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardrec.trainer.run import TrainConfig
from tests.trainer.run.broken_off import SMALL, broken_off

__all__ = ["SPEC", "digests", "feed", "numbers", "trained"]

SPEC = """
label: click
features:
  - {name: number, kind: dense, mean: 0, std: 1000}
  - {name: site, kind: id, rows: 50}
"""


def feed(folder: Path, **options: Any) -> TrainConfig:
    """A run on the files in ``folder/in``, three an arrival, or on a feed, which ends when there are no more."""
    (folder / "in").mkdir()
    (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
    common = {"data": f"feed:{folder / 'in'}", "features": str(folder / "spec.yaml"), "out": str(folder / "run")}
    options = {"streams": 3, "batch_size": 32, "checkpoint_every": "4", "feed_idle": 0, **options}
    return SMALL.changed(samples=None, evaluations=10, holdout_samples=200, **{**common, **options})


def trained(config: TrainConfig, **how: Any) -> dict[int, list[int]]:
    """The numbers of this rank's rows in each step that a run made until it was broken off, or ended."""
    from shardrec.trainer.run import loop, session

    batches: list[list[int]] = []
    original, poll_s = loop.batch_loss, session._POLL_S

    def batch_loss(name: str, model: Any, batch: Any, *rest: Any) -> Any:
        batches.append([round(1000 * number) for number in batch.dense[:, 0].tolist()])
        return original(name, model, batch, *rest)

    loop.batch_loss, session._POLL_S = batch_loss, 0.001
    try:
        steps = broken_off(config, **how)
    finally:
        loop.batch_loss, session._POLL_S = original, poll_s
    assert len(steps) == len(batches)
    return dict(zip(steps, batches, strict=True))


def digests(rows: Mapping[int, Sequence[int]], every: int) -> list[str]:
    """Of the rows between a checkpoint and the next."""
    steps = sorted(rows)
    intervals = [steps[start : start + every] for start in range(0, len(steps), every)]
    return [hashlib.sha256(repr([rows[step] for step in steps]).encode()).hexdigest() for steps in intervals]


def numbers(rows: Mapping[int, Sequence[int]]) -> list[int]:
    return sorted(number for step in rows.values() for number in step)
