"""Embedding bag collections and a small click model, sharded and not, from the same description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import COLUMN_UNIT
from tests.worker import seed_torch

__all__ = [
    "OPTIMIZERS",
    "ClickModel",
    "InBackward",
    "LazyAdam",
    "apply_optimizer_in_backward",
    "click_model",
    "collection",
    "feature_rows",
    "random_configs",
    "table_sizes",
]


class LazyAdam(torch.optim.Optimizer):
    """Adam that leaves the rows without gradient alone: what the fused Adam must equal. Dense, and by hand.

    A parameter with an attribute ``looked_up`` (rows,) has those rows updated instead: of a cut table, the moments of a
    row that is looked up and whose gradient is zero decay.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not for this one
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(t=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
                state["t"] += 1
                row = getattr(parameter, "looked_up", parameter.grad.any(dim=1))
                gradient = parameter.grad[row]
                state["m"][row] = 0.9 * state["m"][row] + 0.1 * gradient
                state["v"][row] = 0.999 * state["v"][row] + 0.001 * gradient * gradient
                root = (state["v"][row] / (1 - 0.999 ** state["t"])).sqrt() + 1e-8
                parameter[row] -= group["lr"] * (state["m"][row] / (1 - 0.9 ** state["t"])) / root


@dataclass(frozen=True, kw_only=True)
class InBackward:
    """An optimizer for ``apply_optimizer_in_backward``.

    Args:
        optimizer: the class that a user gives; None to give the tables to an ordinary dense Adam.
        settings: its keyword arguments.
        reference: the class that the unsharded tables are trained with, where it is another.
    """

    optimizer: type[torch.optim.Optimizer] | None
    settings: Mapping[str, Any]
    reference: type[torch.optim.Optimizer] | None = None


OPTIMIZERS: Mapping[str, InBackward] = {
    "sgd": InBackward(optimizer=torch.optim.SGD, settings={"lr": 0.5}),
    "adagrad": InBackward(optimizer=torch.optim.Adagrad, settings={"lr": 0.5, "initial_accumulator_value": 0.1}),
    "rowwise_adagrad": InBackward(optimizer=torchrec.optim.RowWiseAdagrad, settings={"lr": 0.5}),
    "adam": InBackward(optimizer=torch.optim.Adam, settings={"lr": 0.1}, reference=LazyAdam),
    "none": InBackward(optimizer=None, settings={}),
}


def random_configs(rng: Random, *, weighted: bool = False, most: int = 4) -> list[EmbeddingBagConfig]:
    """1 to ``most`` tables with features shared between them, sum- and (without weights) mean-pooled."""
    return [
        EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=rng.choice([1, 2, 7, 13, 29]),
            embedding_dim=COLUMN_UNIT * rng.randint(1, 4),
            feature_names=rng.sample("abcd", rng.choice([1, 1, 1, 2, 3])),
            pooling=PoolingType.SUM if weighted else rng.choice([PoolingType.SUM, PoolingType.MEAN]),
        )
        for number in range(rng.randint(1, most))
    ]


def collection(
    configs: Sequence[EmbeddingBagConfig],
    *,
    weighted: bool = False,
    optimizers: Sequence[str] | str = "none",
    reference: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> EmbeddingBagCollection:
    """An unsharded collection.

    Args:
        configs: its tables.
        weighted: ids come with weights.
        optimizers: a key of :data:`OPTIMIZERS` for each table, or one for all.
        reference: give the tables the optimizers that the sharded ones are compared with.
        seed: of the first values.
        device: where the tables are.
    """
    seed_torch(seed)
    module = EmbeddingBagCollection(tables=list(configs), is_weighted=weighted, device=torch.device(device))
    names = [optimizers] * len(configs) if isinstance(optimizers, str) else optimizers
    for config, name in zip(configs, names, strict=True):
        choice = OPTIMIZERS[name]
        if choice.optimizer is not None:
            cls = choice.reference if reference and choice.reference else choice.optimizer
            parameters = module.embedding_bags[config.name].parameters()
            apply_optimizer_in_backward(cls, parameters, dict(choice.settings))
    return module


def table_sizes(configs: Sequence[EmbeddingBagConfig], path: str = "") -> dict[str, tuple[int, int]]:
    """(rows, columns) of each table by its name in a plan."""
    prefix = f"{path}." if path else ""
    return {prefix + config.name: (config.num_embeddings, config.embedding_dim) for config in configs}


def feature_rows(configs: Sequence[EmbeddingBagConfig]) -> dict[str, int]:
    """Per feature, ids must be below this: the rows of its smallest table."""
    rows: dict[str, int] = {}
    for config in configs:
        for feature in config.feature_names:
            rows[feature] = min(config.num_embeddings, rows.get(feature, config.num_embeddings))
    return rows


class ClickModel(nn.Module):
    """Dense columns through a layer, pooled features through another, to one logit per sample.

    Args:
        sparse: the embedding bags.
        dense_first: whether the dense layer runs before the lookup.
        columns: dense columns of a sample.
    """

    def __init__(self, sparse: nn.Module, *, pooled: int, dense_first: bool = False, columns: int = 3) -> None:
        super().__init__()
        self.sparse = sparse
        self.bottom = nn.Linear(columns, 8)
        self.norm = nn.LayerNorm(8)
        self.top = nn.Linear(8 + pooled, 1)
        self.dense_first = dense_first

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        if self.dense_first:
            hidden = self._hidden(dense)
            pooled = self.sparse(features)
        else:
            pooled = self.sparse(features)
            hidden = self._hidden(dense)
        logits: Tensor = self.top(torch.cat([hidden, pooled.values()], dim=1)).squeeze(1)
        return logits

    def _hidden(self, dense: Tensor) -> Tensor:
        hidden: Tensor = self.norm(torch.relu(self.bottom(dense)))
        return hidden


def click_model(
    configs: Sequence[EmbeddingBagConfig], *, optimizer: str = "sgd", dense_first: bool = False, seed: int = 0
) -> ClickModel:
    """A :class:`ClickModel` on a collection of ``configs``, the same for the same seed."""
    sparse = collection(configs, optimizers=optimizer, seed=seed)
    pooled = sum(config.embedding_dim * len(config.feature_names) for config in configs)
    return ClickModel(sparse, pooled=pooled, dense_first=dense_first)
