"""Drawn models and steps: parts out of use, frozen or tied, ranks in other grad modes, beside the unsharded model.

:func:`structures` draws what a model is made of and what its steps are; :func:`train` makes these steps on the ranks of
a process group. Every rank computes the batches of all ranks with an unsharded model of its own, so that the comparison
needs no collective which could hide, or cause, a hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError, InputError, ShardrecError
from shardrec.exchange.transport import Transport
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.modules.collection import ShardedCollection
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.modules.tables import local_part

__all__ = ["Step", "Structure", "Table", "structures", "train"]

RANKS = 2
DIM = 8
BAGS, MORE_BAGS, SEQUENCES = "bags", "more_bags", "sequences"
COLLECTIONS = (BAGS, MORE_BAGS, SEQUENCES)
CUTS = ("table_wise 0", "table_wise 1", "row_wise", "column_wise", "data_parallel")
GRAD, NO_GRAD, INFERENCE = "grad", "no_grad", "inference"
TIES = ("none", "linears", "tables", "table and linear", "collections")
DENSE_LR, DECAY = 0.1, 0.125
"""Weight decay moves a parameter whose gradient is zero, and leaves one alone that has no gradient."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, of the feature of its name.

    Args:
        collection: one of ``COLLECTIONS``.
        rows: its number of rows.
        cut: one of ``CUTS``.
        optimizer: a key of ``tests.models.OPTIMIZERS``.
    """

    collection: str
    rows: int
    cut: str
    optimizer: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of all ranks.

    Args:
        modes: grad mode of each rank.
        called: the collections that take part in the forward, on all ranks.
        heads: of each rank, the parts of the model that its output depends on.
        sizes: samples of each rank.
        toggled: a part that is frozen, or is no longer, before this step; "" for none.
    """

    modes: tuple[str, ...]
    called: frozenset[str]
    heads: tuple[frozenset[str], ...]
    sizes: tuple[int, ...]
    toggled: str


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A model and what is done with it.

    Args:
        tables: by name.
        tie: one of ``TIES``: what has one parameter, or collection, in two places.
        frozen: parts frozen before ``shard``.
        transport: as :func:`shardrec.shard` takes it.
        steps: in order.
        seed: of first values and batches.
    """

    tables: dict[str, Table]
    tie: str
    frozen: frozenset[str]
    transport: Transport
    steps: Sequence[Step]
    seed: int


@st.composite
def structures(draw: Any, most_steps: int = 40) -> Structure:
    """Any structure; the parts are named as the model names them."""
    collections = st.sampled_from(COLLECTIONS)
    table = st.builds(
        Table,
        collection=collections,
        rows=st.sampled_from([2, 5, 11]),
        cut=st.sampled_from(CUTS),
        optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "none"]),
    )
    tables = {f"t{number}": one for number, one in enumerate(draw(st.lists(table, min_size=1, max_size=4)))}
    there = sorted({one.collection for one in tables.values()})
    heads = st.sampled_from(["bottom", *there])
    # A table with an optimizer in backward may be refused once it is frozen or unfrozen, which ends the steps.
    toggles = [name for name, one in tables.items() if one.optimizer == "none" or draw(st.integers(0, 19)) == 19]
    toggled = st.sampled_from(["", "", "", "bottom", *there, *toggles])
    modes = st.one_of(st.just((GRAD,) * RANKS), st.tuples(*[st.sampled_from([GRAD, NO_GRAD, INFERENCE])] * RANKS))
    step = st.builds(
        Step,
        modes=modes,
        called=st.one_of(st.just(frozenset(there)), st.frozensets(st.sampled_from(there))),
        heads=st.one_of(
            st.just((frozenset({"bottom", *there}),) * RANKS),
            st.frozensets(heads).map(lambda heads: (heads,) * RANKS),
            st.tuples(*[st.frozensets(heads)] * RANKS),
        ),
        sizes=st.tuples(*[st.integers(0, 3)] * RANKS),
        toggled=toggled,
    )
    length = draw(st.sampled_from([1, 2, most_steps]))
    tie = draw(st.sampled_from([*["none"] * 8, *TIES]))
    if tie == "collections":
        # Calls of one collection are an update each where they do not share an exchange: one of both, for SGD.
        tables = {name: replace(table, optimizer="sgd") for name, table in tables.items()}
    return Structure(
        tables=tables,
        tie=tie,
        frozen=draw(st.frozensets(st.sampled_from(["bottom", *there, *tables]))),
        transport=draw(st.sampled_from(["auto", "group"])),
        steps=draw(st.lists(step, min_size=length, max_size=length)),
        seed=draw(st.integers(0, 2**16)),
    )


class Model(nn.Module):
    """A head on the samples' numbers, one on each collection, and a bias that is always there."""

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        torch.manual_seed(structure.seed)
        self.collections = nn.ModuleDict()
        for path in COLLECTIONS:
            tables = {name: table for name, table in structure.tables.items() if table.collection == path}
            configs: list[Any] = [
                (EmbeddingConfig if path == SEQUENCES else EmbeddingBagConfig)(
                    name=name, num_embeddings=table.rows, embedding_dim=DIM, feature_names=[name]
                )
                for name, table in tables.items()
            ]
            if configs:
                made = EmbeddingCollection if path == SEQUENCES else EmbeddingBagCollection
                self.collections[path] = made(tables=configs)
        self.heads = nn.ModuleDict(
            {"bottom": nn.Linear(DIM, 1)} | {path: nn.Linear(DIM, 1) for path in self.collections}
        )
        self.vocabulary = nn.Linear(DIM, 2)
        self.bias = nn.Parameter(torch.zeros(1))
        self.tie(structure)

    def tie(self, structure: Structure) -> None:
        """Put one parameter in two places, where the model has two for it."""
        first, *others = self.collections
        if structure.tie == "linears":
            self.heads[first].weight = self.heads["bottom"].weight
        elif structure.tie == "table and linear":
            self.vocabulary = nn.Linear(DIM, next(iter(structure.tables.values())).rows)
            self.vocabulary.weight = table_of(self, structure, next(iter(structure.tables))).weight
        elif structure.tie == "tables":
            name, table = next(iter(structure.tables.items()))
            for other, spec in structure.tables.items():
                if spec.collection != table.collection and spec.rows == table.rows:
                    table_of(self, structure, other).weight = table_of(self, structure, name).weight
        elif structure.tie == "collections" and others:
            self.again = self.collections[first]

    def freeze(self, structure: Structure, part: str, frozen: bool) -> None:
        """Freeze a head or a table, or no longer; the model may be sharded."""
        module = self.heads[part] if part in self.heads else table_of(self, structure, part)
        for parameter in module.parameters():
            parameter.requires_grad_(not frozen)

    def forward(
        self, dense: Tensor, features: KeyedJaggedTensor, called: frozenset[str], heads: frozenset[str], alone: bool
    ) -> Tensor:
        """Numbers (B,).

        Args:
            dense: (B, DIM).
            features: of the tables.
            called: the collections that are looked up.
            heads: what the numbers are made of.
            alone: ranks have other heads; an exchange is in the loss of all of them, or of none.
        """
        outputs: dict[str, Any] = {
            path: module(features) for path, module in self.collections.items() if path in called
        }
        if hasattr(self, "again"):
            outputs["again"] = self.again(features)
        total = self.bias.expand(dense.size(0))
        if alone:
            for output in outputs.values():
                total = total + 0 * pooled(output, dense.size(0)).sum(1)
        for head in sorted(heads):
            if head == "bottom":
                part = dense
            elif head in outputs:
                part = pooled(outputs[head], dense.size(0))
            else:
                continue
            total = total + self.heads[head](part).squeeze(1)
            if head != "bottom":
                total = total + self.vocabulary(part).sum(1)
                if "again" in outputs and head == next(iter(self.collections)):
                    total = total + pooled(outputs["again"], dense.size(0)).sum(1)
        return total


def pooled(output: Any, size: int) -> Tensor:
    """(B, DIM): the sum over a collection's features, and over the ids of a sample."""
    if hasattr(output, "values") and not isinstance(output, dict) and hasattr(output, "length_per_key"):
        return output.values().unflatten(1, (len(output.keys()), DIM)).sum(1)
    parts = []
    for item in output.values():
        sample = torch.repeat_interleave(torch.arange(size), item.lengths().long())
        parts.append(torch.zeros(size, DIM).index_add(0, sample, item.values()))
    return torch.stack(parts).sum(0)


def table_of(model: nn.Module, structure: Structure, name: str) -> nn.Module:
    """The module that has a table's weight, or weights of its shards."""
    collection: Any = model.collections[structure.tables[name].collection]  # type: ignore[index]
    if isinstance(collection, ShardedCollection):
        return collection.tables()[name]
    tables = collection.embeddings if isinstance(collection, EmbeddingCollection) else collection.embedding_bags
    return tables[name]


def plan_of(structure: Structure) -> ShardingPlan:
    """Where the tables go."""
    layouts: list[TableLayout] = []
    for name, table in structure.tables.items():
        full = f"collections.{table.collection}.{name}"
        kind, *rank = table.cut.split()
        if kind == "table_wise":
            layouts.append(cuts.table_wise(full, table.rows, DIM, rank=int(rank[0])))
        elif kind == "data_parallel":
            layouts.append(cuts.data_parallel(full, table.rows, DIM))
        else:
            layouts.append(getattr(cuts, kind)(full, table.rows, DIM, ranks=range(RANKS)))
    return ShardingPlan(topology=Topology(ranks_per_host=RANKS), tables=tuple(layouts))


def batch_of(structure: Structure, number: int, rank: int, *, least: int = 0) -> tuple[Tensor, KeyedJaggedTensor]:
    """A rank's batch of a step: numbers (B, DIM), and 0 to 3 ids per sample and feature.

    Fewer samples than ``least`` are so many without ids.
    """
    generator = torch.Generator().manual_seed(structure.seed + 1000 * number + rank)
    size = structure.steps[number].sizes[rank]
    lengths = torch.randint(4, (len(structure.tables) * size,), generator=generator)
    if size < least:
        size, lengths = least, torch.zeros(len(structure.tables) * least, dtype=torch.int64)
    ids = [
        torch.randint(table.rows, (int(counts.sum()),), generator=generator)
        for table, counts in zip(structure.tables.values(), lengths.view(len(structure.tables), size), strict=True)
    ]
    features = KeyedJaggedTensor(keys=list(structure.tables), values=torch.cat(ids), lengths=lengths, stride=size)
    return torch.randn(size, DIM, generator=generator), features


class Training:
    """A model, sharded and not, in training.

    Args:
        structure: what they are.

    Raises:
        ConfigError: if ``shard`` refuses the model.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.rank = dist.get_rank()
        self.reference = Model(structure)
        model = Model(structure)
        given: set[int] = set()
        for name, table in structure.tables.items():
            weight: Any = table_of(model, structure, name).weight
            choice = OPTIMIZERS[table.optimizer]
            if choice.optimizer is not None and id(weight) not in given:
                apply_optimizer_in_backward(choice.optimizer, [weight], dict(choice.settings))
            given.add(id(weight))
        for either in (self.reference, model):
            for part in structure.frozen:
                either.freeze(structure, part, True)
        self.model: ShardedModel = shard(model, plan_of(structure), transport=structure.transport)
        self.frozen = set(structure.frozen)
        self.optimizers = self._reference_optimizers()
        self.dense = torch.optim.SGD([{"params": group, **settings} for group, settings in self._ordinary()])

    def _reference_optimizers(self) -> list[torch.optim.Optimizer]:
        made: list[torch.optim.Optimizer] = []
        taken: set[int] = set()
        for name, table in self.structure.tables.items():
            weight: Any = table_of(self.reference, self.structure, name).weight
            if id(weight) in taken:
                continue
            taken.add(id(weight))
            choice = OPTIMIZERS[table.optimizer]
            if choice.optimizer is None:
                made.append(torch.optim.SGD([weight], lr=DENSE_LR))
            else:
                made.append(choice.optimizer([weight], **choice.settings))  # type: ignore[call-arg]
        rest = [one for one in self.reference.parameters() if id(one) not in taken]
        return [*made, torch.optim.SGD(rest, lr=DENSE_LR, weight_decay=DECAY)]

    def _ordinary(self) -> list[tuple[list[nn.Parameter], dict[str, float]]]:
        """The sharded model's parameters; tables, whose gradient is zero where they are not used, without decay."""
        tables = {
            id(one)
            for name in self.structure.tables
            for one in table_of(self.model.module, self.structure, name).parameters()
        }
        parameters = list(self.model.parameters())
        return [
            ([one for one in parameters if id(one) in tables], {"lr": DENSE_LR}),
            ([one for one in parameters if id(one) not in tables], {"lr": DENSE_LR, "weight_decay": DECAY}),
        ]

    def step(self, number: int) -> None:
        """Make a step of both and compare them."""
        step = self.structure.steps[number]
        if step.toggled:
            self.frozen ^= {step.toggled}
            for model in (self.reference, self.model.module):
                model.freeze(self.structure, step.toggled, step.toggled in self.frozen)  # type: ignore[operator]
        mode, alone = step.modes[self.rank], len(set(step.heads)) > 1
        with torch.inference_mode(mode == INFERENCE), torch.set_grad_enabled(mode == GRAD):
            arguments = batch_of(self.structure, number, self.rank)
            agree = len({mode == GRAD for mode in step.modes}) == 1
            try:
                output = self.model(*arguments, step.called, step.heads[self.rank], alone)
            except InputError:
                if agree:
                    raise
                self.compare(f"step {number}, which was refused")
                return
            assert agree or not self.structure.steps[number].called, "ranks in different grad modes went on"
        # The unsharded collections take no batch without a sample.
        expected = [
            self.reference(*batch_of(self.structure, number, rank, least=1), step.called, heads, alone)[:size]
            for rank, (heads, size) in enumerate(zip(step.heads, step.sizes, strict=True))
        ]
        assert torch.allclose(output, expected[self.rank], atol=1e-4), (
            f"step {number}: output {output.tolist()} for {expected[self.rank].tolist()}"
        )
        if agree and mode == GRAD:
            loss(output).backward()
            # The mean over the ranks of the gradients; none where no rank has one.
            (sum(loss(one) for one in expected) / RANKS).backward()  # type: ignore[union-attr]
            for optimizer in (self.dense, *self.optimizers):
                optimizer.step()
                optimizer.zero_grad()
        self.compare(f"after step {number}")

    def compare(self, where: str) -> None:
        """The parameters of both: dense ones by name, under each name that they have; tables shard by shard."""
        tables: set[int] = set()
        for name in self.structure.tables:
            table: Any = table_of(self.model.module, self.structure, name)
            whole: Any = table_of(self.reference, self.structure, name).weight
            tables |= {id(one) for one in table.parameters()}
            for place, parameter in table.locals.items():
                assert_close(parameter, local_part(whole, place), f"{where}: {place or name}")
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in tables:
                assert_close(parameter, self.reference.get_parameter(name), f"{where}: {name}")


def loss(output: Tensor) -> Tensor:
    """Of a rank's output, which may be that of no sample; its gradient has a bound, so that errors do not grow."""
    return 0.1 * nn.functional.smooth_l1_loss(output, torch.ones_like(output), reduction="sum")


def assert_close(found: Tensor, expected: Tensor, where: str) -> None:
    difference = (found.detach() - expected.detach()).abs().max().item() if found.numel() else 0.0
    assert torch.allclose(found, expected, atol=1e-4), f"{where} is off by {difference}"


def train(structure: Structure) -> int:
    """Make all steps on this rank.

    Returns:
        Steps made; 0 if ``shard`` refused the model, which only one with a tied table may be.

    Raises:
        AssertionError: what differs, and where.
    """
    try:
        training = Training(structure)
    except ConfigError:
        if structure.tie in ("none", "linears", "collections"):
            raise
        return 0
    for number in range(len(structure.steps)):
        try:
            training.step(number)
        except ShardrecError as error:
            # A table frozen or unfrozen since may be refused, by a message that says so.
            changed = (training.frozen ^ structure.frozen) & structure.tables.keys()
            if changed and "requires_grad" in str(error):
                return number
            raise
    return len(structure.steps)
