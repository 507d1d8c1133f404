"""Models of the structures that TorchRec's tests of ``DistributedModelParallel`` shard, and their batches.

Each has a dense layer with a parameter and a buffer that nothing uses, embeddings, and layers over both. In training
mode a model returns its loss and its prediction, else the prediction alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["MODELS", "Batch", "random_batch"]

FLOATS = 16
"""Dense columns of a sample."""
LONGEST = 6
"""Ids of a bag, and rows of a sequence, at most."""
SAMPLES = 4

ROWS = {f"f{number}": 10 * (number + 1) for number in range(4)}
WEIGHTED_ROWS = {f"w{number}": 10 * (number + 1) for number in range(2)}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's batch, as the sharded model takes it; :meth:`full` is the same for the unsharded one.

    Args:
        floats: (``SAMPLES``, ``FLOATS``) dense columns.
        labels: (``SAMPLES``,) in [0, 1].
        ids: without weights.
        weighted: with weights, or None.
    """

    floats: Tensor
    labels: Tensor
    ids: KeyedJaggedTensor
    weighted: KeyedJaggedTensor | None

    def full(self) -> Batch:
        """Each sample with a bag of its own: those that inverse indices choose, or empty ones behind the others."""
        weighted = None if self.weighted is None else _full(self.weighted)
        return Batch(floats=self.floats, labels=self.labels, ids=_full(self.ids), weighted=weighted)


def _full(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    inverse, weights = features.inverse_indices_or_none(), features.weights_or_none()
    bags = list(features.values().split(features.lengths().tolist()))
    chosen, first = [], 0
    for number, size in enumerate(features.stride_per_key()):
        own = bags[first : first + size]
        empty = [features.values()[:0]] * (SAMPLES - size)
        chosen += [*own, *empty] if inverse is None else [own[bag] for bag in inverse[1][number].tolist()]
        first += size
    assert weights is None or inverse is None, "weights stay where they are"
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat(chosen),
        lengths=torch.tensor([len(bag) for bag in chosen]),
        weights=weights,
    )


def random_batch(
    rng: Random, *, bags: int = SAMPLES, each: bool = False, dtype: torch.dtype = torch.int64, offsets: bool = False
) -> Batch:
    """Features with ``bags`` bags, or with a number of bags of their own ``each``, and inverse indices."""

    def features(rows: Mapping[str, int], weighted: bool) -> KeyedJaggedTensor:
        sizes = [rng.randint(1, SAMPLES) if each else bags for _ in rows]
        lengths = [[rng.randrange(LONGEST) for _ in range(size)] for size in sizes]
        ids = [rng.randrange(limit) for limit, own in zip(rows.values(), lengths, strict=True) for _ in range(sum(own))]
        flat = torch.tensor([length for own in lengths for length in own], dtype=dtype)
        chosen = torch.tensor([[rng.randrange(size) for _ in range(SAMPLES)] for size in sizes]) if each else None
        return KeyedJaggedTensor(
            keys=list(rows),
            values=torch.tensor(ids, dtype=dtype),
            lengths=None if offsets else flat,
            offsets=nn.functional.pad(flat.cumsum(0), [1, 0]).to(dtype) if offsets else None,
            weights=torch.tensor([rng.random() for _ in ids]) if weighted else None,
            stride=None if each else bags,
            stride_per_key_per_rank=[[size] for size in sizes] if each else None,
            inverse_indices=None if chosen is None else (list(rows), chosen),
        )

    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return Batch(
        floats=torch.rand(SAMPLES, FLOATS, generator=generator),
        labels=torch.rand(SAMPLES, generator=generator),
        ids=features(ROWS, False),
        # As in TorchRec's tests, there are no weighted features where each has a number of bags of its own.
        weighted=None if each else features(WEIGHTED_ROWS, True),
    )


class Dense(nn.Module):
    """A layer beside a parameter and a buffer that take no part in anything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FLOATS, 8)
        self.unused = nn.Parameter(torch.zeros(2))
        self.register_buffer("unused_buffer", torch.zeros(1))

    def forward(self, floats: Tensor) -> Tensor:
        hidden: Tensor = self.linear(floats)
        return hidden


class Net(nn.Module):
    """What the models have in common: ``embedded`` gives the (B, ``columns``) embeddings of a batch."""

    def __init__(self, columns: int, *, deep: bool = False) -> None:
        super().__init__()
        self.dense = Dense()
        self.over = nn.Sequential(nn.Linear(8 + columns, 16), *([nn.Linear(16, 16)] if deep else []))

    def embedded(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        hidden = self.over(torch.cat([self.dense(batch.floats), self.embedded(batch)], dim=1))
        prediction = torch.sigmoid(hidden.mean(dim=1))
        if not self.training:
            return prediction
        return nn.functional.binary_cross_entropy_with_logits(prediction, batch.labels), prediction


def _filled(columns: Tensor) -> Tensor:
    """Zeros for the samples that have no bags."""
    return nn.functional.pad(columns, [0, 0, 0, SAMPLES - columns.size(0)])


class Bags(Net):
    """A collection whose first two features are looked up in two tables each, and a weighted one."""

    def __init__(self, pooling: PoolingType, dtype: DataType, weighted: bool) -> None:
        tables, of_weights = bag_tables(pooling, dtype)
        names = [f"f{number}@t{number}" if number < 2 else f"f{number}" for number in range(4)]
        of_weights = of_weights if weighted else []
        super().__init__(sum(table.embedding_dim for table in [*tables, *of_weights]), deep=True)
        self.names = [*names, "f0@t4", "f1@t5", *WEIGHTED_ROWS] if weighted else [*names, "f0@t4", "f1@t5"]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.weighted = EmbeddingBagCollection(tables=of_weights, is_weighted=True) if weighted else None

    def embedded(self, batch: Batch) -> Tensor:
        pooled = [self.bags(batch.ids)]
        if self.weighted is not None:
            pooled.append(self.weighted(batch.weighted))
        return _filled(KeyedTensor.regroup(pooled, [self.names])[0])


class Interaction(nn.Module):
    """Of a tower."""

    def __init__(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.columns = sum(table.embedding_dim for table in tables)
        self.features = [feature for table in tables for feature in table.feature_names]
        self.linear = nn.Linear(self.columns, self.columns)

    def forward(self, pooled: KeyedTensor) -> Tensor:
        mixed: Tensor = self.linear(torch.cat([pooled[feature] for feature in self.features], dim=1))
        return mixed


def _tower(tables: Sequence[EmbeddingBagConfig], *, weighted: bool = False) -> EmbeddingTower:
    module = EmbeddingBagCollection(tables=list(tables), is_weighted=weighted)
    return EmbeddingTower(embedding_module=module, interaction_module=Interaction(tables))


class Towers(Net):
    """Two towers beside collections that are in none."""

    def __init__(self, pooling: PoolingType, dtype: DataType, weighted: bool) -> None:
        tables, of_weights = bag_tables(pooling, dtype)
        super().__init__(sum(table.embedding_dim for table in [*tables[:4], of_weights[0]]))
        self.first, self.second = _tower(tables[2:4]), _tower(tables[:1])
        self.bags = EmbeddingBagCollection(tables=tables[1:2])
        self.weighted = EmbeddingBagCollection(tables=of_weights[:1], is_weighted=True)

    def embedded(self, batch: Batch) -> Tensor:
        towers = [self.first(batch.ids), self.second(batch.ids)]
        return torch.cat([*towers, self.bags(batch.ids).values(), self.weighted(batch.weighted).values()], dim=1)


class TowerCollection(Net):
    """A collection of three towers, of which one takes weights."""

    def __init__(self, pooling: PoolingType, dtype: DataType, weighted: bool) -> None:
        tables, of_weights = bag_tables(pooling, dtype)
        super().__init__(sum(table.embedding_dim for table in [*tables[:3], of_weights[0]]))
        towers = [_tower([tables[0], tables[2]]), _tower(tables[1:2]), _tower(of_weights[:1], weighted=True)]
        self.towers = EmbeddingTowerCollection(towers=towers)

    def embedded(self, batch: Batch) -> Tensor:
        mixed: Tensor = self.towers(batch.ids, batch.weighted)
        return mixed


def _padded(rows: Mapping[str, JaggedTensor], names: Sequence[str]) -> Tensor:
    """(B, columns): of each feature ``LONGEST`` rows per sample, zeros behind those that it has."""
    parts = []
    for name in names:
        sequence = rows[name]
        dense = torch.ops.fbgemm.jagged_2d_to_dense(sequence.values(), sequence.offsets(), LONGEST)
        parts.append(dense.flatten(1))
    return torch.cat(parts, dim=1)


class Sequences(Net):
    """Rows per id, padded; the first two features are looked up in two tables each."""

    def __init__(self, pooling: PoolingType, dtype: DataType, weighted: bool) -> None:
        tables = row_tables(dtype, shared=True)
        super().__init__(len(tables) * LONGEST * tables[0].embedding_dim)
        self.names = ["f0@t0", "f1@t1", "f2", "f3", "f0@t4", "f1@t5"]
        self.rows = EmbeddingCollection(tables=tables, need_indices=True)

    def embedded(self, batch: Batch) -> Tensor:
        return 10 * _filled(_padded(self.rows(batch.ids), self.names))


class SequenceInteraction(nn.Module):
    """Of a tower of rows per id."""

    def __init__(self, tables: Sequence[EmbeddingConfig]) -> None:
        super().__init__()
        self.features = [feature for table in tables for feature in table.feature_names]
        self.linear = nn.Linear(sum(LONGEST * table.embedding_dim for table in tables), 8)

    def forward(self, rows: Mapping[str, JaggedTensor]) -> Tensor:
        mixed: Tensor = self.linear(_padded(rows, self.features))
        return mixed


class SequenceTowers(Net):
    """Two towers of rows per id."""

    def __init__(self, pooling: PoolingType, dtype: DataType, weighted: bool) -> None:
        super().__init__(16)
        tables = row_tables(dtype, shared=False)
        self.first, self.second = (
            EmbeddingTower(
                embedding_module=EmbeddingCollection(tables=own), interaction_module=SequenceInteraction(own)
            )
            for own in (tables[::2], tables[1::2])
        )

    def embedded(self, batch: Batch) -> Tensor:
        return torch.cat([self.first(batch.ids), self.second(batch.ids)], dim=1)


MODELS: Mapping[str, Callable[[PoolingType, DataType, bool], Net]] = {
    "bags": Bags,
    "towers": Towers,
    "tower collection": TowerCollection,
    "sequences": Sequences,
    "sequence towers": SequenceTowers,
}


def bag_tables(pooling: PoolingType, dtype: DataType) -> tuple[list[EmbeddingBagConfig], list[EmbeddingBagConfig]]:
    """Six tables of four features, and two of weighted features."""

    def table(name: str, feature: str, number: int, width: int, pooled: PoolingType) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name,
            feature_names=[feature],
            num_embeddings=10 * (number + 1),
            embedding_dim=width * (number + 2),
            pooling=pooled,
            data_type=dtype,
        )

    tables = [table(f"t{number}", f"f{number % 4}", number % 4, 8, pooling) for number in range(6)]
    return tables, [table(f"wt{number}", f"w{number}", number, 4, PoolingType.SUM) for number in range(2)]


def row_tables(dtype: DataType, *, shared: bool) -> list[EmbeddingConfig]:
    """Four tables of a feature each; ``shared``: and two more of the first two features."""
    return [
        EmbeddingConfig(
            name=f"t{number}",
            feature_names=[f"f{number % 4}"],
            num_embeddings=11 * (number % 4 + 1),
            embedding_dim=16,
            data_type=dtype,
        )
        for number in range(6 if shared else 4)
    ]
