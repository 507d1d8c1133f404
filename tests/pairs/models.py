"""Models of the rows, their tables and their batches, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from tests.pairs.axes import Row

__all__ = ["DIM", "IDS", "Batch", "batch_of", "half_of", "id_of", "loss_of", "make_model", "plan_of", "special_tables"]

IDS, DIM, COLUMNS = 12, 8, 3
SPECIAL = {"f": "bags.t_f", "s": "rows.t_s"}
"""The features, and tables, of which the axis of tables decides; there is another table beside each."""
ROOM = 32
"""Rows of a table with dynamic ids, so that each block has room for all ids."""
STRIDE, OFFSET = 2**40 + 7, 3

Batch = tuple[Tensor, KeyedJaggedTensor, KeyedJaggedTensor, Tensor]
"""Numbers (B, COLUMNS), features, further ones of the collection that is called twice, and labels (B,)."""


def equal_rows(weight: Tensor) -> None:
    """First values with which it does not matter which row an id gets."""
    with torch.no_grad():
        weight.copy_(torch.linspace(-0.3, 0.3, DIM).expand_as(weight))


def options_of(row: Row, feature: str, *, reference: bool) -> dict[str, Any]:
    """Arguments of a table's config."""
    is_dynamic = row.table == "dynamic ids" and feature in SPECIAL
    is_half = row.table == "16 bit" and feature in SPECIAL and not reference
    return {
        "name": f"t_{feature}",
        "num_embeddings": ROOM if is_dynamic and not reference else IDS,
        "embedding_dim": DIM,
        "feature_names": [feature],
        "data_type": (DataType.FP16 if half_of(row) is torch.float16 else DataType.BF16) if is_half else DataType.FP32,
        "init_fn": equal_rows if is_dynamic else None,
    }


def half_of(row: Row) -> torch.dtype:
    """The 16-bit type: FP16, but where torch's GradScaler would be given gradients of this type, which it refuses."""
    return torch.bfloat16 if row.gradients == "GradScaler" and row.optimizer == "ordinary" else torch.float16


def bags_of(row: Row, *, reference: bool) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(**options_of(row, feature, reference=reference)) for feature in "fg"]
    return EmbeddingBagCollection(tables=tables)


def rows_of(row: Row, *, reference: bool) -> EmbeddingCollection:
    tables = [EmbeddingConfig(**options_of(row, feature, reference=reference)) for feature in "sv"]
    return EmbeddingCollection(tables=tables)


def top_of(pooled: int) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS + pooled * DIM, 6), nn.Tanh(), nn.Linear(6, 1))


class Bags(nn.Module):
    def __init__(self, row: Row, *, reference: bool) -> None:
        super().__init__()
        self.bags, self.top = bags_of(row, reference=reference), top_of(2)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor, again: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.top(torch.cat([dense, self.bags(features).values()], dim=1)).squeeze(1)
        return logits


class Sequences(nn.Module):
    def __init__(self, row: Row, *, reference: bool) -> None:
        super().__init__()
        self.rows, self.top = rows_of(row, reference=reference), top_of(2)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor, again: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(features)
        totals = torch.cat([rows["s"].values().sum(dim=0), torch.tanh(rows["v"].values()).sum(dim=0)])
        totals = totals.unsqueeze(0).expand(dense.size(0), -1)
        logits: Tensor = self.top(torch.cat([dense, totals], dim=1)).squeeze(1)
        return logits


class Both(nn.Module):
    def __init__(self, row: Row, *, reference: bool) -> None:
        super().__init__()
        self.bags, self.rows = bags_of(row, reference=reference), rows_of(row, reference=reference)
        self.top = top_of(4)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor, again: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(features)
        rows = self.rows(features)
        totals = torch.cat([rows["s"].values().sum(dim=0), torch.tanh(rows["v"].values()).sum(dim=0)])
        totals = totals.unsqueeze(0).expand(dense.size(0), -1)
        logits: Tensor = self.top(torch.cat([dense, pooled.values(), totals], dim=1)).squeeze(1)
        return logits


class Twice(nn.Module):
    def __init__(self, row: Row, *, reference: bool) -> None:
        super().__init__()
        self.bags, self.top = bags_of(row, reference=reference), top_of(4)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor, again: KeyedJaggedTensor) -> Tensor:
        first = self.bags(features)
        second = self.bags(again)
        logits: Tensor = self.top(torch.cat([dense, first.values(), second.values()], dim=1)).squeeze(1)
        return logits


KINDS: dict[str, type[nn.Module]] = {"bags": Bags, "sequences": Sequences, "both": Both, "one twice": Twice}


def make_model(row: Row, seed: int, *, reference: bool = False) -> nn.Module:
    """The unsharded model; as reference with float32 tables, of which each id is a row."""
    torch.manual_seed(seed)
    model = KINDS[row.collections](row, reference=reference)
    if row.table == "frozen":
        for name in special_tables(row):
            weight_of(model, name).requires_grad_(False)
    return model


def weight_of(model: nn.Module, table: str) -> nn.Parameter:
    """Of an unsharded model."""
    collection, name = table.split(".")
    inner = "embedding_bags" if collection == "bags" else "embeddings"
    weight = model.get_parameter(f"{collection}.{inner}.{name}.weight")
    assert isinstance(weight, nn.Parameter)
    return weight


def tables_of(row: Row) -> list[str]:
    """The names of the tables in a plan."""
    named = {"bags": ["bags.t_f", "bags.t_g"], "rows": ["rows.t_s", "rows.t_v"]}
    collections = {"bags": ["bags"], "sequences": ["rows"], "both": ["bags", "rows"], "one twice": ["bags"]}
    return [name for collection in collections[row.collections] for name in named[collection]]


def special_tables(row: Row) -> list[str]:
    """The tables of which the axis of tables decides."""
    return [name for name in tables_of(row) if name in SPECIAL.values()]


def plan_of(row: Row, ranks: int, *, other: bool = False) -> ShardingPlan:
    """Where the tables go; ``other``: in another plan for the same ranks."""
    layouts = [_layout(row, name, ranks, other) for name in tables_of(row)]
    return ShardingPlan(topology=Topology(ranks_per_host=ranks), tables=tuple(layouts))


def _layout(row: Row, name: str, ranks: int, other: bool) -> TableLayout:
    if ranks == 1:
        rows = ROOM if row.table == "dynamic ids" and name in SPECIAL.values() else IDS
        replicated = row.table == "replicated" and name in SPECIAL.values()
        return cuts.data_parallel(name, rows, DIM) if replicated else cuts.table_wise(name, rows, DIM, rank=0)
    by_rows, by_columns = cuts.row_wise(name, IDS, DIM, ranks=[0, 1]), cuts.column_wise(name, IDS, DIM, ranks=[1, 0])
    if name not in SPECIAL.values():
        return by_columns if other else by_rows
    return {
        "table-wise": cuts.table_wise(name, IDS, DIM, rank=int(not other)),
        "row-wise": cuts.row_wise(name, IDS, DIM, ranks=[0, 1], boundaries=[0, 3, IDS]) if other else by_rows,
        "column-wise": cuts.column_wise(name, IDS, DIM, ranks=[0, 1]) if other else by_columns,
        "replicated": cuts.data_parallel(name, IDS, DIM),
        "frozen": by_rows if other else by_columns,
        "dynamic ids": cuts.table_wise(name, ROOM, DIM, rank=0)
        if other
        else cuts.row_wise(name, ROOM, DIM, ranks=[0, 1]),
        "16 bit": by_columns if other else by_rows,
    }[row.table]


def raw_id(number: int) -> int:
    """The id that a table with dynamic ids is given."""
    return number * STRIDE + OFFSET


def id_of(raw: int) -> int:
    """The reverse."""
    number, rest = divmod(raw - OFFSET, STRIDE)
    assert not rest and 0 <= number < IDS, f"{raw} is no id of a batch"
    return number


def batch_of(row: Row, number: int, rank: int, *, reference: bool, ids: Sequence[int] = range(IDS)) -> Batch:
    """A rank's batch; ``number`` 0 has each id, later ones some of ``ids``."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    size = 4 - rank
    dense, labels = torch.randn(size, COLUMNS, generator=generator), torch.rand(size, generator=generator).round()
    both = []
    for _ in range(2):
        keys: dict[str, tuple[list[int], list[int]]] = {}
        for key in "fgsv":
            lengths = torch.randint(0, 4, (size,), generator=generator).tolist()
            drawn = torch.randint(0, len(ids), (sum(lengths),), generator=generator).tolist()
            if number == 0:
                lengths, drawn = [IDS // size] * size, list(range(IDS))
            keys[key] = lengths, [ids[each] for each in drawn]
        is_dynamic = row.table == "dynamic ids" and not reference
        values = [
            raw_id(each) if is_dynamic and key in SPECIAL else each
            for key, (_, numbers) in keys.items()
            for each in numbers
        ]
        both.append(
            KeyedJaggedTensor(
                keys=list(keys),
                values=torch.tensor(values, dtype=torch.int64),
                lengths=torch.tensor([each for lengths, _ in keys.values() for each in lengths], dtype=torch.int64),
            )
        )
    return dense, both[0], both[1], labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Large, so that a step that is missing is far beyond rounding."""
    return 4 * nn.functional.binary_cross_entropy_with_logits(logits, labels)
