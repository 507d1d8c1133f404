"""Training with dynamic ids equals training with a perfect table, whatever the cut; rows and counts are a dict's."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import QuantizedComms, load_checkpoint, native, save_checkpoint, shard
from shardrec.errors import ConfigError, InputError, PlanError
from shardrec.exchange.hashing import home_rows, mixed
from shardrec.ids import DynamicIds
from shardrec.ids.id_map import COUNTED
from shardrec.ids.options import POLICIES, Evict
from shardrec.layout import Shard, ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import ShardedModel
from shardrec.pipeline import TrainPipeline
from tests.collective_counts import CountCollectives
from tests.ids.oracle import (
    DIM,
    FEATURES,
    ROWS,
    Bags,
    Batches,
    Oracle,
    dynamic_step,
    kjt,
    loss_of,
    model_of,
    perfect_step,
    raw_batches,
)
from tests.ids.reference import DictMap
from tests.models import apply_optimizer_in_backward
from tests.plans import cut_plan
from tests.ranks import raises_on_all, ranks

pytestmark = pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")

SIZES = {f"sparse.{name}": (rows, DIM) for name, rows in ROWS.items()}
CUTS = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"]


def options_of(rng: Random) -> dict[str, DynamicIds]:
    evict = rng.choice(["lfu", "lru", "score", "ttl", "never"])
    return {
        "users": DynamicIds(evict=evict, ttl=3 if evict == "ttl" else None),  # type: ignore[arg-type]
        "goods": DynamicIds(
            evict=rng.choice(["lfu", "lru", "score"]),
            admit_after=rng.choice([1, 2]),
            fallback_rows=rng.choice([0, 1, 2]),
        ),
    }


def train(
    batches: Batches, plan: ShardingPlan, options: dict[str, DynamicIds], pooled: bool, optimizer: str, dedup: bool
) -> tuple[list[Tensor], dict[Any, Tensor], dict[str, dict[str, int]]]:
    """On one rank: its outputs, the records of its maps, and the counts."""
    rank = torch.distributed.get_rank()
    model = shard(model_of(pooled, optimizer), plan, dynamic_ids=options, dedup=dedup)
    outputs = [dynamic_step(model, of_step[rank], seed) for seed, of_step in enumerate(batches)]
    (collection,) = model._sharded
    assert collection.id_maps is not None
    return outputs, {key: one.records for key, one in collection.id_maps.maps.items()}, model.id_stats()


def check(rng: Random, world_size: int, cut: str, pooled: bool, optimizer: str) -> None:
    topology = Topology(hosts=rng.choice([1, world_size]), ranks_per_host=1)
    topology = Topology(hosts=topology.hosts, ranks_per_host=world_size // topology.hosts)
    plan, options, dedup = cut_plan(cut, rng, SIZES, topology), options_of(rng), rng.random() < 0.5
    batches = raw_batches(rng, 12, world_size)
    oracle = Oracle(plan, options, dedup=dedup and not pooled)
    lives = [oracle.learn(of_step) for of_step in batches]
    perfect = model_of(pooled, optimizer, oracle.perfect)
    reference = shard(perfect, cut_plan("table_wise", rng, sizes_of(oracle), Topology()))
    expected = [perfect_step(perfect, reference, of_step, seed) for seed, of_step in enumerate(lives)]
    found = ranks(world_size, train, batches, plan, options, pooled, optimizer, dedup)
    for step, of_step in enumerate(expected):
        for rank, output in enumerate(of_step):
            torch.testing.assert_close(found[rank][0][step], output, rtol=1e-6, atol=1e-6, msg=lambda m: f"{step}: {m}")  # noqa: B023
    for _, records, stats in found:
        for (name, start), of_map in records.items():
            rows = oracle.maps[name.removeprefix("sparse."), start].rows.entries
            expected_rows = {one.row: (key, one.uses, one.last) for key, one in rows.items()}
            assert {row: tuple(one) for row, one in enumerate(of_map.tolist()) if one[1] > 0} == expected_rows
        for table in options:
            maps = [one for (name, _), one in oracle.maps.items() if name == table]
            for count in maps[0].counts:
                assert stats[f"sparse.{table}"][count] == sum(one.counts[count] for one in maps), count


def sizes_of(oracle: Oracle) -> dict[str, tuple[int, int]]:
    return {f"sparse.{name}": (rows, DIM) for name, rows in oracle.perfect.items()}


@pytest.mark.some(8)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("world_size", "seed"), [(1, 0), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pooled", [True, False])
def test_as_a_perfect_table(cut: str, world_size: int, seed: int, pooled: bool) -> None:
    rng = Random(f"{cut} {seed} {pooled}")
    check(rng, world_size, cut, pooled, rng.choice(["sgd", "adagrad", "rowwise_adagrad", "adam"]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_as_a_perfect_table_in_many_cases(seed: int) -> None:
    rng = Random(seed)
    world_size = rng.choice([1, 2, 2, 4])
    check(
        rng, world_size, rng.choice(CUTS), rng.random() < 0.5, rng.choice(["sgd", "adagrad", "rowwise_adagrad", "adam"])
    )


def learn(plan: ShardingPlan, options: DynamicIds, rows: dict[str, int], ids: Tensor) -> tuple[Any, dict[str, int]]:
    """On one rank: a step for each of its ids (steps, features, ranks, N); the records of its maps, and the counts."""
    model = shard(model_of(True, "sgd", rows), plan, dynamic_ids={"goods": options})
    for of_step in ids[:, :, torch.distributed.get_rank() if ids.size(2) > 1 else 0]:
        lengths = torch.tensor([0, 4, 4, 0], dtype=torch.int32).repeat_interleave(of_step.size(1) // 4)
        batch = KeyedJaggedTensor(keys=list(FEATURES), values=of_step.reshape(-1), lengths=lengths)
        model(batch).sum().backward()
    maps = model._sharded[0].id_maps
    assert maps is not None
    return {start: one.records for (_, start), one in maps.maps.items()}, model.id_stats()["sparse.goods"]


@pytest.mark.slow
@pytest.mark.parametrize("evict", POLICIES)
@pytest.mark.parametrize(("world_size", "cut"), [(1, "column_wise"), (2, "row_wise"), (4, "table_row_wise")])
def test_a_million_ids_over_ranks(evict: Evict, world_size: int, cut: str) -> None:
    """Same rows, same evictions and same counts as dicts, one for each row block."""
    rng, rows = torch.Generator().manual_seed(0), {"users": 12, "goods": 3000, "plain": 9}
    options = DynamicIds(evict=evict, ttl=8 if evict == "ttl" else None, admit_after=2, fallback_rows=1)
    uniform = torch.rand((25, 2, world_size, 20_000 // world_size), generator=rng)
    drift = 1_000 * torch.arange(25).div(3, rounding_mode="floor").view(-1, 1, 1, 1)
    ids = mixed((uniform**-1.2).clamp(max=1e15).to(torch.int64) + drift)
    sizes = {f"sparse.{name}": (count, DIM) for name, count in rows.items()}
    plan = cut_plan(cut, Random(evict), sizes, Topology(ranks_per_host=world_size))
    blocks = sorted(plan.by_name["sparse.goods"].stripes()[0].shards, key=lambda one: one.row_start)
    expected = {one.row_start: DictMap(one.rows, options, one.rows - 1) for one in blocks}
    ends = torch.tensor([one.row_end for one in blocks])
    for step, of_step in enumerate(ids, 1):
        flat = of_step.reshape(-1)
        block = torch.searchsorted(ends, home_rows(flat, torch.tensor(rows["goods"])), right=True)
        for number, one in enumerate(expected.values()):
            one.learn(flat[block == number].tolist(), step)
    found = ranks(world_size, learn, plan, options, rows, ids)
    for records, stats in found:
        for start, of_map in records.items():
            entries = {one.row: (key, one.uses, one.last) for key, one in expected[start].rows.entries.items()}
            assert {row: tuple(one) for row, one in enumerate(of_map.tolist()) if one[1] > 0} == entries
        totals = {name: sum(one.counts[name] for one in expected.values()) for name in COUNTED}
        assert {name: stats[name] for name in COUNTED} == totals
        assert totals["evictions"] or evict in ("never", "ttl")


def given_rows(batches: Batches) -> list[list[Bags]]:
    """The rows that ids get where there are enough: in the order in which they first come."""
    rows: dict[str, dict[int, int]] = {"users": {}, "goods": {}}
    found: list[list[Bags]] = []
    for of_step in batches:
        of_ranks: list[dict[str, list[list[int]]]] = [{} for _ in of_step]
        for feature, table in FEATURES.items():
            for bags, to in zip(of_step, of_ranks, strict=True):
                known = rows.get(table)
                to[feature] = [
                    [raw if known is None else known.setdefault(raw, len(known)) for raw in bag]
                    for bag in bags[feature]
                ]
        found.append(list(of_ranks))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("variant", ["variable batches", "learned weights", "fp16 comms"])
def test_as_plain_rows_with(variant: str) -> None:
    """With enough rows, to the bit; of batch sizes per feature, weights that train, and rounded exchanges."""
    rng = Random(variant)
    pools = {"users": 12, "goods": 24, "plain": 9}
    raw = {table: [rng.getrandbits(64) - 2**63 for _ in range(count)] for table, count in pools.items()}
    raw["plain"] = list(range(9))

    def bags_of(feature: str) -> list[list[int]]:
        count = rng.randint(1, 4) if variant == "variable batches" else 4
        return [rng.choices(raw[FEATURES[feature]], k=rng.choice([0, 1, 3])) for _ in range(count)]

    batches = [[{feature: bags_of(feature) for feature in FEATURES} for _ in range(2)] for _ in range(8)]

    def batch_of(bags: Bags, step: int) -> KeyedJaggedTensor:
        plain, own = kjt(bags), Random(step)
        if variant == "fp16 comms":
            return plain
        keys, count = list(FEATURES), len(plain.values())
        if variant == "learned weights":
            weights = torch.tensor([own.random() for _ in range(count)], requires_grad=True)
            return KeyedJaggedTensor(keys=keys, values=plain.values(), lengths=plain.lengths(), weights=weights)
        inverse = torch.tensor([[own.randrange(len(bags[feature])) for _ in range(5)] for feature in keys])
        strides = [[len(bags[feature])] for feature in keys]
        return KeyedJaggedTensor(
            keys=keys,
            values=plain.values(),
            lengths=plain.lengths(),
            stride_per_key_per_rank=strides,
            inverse_indices=(keys, inverse),
        )

    def outputs(options: dict[str, DynamicIds], given: list[list[Bags]]) -> list[Tensor]:
        model = model_of(True, "adagrad")
        if variant == "learned weights":
            model.sparse = EmbeddingBagCollection(tables=model.sparse.embedding_bag_configs(), is_weighted=True)
            apply_optimizer_in_backward(torch.optim.Adagrad, model.sparse.parameters(), {"lr": 0.5})
        comms = QuantizedComms(output="fp16", gradient="fp16") if variant == "fp16 comms" else None
        sharded = shard(model, two_ranks(), dynamic_ids=options, comms=comms)
        found = []
        for step, of_step in enumerate(given):
            batch = batch_of(of_step[torch.distributed.get_rank()], step)
            values = sharded(batch)
            loss_of(values, step).backward()
            found.append(values.detach().clone())
            if variant == "learned weights":
                gradient = batch.weights().grad
                assert gradient is not None
                found.append(gradient)
        return found

    def both() -> None:
        options = {name: DynamicIds(evict="never") for name in ("users", "goods")}
        for one, other in zip(outputs(options, batches), outputs({}, given_rows(batches)), strict=True):
            assert torch.equal(one, other)

    ranks(2, both)


def two_ranks() -> ShardingPlan:
    layouts = [cuts.table_wise(name, *size, rank=number % 2) for number, (name, size) in enumerate(SIZES.items())]
    return ShardingPlan(topology=Topology(ranks_per_host=2), tables=tuple(layouts))


def one_table(rank: int = 0) -> ShardingPlan:
    return ShardingPlan(
        topology=Topology(), tables=tuple(cuts.table_wise(name, *size, rank=rank) for name, size in SIZES.items())
    )


def bags(*ids: int) -> dict[str, list[list[int]]]:
    return {feature: [list(ids) if feature == "g" else []] for feature in FEATURES}


def test_evaluation_changes_nothing() -> None:
    model = shard(model_of(True, "adagrad"), one_table(), dynamic_ids={"goods": DynamicIds()})
    dynamic_step(model, bags(7, -7), 0)
    before, stats = [one.clone() for one in model.state_dict().values()], model.id_stats()
    model.eval()
    values = model(kjt(bags(7, 123456789)))
    assert model.id_stats() == stats
    assert all(map(torch.equal, before, model.state_dict().values()))
    model.train()
    torch.testing.assert_close(model(kjt(bags(7))), values)  # the other one is a row of zeros


def test_a_recomputed_forward_is_no_step() -> None:
    model = shard(model_of(True, "sgd"), one_table(), dynamic_ids={"goods": DynamicIds()})

    def loss() -> Tensor:
        return model(kjt(bags(7, 8))).square().sum()

    def again(gradient: Tensor) -> None:
        loss()

    value = loss()
    value.register_hook(again)
    value.backward()
    assert model.id_stats()["sparse.goods"]["lookups"] == 2


def test_a_step_whose_backward_is_to_come_keeps_its_rows() -> None:
    """Else the second forward would give the rows of the first to others, which its backward would update."""
    model = shard(model_of(True, "sgd"), one_table(), dynamic_ids={"goods": DynamicIds(evict="lru")})
    first = model(kjt(bags(*range(20)))).square().sum()
    model(kjt(bags(*range(20, 40)))).square().sum().backward()
    stats = model.id_stats()["sparse.goods"]
    assert (stats["evictions"], stats["no_room"]) == (0, 16)
    first.backward()
    dynamic_step(model, bags(*range(20, 40)), 0)
    assert model.id_stats()["sparse.goods"]["evictions"] == 16


def test_a_second_backward_over_rows_that_went_is_refused() -> None:
    model = shard(model_of(True, "sgd"), one_table(), dynamic_ids={"goods": DynamicIds(evict="lru")})
    first = model(kjt(bags(*range(20)))).square().sum()
    first.backward(retain_graph=True)
    first.backward(retain_graph=True)
    dynamic_step(model, bags(*range(20, 40)), 0)
    with pytest.raises(ConfigError, match="call backward once"):
        first.backward()


def test_going_back_to_a_checkpoint_forgets_the_evictions_since(tmp_path: Path) -> None:
    model = shard(model_of(True, "sgd"), one_table(), dynamic_ids={"goods": DynamicIds(evict="lru")})
    dynamic_step(model, bags(*range(20)), 0)
    save_checkpoint(tmp_path, model)
    for step in range(1, 9):
        dynamic_step(model, bags(*range(20 * step, 20 * step + 20)), step)
    load_checkpoint(tmp_path, model)
    loss = model(kjt(bags(*range(20)))).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_copy_learns_for_itself() -> None:
    model = shard(model_of(True, "adagrad"), one_table(), dynamic_ids={"goods": DynamicIds()})
    dynamic_step(model, bags(1, 2), 0)
    other = copy.deepcopy(model)
    assert torch.equal(dynamic_step(other, bags(2, 3), 1), dynamic_step(model, bags(2, 3), 1))
    dynamic_step(other, bags(4, 5), 2)
    assert [one.id_stats()["sparse.goods"]["used"] for one in (model, other)] == [3, 5]


def test_any_id_is_sound_and_dtypes_are_not() -> None:
    model = shard(model_of(True, "sgd"), one_table(), dynamic_ids={"goods": DynamicIds()}, on_bad_id={"g": "zero"})
    dynamic_step(model, bags(-1, 2**63 - 1, -(2**63)), 0)
    assert model.bad_ids() == {}
    given = kjt(bags(1))
    given._values = given.values().float()
    with pytest.raises(InputError, match="ids are float32"):
        model(given)
    with pytest.raises(InputError, match="outside"):
        model(kjt({**bags(1), "p": [[-1]]}))


def test_what_cannot_be() -> None:
    items, topology = "sparse.goods", Topology(ranks_per_host=2)

    def plan(items_layout: Any) -> ShardingPlan:
        others = [cuts.table_wise(name, *SIZES[name], rank=0) for name in SIZES if name != items]
        return ShardingPlan(topology=topology, tables=(*others, items_layout))

    def attempt(layout: Any, options: DynamicIds = DynamicIds(), **kwargs: Any) -> None:  # noqa: B008
        shard(model_of(True, "sgd"), plan(layout), dynamic_ids={"goods": options}, **kwargs)

    halves = cuts.row_wise(items, 24, DIM, ranks=[0, 1])

    def part(top: int, bottom: int, left: int, rank: int) -> Shard:
        return Shard(table=items, row_start=top, row_end=bottom, col_start=left, col_end=left + 4, rank=rank)

    askew = TableLayout(
        name=items,
        num_embeddings=24,
        embedding_dim=DIM,
        shards=(part(0, 24, 0, 0), part(0, 12, 4, 0), part(12, 24, 4, 1)),
    )
    for words, layout, options in (
        ("is replicated", cuts.data_parallel(items, 24, DIM), DynamicIds()),
        ("column stripes with different row cuts", askew, DynamicIds()),
        ("must be 1 or more", halves, DynamicIds(capacity=1)),
        ("must be 1 or more", halves, DynamicIds(fallback_rows=12)),
    ):
        raises_on_all(2, PlanError, words, attempt, layout, options)


def test_names_and_optimizers() -> None:
    with pytest.raises(ConfigError, match=r"the tables 'sparse\.users'"):
        shard(model_of(True, "sgd"), one_table(), dynamic_ids={"item": DynamicIds()})
    model = model_of(True, "sgd")
    for parameter in model.parameters():
        del parameter._optimizer_classes  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="lacks a fused optimizer"):
        shard(model, one_table(), dynamic_ids={"goods": DynamicIds()})
    dynamic_step(shard(model, one_table(), dynamic_ids={"goods": DynamicIds(evict="never")}), bags(5), 0)


def test_the_capacity_is_raised(tmp_path: Path) -> None:
    """No checkpoint has it: a program that goes on gives the raised one, or is warned that ids are left out."""

    def make(capacity: int) -> ShardedModel:
        options = DynamicIds(capacity=capacity, evict="never")
        return shard(model_of(True, "sgd"), one_table(), dynamic_ids={"goods": options})

    model = make(4)
    dynamic_step(model, bags(*range(6)), 0)
    assert model.id_stats()["sparse.goods"]["used"] == 4
    model.set_id_capacity("sparse.goods", 9)
    dynamic_step(model, bags(*range(20)), 1)
    assert model.id_stats()["sparse.goods"]["used"] == 9
    save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, resumed := make(9))
    assert resumed.id_stats()["sparse.goods"]["used"] == 9
    with pytest.warns(UserWarning, match="lack room for 5 of the saved ids.* or capacity if it is given"):
        load_checkpoint(tmp_path, resumed := make(4))
    assert resumed.id_stats()["sparse.goods"]["used"] == 4
    assert copy.deepcopy(model).id_stats()["sparse.goods"]["used"] == 9
    for words, table, capacity in (
        ("lacks dynamic ids", "sparse.users", 9),
        ("Give more", "sparse.goods", 8),
        ("must be 1 or more", "sparse.goods", 25),
    ):
        with pytest.raises(ConfigError, match=words):
            model.set_id_capacity(table, capacity)


def test_ranks_that_raise_a_capacity_to_other_numbers() -> None:
    """Column stripes on two ranks would give an id a row in one of them alone."""

    def run() -> None:
        where = ShardingPlan(topology=Topology(ranks_per_host=2), tables=(cuts.column_wise("t", 8, 8, ranks=[0, 1]),))
        config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=8, feature_names=["a"])
        module = EmbeddingBagCollection(tables=[config])
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        model = shard(module, where, dynamic_ids={"t": DynamicIds(capacity=3)})
        with pytest.raises(ConfigError, match="rank 0: table 't', capacity 4\n  rank 1: table 't', capacity 5"):
            model.set_id_capacity("t", 4 + torch.distributed.get_rank())

    ranks(2, run)


def trained_through(*, checkpoints: bool) -> tuple[list[Tensor], dict[str, int]]:
    """Forwards of several batches before one backward, of a table of as many rows as two of them have ids. Then the
    graph is gone, and ids may lose their rows."""
    options = DynamicIds(capacity=4, evict="lru")
    model = shard(model_of(True, "sgd"), one_table(), dynamic_ids={"goods": options})
    scale = torch.ones(1, requires_grad=True)
    batches = [kjt(bags(*ids)) for ids in ((1, 2), (3, 4), (5, 6), (2, 1))]

    def forward(ids: KeyedJaggedTensor, scale: Tensor) -> Tensor:
        output: Tensor = model(ids) * scale
        return output

    outputs = []
    for ids in batches:
        outputs.append(checkpoint(forward, ids, scale, use_reentrant=False) if checkpoints else forward(ids, scale))
    sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    stats, _ = model.id_stats()["sparse.goods"], outputs.clear()
    dynamic_step(model, bags(7, 8), 0)
    assert model.id_stats()["sparse.goods"]["evictions"] == 2
    return [value.clone() for value in model.state_dict().values()], stats


def test_ids_of_a_checkpoint_keep_their_rows_until_its_backward() -> None:
    weights, stats = trained_through(checkpoints=True)
    expected, expected_stats = trained_through(checkpoints=False)
    assert all(map(torch.equal, weights, expected))
    assert stats == expected_stats and stats["evictions"] == 0


def test_training_ahead_is_the_same() -> None:
    """Ids of the next batch are exchanged before the update of this one, and mapped after it."""
    batches = [kjt(of_step[0]) for of_step in raw_batches(Random(3), 8, 1)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model(batch), 0)

    records, losses = [], []
    for depth in (0, 2):
        model = shard(
            model_of(True, "adagrad"), one_table(), dynamic_ids={"goods": DynamicIds(), "users": DynamicIds()}
        )
        losses.append(
            torch.stack([one.detach() for one in TrainPipeline(model, [], batches, loss_fn=loss, depth=depth)])
        )
        maps = model._sharded[0].id_maps
        assert maps is not None
        records.append([one.records for one in maps.maps.values()])
    assert torch.equal(*losses)
    assert all(map(torch.equal, *records))


@pytest.mark.slow
def test_a_compiled_model_learns_and_evaluates() -> None:
    model = shard(model_of(True, "adagrad"), one_table(), dynamic_ids={"goods": DynamicIds()})
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager")
    for seed, of_step in enumerate(raw_batches(Random(3), 5, 1)):
        given = {**of_step[0], "f": [[] for _ in of_step[0]["f"]]}
        torch.testing.assert_close(dynamic_step(compiled, given, seed), dynamic_step(model, given, seed))
    assert other.id_stats() == model.id_stats()
    model.eval(), other.eval()
    torch.testing.assert_close(compiled(kjt(bags(1, 2, 3))), model(kjt(bags(1, 2, 3))))
    assert other.id_stats() == model.id_stats()


def test_no_collective_is_added() -> None:
    def counts(options: dict[str, DynamicIds] | None) -> dict[str, int]:
        plan = cut_plan("row_wise", Random(0), SIZES, Topology(ranks_per_host=2))
        model = shard(model_of(True, "sgd"), plan, dynamic_ids=options)
        with CountCollectives() as found:
            dynamic_step(model, bags(1, 2), 0)
        return dict(found)

    def both() -> list[dict[str, int]]:
        return [counts(None), counts({"goods": DynamicIds(admit_after=2)})]

    for plain, dynamic in ranks(2, both):
        assert plain == dynamic
