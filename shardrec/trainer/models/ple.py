"""PLE and MMoE: experts, of one task or of all, which a gate per task mixes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError
from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import MLP, Share, Size, Sizes, columns_of, pooled_features


class PLE(nn.Module):
    """Levels of experts, each of one task or of all. A task's gate mixes its own and the shared ones.

    "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized Recommendations",
    Tang et al., 2020.

    Args:
        levels: of experts.
        experts: per task in a level, with layers ``hidden``.
        shared: experts of all tasks in a level.
        tower: widths of a task's layers before its columns of the output.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        levels: Size = 2,
        experts: Size = 2,
        shared: Size = 2,
        hidden: Sizes = (128, 64),
        tower: Sizes = (32,),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not hidden:
            raise ConfigError("hidden is empty: an expert needs one layer at least")
        self.bags, self.tasks = pooled_features(schema, dim), len(schema.outputs)
        inputs = [len(columns_of(self.bags)) + len(schema.dense_names), *[hidden[-1]] * (levels - 1)]
        gates = [self.tasks + 1] * (levels - 1) + [self.tasks]
        self.levels = nn.ModuleList(
            _Experts(width, hidden, self.tasks, shared, experts, count, dropout=dropout, batch_norm=batch_norm)
            for width, count in zip(inputs, gates, strict=True)
        )
        self.towers = nn.ModuleList(
            MLP(hidden[-1], tower, outputs, dropout=dropout, batch_norm=batch_norm) for outputs in schema.outputs
        )

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The columns of all tasks, side by side."""
        mixtures = [torch.cat([self.bags(sparse).values(), dense], dim=1)] * (self.tasks + 1)
        for level in self.levels:
            mixtures = level(mixtures)
        outputs: list[Tensor] = []
        for number, tower in enumerate(self.towers):
            outputs.append(tower(mixtures[number]))
        return torch.cat(outputs, dim=1)


class MMoE(PLE):
    """Experts that all tasks share, mixed for each task by a gate of its own: PLE's first level without tasks' experts.

    "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", Ma et al., 2018.

    Args:
        experts: number of experts, with layers ``hidden``.
        tower: widths of a task's layers before its columns of the output.
    """

    def __init__(
        self,
        schema: ClickSchema,
        *,
        dim: Size = 16,
        experts: Size = 4,
        hidden: Sizes = (128, 64),
        tower: Sizes = (32,),
        dropout: Share = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            schema,
            dim=dim,
            levels=1,
            experts=0,
            shared=experts,
            hidden=hidden,
            tower=tower,
            dropout=dropout,
            batch_norm=batch_norm,
        )


class _Experts(nn.Module):
    """Networks of the same layers, ``per_task`` for each of T tasks and ``shared`` for all, which gates mix.

    Args:
        inputs: columns of the inputs.
        hidden: widths of an expert's layers.
        tasks: T.
        shared: experts of all tasks.
        per_task: experts per task.
        gates: T. Each sees its task's experts and the shared experts. Or T + 1, where the last gate sees all.
        dropout: of :class:`MLP`.
        batch_norm: the same.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        tasks: int,
        shared: int,
        per_task: int,
        gates: int,
        *,
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        self.input_of = [task for task in range(tasks) for _ in range(per_task)] + [tasks] * shared
        numbers = [*range(len(self.input_of))]
        of_tasks = [[n for n in numbers if self.input_of[n] in (task, tasks)] for task in range(tasks)]
        self.mixed = [*of_tasks, numbers][:gates]
        self.experts = nn.ModuleList(MLP(inputs, hidden, dropout=dropout, batch_norm=batch_norm) for _ in numbers)
        self.gates = nn.ModuleList(nn.Linear(inputs, len(experts)) for experts in self.mixed)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """T + 1 inputs (B, inputs), of each task and of all, to a mixture (B, last width) for each gate."""
        outputs: list[Tensor] = []
        for number, expert in enumerate(self.experts):
            outputs.append(expert(inputs[self.input_of[number]]))
        mixtures: list[Tensor] = []
        for number, gate in enumerate(self.gates):
            shares_BE = gate(inputs[number]).softmax(1)
            experts_BED = torch.stack([outputs[n] for n in self.mixed[number]], dim=1)
            mixtures.append((shares_BE.unsqueeze(2) * experts_BED).sum(1))
        return mixtures
