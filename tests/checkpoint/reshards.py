"""Drawn models and plans that follow each other, for `model.reshard` beside a save, another model, and a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from shardrec import load_checkpoint, native, save_checkpoint, shard
from shardrec.checkpoint.optimizer import optimizer_state
from shardrec.checkpoint.parts import Rect
from shardrec.checkpoint.state import model_tensors
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, TableLayout, Topology
from shardrec.modules import ShardedModel
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.plans import CUTS, random_layout, randoms, topologies_of

__all__ = [
    "DIM",
    "Case",
    "Model",
    "Table",
    "batch_of",
    "cases",
    "check",
    "contents",
    "differences",
    "make",
    "plan_of",
    "train",
]

DIM = 16
BAGS, SEQUENCES = "bags", "sequences"
LAYOUTS = (*CUTS, "any")
DYNAMIC_CUTS = ("table_wise", "row_wise", "column_wise")

Contents = Mapping[tuple[str, Rect], Tensor]
"""What a rank holds: by name and place."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, of the feature of its name.

    Args:
        collection: ``BAGS`` or ``SEQUENCES``.
        rows: its number of rows.
        optimizer: a key of ``tests.models.OPTIMIZERS``.
        data_type: of its weights.
        frozen: whether it takes no gradient.
        dynamic: whether its ids are dynamic.
        cuts: of each plan, one of ``LAYOUTS``.
    """

    collection: str = BAGS
    rows: int = 12
    optimizer: str = "adagrad"
    data_type: DataType = DataType.FP32
    frozen: bool = False
    dynamic: bool = False
    cuts: tuple[str, ...] = ("table_wise", "row_wise")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its plans.

    Args:
        tables: by name.
        plans: the first one, and those to which it is resharded one after the other.
        at_step: whether tables are updated by the optimizer's step.
        averages: whether averages of rows are kept.
        transport: as :func:`shardrec.shard` takes it.
        device: of the model; on CUDA, sums come in an order that is not fixed.
        seed: of values and batches.
    """

    tables: Mapping[str, Table]
    plans: Sequence[ShardingPlan]
    at_step: bool = False
    averages: bool = False
    transport: Any = "auto"
    device: str = "cpu"
    seed: int = 0


@st.composite
def cases(draw: Any, changes: int) -> Case:
    """Any case, with so many changes of plan; the least one has one table on one rank."""
    topology = draw(st.sampled_from([1, 2, 4]).flatmap(lambda ranks: st.sampled_from(topologies_of(ranks))))
    tables = {f"t{number}": _table(draw, changes + 1) for number in range(draw(st.integers(1, 4)))}
    rng = draw(randoms())
    at_step = draw(st.booleans())
    return Case(
        tables=tables,
        plans=[plan_of(tables, number, rng, topology) for number in range(changes + 1)],
        at_step=at_step,
        averages=at_step and draw(st.booleans()),
        transport=draw(st.sampled_from(["auto", "group"])),
        seed=draw(st.integers(0, 2**16)),
    )


def _table(draw: Any, plans: int) -> Table:
    collection = draw(st.sampled_from([BAGS, SEQUENCES]))
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    dynamic = native.has_operators() and draw(st.booleans())
    # Stripes of several widths are refused for row-wise states of sequences.
    layouts = DYNAMIC_CUTS if dynamic else tuple(CUTS) if collection == SEQUENCES else LAYOUTS
    return Table(
        collection=collection,
        rows=draw(st.sampled_from([24, 40])) if dynamic else draw(st.integers(1, 20)),
        optimizer=optimizer,
        data_type=draw(st.sampled_from([DataType.FP32, DataType.FP16, DataType.BF16])),
        frozen=draw(st.integers(0, 4)) == 4,
        dynamic=dynamic,
        cuts=tuple(draw(st.sampled_from(layouts)) for _ in range(plans)),
    )


def plan_of(tables: Mapping[str, Table], number: int, rng: Random, topology: Topology) -> ShardingPlan:
    """The tables by their cuts of one number, with what is free drawn."""

    def layout(name: str, table: Table) -> TableLayout:
        name, cut = f"{table.collection}.{name}", table.cuts[number]
        if cut == "any":
            return random_layout(rng, name, table.rows, DIM, topology.world_size)
        return CUTS[cut](rng, name, table.rows, DIM, topology)

    return ShardingPlan(topology=topology, tables=tuple(layout(name, table) for name, table in tables.items()))


class Model(nn.Module):
    """Bags and sequences, and a head."""

    def __init__(self, tables: Mapping[str, Table], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for path, kind, config in (
            (BAGS, EmbeddingBagCollection, EmbeddingBagConfig),
            (SEQUENCES, EmbeddingCollection, EmbeddingConfig),
        ):
            configs: list[Any] = [
                config(
                    name=name,
                    num_embeddings=table.rows,
                    embedding_dim=DIM,
                    feature_names=[name],
                    data_type=table.data_type,
                )
                for name, table in tables.items()
                if table.collection == path
            ]
            setattr(self, path, kind(tables=configs) if configs else None)
        self.dim = DIM
        self.head = nn.Linear(DIM, 1)
        for name, table in tables.items():
            weight = self.weight(name, table)
            choice = OPTIMIZERS[table.optimizer]
            if choice.optimizer is not None:
                apply_optimizer_in_backward(choice.optimizer, [weight], dict(choice.settings))
            weight.requires_grad_(not table.frozen)

    def weight(self, name: str, table: Table) -> nn.Parameter:
        """Of a table, before it is sharded."""
        holder = self.bags.embedding_bags if table.collection == BAGS else self.sequences.embeddings
        return holder[name].weight

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(n,), of samples and ids."""
        parts: list[Tensor] = []
        if self.bags is not None:
            values: Tensor = self.bags(features).values()
            parts.append(values.reshape(-1, self.dim))
        if self.sequences is not None:
            rows = self.sequences(features)
            parts.extend([value.values() for value in rows.values()])
        scores: Tensor = self.head(torch.cat(parts))
        return scores.tanh().squeeze(1)


def make(case: Case, plan: ShardingPlan) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """The model on all ranks, and an optimizer of the parameters that have none of their own."""
    dynamic = {
        f"{table.collection}.{name}": DynamicIds(
            fallback_rows=1, evict="never" if OPTIMIZERS[table.optimizer].optimizer is None else "lru"
        )
        for name, table in case.tables.items()
        if table.dynamic
    }
    update: Any = "step" if case.at_step else "backward"
    options: Any = {"dynamic_ids": dynamic, "update": update, "transport": case.transport, "device": case.device}
    model = shard(Model(case.tables, case.seed), plan, **options)
    if case.averages:
        for collection in model.sharded_collections:
            collection.keep_averages(0.9)
    return model, torch.optim.Adam(model.dense_parameters(), lr=0.01, eps=1e-4)


def batch_of(case: Case, seed: int) -> KeyedJaggedTensor:
    """Of this rank."""
    rng = Random(f"{case.seed} {seed} {dist.get_rank() if dist.is_initialized() else 0}")
    ids = {
        name: [
            [
                rng.randrange(-60, 60) * 2**50 if table.dynamic else rng.randrange(table.rows)
                for _ in range(rng.choice([0, 1, 3]))
            ]
            for _ in range(4)
        ]
        for name, table in case.tables.items()
    }
    return KeyedJaggedTensor(
        keys=list(ids),
        values=torch.tensor([one for bags in ids.values() for bag in bags for one in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bags in ids.values() for bag in bags]),
    ).to(torch.device(case.device))


def train(case: Case, model: ShardedModel, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> list[Tensor]:
    """Train on the batches of some steps; gives the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch_of(case, step)).sum()
        loss.backward()
        if case.at_step and model.has_fused_tables:
            model.fused_optimizer.step()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def contents(model: ShardedModel, optimizer: torch.optim.Optimizer) -> Contents:
    """All that this rank has of the model, to the last bit."""
    tensors = model_tensors(model) | optimizer_state(model, optimizer)[0]
    counts = {key: n for one in model.sharded_collections for key, n in one.step_counts().items()}
    values = {
        (name, part.rect): part.values.detach().clone() for name, tensor in tensors.items() for part in tensor.parts
    }
    return values | {(name, Rect(0, 1, 0, 1)): torch.tensor(count) for name, count in counts.items()}


def differences(actual: Contents, expected: Contents, most: float = 0.0) -> list[str]:
    """What is not there, or not equal: to the last bit, or with ``most`` up to that."""
    faults = [f"{'un' * (key in actual)}expected {key}" for key in actual.keys() ^ expected.keys()]
    for key in actual.keys() & expected.keys():
        pair = actual[key], expected[key]
        bits = [one.contiguous().view(-1).view(torch.uint8) for one in pair]
        near = most > 0 and torch.allclose(*(one.double() for one in pair), rtol=most, atol=most)
        if pair[0].dtype is not pair[1].dtype or not (near or torch.equal(*bits)):
            faults.append(f"{key}: {pair[0]} for {pair[1]}")
    return sorted(faults)


def check(case: Case, folder: Path) -> list[str]:
    """On a rank: reshard a model from plan to plan, beside loads; gives the differences."""
    model, optimizer = make(case, case.plans[0])
    train(case, model, optimizer, range(2))
    faults = []
    for number, plan in enumerate(case.plans[1:], 1):
        save_checkpoint(folder / str(number), model, optimizer)
        other, others_optimizer = make(case, plan)
        load_checkpoint(folder / str(number), other, others_optimizer)
        model.reshard(plan, optimizer)
        assert model.plan == plan
        for stage in ("moved", "trained"):
            most = 0.0 if case.device == "cpu" or stage == "moved" else 2e-3
            if stage == "trained":
                steps = range(10 * number, 10 * number + 2)
                losses = [train(case, *pair, steps) for pair in ((model, optimizer), (other, others_optimizer))]
                near = torch.allclose(*map(torch.stack, losses), rtol=most, atol=most)
                faults += [] if near else [f"plan {number}: losses {losses}"]
            pair = contents(model, optimizer), contents(other, others_optimizer)
            faults += [f"plan {number}, {stage}: {text}" for text in differences(*pair, most)]
    return faults
