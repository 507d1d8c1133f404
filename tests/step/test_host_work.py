"""The work of the host in a step at batch 1: at most what is written down here, which only becomes less.

Python calls, the package's own, its files that they are in, moves between these, and torch operators, of a forward and
of its backward. 26 tables of 64 columns, one feature each, rowwise Adagrad in backward, on the CPU. Of several ranks,
the most of each.

After a change that makes a number smaller, write the smaller number down: ``pytest -s -m "slow or not slow"`` prints
every case as it stands in the table.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import shardrec
from benchmarks.harness.host_work import HostWork, count_steps, largest
from shardrec import native
from shardrec.layout import ShardingPlan, Topology, cuts
from tests.executors import executed
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks
from tests.worker import seed_torch

PYTHON, TORCH = "3.11", "2.13"
"""The versions that the numbers are of: other ones call other functions."""

pytestmark = [
    pytest.mark.skipif(
        not (platform.python_version().startswith(f"{PYTHON}.") and torch.__version__.startswith(f"{TORCH}.")),
        reason=f"the numbers are those of Python {PYTHON} and torch {TORCH}",
    ),
    pytest.mark.skipif(not native.has_kernels(), reason="the numbers are those with the C++ operators"),
]

TABLES, ROWS, DIM = 26, 10, 64
KEYS = [f"f{number}" for number in range(TABLES)]
OWN = [f"{Path(shardrec.__file__).parent}/"]
WARM_UP, COUNTED = 6, 6


class Gate(NamedTuple):
    """The most that a part of a step may do, see :class:`~benchmarks.harness.host_work.HostWork`."""

    calls: int
    own: int
    files: int
    moves: int
    operators: int


GATES: dict[tuple[str, str, int], tuple[Gate, Gate]] = {
    # calls, own, files, moves, operators
    ("pooled", "eager", 1): (Gate(93, 50, 22, 41, 6), Gate(29, 9, 6, 7, 1)),
    ("pooled", "eager", 2): (Gate(215, 150, 34, 107, 45), Gate(61, 38, 15, 28, 7)),
    ("sequences", "eager", 1): (Gate(607, 75, 24, 50, 35), Gate(35, 13, 7, 8, 35)),
    ("sequences", "eager", 2): (Gate(734, 177, 34, 110, 79), Gate(74, 43, 14, 27, 71)),
    ("pooled", "live script", 1): (Gate(399, 82, 21, 49, 2), Gate(295, 76, 14, 35, 12)),
    ("pooled", "live script", 2): (Gate(466, 145, 30, 94, 2), Gate(279, 68, 16, 38, 9)),
    ("pooled", "traced", 1): (Gate(530, 96, 24, 58, 0), Gate(295, 76, 14, 35, 0)),
    ("pooled", "traced", 2): (Gate(611, 168, 33, 109, 0), Gate(281, 70, 16, 39, 0)),
}
"""By kind of collection, executor and number of ranks: of the forward, and of its backward. Operators of compiled
programs are not counted, which run under no dispatch mode."""


class Pooled(nn.Module):
    """A model whose part is the collection."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{number}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[key])
            for number, key in enumerate(KEYS)
        ]
        self.tables = EmbeddingBagCollection(tables=tables)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled: KeyedTensor = self.tables(features)
        return pooled


class PooledValues(Pooled):
    """The same for compilers: its values are used in the program."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # type: ignore[override]
        return self.tables(features).values()


class Sequences(nn.Module):
    """The same with a row for each id."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=f"t{number}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[key])
            for number, key in enumerate(KEYS)
        ]
        self.tables = EmbeddingCollection(tables=tables)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.tables(features)


def make(kind: str, executor: str) -> Callable[[KeyedJaggedTensor], Tensor]:
    """A sharded model's forward, from features to (B, D) or (N, D) values; tables round robin."""
    seed_torch(0)
    size = dist.get_world_size()
    model = Sequences() if kind == "sequences" else Pooled() if executor == "eager" else PooledValues()
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.01})
    layouts = [cuts.table_wise(f"tables.t{n}", ROWS, DIM, rank=n % size) for n in range(TABLES)]
    plan = ShardingPlan(topology=Topology(ranks_per_host=size), tables=tuple(layouts))
    sharded = executed(shardrec.shard(model, plan, device="cpu"), executor)
    if kind == "sequences":
        return lambda features: torch.cat([rows.values() for rows in sharded(features).values()])
    if executor == "eager":
        return lambda features: sharded(features).values()
    return lambda features: sharded(features)


def features(number: int) -> KeyedJaggedTensor:
    """One sample with an id per feature; a new object for each step, in which nothing is cached."""
    ids = torch.full((TABLES,), (number + dist.get_rank()) % ROWS)
    return KeyedJaggedTensor(keys=KEYS, values=ids, lengths=torch.ones(TABLES, dtype=torch.int32))


def count(kind: str, executor: str) -> tuple[HostWork, HostWork]:
    forward = make(kind, executor)
    gradient = torch.ones_like(forward(features(0)))
    for number in range(WARM_UP):
        forward(features(number)).backward(gradient)
    batches = [features(number) for number in range(COUNTED)]
    return count_steps(forward, batches, gradient, OWN, operators=executor != "traced")


def as_gate(work: HostWork) -> Gate:
    return Gate(*(work.counts[name] for name in Gate._fields))


def as_line(case: tuple[str, str, int], gates: Sequence[Gate]) -> str:
    kind, executor, size = case
    return f'("{kind}", "{executor}", {size}): ({", ".join(f"Gate{tuple(gate)}" for gate in gates)}),'


def excess(part: str, work: HostWork, gate: Gate, limit: Gate) -> list[str]:
    """What there is too much of, and where it is; nothing if there is not."""
    more = [
        f"{name} {value}, at most {most}"
        for name, value, most in zip(Gate._fields, gate, limit, strict=True)
        if value > most
    ]
    if not more:
        return []
    where = {"calls": work.by_file, "operators": work.by_operator}
    lines = [f"  {what}: {', '.join(f'{key} {count}' for key, count in of.items())}" for what, of in where.items()]
    return [f"{part}: {'; '.join(more)}", *lines]


@pytest.mark.parametrize(
    ("kind", "executor", "size"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[1] == "traced" else (), id=" ".join(map(str, case)))
        for case in GATES
    ],
)
def test_the_host_does_no_more(kind: str, executor: str, size: int) -> None:
    by_rank = ranks(size, count, kind, executor)
    works = [largest(parts) for parts in zip(*by_rank, strict=True)]
    gates = tuple(map(as_gate, works))
    line = as_line((kind, executor, size), gates)
    print(line)
    report = [
        text
        for part, work, gate, limit in zip(
            ("forward", "backward"), works, gates, GATES[kind, executor, size], strict=True
        )
        for text in excess(part, work, gate, limit)
    ]
    if report:
        pytest.fail("\n".join([*report, "measured:", line]), pytrace=False)
