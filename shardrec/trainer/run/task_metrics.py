"""Several labels of a row: their loss, their metrics and their predictions.

Legend: B rows of a batch, N rows over all ranks, T tasks, K columns of the model's output (all tasks' columns, side by
side).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardrec import ConfigError
from shardrec.launch import peers
from shardrec.trainer.data import ClickMetrics, Task, click_metrics, ranking_metrics

_Values = dict[str, float | int | None]


@dataclass(frozen=True, kw_only=True)
class TaskMetrics:
    """Held-out metrics of several tasks.

    Attributes:
        rows: number of rows.
        values: ``loss``, which training minimizes: the tasks' mean losses, times their weights, added up; and
            ``TASK/METRIC``, in the order of the tasks; None where the labels have too few values for it. Each row with
            the label counts once in a metric, whatever its weight.
    """

    rows: int
    values: _Values

    def to_mapping(self) -> _Values:
        """All of it by name. JSON-compatible."""
        return {"rows": self.rows, **self.values}


def outputs_of(logits: Tensor, rows: int, tasks: Sequence[Task]) -> Tensor:
    """A model's output as (B, K) float32.

    Raises:
        ConfigError: if it has another number of columns.
    """
    columns = sum(task.outputs for task in tasks)
    if logits.shape != (rows, columns) and not (columns == 1 and logits.shape == (rows,)):
        names = ", ".join(f"{task.name} ({task.outputs})" for task in tasks)
        raise ConfigError(
            f"the model (--model) returns {tuple(logits.shape)} for {rows} rows and labels need {columns} columns, "
            f"{names}: give model mmoe or ple, or return ({rows}, {columns})"
        )
    return logits.view(rows, columns).float()


def _by_task(outputs: Tensor, tasks: Sequence[Task]) -> list[tuple[Task, Tensor]]:
    """Each task with its columns of (B, K)."""
    return list(zip(tasks, outputs.split([task.outputs for task in tasks], 1), strict=True))


def label_weights(labels: Tensor, row_weights: Tensor | None) -> Tensor:
    """What each label counts in its task's loss, (B, T) float32; 0 for a missing one."""
    present_BT = (~labels.isnan()).float()
    return present_BT if row_weights is None else present_BT * row_weights.unsqueeze(1)


class LabelWeights:
    """The sums of a step's label weights over all ranks, which make a task's loss the global batch's.

    The sums are known before the step's first forward, which runs while they are added up. As gradients are averaged
    over W ranks, the loss of a rank is W times its part of the sum over all ranks, divided by the sum of weights.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._work: dist.Work | None = None

    def begin(self, sums: Tensor, batches: int) -> None:
        """Add up this rank's sums, float64 (T,), of a step of this many batches. Every rank calls it in every step."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._sums = sums / (ranks * batches)
        with peers(None, "sums of label weights"):
            self._work = dist.all_reduce(self._sums, async_op=True) if ranks > 1 else None

    def divisors(self) -> Tensor | None:
        """What the sums of this rank's losses are divided by, (T,). None before any step."""
        if self._work is not None:
            with peers(None, "sums of label weights"):
                self._work.wait()
            self._work = None
        return self._sums


def task_loss(
    outputs: Tensor, labels: Tensor, row_weights: Tensor | None, tasks: Sequence[Task], divisors: Tensor | None = None
) -> Tensor:
    """The sum over the tasks of their weights times their mean losses, in nats or squared units of the label.

    Args:
        outputs: (B, K) float32.
        labels: float32 (B, T), NaN for missing ones.
        row_weights: float32 (B,), or None.
        tasks: T of them.
        divisors: (T,), of the tasks' sums over the rows. Default: B.
    """
    weights_BT, labels = label_weights(labels, row_weights), labels.nan_to_num(0.0)
    if divisors is None:
        divisors = outputs.new_full((len(tasks),), max(1, outputs.size(0)))
    loss = outputs.new_zeros(())
    for number, (task, columns) in enumerate(_by_task(outputs, tasks)):
        total = (_losses(task, columns, labels[:, number]) * weights_BT[:, number]).sum()
        # Without any weight in the step the sum is also 0.
        loss = loss + task.weight * total / divisors[number].clamp(min=torch.finfo(torch.float32).tiny).float()
    return loss


def _losses(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    """Of each row, (B,), from its columns of the output and its labels (B,)."""
    if task.kind == "multiclass":
        return F.cross_entropy(outputs, labels.long(), reduction="none")
    outputs = outputs.squeeze(1)
    if task.kind == "binary":
        return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
    if task.loss == "poisson":
        return F.poisson_nll_loss(outputs, labels, reduction="none")
    return (F.huber_loss if task.loss == "huber" else F.mse_loss)(outputs, labels, reduction="none")


def predictions(logits: Tensor, rows: int, tasks: Sequence[Task], loss: str) -> dict[str, Tensor]:
    """A model's predictions per row, by the task's name. For data with one label, under the name "".

    Args:
        logits: its output.
        rows: B.
        tasks: empty for data with one label.
        loss: the run's. Logits of ``bce`` are log odds.

    Returns:
        float32, (B,): a probability, another score, or a number. For a multiclass task (B, classes)
        probabilities.
    """
    if not tasks:
        logits = logits.view(-1).float()
        return {"": torch.sigmoid(logits) if loss == "bce" else logits}
    return {task.name: _predicted(task, columns) for task, columns in _by_task(outputs_of(logits, rows, tasks), tasks)}


def _predicted(task: Task, outputs: Tensor) -> Tensor:
    if task.kind == "multiclass":
        return outputs.softmax(1)
    outputs = outputs.squeeze(1)
    if task.kind == "binary":
        return outputs.sigmoid()
    return outputs.exp() if task.loss == "poisson" else outputs


def task_metrics(
    outputs: Tensor, labels: Tensor, row_weights: Tensor | None, groups: Tensor | None, tasks: Sequence[Task], k: int
) -> TaskMetrics:
    """Metrics of N rows, which may be none, on the CPU. Arguments as for :func:`task_loss`, groups int64 (N,) or None.

    Raises:
        ConfigError: if outputs are not numbers.
    """
    if not outputs.isfinite().all():
        raise ConfigError(f"outputs of {len(outputs)} rows are not all finite numbers: has training diverged?")
    divisors = label_weights(labels, row_weights).double().sum(0)
    loss = task_loss(outputs, labels, row_weights, tasks, divisors)
    values: _Values = {"loss": float(loss) if len(outputs) else None}
    for number, (task, columns) in enumerate(_by_task(outputs, tasks)):
        there = ~labels[:, number].isnan()
        group = None if groups is None else groups[there]
        metrics = _METRICS[task.kind](task, columns[there], labels[there, number], group, k) if there.any() else {}
        values |= {f"{task.name}/{name}": value for name, value in metrics.items()}
        values[f"{task.name}/rows"] = int(there.sum())
    return TaskMetrics(rows=len(labels), values=values)


def logit_metrics(logits: Tensor, labels: Tensor, groups: Tensor | None = None, k: int = 10) -> ClickMetrics:
    """Metrics of N rows from their log odds, and of their order in groups, if any was clicked; (N,) or (N, 1), CPU."""
    metrics = click_metrics(labels.numpy(), torch.sigmoid(logits.double()).numpy())  # float32 has 1 from 17 on
    if groups is None or not labels.any():
        return metrics
    # By logits: probabilities of 1 are equal where their logits are not.
    return replace(metrics, ranking=ranking_metrics(labels.numpy(), logits.numpy(), groups.numpy(), k))


def _binary(task: Task, logits: Tensor, labels: Tensor, groups: Tensor | None, k: int) -> _Values:
    return logit_metrics(logits, labels, groups, k).to_mapping()


def _regression(task: Task, outputs: Tensor, labels: Tensor, groups: Tensor | None, k: int) -> _Values:
    errors, variance = _predicted(task, outputs).double() - labels, float(labels.double().var(correction=0))
    mse = float(errors.square().mean())
    return {"mse": mse, "mae": float(errors.abs().mean()), "r2": 1 - mse / variance if variance else None}


def _multiclass(task: Task, logits: Tensor, labels: Tensor, groups: Tensor | None, k: int) -> _Values:
    logloss = float(F.cross_entropy(logits.double(), labels.long()))
    shares = labels.long().bincount() / len(labels)
    entropy = float(-torch.xlogy(shares, shares).sum())
    accuracy = float((logits.argmax(1) == labels).double().mean())
    return {"accuracy": accuracy, "logloss": logloss, "normalized_entropy": logloss / entropy if entropy else None}


_METRICS = {"binary": _binary, "regression": _regression, "multiclass": _multiclass}
