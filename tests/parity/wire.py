"""How far outputs and gradients may be off because they travelled in fewer bits: bounds computed, not guessed.

A float format errs by ``ERROR`` of each number. The sum of a bag arrives in partial sums, one per row block, whose
errors add up to that part of the sum of *absolute* values; so a bound is an unsharded forward over absolute weights,
and for a row's gradient its backward from absolute gradients. INT8 errs by 1/255 of the largest number of the row that
travels, which holds the columns of all the tables of a rank. What is summed inside a host travels, and errs, twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.parity.cases import Case
from tests.plans import sums_inside_hosts

__all__ = ["WireBounds"]

ERROR = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 255}
ROUNDING = 1.02
"""That the second of two errors is of a number with the first, and that a scale is rounded, too."""


class WireBounds:
    """Bounds of a case's outputs and gradients.

    Args:
        case: says in which format they travel.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        plan = case.plan()
        self._replicated = {layout.name for layout in plan.tables if layout.replicated}
        self._blocks = {
            layout.name: max((len(stripe.shards) for stripe in layout.stripes()), default=0) for layout in plan.tables
        }
        hops = 2 if case.pooled and sums_inside_hosts(plan) else 1
        self._error = 0.0 if plan.world_size == 1 else ERROR[case.comms] * hops * ROUNDING
        self._rows_share_a_scale = case.comms == "int8"
        self._module: EmbeddingBagCollection | EmbeddingCollection
        if case.pooled:
            # Of sums, where bags are means: an upper bound, too.
            configs = [replace(one, pooling=PoolingType.SUM) for one in case.bag_configs(reference=True)]
            self._module = EmbeddingBagCollection(tables=configs, is_weighted=case.weights != "none")
        else:
            self._module = EmbeddingCollection(tables=case.sequence_configs(reference=True))

    def __call__(
        self, weights: Mapping[str, Tensor], features: KeyedJaggedTensor, gradients: Sequence[Tensor], samples: int
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Bounds of a step; made on all ranks together.

        Args:
            weights: of each table before the step.
            features: this rank's batch.
            gradients: of each part of the output.
            samples: of the batch, maybe 0.

        Returns:
            Per part of the output, and per table for the averaged gradient of its weights.
        """
        parameters = self._fill(weights)
        allowed: list[Tensor] = [torch.zeros(()) for _ in gradients]
        if samples:
            found = self._module(features)
            parts = (
                list(found.values().split(found.length_per_key(), dim=1))
                if self._case.pooled
                else [one.values() for one in found.values()]
            )
            allowed = [
                self._error * one * blocks for one, blocks in zip(self._spread(parts), self._factors(), strict=True)
            ]
            upstream = self._spread([one.abs() for one in gradients])
            torch.cat([one.reshape(-1) for one in parts]).backward(torch.cat([one.reshape(-1) for one in upstream]))
        names = list(parameters)
        flat = torch.cat(
            [(one.new_zeros(one.shape) if one.grad is None else one.grad).reshape(-1) for one in parameters.values()]
        )
        dist.all_reduce(flat)
        flat.mul_(self._error / dist.get_world_size())
        errors = {
            name: part.view_as(parameters[name])
            for name, part in zip(names, flat.split([one.numel() for one in parameters.values()]), strict=True)
            if name not in self._replicated
        }
        return [one.detach() for one in allowed], errors

    def _fill(self, weights: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        tables = self._module.embedding_bags if self._case.pooled else self._module.embeddings
        found: dict[str, nn.Parameter] = {name: tables[name].weight for name in weights}  # type: ignore[index,union-attr,misc]
        for name, parameter in found.items():
            size = weights[name].detach().abs()
            with torch.no_grad():
                parameter.copy_(size.amax(1, keepdim=True).expand_as(size) if self._rows_share_a_scale else size)
            parameter.grad = None
        return found

    def _factors(self) -> list[int]:
        """Of each part of the output: 0 if it does not travel; with a common scale, the errors of its blocks add up."""
        factors = []
        for table, features in self._case.features().items():
            one = 0 if table in self._replicated else 1
            factors += [one * (self._blocks[table] if self._rows_share_a_scale else 1)] * len(features)
        return factors

    def _spread(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """With a scale per row, each number as large as its row's largest."""
        if not self._rows_share_a_scale:
            return list(parts)
        if not self._case.pooled:
            return [one.amax(1, keepdim=True).expand_as(one) if one.numel() else one for one in parts]
        largest = torch.cat(list(parts), dim=1).amax(1, keepdim=True)
        return [largest.expand_as(one) for one in parts]
