"""Runs on this process's rank, small ones, that may be broken off at a step."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from shardrec.trainer.run import TrainConfig

SMALL = TrainConfig(
    samples=1_500,
    holdout_samples=500,
    max_embeddings=60,
    embedding_dim=4,
    dense_layers=(8,),
    over_layers=(8,),
    embedding_optimizer="adam",
    embedding_lr=0.01,
    batch_size=64,
    evaluations=3,
    threads=1,
)
"""24 batches, the last one of 28 rows."""


FEW_TABLES = (1460, 583, 10131227, 305, 24, 3)
"""Distinct values of the categories of generated rows, in place of 26: a run of a few steps takes half the time."""


class PowerCut(BaseException):
    """What no part of a run handles."""


def broken_off(
    config: TrainConfig,
    *,
    resume: bool = False,
    cut_after: int | None = None,
    told_in: int | None = None,
    rank: int = 0,
    cardinalities: tuple[int, ...] = FEW_TABLES,
) -> Any:
    """Train on this process's rank, up to a step: broken off there, or ``rank`` told to end. Returns the steps made."""
    from shardrec.trainer.data import schema, synthetic
    from shardrec.trainer.run import session
    from shardrec.trainer.run.saving import Saver

    def after_step(saver: Saver, *, idle: bool = False) -> None:
        if saver._progress.steps == told_in:
            saver._agree_at = 0  # the agreement is due, on every rank
            if saver._place.rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)
        original(saver, idle=idle)
        if idle:
            return
        steps.append(saver._progress.steps)
        if saver._progress.steps == cut_after:
            saver._acknowledge()  # what was to be saved is on disk or not; here it is
            saver._wait_for_publish()
            raise PowerCut

    steps: list[int] = []
    original, draw, rows = Saver.after_step, session.write_curve, synthetic._EXPECTATION_ROWS
    tables = schema.CRITEO_CARDINALITIES
    Saver.after_step = after_step  # type: ignore[method-assign]
    # Half a million rows more to say what is best possible, and a drawing, take longer than the training.
    synthetic._EXPECTATION_ROWS = 1_000
    session.write_curve = lambda report, path: path.write_bytes(b"")
    if config.data.is_synthetic:
        schema.CRITEO_CARDINALITIES = cardinalities
    try:
        with contextlib.suppress(PowerCut):
            session.run_rank(config, resume=resume)
    finally:
        Saver.after_step, session.write_curve = original, draw  # type: ignore[method-assign]
        synthetic._EXPECTATION_ROWS, schema.CRITEO_CARDINALITIES = rows, tables
    return steps
