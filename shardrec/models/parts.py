"""What the models share: tables of a schema, layers with dropout and batch norm, and the factorization machine.

Legend: B rows, F features, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

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
    "FactorizationMachine",
    "ItemCounts",
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


class ItemCounts(nn.Module):
    """How often each item was clicked so far, from which follows how likely it is drawn as a negative: its Q.

    Exact counts in place of the hashed intervals of "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations", Yi et al., 2019. They are a buffer: of several ranks, the first one's clicks count.
    """

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.counts: Tensor
        self.register_buffer("counts", torch.ones(num_items, dtype=torch.int64))

    def add(self, ids_N: Tensor) -> None:
        """Count some items, in training."""
        if self.training:
            self.counts.index_add_(0, ids_N, torch.ones_like(ids_N))

    def draw(self, number: int) -> Tensor:
        """Items by their shares, with replacement: int64 (number,)."""
        ends = self.counts.cumsum(0)
        places = (torch.rand(number, device=ends.device, dtype=torch.float64) * ends[-1]).long()
        return torch.searchsorted(ends, places, right=True)

    def log_q(self, ids_N: Tensor) -> Tensor:
        """Logs of the items' shares: float32 (N,)."""
        return (self.counts[ids_N].float() / self.counts.sum()).log()
