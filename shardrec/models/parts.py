"""What the models share: tables of a schema, layers with dropout and batch norm, the factorization machine, experts.

Legend: B rows, F features, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from shardrec.data import ClickSchema
from shardrec.errors import ConfigError

__all__ = [
    "MLP",
    "Experts",
    "FactorizationMachine",
    "Share",
    "Size",
    "Sizes",
    "activation",
    "item_rows",
    "pooled_features",
]

Size: TypeAlias = Annotated[int, Field(gt=0)]
Sizes: TypeAlias = tuple[Size, ...]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""What the constructors' arguments are, as shardrec.train.model checks them."""


def pooled_features(
    schema: ClickSchema, dim: int, *, dims: Mapping[str, int] | None = None, features: Sequence[str] | None = None
) -> EmbeddingBagCollection:
    """A table on meta for each feature, or each of ``features``; ``dims`` has other numbers of columns, by feature."""
    sizes, dims = dict(zip(schema.sparse_names, schema.num_embeddings, strict=True)), dims or {}
    features = schema.sparse_names if features is None else features
    _check_features(schema, [*features, *dims])
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{feature}",
                embedding_dim=dims.get(feature, dim),
                num_embeddings=sizes[feature],
                feature_names=[feature],
            )
            for feature in features
        ],
        is_weighted=schema.weighted,
        device=torch.device("meta"),
    )


def item_rows(schema: ClickSchema, dim: int, *, history: str, item: str) -> EmbeddingCollection:
    """One table on meta for the ids of a history and of the items to score, with a row for each id."""
    _check_features(schema, [history, item])
    items, others = (schema.num_embeddings[schema.sparse_names.index(feature)] for feature in (item, history))
    if items != others:
        raise ConfigError(
            f"features {history!r} and {item!r} share a table and have {others:,} and {items:,} rows: give both the "
            "same rows in the features file (--features)"
        )
    table = EmbeddingConfig(
        name=f"t_{item}",
        num_embeddings=items,
        embedding_dim=dim,
        feature_names=[history, item],
        init_fn=lambda weight: nn.init.normal_(weight, std=0.02),
    )
    return EmbeddingCollection(tables=[table], device=torch.device("meta"))


def _check_features(schema: ClickSchema, features: Sequence[str]) -> None:
    missing = [feature for feature in features if feature not in schema.sparse_names]
    if missing:
        raise ConfigError(
            f"the data has no feature {', '.join(map(repr, missing))} with a table; those that it has are "
            f"{', '.join(map(repr, schema.sparse_names))}: name them in the model's arguments (--model-arg)"
        )


class BatchNorm(nn.BatchNorm1d):
    """Batch norm that takes a rank's batch of no row or one, such as the last of an epoch, by the running means."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, D) to (B, D)."""
        learns = self.training and input.size(0) > 1
        momentum = 0.1 if self.momentum is None else self.momentum
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(input, mean, var, self.weight, self.bias, learns, momentum, self.eps)


def activation(width: int, dropout: float, batch_norm: bool) -> nn.Module:
    """What follows a hidden layer: batch norm, ReLU, dropout."""
    before = [BatchNorm(width)] if batch_norm else []
    after = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*before, nn.ReLU(), *after)


class MLP(nn.Sequential):
    """From (B, inputs): hidden layers, each with :func:`activation`; then a linear one where ``outputs`` is above 0."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int = 0, *, dropout: float = 0.0, batch_norm: bool = False
    ) -> None:
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(inputs, width), activation(width, dropout, batch_norm)]
            inputs = width
        super().__init__(*layers, *([nn.Linear(inputs, outputs)] if outputs else []))


class FactorizationMachine(nn.Module):
    """The dot products of all pairs of features, added up ("Factorization Machines", Rendle, 2010)."""

    def forward(self, features: Tensor) -> Tensor:
        """(B, F, D) to (B,)."""
        pairs_BD = features.sum(1).square() - features.square().sum(1)
        return pairs_BD.sum(1) / 2


class Experts(nn.Module):
    """Networks of the same layers, ``single`` for each of T tasks and ``shared`` for all, which gates mix.

    Args:
        inputs: columns of the inputs.
        hidden: widths of an expert's layers.
        tasks: T.
        shared: experts of all tasks.
        single: experts of each task.
        gates: T, each of which sees its task's experts and the shared ones; or T + 1, the last of which sees all.
        settings: dropout and batch norm, as :class:`MLP` takes them.
    """

    def __init__(
        self, inputs: int, hidden: Sequence[int], tasks: int, shared: int, single: int, gates: int, **settings: Any
    ) -> None:
        super().__init__()
        self.input_of = [task for task in range(tasks) for _ in range(single)] + [tasks] * shared
        numbers = [*range(len(self.input_of))]
        of_tasks = [[n for n in numbers if self.input_of[n] in (task, tasks)] for task in range(tasks)]
        self.mixed = [*of_tasks, numbers][:gates]
        self.experts = nn.ModuleList(MLP(inputs, hidden, **settings) for _ in numbers)
        self.gates = nn.ModuleList(nn.Linear(inputs, len(experts)) for experts in self.mixed)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """T + 1 inputs (B, inputs), those of each task and of all, to a mixture (B, last width) for each gate."""
        outputs: list[Tensor] = []
        for number, expert in enumerate(self.experts):
            outputs.append(expert(inputs[self.input_of[number]]))
        mixtures: list[Tensor] = []
        for number, gate in enumerate(self.gates):
            shares_BE = gate(inputs[number]).softmax(1)
            experts_BED = torch.stack([outputs[n] for n in self.mixed[number]], dim=1)
            mixtures.append((shares_BE.unsqueeze(2) * experts_BED).sum(1))
        return mixtures
