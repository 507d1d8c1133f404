"""Names of parameters and state_dict entries: those of the unsharded model, each rank with its own part."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from tests.batches import random_bags
from tests.models import (
    click_model,
    table_sizes,
)
from tests.modules.clicks import (
    CONFIGS,
    ROWS,
    SIZES,
    assert_dense_equal,
    assert_tables_equal,
    mixed_plan,
)
from tests.plans import CUTS, cut_plan, topologies_of
from tests.ranks import raises_on_all, ranks


def test_names_are_those_of_the_unsharded_model() -> None:
    def rank_main() -> tuple[list[str], list[str]]:
        model = shard(click_model(CONFIGS), mixed_plan(2))
        assert list(model.state_dict()) == list(click_model(CONFIGS).state_dict())
        named = dict(model.named_parameters())
        assert len(named) == len(list(model.parameters()))
        assert all(one is two for one, two in zip(named.values(), model.parameters(), strict=True))
        own = [name for name, one in named.items() if hasattr(one, "_in_backward_optimizers")]
        return list(named), own

    dense = [name for name, _ in click_model(CONFIGS).named_parameters() if "embedding_bags" not in name]
    tables = [f"sparse.embedding_bags.{name}.weight" for name in ("movies", "tags", "users")]
    for names, own in ranks(2, rank_main):
        assert names == [*tables, *dense]
        assert {tables[0], tables[2]} <= set(own)
        assert not set(own) & set(dense)


def test_several_shards_of_a_table_on_a_rank_have_names_of_their_own() -> None:
    sizes, key = table_sizes(CONFIGS, "sparse"), "sparse.embedding_bags.movies.weight"
    plan = cut_plan("grid", Random(0), sizes, Topology(hosts=2, ranks_per_host=1))
    one_rank = ShardingPlan.from_json(
        {
            **plan.to_json(),
            "topology": {"hosts": 1, "ranks_per_host": 1},
            "tables": [
                {**table, "shards": [[*shard_[:4], 0] for shard_ in table["shards"]]}
                for table in plan.to_json()["tables"]
            ],
        }
    )
    model = shard(click_model(CONFIGS), one_rank)
    assert [name for name, _ in model.named_parameters() if "movies" in name] == [key], "one rank cuts no columns"
    rows = [cuts.row_wise(name, *size, ranks=[0, 0]) for name, size in sizes.items()]
    blocks = shard(click_model(CONFIGS), ShardingPlan(topology=Topology(), tables=tuple(rows)))
    names = [name for name, _ in blocks.named_parameters() if "movies" in name]
    assert names == ["sparse.embedding_bags.movies.weight_r0_c0", "sparse.embedding_bags.movies.weight_r5_c0"]
    assert model.reshard(one_rank) == 0
    for sharded in (model, blocks):
        state = sharded.state_dict()
        assert torch.equal(state[key], click_model(CONFIGS).state_dict()[key])
        state[key].fill_(7.0)
        for name, parameter in sharded.named_parameters():
            assert "movies" not in name or bool((parameter == 7.0).all()), "a state_dict shares the table's memory"
        assert sharded.load_state_dict(state).unexpected_keys == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_dict_holds_this_ranks_part_of_each_table(world_size: int) -> None:
    def rank_main() -> None:
        reference = click_model(CONFIGS, seed=4).state_dict()
        for cut in sorted(CUTS):
            plan = cut_plan(cut, Random(cut), SIZES, topologies_of(world_size)[-1])
            state = shard(click_model(CONFIGS, seed=4), plan).state_dict()
            for name, value in state.items():
                if isinstance(value, ShardedTensor):
                    assert tuple(value.size()) == tuple(reference[name].shape)
                    for part in value.local_shards():
                        top, left = part.metadata.shard_offsets
                        rows, cols = part.metadata.shard_sizes
                        assert torch.equal(part.tensor, reference[name][top : top + rows, left : left + cols])
                else:
                    assert torch.equal(value, reference[name]), f"{cut}: {name}"

    ranks(world_size, rank_main)


@pytest.mark.parametrize("world_size", [1, 2])
def test_loads_the_unsharded_models_state_and_its_own(world_size: int) -> None:
    def rank_main() -> None:
        for cut in sorted(CUTS):
            plan = cut_plan(cut, Random(cut), SIZES, topologies_of(world_size)[-1])
            other = click_model(CONFIGS, seed=9)
            model = shard(click_model(CONFIGS, seed=4), plan)
            result = model.load_state_dict(other.state_dict())
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            assert_tables_equal(model.module, other, cut, atol=0.0)
            assert_dense_equal(model, other, cut, atol=0.0)
            again = shard(click_model(CONFIGS, seed=5), plan)
            again.load_state_dict(model.state_dict())
            assert_tables_equal(again.module, other, cut, atol=0.0)
            features = random_bags(Random(dist.get_rank()), ROWS, 3).kjt()
            dense = torch.randn(3, 3)
            assert torch.allclose(again(dense, features), other(dense, features), atol=1e-6), "the kernels see it too"

    ranks(world_size, rank_main)


def test_states_that_do_not_fit() -> None:
    model = shard(click_model(CONFIGS, seed=4), mixed_plan(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = click_model(CONFIGS, seed=9).state_dict()
    name = "sparse.embedding_bags.movies.weight"
    for shape in ((11, 8), (10, 4), (10,), (8, 10)):
        with pytest.raises(RuntimeError, match=rf"{name}.*shape \({shape[0]}.*the table \(10, 8\)"):
            model.load_state_dict({**state, name: torch.zeros(shape)})
        model.load_state_dict(before)
    with pytest.raises(RuntimeError, match=rf"Missing key.*{name}"):
        model.load_state_dict({key: value for key, value in state.items() if key != name})
    for unexpected in ("nonsense", name + "_scale", name + ".more"):
        with pytest.raises(RuntimeError, match=rf"Unexpected key.*{unexpected}"):
            model.load_state_dict({**state, unexpected: torch.zeros(1)})
    model.load_state_dict(before)
    users = "sparse.embedding_bags.users.weight"
    faulty = {**state, name: torch.zeros((10, 8), dtype=torch.uint8), users: torch.zeros(3, 3)}
    with pytest.raises(ConfigError, match=rf"nothing was loaded: {name}.*torch\.uint8.*{users}: .*shape \(3, 3\)"):
        model.load_state_dict(faulty)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_state_cut_in_another_way() -> None:
    def rank_main() -> None:
        one, other = (
            cut_plan(cut, Random(0), SIZES, Topology(ranks_per_host=2)) for cut in ("row_wise", "column_wise")
        )
        state = shard(click_model(CONFIGS, seed=4), one).state_dict()
        model = shard(click_model(CONFIGS, seed=5), other)
        before = [parameter.clone() for parameter in model.parameters()]
        try:
            model.load_state_dict(state)
        finally:
            assert all(map(torch.equal, model.parameters(), before))

    raises_on_all(2, RuntimeError, r"sharded in another way than this plan.*load_checkpoint", rank_main)


def test_a_sharded_state_of_another_size() -> None:
    """Its first block has the rows and columns of the smaller table, on the same rank."""

    def rank_main() -> None:
        configs = [replace(config, num_embeddings=20) for config in CONFIGS[:1]]
        name, topology = "sparse.movies", Topology(ranks_per_host=2)
        blocks = ShardingPlan(topology=topology, tables=(cuts.row_wise(name, 20, 8, ranks=[0, 1]),))
        whole = ShardingPlan(topology=topology, tables=(cuts.table_wise(name, 10, 8, rank=0),))
        shard(click_model(CONFIGS[:1]), whole).load_state_dict(shard(click_model(configs), blocks).state_dict())

    raises_on_all(2, ConfigError, r"nothing was loaded: .*movies\.weight: the value has shape \(20, 8\)", rank_main)


def test_data_parallel_wrappers_around_shards_are_refused() -> None:
    """Also around a module that holds the model, and on a rank without a shard. Around dense layers they are not."""

    def rank_main() -> None:
        whole = click_model(CONFIGS)
        layouts = [
            cuts.table_wise(f"sparse.{config.name}", config.num_embeddings, config.embedding_dim, rank=0)
            for config in CONFIGS
        ]
        plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=tuple(layouts))
        for wrap in (lambda model: model, nn.Sequential):
            for layout in (plan, mixed_plan(2)):
                model = shard(click_model(CONFIGS), layout)
                with pytest.raises(ConfigError, match=r"around .*Model|Sequential.* of table 'sparse\.\w+': use what"):
                    DistributedDataParallel(wrap(model))
                assert_tables_equal(model.module, whole, "as they were")
        dense = click_model(CONFIGS)
        dense.top = DistributedDataParallel(dense.top)
        shard(dense, mixed_plan(2), dense="none")

    ranks(2, rank_main)
    ranks(1, lambda: DistributedDataParallel(shard(click_model(CONFIGS), mixed_plan(1))) and None)
