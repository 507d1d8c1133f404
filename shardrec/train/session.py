"""One rank of a run, from its config to its results.

::

    source ─► model on meta ─► plan ─► shard ─► epochs of steps, with evaluations between ─► final metrics ─► results
              └ fused optimizers      └ dense optimizer

Every rank goes through all of it; the first one alone shows and writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from shardrec.checkpoint import save_checkpoint
from shardrec.compile import annotate_for_dynamo
from shardrec.data import ClickBatch, ClickMetrics
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan
from shardrec.modules import ShardedModel, shard
from shardrec.planner import plan as make_plan
from shardrec.train.config import TrainConfig
from shardrec.train.display import Announcer
from shardrec.train.loop import Progress, Schedule, failing_together, train_epoch
from shardrec.train.metrics import evaluate
from shardrec.train.model import build_model, dense_optimizer, fuse_optimizer, planner_constraints
from shardrec.train.prefetch import Prefetcher
from shardrec.train.ranks import Place, joined, same_everywhere
from shardrec.train.report import RunReport, environment, write_curve, write_metrics
from shardrec.train.source import Source

__all__ = ["run_rank"]

_CURVE_ROWS = 100_000
"""Most held-out rows behind a point of the curve; all of the generated ones by default, few of a large file's."""


_SAMPLED = 4
"""Batches that tell the planner how many ids there are and how they are spread."""


def run_rank(config: TrainConfig) -> RunReport | None:
    """Train as this process's rank, in the process group that the environment describes or alone.

    Args:
        config: the run; rank 0's ``out``, which must be set there, holds for all.

    Returns:
        The report, on rank 0.

    Raises:
        ShardrecError: for options, data or peers that the run cannot go on with.
    """
    with joined(config) as place:
        config = dataclasses.replace(config, out=same_everywhere(str(config.out), place))
        announcer = Announcer() if place.is_lead else None
        source = Source(config, place)
        model, plan = _sharded_model(config, source, place)
        folder = _results_folder(config, place)
        if announcer is not None:
            announcer.plan(plan)
            announcer.run(source.description, config, world_size=place.world_size, threads=place.threads)
        optimizer = dense_optimizer(model, config)
        progress = _train(config, source, model, optimizer, place, announcer)
        with Prefetcher(source.holdout_batches()) as batches:
            final = evaluate(model, failing_together(batches, model), place.device)
        samples = _over_ranks(progress.rows, place)
        if config.checkpoint == "last":
            save_checkpoint(folder / "checkpoint", model, optimizer, extra={"samples": samples})
        if announcer is None:
            return None
        report = _report(config, source, place, progress, samples, final)
        _write(report, config, plan, folder)
        announcer.results(report, folder)
        return report


def _sharded_model(config: TrainConfig, source: Source, place: Place) -> tuple[ShardedModel, ShardingPlan]:
    model = build_model(config, source.schema)
    fuse_optimizer(model, config)
    if config.plan is not None:
        try:
            plan = ShardingPlan.load(config.plan)
        except OSError as error:
            raise ConfigError(f"plan (--plan) is {config.plan!r}: {error.strerror}; give a plan.json") from error
    else:
        plan = make_plan(
            model,
            batch_size=config.batch_size,
            constraints=planner_constraints(config),
            sample_batches=source.sampled(_SAMPLED),
        )
    sharded = shard(model, plan, device=place.device)
    _compile(sharded, config)
    return sharded, plan


def _compile(model: ShardedModel, config: TrainConfig) -> None:
    """In place, so that the model stays what the loop and the checkpoint know."""
    if config.compile == "off":
        return
    full = config.compile == "full"
    annotate_for_dynamo(model, mode="traced" if full else "boundary")
    model.compile(fullgraph=full)


def _results_folder(config: TrainConfig, place: Place) -> Path:
    folder = Path(str(config.out))
    if place.is_lead:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out (--out) is {config.out!r}: {error.strerror}; give a folder to write to") from error
    return folder


def _train(
    config: TrainConfig,
    source: Source,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    place: Place,
    announcer: Announcer | None,
) -> Progress:
    progress = Progress(world_size=place.world_size)
    curve_batches = _kept(source.holdout_batches(_CURVE_ROWS), model)
    total = None if source.train_rows is None else source.train_rows * config.epochs
    with Announcer.display(announcer, total) as display:
        for epoch in range(config.epochs):
            # The first epoch counts the steps of a file.
            steps = source.steps or (progress.steps // epoch if epoch else None)
            with Prefetcher(source.train_batches()) as batches:
                train_epoch(
                    model,
                    (optimizer, model.fused_optimizer),
                    failing_together(batches, model),
                    progress=progress,
                    schedule=Schedule(
                        total_steps=steps and steps * config.epochs,
                        evaluations=config.evaluations,
                        decay=config.decay,
                    ),
                    evaluate=lambda: evaluate(model, curve_batches, place.device),
                    display=display,
                    device=place.device,
                )
    return progress


def _kept(batches: Iterator[ClickBatch], model: ShardedModel) -> list[ClickBatch]:
    """The batches in memory: a file would have to be read to its end again for each point of the curve."""
    return list(failing_together(batches, model))


def _over_ranks(count: int, place: Place) -> int:
    """The sum of every rank's count."""
    if place.world_size == 1:
        return count
    total = torch.tensor([count])
    dist.all_reduce(total)
    return int(total)


def _report(
    config: TrainConfig, source: Source, place: Place, progress: Progress, samples: int, final: ClickMetrics
) -> RunReport:
    return RunReport(
        config=config.to_mapping(),
        environment=environment(world_size=place.world_size, threads=place.threads),
        source=source.description,
        curve=tuple(progress.curve),
        final=final,
        optimum=source.best_metrics(),
        samples=samples,
        steps=progress.steps,
        seconds=progress.seconds,
        skipped=source.skipped,
    )


def _write(report: RunReport, config: TrainConfig, plan: ShardingPlan, folder: Path) -> None:
    try:
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        plan.save(folder / "plan.json")
        write_metrics(report, folder / "metrics.json")
        write_curve(report, folder / "curve.png")
    except OSError as error:
        raise ConfigError(
            f"out (--out) is {str(folder)!r}: {error.filename or 'a file'}: {error.strerror}; give a folder to write to"
        ) from error
