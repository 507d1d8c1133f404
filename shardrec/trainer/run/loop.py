"""The training loop: batches in, steps made, curve out.

A step's gradients are means over the ranks of the means over their rows, of all the batches of the step together. Ranks
have equally many rows in every step except perhaps the last step of an epoch. Its few rows weigh a little more. Where
rows have weights or lack labels, the gradient is the gradient of the weighted mean over the step's rows of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shardrec import ShardedModel
from shardrec.launch import RunStopped
from shardrec.pipeline import TrainPipeline, tell_others
from shardrec.trainer.data import ClickBatch, ClickMetrics
from shardrec.trainer.run.display import Display
from shardrec.trainer.run.losses import batch_loss
from shardrec.trainer.run.prefetch import Prefetcher
from shardrec.trainer.run.replan import Replanner
from shardrec.trainer.run.report import CurvePoint, held_out_values
from shardrec.trainer.run.run import Run
from shardrec.trainer.run.task_metrics import LabelWeights, TaskMetrics, label_weights

T = TypeVar("T")

_SMOOTHING_STEPS = 20
_MAX_POINTS = 10_000
"""Points of the curve that a run without an end keeps."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens at which step. A function of the step alone, so that all ranks agree.

    Args:
        total_steps: of the run. 0 if it does not end.
        evaluations: number of points, spread evenly, the last at the last step; of a run without an end, the steps from
            one to the next.
        warmup: steps in which the learning rates rise linearly, the last of them with the whole rates.
        shape: ``linear`` or ``cosine``, how they decay to 0; or ``constant``.
        decay: share of the steps, at the end, in which they decay.
    """

    total_steps: int
    evaluations: int
    warmup: int = 0
    shape: str = "linear"
    decay: float = 0.0

    def rate(self, step: int) -> float:
        """Factor of the learning rates in the step after ``step`` steps."""
        rate = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if not self.total_steps or not self.decay or self.shape == "constant":
            return rate
        left = min(1.0, max(0, self.total_steps - step) / (self.decay * self.total_steps))
        return rate * (left if self.shape == "linear" else (1 - math.cos(math.pi * left)) / 2)

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after ``step`` steps, counted from 1."""
        if not self.total_steps:
            return step % self.evaluations == 0
        count = min(self.evaluations, self.total_steps)
        return step * count // self.total_steps > (step - 1) * count // self.total_steps


class StepPart(NamedTuple):
    """A batch of a step.

    Attributes:
        batch: the batch.
        weight: factor of its mean loss, so that the mean over the step's batches is that over their rows.
        ends: whether it is the last one of the step.
        sums: of the first one of a step: sums of the label weights of all its batches, float64 (T,). None where rows
            count equally.
        left_out: broken rows of this rank that were left out of the batches of the pass so far, by reason.
    """

    batch: ClickBatch
    weight: float
    ends: bool
    sums: Tensor | None = None
    left_out: Mapping[str, int] = MappingProxyType({})


def step_parts(
    batches: Iterator[ClickBatch],
    accumulate: int,
    left_out: Callable[[], Mapping[str, int]] = dict,
    *,
    weighs_labels: bool = False,
) -> Iterator[StepPart]:
    """The batches, ``accumulate`` of them a step. The last step may have fewer.

    With ``weighs_labels`` their losses are divided by the sums of the step, and so have the weight 1.
    """
    while step := list(islice(batches, accumulate)):
        rows = max(1, sum(batch.size for batch in step))
        weights = [label_weights(batch.labels, batch.row_weights) for batch in step] if weighs_labels else []
        sums = torch.cat(weights).double().sum(0) if weights else None
        for number, batch in enumerate(step, 1):
            weight = 1.0 if weighs_labels else accumulate * batch.size / rows
            yield StepPart(batch, weight, number == len(step), sums if number == 1 else None, left_out())


def train_epoch(
    run: Run,
    batches: Prefetcher[StepPart],
    *,
    schedule: Schedule,
    evaluate: Callable[[], ClickMetrics | TaskMetrics | None],
    display: Display,
    after_point: Callable[[], None],
    after_step: Callable[[], None],
    replanner: Replanner | None = None,
) -> None:
    """Make the steps of some batches. Every rank calls it with equally many batches.

    Args:
        run: its progress is moved on, at the end to the next epoch.
        batches: this rank's remaining batches of the epoch, from :func:`step_parts`.
        schedule: of evaluations and learning rates.
        evaluate: held-out metrics, on every rank; of a feed, metrics of the last rows, None if undefined.
        display: is told of every step.
        after_point: is called when a point of the curve has been added.
        after_step: is called when a step and its evaluation are over. May end the run by raising.
        replanner: changes the plan before the step's evaluation.
    """
    progress = run.progress
    optimizers = (run.optimizer, run.model.fused_optimizer)
    schedulers = [LambdaLR(optimizer, schedule.rate, last_epoch=progress.steps - 1) for optimizer in optimizers]

    weights, event_every = LabelWeights(), None if run.config.feed is None else run.config.feed.event_every
    if run.progressive is not None and event_every is not None and progress.evaluated_at == progress.steps:
        run.progressive.load(torch.zeros((2, 0)))  # a point is of the rows after the last one

    def add_point() -> None:
        with progress.off_the_clock():
            progress.evaluated_at = progress.steps
            train_loss, metrics = progress.loss.since_point(), evaluate()
            if metrics is None:
                return
            norms = {name: recent.since_point() for name, recent in progress.grad_norms.items()}
            point = CurvePoint(
                samples=progress.samples,
                seconds=progress.seconds,
                train_loss=train_loss,
                rows=metrics.rows,
                **held_out_values(metrics),
                grad_norms={name: norm for name, norm in norms.items() if norm is not None and math.isfinite(norm)},
                ids=run.id_counts(),
                progressive=run.progressive is not None,
            )
            progress.curve = [*progress.curve, point][-_MAX_POINTS:]
            display.evaluated(point)
        after_point()

    def weighted_loss(model: nn.Module, part: StepPart) -> tuple[Tensor, Tensor, StepPart]:
        if part.sums is not None:
            weights.begin(part.sums, run.config.learning.accumulate)
        with torch.autocast(run.rank_info.device.type, torch.bfloat16, enabled=run.config.learning.precision == "bf16"):
            scored = model if run.progressive is None else run.progressive.scoring(model, part.batch.labels)
            loss = batch_loss(run.config.learning.loss, scored, part.batch, run.spec.labels, weights.divisors)
        return loss if part.weight == 1 else loss * part.weight, loss.detach(), part

    steps = TrainPipeline(
        run.model,
        optimizers,
        batches,
        loss_fn=weighted_loss,
        depth=run.config.ranks.pipeline,
        accumulate=run.config.learning.accumulate,
        clip_norm=run.config.learning.clip,
        device=run.rank_info.device,
    )
    shown = (0.0, progress.seconds)
    with progress.on_the_clock():
        for _, loss, part in steps:
            if run.elastic is not None and run.elastic.steps == progress.steps:
                continue  # the step is lost, and progress comes from another replica
            progress.loss.add(loss)
            if run.elastic is None:
                progress.rows += part.batch.size
            elif run.rank_info.is_lead:  # for all ranks of all replicas
                progress.rows += run.source.step_rows(progress.epoch_steps)
            run.source.left_out_of(progress.epoch, part.left_out)
            if replanner is not None:
                replanner.saw(part.batch.sparse)
            if not part.ends:
                continue
            steps.update()  # the last step of an epoch may have fewer batches
            if steps.grad_norms is not None:
                for recent, norm in zip(progress.grad_norms.values(), steps.grad_norms, strict=True):
                    recent.add(norm)
            progress.steps += 1
            progress.epoch_steps += 1
            for scheduler in schedulers:
                scheduler.last_epoch = progress.steps - 1  # progress may come from another replica
                scheduler.step()
            due = schedule.is_due(progress.steps)
            if event_every is not None:
                due = run.source.ends_interval(event_every, progress.epoch_steps)
            if due or progress.steps % _SMOOTHING_STEPS == 0:
                mean, now = progress.loss.mean(), (batches.waited, progress.seconds_now())
                waits = (now[0] - shown[0]) / max(now[1] - shown[1], 1e-9)
                shown = now
                display.advance(progress.samples, now[1], mean, waits)
            if replanner is not None:
                replanner.after_step()  # before the point: its checkpoint is to have the new plan
            if due:
                add_point()
            try:
                after_step()
            except RunStopped:
                steps.close()  # all ranks end here
                raise
            if due and progress.stalled(run.config.learning.patience):
                steps.close()  # also here: their metrics are the same
                return
    if run.elastic is None or progress.epoch_steps:  # progress may come from a replica that has ended its epoch
        progress.next_epoch()


def failing_together(batches: Iterator[T], model: ShardedModel) -> Iterator[T]:
    """The batches. An error in making one is raised here, and on all the other ranks at the step that they are in.

    A rank that fails alone, at a broken row among its own, would leave the others waiting in the next exchange.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            tell_others(error, model.context)
            raise
        yield batch
