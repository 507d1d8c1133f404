"""TorchRec's tests of sharded models against unsharded ones (those by its ``sharding_single_rank_test``), by name.

Each case has the name of the upstream test whose axes it is drawn from. What they ask for that is not here is listed in
docs/ledger.md. Upstream trains one step and compares predictions; here two steps are trained, and compared are losses,
predictions and all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType

import shardrec
from shardrec.layout import ShardingPlan, Topology
from shardrec.layout.discover import table_shapes
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.peers.models import MODELS, SAMPLES, Batch, Net, random_batch
from tests.plans import cut_plan, random_plan
from tests.ranks import ranks

BOTH = (False, True)
IN_BACKWARD = {"bags": 0.01, "rows": 0.2}
"""Learning rates of SGD in backward; elsewhere it is 0.1."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is sharded, and how.

    Args:
        test: the upstream test.
        number: of the example.
        model: a key of ``MODELS``.
        cut: of all tables; "mixture": another one for each.
        ranks: world size.
        hosts: over which the ranks are spread.
        replicas: copies of the tables; None for a model without replicas.
        pooling: of the bags.
        half: tables are FP16.
        comms: rows travel as FP16 and gradients as BF16.
        optimizer: of the tables, in backward: a key of ``OPTIMIZERS``, "two rates" of SGD; or "none".
        bags: of rank 0, of each other rank; or "each": a number of bags per feature.
        dtype: of ids, lengths and offsets.
        offsets: the input has offsets in place of lengths.
        dedup: of sequences.
        on_rank_0: all tables are there.
        steps: trained.
    """

    test: str
    number: int = 0
    model: str = "bags"
    cut: str = "mixture"
    ranks: int = 2
    hosts: int = 1
    replicas: int | None = None
    pooling: PoolingType = PoolingType.SUM
    half: bool = False
    comms: bool = False
    optimizer: str = "none"
    bags: tuple[int, int] | str = (SAMPLES, SAMPLES)
    dtype: torch.dtype = torch.int64
    offsets: bool = False
    dedup: bool = True
    on_rank_0: bool = False
    steps: int = 2

    def __str__(self) -> str:
        return f"{self.test}-{self.number}" + ("-one_rank" if self.ranks == 1 else "")

    def plan(self, model: nn.Module) -> ShardingPlan:
        """The layouts."""
        sizes = table_shapes(model)
        per_host = self.ranks // (self.replicas or 1) // self.hosts
        topology = Topology(hosts=self.hosts, ranks_per_host=per_host)
        if self.on_rank_0:
            alone = cut_plan(self.cut, Random(0), sizes, Topology(ranks_per_host=1 if self.hosts == 1 else per_host))
            return ShardingPlan(topology=topology, tables=alone.tables)
        rng = Random(str(self))
        return random_plan(rng, sizes, topology) if self.cut == "mixture" else cut_plan(self.cut, rng, sizes, topology)

    def make(self, *, half: bool) -> Net:
        """The model, alike on all ranks."""
        torch.manual_seed(0)
        return MODELS[self.model](self.pooling, DataType.FP16 if half else DataType.FP32, self.bags != "each")

    def batch(self, step: int, rank: int) -> Batch:
        """A rank's."""
        rng = Random(f"{self} {step} {rank}")
        if isinstance(self.bags, str):
            return random_batch(rng, each=True, dtype=self.dtype)
        return random_batch(rng, bags=self.bags[rank > 0], dtype=self.dtype, offsets=self.offsets)


def is_table(name: str) -> bool:
    """Whether a parameter, by its name in the unsharded model, is a table."""
    return ".embedding_bags." in name or ".embeddings." in name


class Reference:
    """The unsharded model, of float32, on the batches of all ranks."""

    def __init__(self, case: Case, source: Net) -> None:
        self.case = case
        self.model = case.make(half=False)
        self.model.load_state_dict({name: value.float() for name, value in source.state_dict().items()})
        tables = {name: value for name, value in self.model.named_parameters() if is_table(name)}
        self.tables = list(tables.values())
        dense = [value for name, value in self.model.named_parameters() if name not in tables]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(dense, lr=0.1)]
        if case.optimizer == "two rates":
            for name, table in tables.items():
                rate = IN_BACKWARD["bags" if ".embedding_bags." in name else "rows"]
                self.optimizers.append(torch.optim.SGD([table], lr=rate))
        elif case.optimizer == "none":
            self.optimizers.append(torch.optim.SGD(self.tables, lr=0.1))
        else:
            choice = OPTIMIZERS[case.optimizer]
            made: Any = choice.reference or choice.optimizer
            self.optimizers.append(made(self.tables, **choice.settings))

    def step(self, batches: Sequence[Batch], rank: int) -> tuple[Tensor, Tensor]:
        """Train on all batches; gives the rank's loss and prediction."""
        found = [self.model(batch.full()) for batch in batches]
        torch.stack([loss for loss, _ in found]).mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.case.half:
            with torch.no_grad():
                for table in self.tables:
                    table.copy_(table.half())
        loss, prediction = found[rank]
        return loss.detach(), prediction.detach()


def set_optimizers(case: Case, model: Net) -> None:
    """Those in backward."""
    for name, parameter in model.named_parameters():
        if not is_table(name) or case.optimizer == "none":
            continue
        if case.optimizer == "two rates":
            rate = IN_BACKWARD["bags" if ".embedding_bags." in name else "rows"]
            apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": rate})
        else:
            choice = OPTIMIZERS[case.optimizer]
            assert choice.optimizer is not None
            apply_optimizer_in_backward(choice.optimizer, [parameter], dict(choice.settings))


def compare_weights(sharded: nn.Module, reference: nn.Module, near: float) -> None:
    """This rank's shards, and all that is not sharded."""
    wanted, found = reference.state_dict(), sharded.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        parts = [(value, wanted[name])]
        if isinstance(value, ShardedTensor):
            places = [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
            parts = [
                (part, wanted[name][row : row + part.size(0), column : column + part.size(1)])
                for part, (row, column) in places
            ]
        for part, whole in parts:
            torch.testing.assert_close(part.float(), whole, atol=near, rtol=near, msg=f"{name} differs: {part - whole}")


def check(case: Case) -> None:
    """Train both, on this rank."""
    rank = dist.get_rank()
    source = case.make(half=case.half)
    reference = Reference(case, source)
    set_optimizers(case, source)
    sharded = shardrec.shard(
        source,
        case.plan(source),
        comms=shardrec.QuantizedComms(output="fp16", gradient="bf16") if case.comms else None,
        replicas=case.replicas and shardrec.Replicas(case.replicas),
        dedup=case.dedup,
    )
    # Of tables with an optimizer in backward no gradient is there for this one.
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    # Adam divides a gradient that cancels but for its rounding by its own size.
    near = 3e-3 if case.comms else 1e-4 if case.half or case.optimizer == "adam" else 1e-5
    for step in range(case.steps):
        batches = [case.batch(step, other) for other in range(case.ranks)]
        loss, prediction = sharded(batches[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close((loss, prediction), reference.step(batches, rank), atol=near, rtol=near)
    if isinstance(sharded, shardrec.replicas.ReplicatedModel):
        sharded.sync_replicas()
    # A step in FP16 may be rounded to the number beside.
    compare_weights(sharded, reference.model, 3e-3 if case.half else near)
    batch = case.batch(case.steps, rank)
    with torch.no_grad():
        sharded.eval()
        reference.model.eval()
        torch.testing.assert_close(sharded(batch), reference.model(batch.full()), atol=near, rtol=near)


def drawn(test: str, count: int, axes: Mapping[str, Sequence[Any]], **fixed: Any) -> Iterator[Case]:
    """So many examples, in which each value of each axis comes up."""
    columns = {}
    for axis, values in axes.items():
        assert count >= len(values)
        columns[axis] = [values[number % len(values)] for number in range(count)]
        Random(f"{test} {axis}").shuffle(columns[axis])
    for number in range(count):
        yield Case(test=test, number=number, **fixed, **{axis: column[number] for axis, column in columns.items()})


OPTIMIZER: dict[str, Sequence[Any]] = {"optimizer": ["none", "two rates"]}
COMMS: dict[str, Sequence[Any]] = {"comms": BOTH}
UNEVEN: dict[str, Sequence[Any]] = {"bags": [(SAMPLES, SAMPLES), (SAMPLES, SAMPLES - 1)]}
POOLING: dict[str, Sequence[Any]] = {"pooling": [PoolingType.SUM, PoolingType.MEAN]}
HALF: dict[str, Sequence[Any]] = {"half": BOTH}
EMPTY: dict[str, Sequence[Any]] = {"bags": [(SAMPLES, SAMPLES), (SAMPLES, SAMPLES - 1), (SAMPLES, 0)]}
HOSTS: dict[str, Any] = {"ranks": 4, "hosts": 2}
ROWS: dict[str, Any] = {"model": "sequences"}
COPIES: dict[str, Any] = {"ranks": 4, "replicas": 2}

ON_RANKS: list[Case] = [
    # ModelParallelBase
    *drawn("test_sharding_rw", 6, OPTIMIZER | COMMS | UNEVEN | POOLING | HALF, cut="row_wise"),
    *drawn("test_sharding_dp", 2, HALF, cut="data_parallel"),
    *drawn("test_sharding_cw", 6, OPTIMIZER | COMMS | EMPTY | HALF, cut="column_wise"),
    *drawn("test_sharding_twcw", 4, OPTIMIZER | COMMS | UNEVEN | HALF, cut="table_column_wise"),
    *drawn("test_sharding_tw", 4, OPTIMIZER | COMMS | UNEVEN | HALF, cut="table_wise"),
    *drawn("test_sharding_twrw", 4, OPTIMIZER | COMMS | UNEVEN | POOLING | HALF, cut="table_row_wise"),
    *drawn(
        "test_sharding_variable_batch",
        8,
        {"cut": ["table_wise", "column_wise", "row_wise", "data_parallel"]} | POOLING | HALF,
        bags="each",
    ),
    *drawn("test_sharding_grid", 2, OPTIMIZER | COMMS | POOLING, cut="grid", **HOSTS),
    *drawn("test_sharding_grid_8gpu", 2, OPTIMIZER | COMMS | POOLING, cut="grid", ranks=4, hosts=4),
    *drawn(
        "test_sharding_diff_table_index_type",
        4,
        {"dtype": [torch.int32, torch.int64], "offsets": BOTH},
        cut="row_wise",
    ),
    # ModelParallelHierarchicalTest
    *drawn("test_sharding_nccl_twrw", 4, OPTIMIZER | COMMS | UNEVEN | POOLING, cut="table_row_wise", **HOSTS),
    *drawn("test_sharding_nccl_twcw", 4, OPTIMIZER | COMMS | UNEVEN, cut="table_column_wise", **HOSTS),
    *drawn(
        "test_sharding_empty_rank",
        2,
        {"bags": [(SAMPLES, SAMPLES - 1), "each"]},
        cut="table_row_wise",
        on_rank_0=True,
        **HOSTS,
    ),
    *drawn(
        "test_embedding_tower_nccl",
        4,
        {"cut": ["table_row_wise", "table_column_wise"]} | OPTIMIZER | COMMS,
        model="towers",
        **HOSTS,
    ),
    *drawn(
        "test_embedding_tower_collection_nccl",
        4,
        {"cut": ["table_row_wise", "table_column_wise"]} | OPTIMIZER | COMMS,
        model="tower collection",
        **HOSTS,
    ),
    *drawn(
        "test_hierarchical_sharding_variable_batch",
        2,
        {"cut": ["table_row_wise", "table_column_wise"]} | POOLING,
        bags="each",
        **HOSTS,
    ),
    # SequenceModelParallelTest
    *drawn("test_sequence_sharding_nccl_rw", 3, OPTIMIZER | COMMS | UNEVEN, cut="row_wise", **ROWS),
    *drawn("test_sequence_sharding_nccl_dp", 1, {}, cut="data_parallel", **ROWS),
    *drawn("test_sequence_sharding_nccl_tw", 3, OPTIMIZER | COMMS | UNEVEN, cut="table_wise", **ROWS),
    *drawn("test_sequence_sharding_nccl_cw", 3, OPTIMIZER | UNEVEN, cut="column_wise", **ROWS),
    *drawn(
        "test_sequence_sharding_variable_batch",
        5,
        {"cut": ["table_wise", "column_wise", "row_wise"], "dedup": BOTH},
        bags="each",
        **ROWS,
    ),
    *drawn("test_sequence_sharding_empty_rank", 1, {}, cut="table_wise", on_rank_0=True, bags=(4, 3), **ROWS),
    # SequenceModelParallelHierarchicalTest
    *drawn("test_seq_emb_tower_nccl", 2, OPTIMIZER, model="sequence towers", cut="table_row_wise", **HOSTS),
    # TestEmbeddingBagCollection2DParallel, TestEmbeddingCollection2DParallel
    *drawn("test_sharding_cw_2D", 1, {}, cut="column_wise", optimizer="two rates", **COPIES),
    *drawn("test_sharding_tw_2D", 2, OPTIMIZER, cut="table_wise", **COPIES),
    *drawn("test_sharding_grid_2D", 1, {}, cut="grid", optimizer="two rates", **COPIES),
    *drawn("test_sharding_rw_2D", 2, OPTIMIZER, cut="row_wise", **COPIES),
    *drawn("test_sharding_twrw_2D", 1, {}, cut="table_row_wise", optimizer="two rates", **COPIES),
    *drawn("test_sharding_ec_rw_2D", 2, OPTIMIZER, cut="row_wise", **ROWS, **COPIES),
    *drawn("test_sharding_ec_cw_2D", 1, {}, cut="column_wise", optimizer="two rates", **ROWS, **COPIES),
    *drawn("test_sharding_ec_tw_2D", 1, {}, cut="table_wise", optimizer="two rates", **ROWS, **COPIES),
]

ON_ONE = [replace(case, ranks=1) for case in ON_RANKS if case.ranks == 2 and case.number == 0 and not case.on_rank_0]
FIVE_STEPS = [
    # Rowwise Adagrad takes no sequence tables in unequal stripes, as a mixture of cuts has.
    Case(
        test=f"five_steps_of_{optimizer}_{model}".replace(" ", "_"), model=model, cut=cut, optimizer=optimizer, steps=5
    )
    for optimizer, cut in [(name, "row_wise" if name == "rowwise_adagrad" else "mixture") for name in OPTIMIZERS]
    for model in MODELS
]


def parameters(cases: Sequence[Case]) -> list[Any]:
    """With their names; those after the third of an upstream test are slow."""
    return [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case.number > 2)) for case in cases]


@pytest.mark.some(8)
@pytest.mark.parametrize("case", parameters([*ON_RANKS, *ON_ONE, *FIVE_STEPS]))
def test_sharded_as_unsharded(case: Case) -> None:
    ranks(case.ranks, check, case, hosts=case.hosts)
