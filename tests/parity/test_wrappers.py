"""TorchRec's modules that wrap a collection: sharded as any model is, or refused where that would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from shardrec import native
from shardrec.errors import ConfigError
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.layout.discover import table_shapes
from shardrec.modules import shard
from tests.batches import random_bags
from tests.models import apply_optimizer_in_backward, collection, feature_rows, random_configs
from tests.plans import random_plan
from tests.ranks import raises_on_all, ranks

ROWS = {"a": 13, "b": 13, "c": 29}


def bags(seed: int = 0) -> tuple[nn.Module, dict[str, int], int]:
    """A collection, its features' rows, and the columns of its output."""
    configs = random_configs(Random(seed))
    columns = sum(config.embedding_dim * len(config.feature_names) for config in configs)
    return collection(configs, optimizers="sgd", seed=seed), feature_rows(configs), columns


class Interaction(nn.Module):
    """Columns to two numbers per sample."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, 2)

    def forward(self, pooled: KeyedTensor) -> Tensor:
        mixed: Tensor = self.linear(pooled.values())
        return mixed


def towers() -> tuple[nn.Module, dict[str, int]]:
    torch.manual_seed(0)
    one, rows, columns = bags()
    other, more, other_columns = bags(1)
    first = EmbeddingTower(embedding_module=one, interaction_module=Interaction(columns))
    second = EmbeddingTower(embedding_module=other, interaction_module=Interaction(other_columns))
    shared = {key: min(rows.get(key, 99), more.get(key, 99)) for key in {**rows, **more}}
    return EmbeddingTowerCollection(towers=[first, second]), shared


def prioritized() -> tuple[nn.Module, dict[str, int]]:
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(name="s0", num_embeddings=13, embedding_dim=8, feature_names=["a", "b"]),
        EmbeddingConfig(name="s1", num_embeddings=29, embedding_dim=8, feature_names=["c"]),
    ]
    modules = import_module("torchrec.modules.pec_embedding_modules")
    return modules.PECEmbeddingCollection(EmbeddingCollection(tables=tables)), ROWS


def plan_of(model: nn.Module, seed: int) -> ShardingPlan:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return random_plan(Random(seed), table_shapes(model), Topology(ranks_per_host=world_size))


def flat(output: object) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return torch.cat([one.values().reshape(-1) for one in output.values()])  # type: ignore[attr-defined]


WRAPPERS = [
    towers,
    pytest.param(
        prioritized,
        marks=pytest.mark.skipif(
            find_spec("torchrec.modules.pec_embedding_modules") is None, reason="torchrec 1.6 has no such module"
        ),
    ),
]


@pytest.mark.parametrize("make", WRAPPERS)
def test_sharded_as_any_model(make: Callable[[], tuple[nn.Module, dict[str, int]]]) -> None:
    """The wrapper's own layers are in the dense part: averaged over the ranks, as all others."""

    def rank_main() -> None:
        for seed in range(5):
            (model, rows), (reference, _) = make(), make()
            sharded = shard(model, plan_of(model, seed))
            batches = [random_bags(Random(10 * seed + rank), rows, 3, shuffled=False).kjt() for rank in range(2)]
            values = flat(sharded(batches[dist.get_rank()]))
            expected = [flat(reference(batch)) for batch in batches]
            assert torch.allclose(values, expected[dist.get_rank()], atol=1e-5), seed
            values.square().sum().backward()
            (torch.stack([one.square().sum() for one in expected]).sum() / 2).backward()
            unsharded = dict(reference.named_parameters())
            dense = [name for name, _ in sharded.named_parameters() if "linear" in name]
            assert bool(dense) == (make is towers)
            for name in dense:
                gradient = sharded.get_parameter(f"module.{name}").grad
                assert torch.allclose(gradient, unsharded[name].grad, atol=1e-4), f"{seed}: {name}"

    ranks(2, rank_main)


def managed_collision() -> nn.Module:
    inner = collection(random_configs(Random(0), most=1), seed=0)
    (config,) = inner.embedding_bag_configs()
    remapper = MCHManagedCollisionModule(
        zch_size=config.num_embeddings,
        device=torch.device("cpu"),
        input_hash_size=2**40,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=1,
    )
    return ManagedCollisionEmbeddingBagCollection(inner, ManagedCollisionCollection({config.name: remapper}, [config]))


def pruned() -> nn.Module:
    inner = collection(random_configs(Random(0), most=1), seed=0)
    sizes = {config.name: 10 * config.num_embeddings for config in inner.embedding_bag_configs()}
    return ITEPEmbeddingBagCollection(inner, GenericITEPModule(sizes, lookups=None, enable_pruning=True))


@pytest.mark.parametrize(
    ("make", "word"), [(managed_collision, "MCHManagedCollisionModule"), (pruned, "GenericITEPModule")]
)
def test_maps_that_each_rank_would_learn_for_itself_are_refused(make: Callable[[], nn.Module], word: str) -> None:
    """Ranks that share a table must agree which row an id has."""

    def rank_main() -> None:
        shard(make())

    raises_on_all(2, ConfigError, rf"{word}\) keeps a map from ids to rows, and each of 2 ranks", rank_main)


def with_sgd(model: nn.Module) -> nn.Module:
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


@pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")
def test_dynamic_ids_in_place_of_managed_collision() -> None:
    """As dynamic ids of the collection inside, on several ranks, too."""
    inner = collection(random_configs(Random(0), most=1), seed=0)
    (config,) = inner.embedding_bag_configs()
    options = {config.name: DynamicIds(evict="lfu", fallback_rows=1)}
    count = 2 * len(config.feature_names)

    def rank_main() -> None:
        model = with_sgd(managed_collision())
        name, size = f"_embedding_module.{config.name}", (config.num_embeddings, config.embedding_dim)
        plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=(cuts.row_wise(name, *size, ranks=[0, 1]),))
        sharded = shard(model, plan, dynamic_ids=options)
        other = nn.Module()
        other.add_module("_embedding_module", with_sgd(collection(random_configs(Random(0), most=1), seed=0)))
        plain = shard(other, plan, dynamic_ids=options)
        assert sharded.state_dict().keys() == plain.state_dict().keys()
        rng = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(4):
            ids = torch.randint(-(2**63), 2**63 - 1, (count,), generator=rng)
            features = KeyedJaggedTensor(
                keys=config.feature_names, values=ids, lengths=torch.ones(count, dtype=torch.int64)
            )
            (found, remapped), expected = sharded(features), plain._sharded[0](features)
            assert remapped is None
            assert torch.equal(found.values(), expected.values())
            found.values().square().sum().backward()
            expected.values().square().sum().backward()
        assert sharded.id_stats() == plain.id_stats()

    ranks(2, rank_main)


def test_managed_collision_that_dynamic_ids_cannot_replace() -> None:
    def attempt(words: str, model: nn.Module) -> None:
        with pytest.raises(ConfigError, match=words):
            shard(model, dynamic_ids={"t0": DynamicIds(evict="never")})

    model = managed_collision()
    (config,) = model._embedding_module.embedding_bag_configs()  # type: ignore[operator,union-attr]
    assert config.name == "t0"
    model._return_remapped_features = True
    attempt("return_remapped_features=False", model)
    model = managed_collision()
    keys = config.feature_names
    for _ in range(3):
        model(
            KeyedJaggedTensor(
                keys=keys, values=torch.arange(len(keys)), lengths=torch.ones(len(keys), dtype=torch.int64)
            )
        )
    attempt("has learned ids", model)
    raises_on_all(
        2,
        ConfigError,
        r"dynamic_ids=\{'t0': shardrec\.DynamicIds\(evict='score', fallback_rows=1\)\}",
        lambda: shard(managed_collision()),
    )


def test_managed_collision_on_one_rank() -> None:
    model, reference = managed_collision(), managed_collision()
    sharded = shard(model)
    (config,) = reference._embedding_module.embedding_bag_configs()  # type: ignore[operator,union-attr]
    for step in range(4):
        features = KeyedJaggedTensor(
            keys=config.feature_names,
            values=torch.randint(
                0, 2**40, (6 * len(config.feature_names),), generator=torch.Generator().manual_seed(step)
            ),
            lengths=torch.full((3 * len(config.feature_names),), 2),
        )
        values, expected = sharded(features)[0].values(), reference(features)[0].values()
        assert torch.allclose(values, expected, atol=1e-6)
