"""Metrics of a sharded model, over the rows of all ranks: exact, from the gathered predictions.

Of rows that are held out, :func:`evaluate`; of those that a run without an end trains on, :class:`Progressive`.

Legend: B rows of a batch, N rows of this rank, M rows of the longest rank, W ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.launch import gather, peers
from shardrec.pipeline import TrainPipeline
from shardrec.trainer.data import ClickBatch, ClickMetrics, Task
from shardrec.trainer.run.progress import undefined_monitor
from shardrec.trainer.run.report import held_out_values
from shardrec.trainer.run.task_metrics import TaskMetrics, logit_metrics, outputs_of, task_metrics


def evaluate(
    model: nn.Module, batches: Iterable[ClickBatch], device: torch.device, *, k: int = 10, tasks: Sequence[Task] = ()
) -> ClickMetrics | TaskMetrics:
    """Score ``model`` on the batches of all ranks. Every rank calls it and gets the same result.

    Args:
        model: from (dense, sparse) to (B, 1) logits, or the columns of the tasks.
        batches: as many on every rank; with ranking metrics if they have groups.
        device: where the model is.
        k: places at the top of each group that ranking metrics count.
        tasks: of data with several labels.

    Raises:
        ConfigError: for scores that are not numbers.
    """
    groups: list[Tensor] = []

    def grouped() -> Iterator[ClickBatch]:
        for batch in batches:
            if batch.groups is not None:
                groups.append(batch.groups.view(1, -1))
            yield batch

    steps = TrainPipeline(model, (), (), depth=0, device=device)  # copies batches to the device without waiting
    sizes = [len(tasks), sum(task.outputs for task in tasks), 1] if tasks else [1, 1]
    scored = [torch.zeros((sum(sizes), 0), device=device), *steps.predict(grouped(), partial(_scored, tasks))]
    # Scores stay on the device until here: reading each batch's would make the host wait for it.
    labels, outputs, *weights = gather_rows(torch.cat(scored, dim=1).cpu()).t().split(sizes, 1)
    group = gather_rows(torch.cat(groups, dim=1).cpu()).squeeze(0) if groups else None
    if tasks:
        return task_metrics(outputs, labels, weights[0].squeeze(1), group, tasks, k)
    return logit_metrics(outputs, labels, group, k)


def _scored(tasks: Sequence[Task], model: nn.Module, batch: ClickBatch) -> Tensor:
    """(2, B): labels and logits; of tasks (T + K + 1, B): labels, outputs and weights of the rows."""
    logits: Tensor = model(batch.dense, batch.sparse)
    if not tasks:
        return torch.stack((batch.labels, logits.view(-1).float()))
    outputs = outputs_of(logits, batch.size, tasks)
    weights = outputs.new_ones(batch.size) if batch.row_weights is None else batch.row_weights
    return torch.cat([batch.labels, outputs, weights.unsqueeze(1)], dim=1).t()


def gather_rows(rows_CN: Tensor) -> Tensor:
    """The columns of all ranks, rank by rank: (C, N) on the CPU → (C, sum of N)."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows_CN
    with peers(None, "gathering of predictions"):
        sizes = gather(rows_CN.size(1))
        padded_CM = rows_CN.new_zeros((rows_CN.size(0), max(sizes)))
        padded_CM[:, : rows_CN.size(1)] = rows_CN
        gathered = [torch.zeros_like(padded_CM) for _ in sizes]
        dist.all_gather(gathered, padded_CM)
    return torch.cat([part[:, :size] for part, size in zip(gathered, sizes, strict=True)], dim=1)


def check_monitor(batches: Sequence[ClickBatch], watched: str) -> None:
    """Check that a metric can be computed of rows with one label, which it is by their labels and groups. Collective.

    Raises:
        ConfigError: on every rank, if it is undefined.
    """
    parts = [batch.labels.view(1, -1) for batch in batches]
    labels = gather_rows(torch.cat([torch.zeros((1, 0)), *parts], dim=1)).squeeze(0)
    groups = [batch.groups.view(1, -1) for batch in batches if batch.groups is not None]
    grouped = gather_rows(torch.cat(groups, dim=1)).squeeze(0) if groups else None
    if held_out_values(logit_metrics(torch.zeros_like(labels), labels, grouped)).get(watched) is None:
        raise undefined_monitor(watched, len(labels))


class Progressive:
    """Metrics of the last rows that a run trains on, each scored before the step that learns from it.

    "Beating the hold-out", Blum et al., 1999. Training computes the scores anyway, in its own mode (with dropout).

    Args:
        rows: of this rank, that are kept.
    """

    def __init__(self, rows: int) -> None:
        self._most, self._rows = rows, 0
        self._scored: deque[Tensor] = deque()

    def scoring(self, model: nn.Module, labels: Tensor) -> Callable[..., Tensor]:
        """The model, for one call on the rows with these labels, (B,). The logits are then kept."""

        def forward(*inputs: object) -> Tensor:
            logits: Tensor = model(*inputs)
            self._add(torch.stack((labels, logits.detach().view(-1).float())))  # read on the host at a point only
            return logits

        return forward

    def metrics(self) -> ClickMetrics | None:
        """Of the last rows of all ranks. None without rows. Collective.

        Raises:
            ConfigError: for scores that are not numbers.
        """
        labels, logits = gather_rows(self.state())
        return logit_metrics(logits, labels) if labels.numel() else None

    def state(self) -> Tensor:
        """Labels and logits, (2, N) float32 on the CPU."""
        rows = torch.cat([torch.zeros((2, 0)), *(batch.cpu() for batch in self._scored)], dim=1)
        return rows[:, -self._most :].contiguous()

    def load(self, rows: Tensor) -> None:
        """Go on from :meth:`state`."""
        self._scored, self._rows = deque([rows]), rows.size(1)

    def _add(self, rows: Tensor) -> None:
        if not rows.size(1):  # for example a rank without rows of a small arrival
            return
        self._scored.append(rows)
        self._rows += rows.size(1)
        while self._rows - self._scored[0].size(1) >= self._most:
            self._rows -= self._scored.popleft().size(1)
