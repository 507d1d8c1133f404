"""The product of what a collection can be asked for, cell by cell, and how its cells are packed into collections.

Cut, pooling, dtype and optimizer belong to a table, so a *cell* is one table. Module, weights of the ids, kind of
batch, dedup and format on the wire belong to a collection, so cells that have these in common are the tables of one
collection: a *case*. A table that goes wrong names its cell; the tables around it make it harder, not easier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

from shardrec.exchange.batch import OnBadId
from shardrec.exchange.transport import Transport
from shardrec.exchange.wire_format import WireType
from shardrec.layout import ShardingPlan, TableLayout, Topology
from tests.models import OPTIMIZERS
from tests.parity.policies import POLICIES
from tests.plans import CUTS, random_layout, topologies_of

__all__ = [
    "DTYPES",
    "FORMATS",
    "KINDS",
    "MIXTURE",
    "SIZES",
    "WORLDS",
    "Case",
    "Cell",
    "Kind",
    "all_cells",
    "drawn_cases",
    "every_cell",
    "some_of",
    "topology_of",
    "wire_cases",
]

MIXTURE = "mixture"
"""The cut of a table whose layout no cut makes: random stripes, each with random row blocks."""

POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}
WEIGHTS = ("none", "given", "learned")
WORLDS = (1, 2, 4)
SIZES = ("one", "each")
FORMATS: tuple[WireType, ...] = ("fp16", "bf16", "int8")
WIDTHS = (4, 8, 8, 12, 16, 16, 1, 3, 6, 10, 17)
"""Columns of a pooled table; fbgemm's kernels take multiples of 4 only. A sequence's are 16: four stripes."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table of the product.

    Args:
        cut: a key of ``tests.plans.CUTS``, or ``MIXTURE``.
        pooling: a key of ``POOLINGS``; ``"rows"`` in an EmbeddingCollection.
        dtype: a key of ``DTYPES``.
        optimizer: a key of ``tests.models.OPTIMIZERS``.
    """

    cut: str
    pooling: str
    dtype: str
    optimizer: str

    @property
    def name(self) -> str:
        """The table's name."""
        return f"{self.cut}-{self.pooling}-{self.dtype}-{self.optimizer}"

    def layout(self, rng: Random, rows: int, dim: int, topology: Topology) -> TableLayout:
        """Where the table goes, the cut's free choices drawn."""
        if self.cut != MIXTURE:
            return CUTS[self.cut](rng, self.name, rows, dim, topology)
        while True:
            found = random_layout(rng, self.name, rows, dim, topology.world_size)
            widths = {stripe.col_end - stripe.col_start for stripe in found.stripes()}
            # Unequal stripes of a sequence table under rowwise Adagrad are refused (tests/modules/test_sequences.py).
            if self.pooling != "rows" or self.optimizer != "rowwise_adagrad" or len(widths) < 2:
                return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collection whose tables are cells.

    Args:
        cells: its tables.
        topology: of the ranks.
        pooled: an EmbeddingBagCollection, else an EmbeddingCollection.
        weights: of the ids: ``"none"``, ``"given"``, or ``"learned"``: they take a gradient.
        sizes: ``"one"`` batch size, or one ``"each"`` feature, with inverse indices (of sequences: mostly).
        dedup: of an EmbeddingCollection.
        comms: format in which output and gradient travel.
        executor: a key of ``tests.executors.EXECUTORS``.
        meta: the collection to be sharded is built on meta.
        takes_bad_ids: ids outside their tables are looked up as zeros, wrapped, or errors, by their feature.
        transport: as :func:`shardrec.shard` takes it.
        in_torch: without the C++ operators.
        seed: of shapes, layouts, batches and first values.
    """

    cells: Sequence[Cell]
    topology: Topology
    pooled: bool
    weights: str = "none"
    sizes: str = "one"
    dedup: bool = False
    comms: WireType = "fp32"
    executor: str = "eager"
    meta: bool = False
    takes_bad_ids: bool = False
    transport: Transport = "auto"
    in_torch: bool = False
    seed: int = 0

    def __str__(self) -> str:
        words = [
            "bags" if self.pooled else "sequences",
            f"{self.topology.hosts}x{self.topology.ranks_per_host} ranks",
            f"weights={self.weights}" if self.pooled else f"dedup={self.dedup}",
            f"sizes={self.sizes}",
            f"comms={self.comms}",
            f"seed={self.seed}",
        ]
        # What runs it changes nothing that is drawn.
        return " ".join(words)

    def rng(self, *what: object) -> Random:
        """A generator for ``what``, alike on every rank."""
        return Random(f"{self} {' '.join(cell.name for cell in self.cells)} {what}")

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(rows, columns) of each table."""
        rng = self.rng("shapes")
        return {
            cell.name: (rng.choice([1, 2, 7, 13, 13, 29, 29]), rng.choice(WIDTHS) if self.pooled else 16)
            for cell in self.cells
        }

    def features(self) -> Mapping[str, Sequence[str]]:
        """Of each table: one of its own, and sometimes one that other tables look up, too."""
        rng = self.rng("features")
        return {
            cell.name: [f"f{number}", *(rng.sample(["x", "y", "z"], 1) if rng.random() < 0.25 else [])]
            for number, cell in enumerate(self.cells)
        }

    def feature_rows(self) -> dict[str, int]:
        """Per feature, ids must be below this."""
        shapes = self.shapes()
        rows: dict[str, int] = {}
        for table, features in self.features().items():
            for feature in features:
                rows[feature] = min(shapes[table][0], rows.get(feature, shapes[table][0]))
        return rows

    def policies(self) -> dict[str, OnBadId]:
        """Of the features, where ids outside their tables are taken."""
        keys = sorted(self.feature_rows()) if self.takes_bad_ids else []
        return {key: POLICIES[number % len(POLICIES)] for number, key in enumerate(keys)}

    def plan(self) -> ShardingPlan:
        """A layout for each table."""
        rng = self.rng("plan")
        shapes = self.shapes()
        layouts = tuple(cell.layout(rng, *shapes[cell.name], self.topology) for cell in self.cells)
        return ShardingPlan(topology=self.topology, tables=layouts)

    def bag_configs(self, *, reference: bool) -> list[EmbeddingBagConfig]:
        """Of the tables; of float32 and, where torch's bags refuse the mean of weighted rows, of sums as reference."""
        shapes, features = self.shapes(), self.features()
        return [
            EmbeddingBagConfig(
                name=cell.name,
                num_embeddings=shapes[cell.name][0],
                embedding_dim=shapes[cell.name][1],
                feature_names=list(features[cell.name]),
                data_type=DataType.FP32 if reference else DTYPES[cell.dtype],
                pooling=PoolingType.SUM if reference and self.weights != "none" else POOLINGS[cell.pooling],
            )
            for cell in self.cells
        ]

    def sequence_configs(self, *, reference: bool) -> list[EmbeddingConfig]:
        """Of the tables; of float32 as reference."""
        shapes, features = self.shapes(), self.features()
        return [
            EmbeddingConfig(
                name=cell.name,
                num_embeddings=shapes[cell.name][0],
                embedding_dim=shapes[cell.name][1],
                feature_names=list(features[cell.name]),
                data_type=DataType.FP32 if reference else DTYPES[cell.dtype],
            )
            for cell in self.cells
        ]


def some_of(axes: Sequence[Sequence[Any]], fast: set[tuple[Any, ...]]) -> list[Any]:
    """The product of a test's axes; all but a few of it are slow. The few have each value of an axis, but that portable
    programs, which take seconds to compile, may be left to the slow ones."""
    cells = [cell for cell in product(*axes) if "portable" not in cell or "each" not in cell]
    assert fast <= set(cells)
    assert all({cell[at] for cell in fast} | {"portable"} >= set(axis) for at, axis in enumerate(axes))
    return [pytest.param(*cell, marks=() if cell in fast else pytest.mark.slow) for cell in cells]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a collection is and is given: fields of :class:`Case`."""

    pooled: bool = True
    weights: str = "none"
    dedup: bool = False

    def __str__(self) -> str:
        return f"bags-{self.weights}" if self.pooled else f"sequences-{self.dedup}"


KINDS = [*(Kind(weights=weights) for weights in WEIGHTS), *(Kind(pooled=False, dedup=dedup) for dedup in (True, False))]


def topology_of(world_size: int) -> Topology:
    """Four ranks are two hosts of two."""
    return Topology(hosts=2, ranks_per_host=2) if world_size == 4 else Topology(ranks_per_host=world_size)


def all_cells(
    *,
    pooled: bool,
    cuts: Sequence[str] = (*CUTS, MIXTURE),
    dtypes: Sequence[str] = tuple(DTYPES),
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
) -> list[Cell]:
    """The product of what belongs to a table."""
    poolings = tuple(POOLINGS) if pooled else ("rows",)
    return [
        Cell(cut=cut, pooling=pooling, dtype=dtype, optimizer=optimizer)
        for cut, pooling, dtype, optimizer in product(cuts, poolings, dtypes, optimizers)
    ]


def every_cell(world_size: int, kind: Kind, sizes: str, *, by: str = "dtype", seed: int = 0) -> Iterator[Case]:
    """Every cell of a collection, those of one ``"cut"`` or ``"dtype"`` together."""
    choices = {"cut": (*CUTS, MIXTURE), "dtype": tuple(DTYPES)}[by]
    for number, choice in enumerate(choices):
        yield Case(
            cells=[cell for cell in all_cells(pooled=kind.pooled) if getattr(cell, by) == choice],
            topology=topology_of(world_size),
            pooled=kind.pooled,
            weights=kind.weights,
            dedup=kind.dedup,
            sizes=sizes,
            meta=number % 2 == 1,
            takes_bad_ids=number % 3 == 1,
            transport="group" if number % 3 == 2 else "auto",
            in_torch=number % 4 == 3,
            seed=seed,
        )


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """A collection of few tables."""
    kind = draw(st.sampled_from(KINDS))
    executor = draw(st.sampled_from(["eager"] * 8 + ["live script", "portable"]))
    topologies = [topology for world_size in WORLDS for topology in topologies_of(world_size)]
    cells = st.lists(st.sampled_from(all_cells(pooled=kind.pooled)), min_size=1, max_size=5, unique=True)
    return Case(
        cells=draw(cells),
        topology=draw(st.sampled_from(topologies)),
        pooled=kind.pooled,
        weights=kind.weights,
        dedup=kind.dedup,
        sizes="one" if executor == "portable" else draw(st.sampled_from(SIZES)),
        executor=executor,
        meta=draw(st.booleans()),
        takes_bad_ids=draw(st.booleans()),
        transport=draw(st.sampled_from(["auto", "group"])),
        in_torch=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def wire_cases(world_size: int, comms: WireType, *, pooled: bool, seed: int = 0) -> Iterator[Case]:
    """Every cut, pooling and dtype with output and gradient in a format of fewer bits.

    The optimizer is SGD, or an ordinary one, of which the gradient can be seen. Without weights or dedup features have
    one batch size, with them one each; INT8 has one scale for the bags of a row, which are of different samples where
    batch sizes differ, so that there is no bound to compare those with.
    """
    cells = all_cells(pooled=pooled, optimizers=["sgd", "none"])
    for option in (False, True):
        yield Case(
            cells=cells,
            topology=topology_of(world_size),
            pooled=pooled,
            weights="given" if pooled and option else "none",
            dedup=not pooled and option,
            sizes="each" if option and comms != "int8" else "one",
            comms=comms,
            seed=seed,
        )
