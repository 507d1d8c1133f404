"""Training with dynamic ids beside training with a perfect table, in which each life of an id has a row of its own.

An id that is evicted ends a life; when it comes back it begins another, from the first values. Ids without a row are
rows of zeros, or those of the fallback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, TableLayout
from tests.ids.reference import DictMap, mixed
from tests.models import OPTIMIZERS, apply_optimizer_in_backward

__all__ = [
    "DIM",
    "FEATURES",
    "ROWS",
    "Bags",
    "Batches",
    "Model",
    "Oracle",
    "dynamic_step",
    "kjt",
    "loss_of",
    "model_of",
    "perfect_step",
    "raw_batches",
]

FEATURES = {"f": "users", "g": "goods", "h": "goods", "p": "plain"}
"""The table of each feature; the ids of ``users`` and ``goods`` are dynamic."""

ROWS = {"users": 12, "goods": 24, "plain": 9}
DIM = 8

Bags = Mapping[str, Sequence[Sequence[int]]]
"""Per feature and sample, its ids."""

Batches = Sequence[Sequence[Bags]]
"""Per step and rank."""


class Model(nn.Module):
    """A collection of the three tables, all of whose rows begin alike.

    Args:
        optimizer: a key of ``OPTIMIZERS``.
        rows: of each table.
    """

    pooled: bool

    def __init__(self, optimizer: str, rows: Mapping[str, int]) -> None:
        super().__init__()
        config: Any = EmbeddingBagConfig if self.pooled else EmbeddingConfig
        configs = [
            config(
                name=name,
                num_embeddings=rows[name],
                embedding_dim=DIM,
                feature_names=[feature for feature, table in FEATURES.items() if table == name],
                init_fn=lambda values: nn.init.constant_(values, 0.25),
            )
            for name in ROWS
        ]
        kind: Any = EmbeddingBagCollection if self.pooled else EmbeddingCollection
        self.sparse = kind(tables=configs)
        choice = OPTIMIZERS[optimizer]
        assert choice.optimizer is not None
        apply_optimizer_in_backward(choice.optimizer, self.sparse.parameters(), dict(choice.settings))


class Pooled(Model):
    """Sums of bags."""

    pooled = True

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, 4 · DIM)."""
        return self.sparse(features).values()


class Rows(Model):
    """A row for each id."""

    pooled = False

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(N, DIM), feature after feature."""
        found = self.sparse(features)
        return torch.cat([found["f"].values(), found["g"].values(), found["h"].values(), found["p"].values()])


def model_of(pooled: bool, optimizer: str, rows: Mapping[str, int] = ROWS) -> Model:
    """A model of the one kind or the other."""
    return (Pooled if pooled else Rows)(optimizer, rows)


def kjt(bags: Bags) -> KeyedJaggedTensor:
    ids = [one for feature in FEATURES for bag in bags[feature] for one in bag]
    lengths = [len(bag) for feature in FEATURES for bag in bags[feature]]
    return KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )


def raw_batches(rng: Random, steps: int, world_size: int, ids: int = 30, drift: int = 3) -> Batches:
    """Any ids, of which some give way to others as time goes by."""

    def raw(step: int) -> int:
        number = min(int(rng.paretovariate(0.7)), ids) + drift * step
        return mixed(number) - 2**63 if number % 5 else -number

    def bag(feature: str, step: int) -> list[int]:
        rows = ROWS["plain"] if feature == "p" else 0
        return [rng.randrange(rows) if rows else raw(step) for _ in range(rng.choice([0, 1, 1, 3]))]

    return [
        [
            {feature: [bag(feature, step) for _ in range(samples)] for feature in FEATURES}
            for samples in rng.choices([0, 1, 4], k=world_size)
        ]
        for step in range(steps)
    ]


class Oracle:
    """What becomes of raw ids.

    Args:
        plan: of the sharded model.
        options: of the tables with dynamic ids, by their own names.
        dedup: distinct ids of a table and rank are looked up, sorted.
    """

    def __init__(self, plan: ShardingPlan, options: Mapping[str, DynamicIds], *, dedup: bool) -> None:
        self._layouts: dict[str, TableLayout] = {name: plan.by_name[f"sparse.{name}"] for name in options}
        self._options, self._dedup = options, dedup
        self.maps: dict[tuple[str, int], DictMap] = {}
        for name, layout in self._layouts.items():
            for shard in layout.stripes()[0].shards:
                capacity = shard.rows - options[name].fallback_rows
                self.maps[name, shard.row_start] = DictMap(shard.rows, options[name], capacity)
        self._lives: dict[tuple[str, int, int], int] = {}  # table, first row and row, of one that an id has
        self.perfect = dict(ROWS)
        for name in options:
            self.perfect[name] = 1  # row 0 is looked up, and masked, where there are zeros
        self.step = 0

    def block(self, table: str, raw: int) -> int:
        """First row of the block that an id belongs to."""
        layout = self._layouts[table]
        home = (mixed(raw) >> 32) * layout.num_embeddings >> 32
        return max(one.row_start for one in layout.stripes()[0].shards if one.row_start <= home)

    def learn(self, ranks: Sequence[Bags]) -> list[Bags]:
        """A step: the rows of the perfect table, -1 where there are zeros."""
        self.step += 1
        for (table, start), one in self.maps.items():
            ids = []
            lookups = [[feature] for feature, of in FEATURES.items() if of == table]
            if self._dedup:
                lookups = [[feature for features in lookups for feature in features]]
            for features in lookups:
                for bags in ranks:
                    found = [raw for feature in features for bag in bags[feature] for raw in bag]
                    ids += sorted(set(found)) if self._dedup else found
            _, evicted = one.learn([raw for raw in ids if self.block(table, raw) == start], self.step)
            for row in evicted:
                del self._lives[table, start, row]
        return self.rows(ranks)

    def rows(self, ranks: Sequence[Bags]) -> list[Bags]:
        """The rows of the perfect table as the maps are."""
        return [
            {feature: [[self._row(feature, raw) for raw in bag] for bag in bags[feature]] for feature in FEATURES}
            for bags in ranks
        ]

    def _row(self, feature: str, raw: int) -> int:
        table = FEATURES[feature]
        if table not in self._options:
            return raw
        start = self.block(table, raw)
        (row,) = self.maps[table, start].frozen([raw])
        if row < 0:
            return -1
        key = table, start, row
        if key not in self._lives:
            self._lives[key] = self.perfect[table]
            self.perfect[table] += 1
        return self._lives[key]


def loss_of(values: Tensor, seed: int) -> Tensor:
    """Squares of the distances to targets, which the place of a value tells."""
    places = torch.arange(values.numel(), dtype=torch.float32).view(values.shape)
    return (values - (places * 0.37 + seed).sin()).square().sum()


def perfect_step(model: Model, sharded: nn.Module, ranks: Sequence[Bags], seed: int) -> list[Tensor]:
    """A step of a perfect table with the batches of all ranks, where ids below 0 are zeros; the output of each rank."""
    merged: dict[str, list[list[int]]] = {
        feature: [bag for bags in ranks for bag in bags[feature]] for feature in FEATURES
    }
    if model.pooled:
        given = {feature: [[one for one in bag if one >= 0] for bag in some] for feature, some in merged.items()}
        outputs = list(sharded(kjt(given)).split([len(bags["f"]) for bags in ranks]))
    else:
        values = sharded(kjt({name: [[max(one, 0) for one in bag] for bag in some] for name, some in merged.items()}))
        zero = torch.tensor([one < 0 for some in merged.values() for bag in some for one in bag], dtype=torch.bool)
        values = values.masked_fill(zero.unsqueeze(1), 0)
        counts = [sum(map(len, bags[feature])) for feature in FEATURES for bags in ranks]
        parts = values.split(counts)
        outputs = [torch.cat(parts[rank :: len(ranks)]) for rank in range(len(ranks))]
    (torch.stack([loss_of(one, seed) for one in outputs]).sum() / len(ranks)).backward()
    return [one.detach().clone() for one in outputs]


def dynamic_step(sharded: nn.Module, bags: Bags, seed: int) -> Tensor:
    """A step of one rank with raw ids; its output."""
    values: Tensor = sharded(kjt(bags))
    loss_of(values, seed).backward()
    return values.detach().clone()
