"""What programs of TorchRec's do besides training, beside TorchRec's own ``DistributedModelParallel``: plans of wrapped
collections, optimizers by its filter, states without groups, writes into a state_dict, modules on meta."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecModel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError, PlanError
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.layout.discover import table_shapes
from shardrec.planner import from_torchrec
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

ROWS, DIM = 16, 8
SHARDERS: list[Any] = [
    EmbeddingBagCollectionSharder(),
    FeatureProcessedEmbeddingBagCollectionSharder(),
    EmbeddingTowerSharder(),
    EmbeddingTowerCollectionSharder(),
]


def bags(*names: str, weighted: bool = False, **options: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f_{name}"])
        for name in names
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted, **options)


class Sum(nn.Module):
    def forward(self, embeddings: Any) -> Tensor:
        total: Tensor = embeddings.values().sum(1, keepdim=True)
        return total


def processed() -> nn.Module:
    weights = PositionWeightedModuleCollection({"f_a": 9, "f_b": 9})
    return FeatureProcessedEmbeddingBagCollection(bags("a", "b", weighted=True), weights)


def rows() -> nn.Module:
    tables = [EmbeddingConfig(name="c", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f_c"])]
    return EmbeddingCollection(tables=tables)


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "feature processors": processed,
    "tower": lambda: EmbeddingTower(bags("a", "b"), Sum()),
    "towers": lambda: EmbeddingTowerCollection([EmbeddingTower(bags(name), Sum()) for name in "ab"]),
    "bags beside a tower": lambda: nn.ModuleList([bags("a"), EmbeddingTower(bags("b"), Sum())]),
    "a collection without a sharder": lambda: nn.ModuleList([bags("a", "b"), rows()]),
}


def torchrec_plan(model: nn.Module, world_size: int) -> TorchRecPlan:
    topology = TorchRecTopology(world_size=world_size, local_world_size=world_size, compute_device="cpu")
    constraints = (
        None
        if world_size == 1
        else {
            "a": ParameterConstraints(sharding_types=["column_wise", "row_wise", "table_row_wise"], min_partition=4),
            "b": ParameterConstraints(sharding_types=["table_wise", "table_row_wise"]),
        }
    )
    return EmbeddingShardingPlanner(topology=topology, constraints=constraints, stats=[]).plan(model, SHARDERS)


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("root", [False, True])
def test_a_plan_of_wrappers_is_of_the_collections_inside(kind: str, root: bool) -> None:
    """The path in TorchRec's plan may be empty, too."""
    model = WRAPPED[kind]() if root else nn.ModuleDict({"m": WRAPPED[kind]()})
    theirs = torchrec_plan(model, 2)
    plan = from_torchrec(theirs, Topology(ranks_per_host=2), table_shapes(model))
    plan.check_tables(table_shapes(model))
    planned = {name: sharding for module in theirs.plan.values() for name, sharding in module.items()}  # type: ignore[attr-defined]
    assert set(planned) == {"a", "b"}
    for layout in plan.tables:
        table = layout.name.rpartition(".")[2]
        if table == "c":
            assert layout.replicated
            continue
        shards = [(*each.shard_offsets, *each.shard_sizes) for each in planned[table].sharding_spec.shards]
        assert [(s.row_start, s.col_start, s.rows, s.cols) for s in layout.shards] == shards


def test_a_table_that_two_collections_inside_have() -> None:
    inner = nn.ModuleDict({"m": nn.ModuleList([bags("a"), bags("b")])})
    theirs = TorchRecPlan({"m": torchrec_plan(inner, 2).plan["m.0"]})
    both = nn.ModuleDict({"m": nn.ModuleList([bags("a"), bags("a")])})
    words = r"'m\.a' that is not among the shapes given, or is any of m\.0\.a, m\.1\.a: give the path of its collection"
    with pytest.raises(PlanError, match=words):
        from_torchrec(theirs, Topology(ranks_per_host=2), table_shapes(both))


def parts(value: Any) -> dict[tuple[int, ...], Tensor]:
    if isinstance(value, ShardedTensor):
        return {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    return {(0, 0): value}


def torchrec_model(model: nn.Module, plan: TorchRecPlan) -> nn.Module:
    return TorchRecModel(model, device=torch.device("cpu"), plan=plan, sharders=SHARDERS)


@pytest.mark.parametrize("kind", ["feature processors", "a collection without a sharder"])
def test_each_rank_holds_what_torchrecs_model_holds(kind: str) -> None:
    def run() -> None:
        unsharded = nn.ModuleDict({"m": WRAPPED[kind]()})
        plan = torchrec_plan(unsharded, 2)
        peer = torchrec_model(copy.deepcopy(unsharded), plan).state_dict()
        torch.manual_seed(0)
        sharded = shardrec.shard(nn.ModuleDict({"m": WRAPPED[kind]()}), plan).state_dict()
        assert list(sharded) == list(peer)
        for name, value in sharded.items():
            expected = {place: part.shape for place, part in parts(peer[name]).items()}
            assert {place: part.shape for place, part in parts(value).items()} == expected, name

    ranks(2, run)


CUTS: dict[str, Callable[[str, int, int], TableLayout]] = {
    "table_wise": lambda name, first, last: cuts.table_wise(name, ROWS, DIM, rank=last),
    "row_wise": lambda name, first, last: cuts.row_wise(name, ROWS, DIM, ranks=[first, last]),
    "rows on one rank": lambda name, first, last: cuts.row_wise(name, ROWS, DIM, ranks=[last, last]),
    "column_wise": lambda name, first, last: cuts.column_wise(name, ROWS, DIM, ranks=[first, last]),
    "columns on one rank": lambda name, first, last: cuts.column_wise(name, ROWS, DIM, ranks=[last, last]),
    "data_parallel": lambda name, first, last: cuts.data_parallel(name, ROWS, DIM),
}


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_a_write_into_a_state_dict_is_a_write_into_the_table(world_size: int, replicas: int) -> None:
    def run() -> None:
        size = world_size // replicas
        for cut, layout in CUTS.items():
            model = nn.ModuleDict({"m": bags("a")})
            plan = ShardingPlan(topology=Topology(ranks_per_host=size), tables=(layout("m.a", 0, size - 1),))
            sharded = shardrec.shard(model, plan, replicas=shardrec.Replicas(replicas) if replicas > 1 else None)
            (value,) = sharded.state_dict().values()
            for (row, col), part in parts(value).items():
                part.copy_(100.0 * torch.arange(row, row + len(part))[:, None] + torch.arange(col, col + part.size(1)))
            features = KeyedJaggedTensor(["f_a"], torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.int32))
            found = sharded.module["m"](features).values()
            assert torch.equal(found, 100.0 * torch.arange(ROWS)[:, None] + torch.arange(DIM)), cut

    ranks(world_size, run)


def test_the_filter_for_optimizers_in_backward_leaves_no_table_over() -> None:
    """Under every plan TorchRec's recipe makes one optimizer of all parameters, each of which has one part."""

    def run() -> None:
        for cut, layout in CUTS.items():
            model = nn.ModuleDict({"m": bags("a"), "top": nn.Linear(DIM, 1)})
            apply_optimizer_in_backward(torch.optim.SGD, model["m"].parameters(), {"lr": 0.5})
            plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=(layout("m.a", 0, 1),))
            sharded = shardrec.shard(model, plan)
            dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
            assert list(dense) == ["top.weight", "top.bias"], cut
            assert list(dense.values()) == list(sharded.dense_parameters()), cut
            wrapper = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.5))
            both = CombinedOptimizer([sharded.fused_optimizer, wrapper])
            assert {value for value in both.params.values() if value.numel()} == set(sharded.parameters()), cut

    ranks(2, run)


def test_states_without_groups() -> None:
    """``save_param_groups`` is the switch of TorchRec's keyed optimizers; their default is off, ours on."""

    def run() -> None:
        def trained(rate: float) -> shardrec.ShardedModel:
            torch.manual_seed(0)
            model = nn.ModuleDict({"m": bags("a")})
            apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": rate})
            return shardrec.shard(model)

        features = KeyedJaggedTensor(["f_a"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int32))
        source, target = trained(0.5), trained(0.25)
        for _ in range(2):
            source.module["m"](features).values().sum().backward()
        unsharded = nn.ModuleDict({"m": bags("a")})
        apply_optimizer_in_backward(torch.optim.Adagrad, unsharded.parameters(), {"lr": 0.5})
        peer = torchrec_model(unsharded, torchrec_plan(unsharded, 1)).fused_optimizer
        for switch in (True, False):
            source.fused_optimizer.save_param_groups(switch)
            peer.save_param_groups(switch)
            state = source.fused_optimizer.state_dict()
            assert sorted(state) == sorted(peer.state_dict())
        for of_target in (True, False):
            model = trained(0.25)
            model.fused_optimizer.save_param_groups(of_target)
            model.fused_optimizer.load_state_dict(copy.deepcopy(state))
            assert model.fused_optimizer.param_groups[0]["lr"] == 0.25
            torch.testing.assert_close(model.fused_optimizer.state_dict()["state"], state["state"])
        whole = trained(0.5).fused_optimizer.state_dict()
        target.fused_optimizer.load_state_dict(whole)
        assert target.fused_optimizer.param_groups[0]["lr"] == 0.5
        with pytest.raises(ConfigError, match=r"saved states of m\S+ are \[\] and this optimizer's \['a\.momentum1'\]"):
            target.fused_optimizer.load_state_dict({"state": {}})

    ranks(1, run)


class Ramp(nn.Linear):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(self.weight.numel()).view_as(self.weight))
            self.bias.fill_(self.out_features)


class Dense(nn.Module):
    """Linear layers, one of which does not train, and a norm with buffers."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.m = bags("a")
        self.body = nn.Sequential(Ramp(DIM, 6, device=device), nn.BatchNorm1d(6, device=device))
        self.top = Ramp(6, 1, device=device).requires_grad_(False)


def test_a_dense_part_on_meta_has_torchrecs_values() -> None:
    def run() -> None:
        plan = torchrec_plan(Dense("cpu"), 1)
        values = []
        for shard in (torchrec_model, shardrec.shard):
            model = Dense("meta")
            sharded: nn.Module = shard(model, plan)
            state = sharded.state_dict()
            values.append({name: value for name, value in state.items() if not name.startswith("m.")})
            assert [name for name, one in sharded.named_parameters() if not one.requires_grad][:1] == ["top.weight"]
        torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)

    ranks(1, run)


def test_a_dense_part_on_meta_is_one_on_all_ranks() -> None:
    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Dense("meta")
        torch.manual_seed(dist.get_rank())
        return {name: value for name, value in shardrec.shard(model).state_dict().items() if name[0] != "m"}

    first, second = ranks(2, run)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_weights_of_feature_processors_may_be_on_meta() -> None:
    """They are in a dict of parameters, of whose module ``reset_parameters()`` is."""
    weights = PositionWeightedModuleCollection({"f_a": 9, "f_b": 9}, device=torch.device("meta"))
    sharded = shardrec.shard(FeatureProcessedEmbeddingBagCollection(bags("a", "b", weighted=True), weights))
    features = KeyedJaggedTensor(["f_a", "f_b"], torch.arange(6), lengths=torch.tensor([1, 2, 3, 0]))
    torch.testing.assert_close(sharded(features).values(), processed_with_ones(sharded, features), rtol=0, atol=0)
    assert all(torch.equal(weight, torch.ones(9)) for weight in sharded.module._feature_processors.parameters())


def processed_with_ones(sharded: nn.Module, features: KeyedJaggedTensor) -> Tensor:
    unsharded: Any = processed()
    unsharded.load_state_dict(sharded.state_dict())
    values: Tensor = unsharded(features).values()
    return values


class WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, device="meta"))


class HalfReset(WithoutReset):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(2, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_what_cannot_be_drawn_is_refused_by_name() -> None:
    """TorchRec leaves such parameters with whatever the memory holds."""
    tied = nn.ModuleList([nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")])
    tied[1].weight = tied[0].weight
    stepped = nn.Linear(2, 2, device="meta")
    apply_optimizer_in_backward(torch.optim.SGD, [stepped.bias], {"lr": 0.5})
    for dense, words in (
        (WithoutReset(), r"parameter 'd\.scale' is on meta, .*: its module lacks reset_parameters\(\). Build"),
        (HalfReset(), r"module 'd' is on meta, and its reset_parameters\(\) gives some of its parameters"),
        (tied, r"parameter 'd\.0\.weight' is on meta, .*: it is tied to 'd\.1\.weight'"),
        (stepped, r"parameter 'd\.bias' is on meta, .*: its optimizer in backward"),
    ):
        with pytest.raises(ConfigError, match=words):
            shardrec.shard(nn.ModuleDict({"m": bags("a"), "d": dense}))


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_a_device_that_holds_no_tables(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{device}'. Tables are on 'cpu' or 'cuda': leave it out"):
        shardrec.shard(nn.ModuleDict({"m": bags("a")}), device=device)


def test_a_prefix_of_keys() -> None:
    """As ``state_dict(prefix=...)`` writes them, and TorchRec's ``load_state_dict(prefix=...)`` reads them."""
    source, target = (shardrec.shard(nn.ModuleDict({"m": bags("a"), "top": nn.Linear(2, 1)})) for _ in range(2))
    state = {**source.state_dict(prefix="dlrm."), "other.weight": torch.zeros(1)}
    assert str(target.load_state_dict(state, prefix="dlrm.")) == "<All keys matched successfully>"
    torch.testing.assert_close(target.state_dict(), source.state_dict(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict(state, prefix="another.")
