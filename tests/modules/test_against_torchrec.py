"""The same tables, weights and inputs through TorchRec's own ``DistributedModelParallel``.

Both sides hold the same shards on the same ranks: TorchRec's plan is written from ours. It draws new weights, so ours
are copied into its shards. Outputs before and after each of two steps are compared, and the shards at last.

``DIFFERENCES`` lists where TorchRec 1.8 on the CPU gives something else, and why. A test finds each of them, so that a
TorchRec without one is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import collective_utils, comm
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardMetadata,
)
from torchrec.distributed.types import ShardingPlan as PeerPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import ShardedModel, shard
from tests.batches import random_bags
from tests.models import apply_optimizer_in_backward
from tests.ranks import RankErrors, ranks

ATOL, RTOL = 1e-6, 1e-5
TIMEOUT = 100.0
"""Seconds: a rank's first import of ``torchrec.distributed`` takes its time on a loaded machine."""

TABLES: Mapping[str, tuple[int, int, Sequence[str]]] = {"t0": (12, 8, ("a", "b")), "t1": (20, 8, ("b", "c"))}
"""Rows, columns and features. TorchRec's row blocks have equal rows, so the rows are a multiple of 4 ranks."""
KEY_ROWS = {"a": 12, "b": 12, "c": 20}

LEARNING_RATE = 0.5
OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, float]]] = {
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-8}),
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, {"eps": 1e-8}),
}
"""In backward, on both sides. TorchRec passes on to fbgemm what it is given, and no more: without ``eps`` it is
fbgemm's 1e-8 instead of the class's 1e-10, and ``initial_accumulator_value`` is a TypeError."""

Make = Callable[[str, int, int, int, Topology], TableLayout]

CUTS: Mapping[str, tuple[str, Make]] = {
    "table_wise": (
        "table_wise",
        lambda name, rows, dim, number, topology: cuts.table_wise(name, rows, dim, rank=number % topology.world_size),
    ),
    "row_wise": (
        "row_wise",
        lambda name, rows, dim, number, topology: cuts.row_wise(name, rows, dim, ranks=range(topology.world_size)),
    ),
    "column_wise": (
        "column_wise",
        lambda name, rows, dim, number, topology: cuts.column_wise(name, rows, dim, ranks=[0, 1]),
    ),
    "table_row_wise": (
        "table_row_wise",
        lambda name, rows, dim, number, topology: cuts.table_row_wise(
            name, rows, dim, host=number % topology.hosts, topology=topology
        ),
    ),
    "grid": (
        "grid_shard",
        lambda name, rows, dim, number, topology: cuts.grid(
            name, rows, dim, hosts=range(topology.hosts), topology=topology
        ),
    ),
    "data_parallel": (
        "data_parallel",
        lambda name, rows, dim, number, topology: cuts.data_parallel(name, rows, dim),
    ),
}
"""TorchRec's name of each cut, and our cut: ``make(name, rows, dim, number of the table, topology)``."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What to compare.

    Args:
        cut: a key of ``CUTS``, for both tables.
        pooling: of both tables; None for an EmbeddingCollection.
        weighted: ids come with weights.
        optimizer: a key of ``OPTIMIZERS``; None for a dense SGD.
        hosts: over which the ranks are spread.
        each: features have a batch size each, and inverse indices.
    """

    cut: str
    pooling: PoolingType | None = PoolingType.SUM
    weighted: bool = False
    optimizer: str | None = "sgd"
    hosts: int = 1
    each: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        common = [
            {"name": name, "num_embeddings": rows, "embedding_dim": dim, "feature_names": list(features)}
            for name, (rows, dim, features) in TABLES.items()
        ]
        module: nn.Module
        if self.pooling is None:
            module = EmbeddingCollection(tables=[EmbeddingConfig(**one) for one in common])
        else:
            bags = [EmbeddingBagConfig(**one, pooling=self.pooling) for one in common]
            module = EmbeddingBagCollection(tables=bags, is_weighted=self.weighted)
        if self.optimizer is not None:
            cls, settings = OPTIMIZERS[self.optimizer]
            apply_optimizer_in_backward(cls, module.parameters(), {"lr": LEARNING_RATE, **settings})
        return module

    def layouts(self) -> tuple[TableLayout, ...]:
        topology = self.topology()
        make = CUTS[self.cut][1]
        return tuple(
            make(name, rows, dim, number, topology) for number, (name, (rows, dim, _)) in enumerate(TABLES.items())
        )

    def topology(self) -> Topology:
        return Topology(hosts=self.hosts, ranks_per_host=dist.get_world_size() // self.hosts)


def ours(setting: Setting) -> ShardedModel:
    return shard(setting.build(), ShardingPlan(topology=setting.topology(), tables=setting.layouts()))


def theirs(setting: Setting) -> nn.Module:
    """TorchRec's, with our layouts and the unsharded weights."""
    unsharded = setting.build()
    weights = {name: value.clone() for name, value in unsharded.state_dict().items()}
    sharder: Any = EmbeddingCollectionSharder() if setting.pooling is None else EmbeddingBagCollectionSharder()
    tables = {layout.name: _peer_layout(setting, layout) for layout in setting.layouts()}
    group = dist.group.WORLD
    assert group is not None, "the process group is initialised"
    model = DistributedModelParallel(
        unsharded,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=PeerPlan(plan={"": EmbeddingModuleShardingPlan(tables)}),
        sharders=[sharder],
    )
    for name, whole in weights.items():
        for (row, col), part in parts_of(model.state_dict()[name]).items():
            part.copy_(whole[row : row + part.size(0), col : col + part.size(1)])
    return model


def _peer_layout(setting: Setting, layout: TableLayout) -> ParameterSharding:
    sharding_type = CUTS[setting.cut][0]
    if layout.replicated:
        everyone = list(range(dist.get_world_size()))
        return ParameterSharding(sharding_type=sharding_type, compute_kernel="dense", ranks=everyone)
    shards = sorted(layout.shards, key=lambda one: (one.col_start, one.row_start))
    places = [
        ShardMetadata(
            shard_offsets=[one.row_start, one.col_start],
            shard_sizes=[one.rows, one.cols],
            placement=f"rank:{one.rank}/cpu",
        )
        for one in shards
    ]
    return ParameterSharding(
        sharding_type=sharding_type,
        compute_kernel="fused",
        ranks=[one.rank for one in shards],
        sharding_spec=EnumerableShardingSpec(places),
    )


def parts_of(value: Tensor | ShardedTensor) -> dict[tuple[int, int], Tensor]:
    """This rank's parts of a state_dict's value, by their first row and column."""
    if isinstance(value, ShardedTensor):
        return {
            (one.metadata.shard_offsets[0], one.metadata.shard_offsets[1]): one.tensor for one in value.local_shards()
        }
    return {(0, 0): value}


def outputs(model: nn.Module, features: Any, setting: Setting) -> Tensor:
    """All the output's numbers in one tensor, (B, D) or (N, D)."""
    output = model(features)
    if setting.pooling is not None:
        values: Tensor = output.values()
        return values
    sequences = [output[key] for key in ("a", "b@t0", "b@t1", "c")]
    assert all(one.lengths().numel() == 4 for one in sequences), "the batch has 4 samples"
    return torch.cat([one.values() for one in sequences])


def with_inverse_indices(rng: Random) -> KeyedJaggedTensor:
    """1 to 4 bags of each feature, chosen from by 4 samples; TorchRec wants keys in one order."""
    sizes = [rng.randint(1, 4) for _ in KEY_ROWS]
    lengths = [[rng.randrange(4) for _ in range(size)] for size in sizes]
    ids = [rng.randrange(limit) for limit, own in zip(KEY_ROWS.values(), lengths, strict=True) for _ in range(sum(own))]
    return KeyedJaggedTensor(
        keys=list(KEY_ROWS),
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor([one for own in lengths for one in own]),
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(list(KEY_ROWS), torch.tensor([[rng.randrange(size) for _ in range(4)] for size in sizes])),
    )


@contextmanager
def quiet_peer() -> Iterator[None]:
    """TorchRec warns at every table, and thinks that a process sees one world: it keeps the groups inside and between
    hosts, and asks rank 0 only once whether to validate collectives, so that a rank that has leaves others waiting.
    """
    logging.disable(logging.WARNING)
    comm._INTRA_PG = comm._CROSS_PG = None
    collective_utils._INITIALIZED = False
    try:
        yield
    finally:
        comm._INTRA_PG = comm._CROSS_PG = None
        logging.disable(logging.NOTSET)


def excess(found: Tensor, expected: Tensor) -> float:
    """How much further apart two tensors are, anywhere, than the tolerance allows; negative if they are equal."""
    assert found.shape == expected.shape
    if not found.numel():
        return -ATOL
    found, expected = found.detach(), expected.detach()
    return float(((found - expected).abs() - RTOL * expected.abs()).max()) - ATOL


def compare(setting: Setting, steps: int = 2) -> list[float]:
    """Excess of the outputs, step by step, and at last of the weights."""
    with quiet_peer():
        return _compare(setting, steps)


def _compare(setting: Setting, steps: int) -> list[float]:
    mine, peer = ours(setting), theirs(setting)
    dense = []
    if setting.optimizer is None:
        dense = [torch.optim.SGD(list(model.parameters()), lr=LEARNING_RATE) for model in (mine, peer)]
    found = []
    for step in range(steps + 1):
        seed = 10 * step + dist.get_rank()
        features = (
            with_inverse_indices(Random(seed))
            if setting.each
            else random_bags(Random(seed), KEY_ROWS, 4, weighted=setting.weighted, shuffled=False).kjt()
        )
        values = [outputs(model, features, setting) for model in (mine, peer)]
        found.append(excess(*values))
        if step < steps:
            gradient = torch.randn(values[0].shape, generator=torch.Generator().manual_seed(seed))
            for value in values:
                value.backward(gradient)
            for optimizer in dense:
                optimizer.step()
                optimizer.zero_grad()
    state = peer.state_dict()
    assert state.keys() == mine.state_dict().keys()
    for name, value in mine.state_dict().items():
        expected = parts_of(state[name])
        parts = parts_of(value)
        assert parts.keys() == expected.keys()
        found += [excess(part, expected[place]) for place, part in parts.items()]
    return found


SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


def same(cut: str, hosts: int = 1) -> list[Setting]:
    """What both must agree on."""
    optimizers: Sequence[str | None] = [None] if cut == "data_parallel" else list(OPTIMIZERS)
    several_stripes = cut == "column_wise" or (cut == "grid" and hosts > 1)
    found = []
    for optimizer in optimizers:
        if optimizer == "rowwise_adagrad" and several_stripes:
            continue
        found += [Setting(cut=cut, weighted=weighted, optimizer=optimizer, hosts=hosts) for weighted in (False, True)]
        # The optimizer sees a gradient per row, whatever it comes from.
        if optimizer not in (None, "adagrad"):
            continue
        if cut != "grid":
            found.append(Setting(cut=cut, pooling=MEAN, optimizer=optimizer, hosts=hosts))
        if cut in ("table_wise", "row_wise", "column_wise"):
            found.append(Setting(cut=cut, pooling=None, optimizer=optimizer, hosts=hosts))
    return found


def assert_same(settings: Sequence[Setting]) -> None:
    for setting in settings:
        found = compare(setting)
        assert max(found) <= 0, f"{setting}: {found}"


@pytest.mark.some(2)
@pytest.mark.parametrize("cut", sorted(CUTS))
def test_outputs_and_steps_are_torchrecs(cut: str) -> None:
    ranks(2, assert_same, same(cut), timeout=TIMEOUT)


@pytest.mark.some(1)
@pytest.mark.parametrize("cut", ["table_row_wise", "grid"])
def test_outputs_and_steps_are_torchrecs_between_hosts(cut: str) -> None:
    ranks(4, assert_same, same(cut, hosts=2), hosts=2, timeout=TIMEOUT)


DIFFERENCES: Mapping[str, tuple[Setting, int]] = {
    "the mean of a grid's bags: TorchRec adds up the means of the row blocks": (Setting(cut="grid", pooling=MEAN), 0),
    "the weighted mean under row cuts: TorchRec divides by the sum of weights, under other cuts by the number of ids": (
        Setting(cut="row_wise", pooling=MEAN, weighted=True),
        0,
    ),
    "the gradient of a weighted mean under other cuts: fbgemm's CPU kernel leaves out the division": (
        Setting(cut="table_wise", pooling=MEAN, weighted=True),
        1,
    ),
    "rowwise Adagrad on column cuts: TorchRec's ranks use the mean square of their own columns": (
        Setting(cut="column_wise", optimizer="rowwise_adagrad"),
        1,
    ),
    "replicated tables: TorchRec drops the optimizer that they were given in backward": (
        Setting(cut="data_parallel", optimizer="sgd"),
        1,
    ),
    "inverse indices of sequences: on the CPU TorchRec gives the full batch's rows, which take no gradient": (
        Setting(cut="row_wise", pooling=None, each=True),
        1,
    ),
}
"""Per difference, a setting that shows it, and the first step whose output differs."""


@pytest.mark.parametrize("name", DIFFERENCES)
def test_torchrec_differs(name: str) -> None:
    setting, first = DIFFERENCES[name]
    for found in ranks(2, compare, setting, timeout=TIMEOUT):
        assert max(found[:first], default=0) <= 0
        assert found[first] > 0.01, f"TorchRec is as shardrec now. Take this one out of the list: {found}"


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ("table_row_wise", "Sharding not supported table_row_wise"),
        ("grid", "Sharding not supported grid_shard"),
        (
            "data_parallel",
            "split_with_sizes",
        ),  # fbgemm's dense CPU kernel pools the rows that it should give one by one
    ],
)
def test_sequences_that_torchrec_cannot_do_on_the_cpu(cut: str, words: str) -> None:
    with pytest.raises(RankErrors, match=words):
        ranks(2, compare, Setting(cut=cut, pooling=None, optimizer=None), timeout=TIMEOUT)
