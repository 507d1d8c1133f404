"""A sharded EmbeddingCollection: its collectives, its faults, its frozen tables. Its values are in tests/parity."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torchrec
from torchrec import KeyedJaggedTensor

from shardrec.errors import ConfigError, InputError, PlanError
from shardrec.exchange.payload import ShardInput
from shardrec.exchange.route import Lookup, build_route
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedEmbeddingCollection, shard
from shardrec.modules.sequences import distinct_ids_pay
from shardrec.step.sequence_rows import SequenceOutput
from tests.collective_counts import CountCollectives
from tests.large_tensors import LargeTensors
from tests.models import apply_optimizer_in_backward
from tests.modules.sequence_models import DIM, ROWS, Holder, batch, collection
from tests.ranks import ranks


def count_collectives() -> list[dict[str, int]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    layouts = [
        cuts.row_wise("sequences.t0", ROWS["t0"], DIM, ranks=range(world)),
        cuts.column_wise("sequences.t1", ROWS["t1"], DIM, ranks=range(world)),
        cuts.table_wise("sequences.t2", ROWS["t2"], DIM, rank=1),
    ]
    plan = ShardingPlan(topology=Topology(ranks_per_host=world), tables=tuple(layouts))
    model = shard(Holder(collection(torch.optim.Adagrad, 0.1)), plan)
    counts = []
    for step in range(2):
        with CountCollectives() as counted:
            values = model(batch(random.Random(rank * 10 + step), ["a", "b", "c"], rank + step))
            sum(value.values().sum() for value in values.values()).backward()
        counts.append(dict(counted))
    return counts


def train_odd_widths(dim: int) -> None:
    """With the same batch on every rank, so that the mean of their gradients is the unsharded one's."""
    world = dist.get_world_size()
    layouts = (
        cuts.row_wise("sequences.t0", ROWS["t0"], dim, ranks=range(world)),
        cuts.column_wise("sequences.t1", ROWS["t1"], dim, ranks=range(world)),
        cuts.data_parallel("sequences.t2", ROWS["t2"], dim),
    )
    for optimizer in (torch.optim.SGD, torch.optim.Adagrad):
        plan = ShardingPlan(topology=Topology(ranks_per_host=world), tables=layouts)
        model, reference = shard(Holder(collection(optimizer, 0.5, dim=dim)), plan), collection(None, 0.0, dim=dim)
        step = optimizer(reference.parameters(), lr=0.5)
        for seed in range(3):
            features = batch(random.Random(seed), ["a", "b", "c"], 4)
            found, expected = model(features), reference(features)
            for key, values in expected.items():
                torch.testing.assert_close(found[key].values(), values.values(), atol=1e-5, rtol=1e-5)
            for output in (found, expected):
                sum(values.values().square().sum() for values in output.values()).backward()
            step.step()
            step.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_widths_that_are_no_multiple_of_4_train_as_the_unsharded_tables(world: int) -> None:
    for dim in (3, 6):
        ranks(world, train_odd_widths, dim)


@pytest.mark.parametrize("world", [2, 4])
def test_two_collectives_forward_and_one_backward(world: int) -> None:
    for per_rank in ranks(world, count_collectives):
        for counts in per_rank:
            assert sum(counts.values()) == 3, counts


def test_module_describes_itself_as_the_unsharded_one() -> None:
    unsharded = collection(None, 0.0)
    configs, names = unsharded.embedding_configs(), unsharded.embedding_names_by_table()
    layouts = tuple(cuts.table_wise(f"sequences.{name}", rows, DIM, rank=0) for name, rows in ROWS.items())
    module = shard(Holder(unsharded), ShardingPlan(topology=Topology(ranks_per_host=1), tables=layouts))
    sequences = module.sequences
    assert isinstance(sequences, ShardedEmbeddingCollection)
    assert sequences.embedding_configs() == configs
    assert sequences.embedding_names_by_table() == names
    assert (sequences.embedding_dim(), sequences.need_indices()) == (DIM, True)


def bad_ids() -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = ShardingPlan(
        topology=Topology(ranks_per_host=world),
        tables=tuple(cuts.row_wise(f"sequences.{t}", r, DIM, ranks=range(world)) for t, r in ROWS.items()),
    )
    model = shard(Holder(collection(torch.optim.Adagrad, 0.1)), plan)
    good = batch(random.Random(0), ["a", "b", "c"], 3)
    bad = KeyedJaggedTensor(keys=["a", "b", "c"], values=torch.tensor([1, 7, 2]), lengths=torch.tensor([1, 1, 1]))
    before = {key: value.values().clone() for key, value in model(good).items()}
    try:
        model(bad if rank == 1 else good)
    except InputError as error:
        after = model(good)
        assert all(torch.equal(after[key].values(), value) for key, value in before.items())
        return str(error)
    return ""


def test_a_bad_id_on_one_rank_is_reported_on_all() -> None:
    messages = ranks(2, bad_ids)
    assert messages[0] == messages[1]
    for word in ("rank 1", "'b'", "'sequences.t1'", "id 7", "[0, 7)"):
        assert word in messages[0]


def test_unequal_stripes_under_rowwise_adagrad_are_refused() -> None:
    layouts = [cuts.column_wise("t0", ROWS["t0"], DIM, ranks=[0, 0], widths=[4, 12])]
    layouts += [cuts.table_wise(name, ROWS[name], DIM, rank=0) for name in ("t1", "t2")]
    plan = ShardingPlan(topology=Topology(), tables=tuple(layouts))
    with pytest.raises(PlanError, match=r"'t0' is cut into column stripes of 4, 12 columns"):
        ShardedEmbeddingCollection(collection(torchrec.optim.RowWiseAdagrad, 0.1), plan)


def all_frozen_on_one_rank() -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    source = collection(None, 0.0)
    source.requires_grad_(False)
    layouts = [cuts.table_wise(f"sequences.{name}", rows, DIM, rank=0) for name, rows in ROWS.items()]
    model = shard(Holder(source), ShardingPlan(topology=Topology(ranks_per_host=world), tables=tuple(layouts)))
    scale = torch.ones((), requires_grad=True)
    for step in range(2):
        values = model(batch(random.Random(rank + step), ["a", "b", "c"], 3))
        (sum(value.values().sum() for value in values.values()) * scale).backward()
    return scale.grad is not None


def test_ranks_agree_on_a_backward_when_one_holds_all_the_tables_and_they_are_frozen() -> None:
    assert ranks(2, all_frozen_on_one_rank, timeout=20) == [True, True]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, None])
def test_rows_of_one_rank_are_not_put_in_another_order(optimizer: type[torch.optim.Optimizer] | None) -> None:
    """One rank's rows, in the order of the tables, are in the order in which they are sent."""
    names = {name: (rows, DIM) for name, rows in ROWS.items()}
    layouts = tuple(cuts.table_wise(f"sequences.{name}", *shape, rank=0) for name, shape in names.items())
    model = shard(Holder(collection(optimizer, 0.1)), ShardingPlan(topology=Topology(), tables=layouts), dedup=False)
    features = batch(random.Random(0), ["a", "b", "c"], 200)
    rows = [one.values() for one in model(features).values()]
    count = sum(one.numel() for one in rows)
    with LargeTensors(4 * count // 2) as made:
        rows = [one.values() for one in model(features).values()]
        torch.autograd.backward(rows, [torch.ones_like(one) for one in rows])
    # The rows, which are the output's, and the gradients of the output's parts, side by side.
    assert sum(made.made.values()) == 2, made.made


def test_the_gradient_of_one_group_s_rows_is_not_copied_before_it_is_put_in_order() -> None:
    """Two ranks have asked for 3 and 5 of two features of a table."""
    layout = cuts.table_wise("t", 9, 4, rank=0)
    lookups = [Lookup(feature=feature, layout=layout, group=0, output=feature) for feature in "ab"]
    route = build_route(lookups, 2, 1)
    output = SequenceOutput(route, lookups, lookups, {}, group_widths=[4], dim=4, rank=0, device=torch.device("cpu"))
    received = ShardInput(
        lengths=torch.tensor([[1, 3], [2, 2]], dtype=torch.int32),
        ids=torch.zeros(8, dtype=torch.int32),
        weights=None,
        batch_sizes=(1, 1),
        group_ids=(8,),
        counts=((3,), (5,)),
        slot_sizes=(None, None),
    )
    rows, gradient = torch.rand(8, 4), torch.rand(32)
    order = [0, 4, 5, 1, 2, 3, 6, 7]
    flat, _ = output.outgoing([rows], received)
    assert torch.equal(flat.view(8, 4), rows[order])
    with LargeTensors(4 * 32) as made:
        (returned,), _ = output.returned(gradient, received)
    assert sum(made.made.values()) == 1, made.made
    assert torch.equal(returned[order].flatten(), gradient)


def test_a_backward_of_before_a_reshard_is_refused_where_rows_of_one_rank_stay_in_place() -> None:
    names = {f"sequences.{name}": rows for name, rows in ROWS.items()}
    whole, cut = (
        ShardingPlan(topology=Topology(ranks_per_host=1), tables=tables)
        for tables in (
            tuple(cuts.table_wise(name, rows, DIM, rank=0) for name, rows in names.items()),
            tuple(cuts.row_wise(name, rows, DIM, ranks=[0, 0]) for name, rows in names.items()),
        )
    )
    model = shard(Holder(collection(torch.optim.SGD, 0.1)), whole, dedup=False)
    loss = sum(one.values().sum() for one in model(batch(random.Random(0), ["a", "b", "c"], 3)).values())
    model.reshard(cut)
    with pytest.raises(ConfigError, match=r"belongs to a forward before model.reshard\(\)"):
        loss.backward()


def test_distinct_ids_are_found_where_that_pays() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [distinct_ids_pay(*where) for where in ((cpu, 1), (cpu, 2), (cuda, 1), (cuda, 2))] == [
        True,
        True,
        False,
        True,
    ]


def of_two_optimizers() -> torchrec.EmbeddingCollection:
    made = collection(None, 0.0)
    for name, optimizer in (("t0", torch.optim.SGD), ("t1", torch.optim.Adagrad), ("t2", torch.optim.Adagrad)):
        apply_optimizer_in_backward(optimizer, made.embeddings[name].parameters(), {"lr": 0.5})
    return made


@pytest.mark.parametrize("dedup", [False, True])
def test_rows_of_several_groups_are_put_in_order_on_one_rank(dedup: bool) -> None:
    reference = of_two_optimizers()
    tables = [cuts.table_wise(f"sequences.t{n}", ROWS[f"t{n}"], DIM, rank=0) for n in range(3)]
    plan = ShardingPlan(topology=Topology(), tables=tuple(tables))
    model = shard(Holder(of_two_optimizers()), plan, dedup=dedup)
    for seed in range(3):
        features = batch(random.Random(seed), ["a", "b", "c"], 4)
        found, expected = model(features), reference(features)
        for key, values in expected.items():
            torch.testing.assert_close(found[key].values(), values.values())
        for output in (found, expected):
            sum(values.values().square().sum() for values in output.values()).backward()
