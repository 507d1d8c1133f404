"""The unsharded model of a row, trained on the batches of all ranks: what the sharded one has to equal.

Each table and each dense parameter has an optimizer of its own, so that each is stepped when its kind of optimizer and
the row's ``update`` say. A table of 16 bits is one of float32 here, rounded after each update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.pairs.axes import Row
from tests.pairs.models import Batch, half_of, loss_of, make_model, special_tables, tables_of, weight_of

__all__ = ["CLIP", "DECAY", "SCALE", "Unsharded", "dense_optimizer", "table_optimizer"]

CLIP, SCALE, DECAY = 0.5, 8.0, 0.9
"""Largest norm of gradients; first scale of a GradScaler; factor of the learning rates after each step."""

OptimizerOf = tuple[type[torch.optim.Optimizer], dict[str, float]]


def table_optimizer(row: Row) -> OptimizerOf:
    """SGD, where copies of tables are averaged, of which the mean is the unsharded model's, and where torch's own
    states would have 16 bits."""
    if row.mode in ("replicas", "elastic") or row.table == "16 bit":
        return torch.optim.SGD, {"lr": 0.3}
    return torch.optim.Adagrad, {"lr": 0.3, "initial_accumulator_value": 0.1}


def dense_optimizer(row: Row) -> OptimizerOf:
    """An optimizer with states; where an ordinary one trains the tables, too, of its class."""
    if row.optimizer == "ordinary":
        made, settings = table_optimizer(row)
        return made, settings | {"lr": 0.1}
    if row.optimizer == "dense in backward":
        return torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}
    return torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}


class Unsharded:
    """The model and its optimizers.

    Attributes:
        model: with float32 tables of a row for each id.
        optimizers: by the name of a table in the plan, or of a dense parameter.
    """

    def __init__(self, row: Row, first: nn.Module) -> None:
        self.row = row
        self.model = make_model(row, 0, reference=True)
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, values in first.named_parameters():
                own[name].copy_(values[: len(own[name])])
        self.tables = {name: weight_of(self.model, name) for name in tables_of(row)}
        weights = set(map(id, self.tables.values()))
        self.dense = {name: parameter for name, parameter in own.items() if id(parameter) not in weights}
        self.optimizers: dict[str, Any] = {}
        for name, table in self.tables.items():
            if table.requires_grad:
                made, settings = table_optimizer(row)
                self.optimizers[name] = made([table], **settings)  # type: ignore[call-arg]
        self.begin_dense_anew()
        self._round()

    def begin_dense_anew(self) -> None:
        """Fresh optimizers of the dense part."""
        made, settings = dense_optimizer(self.row)
        for name, parameter in self.dense.items():
            self.optimizers[name] = made([parameter], **settings)  # type: ignore[call-arg]

    def begin_tables_anew(self, *, states: bool) -> None:
        """The first learning rates; fresh ``states``, too, or those that there are."""
        made, settings = table_optimizer(self.row)
        for name in self.tables.keys() & self.optimizers.keys():
            before = self.optimizers[name]
            self.optimizers[name] = made([self.tables[name]], **settings)  # type: ignore[call-arg]
            if not states:
                self.optimizers[name].state.update(before.state)

    def decay(self) -> None:
        """The learning rates of the next step."""
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] *= DECAY

    def outputs(self, of_ranks: Sequence[Batch]) -> list[Tensor]:
        """Per rank, without gradients."""
        with torch.no_grad():
            return [self.model(*batch[:3]) for batch in of_ranks]

    def step(
        self, micro_batches: Sequence[Sequence[Batch]], *, syncs: bool = True, overflows: bool = False
    ) -> list[list[Tensor]]:
        """An update.

        Args:
            micro_batches: of all ranks each.
            syncs: whether each backward averages, and not the last alone.
            overflows: whether a GradScaler skips the step.

        Returns:
            Outputs by micro-batch and rank.
        """
        row, outputs = self.row, []
        tables_in_backward = row.optimizer != "ordinary" and row.update == "backward"
        for number, of_ranks in enumerate(micro_batches):
            outputs.append([self.model(*batch[:3]) for batch in of_ranks])
            losses = [loss_of(logits, batch[3]) for logits, batch in zip(outputs[-1], of_ranks, strict=True)]
            (sum(losses) / len(losses) / len(micro_batches)).backward()  # type: ignore[union-attr]
            averages = syncs or number == len(micro_batches) - 1
            waits = special_tables(row) if row.table == "replicated" and not averages else []
            if tables_in_backward:
                self._update([name for name in self.tables if name not in waits])
            if row.optimizer == "dense in backward" and averages:
                self._update(list(self.dense))
        if row.gradients == "clipping":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        if overflows:
            self.model.zero_grad()
        self._update(list(self.optimizers))
        return [[logits.detach() for logits in of_ranks] for of_ranks in outputs]

    def _update(self, names: Sequence[str]) -> None:
        """Step and drop the gradients of tables or parameters."""
        for name in names:
            if name in self.optimizers:
                self.optimizers[name].step()
                self.optimizers[name].zero_grad()
        self._round()

    def _round(self) -> None:
        if self.row.table == "16 bit":
            for name in special_tables(self.row):
                with torch.no_grad():
                    self.tables[name].copy_(self.tables[name].to(half_of(self.row)))

    def states(self, name: str) -> dict[str, Tensor]:
        """The optimizer's states of a table or dense parameter."""
        if name not in self.optimizers:
            return {}
        (parameter,) = self.optimizers[name].param_groups[0]["params"]
        return dict(self.optimizers[name].state.get(parameter, {}))

    def rate(self, name: str) -> float:
        """Its learning rate."""
        return float(self.optimizers[name].param_groups[0]["lr"])
