"""What the models share: tables of a schema, layers with dropout and batch norm, counts of items.

Legend: B rows, F features, D columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import ConfigError
from shardrec.trainer.data import ClickSchema

Size: TypeAlias = Annotated[int, Field(gt=0)]
Sizes: TypeAlias = tuple[Size, ...]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
"""What the constructors' arguments are, as shardrec.trainer.run.model checks them."""


def pooled_features(schema: ClickSchema, dim: int, *, features: Sequence[str] | None = None) -> EmbeddingBagCollection:
    """The tables, on meta, of all features or of ``features``, with ``dim`` columns where the schema says nothing.

    The pooled columns come table by table, in the order of the tables' first features.
    """
    features = schema.sparse_names if features is None else features
    _check_features(schema, features)
    tables: dict[str, EmbeddingBagConfig] = {}
    for feature, size, width, table in zip(
        schema.sparse_names, schema.num_embeddings, schema.dims, schema.tables, strict=True
    ):
        if feature in features:
            config = EmbeddingBagConfig(name=table, num_embeddings=size, embedding_dim=width or dim, feature_names=[])
            tables.setdefault(table, config).feature_names.append(feature)
    return EmbeddingBagCollection(tables=[*tables.values()], is_weighted=schema.weighted, device=torch.device("meta"))


def columns_of(bags: EmbeddingBagCollection) -> list[str]:
    """The feature per pooled column."""
    tables = bags.embedding_bag_configs()
    return [name for table in tables for name in table.feature_names for _ in range(table.embedding_dim)]


class FeatureVectors(nn.Module):
    """The pooled rows of all features as vectors of D columns: KeyedJaggedTensor to (B, F, D).

    Rows of another width go through a learned linear map ("Mixed Dimension Embeddings with Application to
    Memory-Efficient Recommendation Systems", Ginart et al., 2019).
    """

    def __init__(self, schema: ClickSchema, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.bags = pooled_features(schema, dim)
        self.widths = [*Counter(columns_of(self.bags)).values()]
        self.maps = nn.ModuleList(
            nn.Identity() if width == dim else nn.Linear(width, dim, bias=False) for width in self.widths
        )

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        vectors = list(self.bags(sparse).values().split(self.widths, dim=1))
        for number, mapped in enumerate(self.maps):
            vectors[number] = mapped(vectors[number])
        return torch.stack(vectors, dim=1)


def item_rows(schema: ClickSchema, dim: int, *, history: str, item: str) -> EmbeddingCollection:
    """One table on meta for the ids of a history and of the items to score, with a row for each id."""
    _check_features(schema, [history, item])
    items, others = (schema.num_embeddings[schema.sparse_names.index(feature)] for feature in (item, history))
    names, dims = (dict(zip(schema.sparse_names, values, strict=True)) for values in (schema.tables, schema.dims))
    if items != others or dims[history] not in (None, dims[item]):
        raise ConfigError(
            f"features {history!r} and {item!r} share a table and have {others:,} and {items:,} rows, dim "
            f"{dims[history] or dim} and {dims[item] or dim}: give feature {history!r} share: {item} in the features "
            "file (--features), instead of rows and dim of its own"
        )
    for feature in schema.sparse_names:
        if feature not in (history, item) and names[feature] in (names[history], names[item]):
            raise ConfigError(
                f"feature {feature!r} shares the table of {item!r}, which this model looks up without pooling, for "
                f"{history!r} and {item!r} alone: leave its share out in the features file (--features)"
            )
    table = EmbeddingConfig(
        name=names[item],
        num_embeddings=items,
        embedding_dim=dims[item] or dim,
        feature_names=[history, item],
        init_fn=lambda weight: nn.init.normal_(weight, std=0.02),
    )
    return EmbeddingCollection(tables=[table], device=torch.device("meta"))


def check_one_each(lengths_B: Tensor) -> None:
    """Fail if a row has no id of the item's feature, or several. Their vectors would go to other rows.

    Args:
        lengths_B: number of ids per row.

    Raises:
        RuntimeError: immediately on the CPU, and when the device comes to it on CUDA.
    """
    torch._assert_async((lengths_B == 1).all(), "a row lacks an item, or has several: the model takes one in each row")


def _check_features(schema: ClickSchema, features: Sequence[str]) -> None:
    missing = [feature for feature in features if feature not in schema.sparse_names]
    if missing:
        raise ConfigError(
            f"the data lacks a feature {', '.join(map(repr, missing))} with a table. Its features are "
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

    Exact counts instead of the hashed intervals of "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
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
