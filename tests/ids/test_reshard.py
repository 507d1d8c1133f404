"""Ids and their rows go through checkpoints to other numbers of ranks, other cuts and other sizes."""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import load_checkpoint, native, save_checkpoint, shard
from shardrec.checkpoint import export_ids, import_ids
from shardrec.errors import CheckpointError, ConfigError
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, Topology, cuts
from tests.ids.oracle import DIM, ROWS, Batches, Oracle, dynamic_step, kjt, model_of, perfect_step, raw_batches
from tests.plans import cut_plan
from tests.ranks import ranks

pytestmark = pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")

LARGE = {"users": 96, "goods": 160, "plain": 9}


def plan_of(cut: str, world_size: int, rng: Random, rows: dict[str, int]) -> ShardingPlan:
    sizes = {f"sparse.{name}": (count, DIM) for name, count in rows.items()}
    return cut_plan(cut, rng, sizes, Topology(ranks_per_host=world_size))


def go_on(
    folder: Path,
    part: int,
    batches: Batches,
    seeds: range,
    plan: ShardingPlan,
    options: dict[str, DynamicIds],
    optimizer: str,
    rows: dict[str, int],
) -> tuple[list[Tensor], dict[str, dict[str, int]]]:
    """On one rank: load what the part before has saved, train on, and save."""
    model = shard(model_of(True, optimizer, rows), plan, dynamic_ids=options)
    if part:
        load_checkpoint(folder / f"{part - 1}", model)
    rank = torch.distributed.get_rank()
    outputs = [dynamic_step(model, of_step[rank], seed) for seed, of_step in zip(seeds, batches, strict=True)]
    save_checkpoint(folder / f"{part}", model)
    return outputs, model.id_stats()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("cut", "optimizer"),
    [
        ("row_wise", "adagrad"),
        ("column_wise", "rowwise_adagrad"),
        pytest.param("table_wise", "adam", marks=pytest.mark.slow),
        pytest.param("table_row_wise", "sgd", marks=pytest.mark.slow),
    ],
)
def test_from_one_rank_to_many_and_back(tmp_path: Path, cut: str, optimizer: str) -> None:
    """As a perfect table all the way, growing on it: no id is lost, and none begins anew."""
    rng = Random(cut)
    options = {"users": DynamicIds(evict="lru"), "goods": DynamicIds(admit_after=2)}
    worlds = [1, 2, 4, 1]
    batches = [raw_batches(rng, 4, world_size, drift=1) for world_size in worlds]
    first = plan_of("table_wise", 1, rng, {"users": 500, "goods": 500, "plain": 9})
    oracle = Oracle(first, options, dedup=False)
    lives = [[oracle.learn(of_step) for of_step in part] for part in batches]
    perfect = model_of(True, optimizer, oracle.perfect)
    reference = shard(perfect, plan_of("table_wise", 1, rng, oracle.perfect))
    for part, world_size in enumerate(worlds):
        seeds = range(4 * part, 4 * part + 4)
        expected = [perfect_step(perfect, reference, *one) for one in zip(lives[part], seeds, strict=True)]
        rows = LARGE if part < 2 else {**LARGE, "goods": 200}
        plan = plan_of(cut, world_size, rng, rows)
        found = ranks(world_size, go_on, tmp_path, part, batches[part], seeds, plan, options, optimizer, rows)
        for step, of_step in enumerate(expected):
            for rank, output in enumerate(of_step):
                torch.testing.assert_close(found[rank][0][step], output, rtol=1e-6, atol=1e-6)
        for table in options:
            (of_table,) = (one for (name, _), one in oracle.maps.items() if name == table)
            assert of_table.counts["evictions"] == 0
    used = {name: len(one.rows.entries) for (name, _), one in oracle.maps.items()}
    assert {name: found[0][1][f"sparse.{name}"]["used"] for name in options} == used


def trained(rows: dict[str, int], options: DynamicIds, steps: int = 6) -> Any:
    rng = Random(4)
    model = shard(model_of(True, "adagrad", rows), plan_of("table_wise", 1, rng, rows), dynamic_ids={"goods": options})
    for seed, of_step in enumerate(raw_batches(rng, steps, 1)):
        dynamic_step(model, {**of_step[0], "f": [[] for _ in of_step[0]["f"]]}, seed)
    return model


def row_of(model: Any, raw: int) -> Tensor:
    model.eval()
    found: Tensor = model(kjt({"f": [[]], "g": [[raw]], "h": [[]], "p": [[]]}))[0, DIM : 2 * DIM].detach()
    model.train()
    return found


@pytest.mark.parametrize("evict", ["lfu", "lru", "score"])
def test_too_few_rows_keep_the_best(tmp_path: Path, evict: Any) -> None:
    model = trained(LARGE, DynamicIds(evict=evict))
    save_checkpoint(tmp_path / "all", model)
    (map_,) = model._sharded[0].id_maps.maps.values()
    step = model._sharded[0].id_maps.step
    entries = [tuple(one) for one in map_.records.tolist() if one[1] > 0]
    worth = {"lfu": lambda one: one[1], "lru": lambda one: 0, "score": lambda one: one[1] / (step + 1 - one[2])}[evict]
    best = [raw for raw, _, _ in sorted(entries, key=lambda one: (worth(one), one[2]), reverse=True)]
    small = trained({**LARGE, "goods": 10}, DynamicIds(evict=evict))
    with pytest.warns(UserWarning, match=f"lack room for {len(entries) - 10} of the saved ids"):
        load_checkpoint(tmp_path / "all", small)
    kept = {one[0] for one in small._sharded[0].id_maps.maps["sparse.goods", 0].records.tolist()}
    uses = {raw: (worth(one), one[2]) for one in entries for raw in [one[0]]}
    assert sorted(uses[raw] for raw in kept) == sorted(uses[raw] for raw in best[:10])
    for raw in kept:
        assert torch.equal(row_of(small, raw), row_of(model, raw))


def test_what_nobody_has_is_as_at_first(tmp_path: Path) -> None:
    """Rows that the loading model has trained, and no saved id has, are drawn anew, with their states."""
    save_checkpoint(tmp_path / "few", trained({**LARGE, "goods": 40}, DynamicIds(), steps=1))
    model = trained(LARGE, DynamicIds())
    load_checkpoint(tmp_path / "few", model)
    (map_,) = model._sharded[0].id_maps.maps.values()
    free = (map_.records[:, 1] == 0).nonzero().squeeze(1)
    collection = model._sharded[0]
    (shard_of_goods,) = (one for one in collection.shards.shards if one.table == "sparse.goods")
    assert bool((collection.shards.weight(shard_of_goods)[free] == 0.25).all())
    assert bool((collection.shards.states(shard_of_goods)["sum"][free] == torch.tensor(0.1)).all())


def test_the_fallback_goes_along(tmp_path: Path) -> None:
    model = trained(LARGE, DynamicIds(fallback_rows=1, admit_after=50))
    save_checkpoint(tmp_path / "all", model)
    other = shard(
        model_of(True, "adagrad", {**LARGE, "goods": 99}),
        plan_of("row_wise", 1, Random(0), {**LARGE, "goods": 99}),
        dynamic_ids={"goods": DynamicIds(fallback_rows=1, admit_after=50)},
    )
    load_checkpoint(tmp_path / "all", other)
    assert torch.equal(row_of(other, 123), row_of(model, 123))
    assert not torch.equal(row_of(model, 123), torch.full((DIM,), 0.25))


Fallback = dict[tuple[int, int], tuple[int, Tensor, Tensor]]
"""By first row and first column of a shard: its rows, and the fallback's weights and their sums of squares."""


def fallback_on(folder: Path, part: int, batches: Batches, plan: ShardingPlan) -> tuple[Fallback, Fallback]:
    """On one rank: what is loaded, and what is saved after some steps."""

    def rows() -> Fallback:
        shards = model._sharded[0].shards
        return {
            (one.row_start, one.col_start): (
                one.rows,
                shards.weight(one)[:2].clone(),
                shards.states(one)["sum"][:2].clone(),
            )
            for one in shards.shards
            if one.table == "sparse.goods"
        }

    options = {"goods": DynamicIds(fallback_rows=2, admit_after=50), "users": DynamicIds()}
    model = shard(model_of(True, "adagrad", LARGE), plan, dynamic_ids=options)
    if part:
        load_checkpoint(folder / f"{part - 1}", model)
    loaded = rows()
    for seed, of_step in enumerate(batches):
        dynamic_step(model, of_step[torch.distributed.get_rank()], seed)
    save_checkpoint(folder / f"{part}", model)
    return loaded, rows()


@pytest.mark.some(1)
@pytest.mark.parametrize("cut", ["row_wise", "row_wise_uneven"])
def test_the_fallback_is_cut_and_joined(tmp_path: Path, cut: str) -> None:
    """Each block of 1 -> 2 -> 4 -> 1 ranks has the mean of the fallbacks of the saved blocks that it overlaps."""
    rng = Random(6)
    saved: Fallback = {}
    for part, world_size in enumerate([1, 2, 4, 1]):
        plan, batches = plan_of(cut, world_size, rng, LARGE), raw_batches(rng, 6, world_size)
        found = ranks(world_size, fallback_on, tmp_path, part, batches, plan)
        for start, (count, *mine) in ((key[0], one) for loaded, _ in found for key, one in loaded.items() if saved):
            shares = {
                key: max(0, min(start + count, key[0] + theirs[0]) - max(start, key[0]))
                for key, theirs in saved.items()
            }
            assert sum(shares.values()) == count
            for place, values in enumerate(mine, 1):
                expected = sum(saved[key][place].double() * share / count for key, share in shares.items())
                assert torch.equal(values, expected.float())
        saved = {key: one for _, after in found for key, one in after.items()}
        assert len({one[1].sum().item() for one in saved.values()}) == len(saved), "blocks learn apart"


def test_going_on_is_going_on(tmp_path: Path) -> None:
    """The same evictions and admissions as without the break."""
    options = DynamicIds(admit_after=2, evict="score")
    model = trained(ROWS, options)
    save_checkpoint(tmp_path / "now", model)
    other = trained(ROWS, options, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path / "now", other)
    for seed, of_step in enumerate(raw_batches(Random(9), 8, 1)):
        bags = {**of_step[0], "f": [[] for _ in of_step[0]["f"]]}
        assert torch.equal(dynamic_step(model, bags, seed), dynamic_step(other, bags, seed))
    one, two = (each._sharded[0].id_maps.maps["sparse.goods", 0] for each in (model, other))
    assert torch.equal(one.records, two.records)
    assert torch.equal(one.candidates, two.candidates)


def test_stripes_of_several_widths_are_saved(tmp_path: Path) -> None:
    """A lookup group for each width: the first one of a rank need not have the table's first column."""
    widths = {"a": [4, 8], "b": [8, 4]}
    tables = [EmbeddingConfig(name=name, num_embeddings=16, embedding_dim=12, feature_names=[name]) for name in widths]
    layouts = tuple(cuts.column_wise(name, 16, 12, ranks=[0, 0], widths=parts) for name, parts in widths.items())
    plan = ShardingPlan(topology=Topology(), tables=layouts)
    options = {name: DynamicIds(evict="never") for name in widths}
    model, other = (shard(EmbeddingCollection(tables=tables), plan, dynamic_ids=options) for _ in range(2))
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([70, 71, 72, 73]), lengths=torch.tensor([2, 2]))
    expected = {name: rows.values() for name, rows in model(features).items()}
    save_checkpoint(tmp_path / "all", model)
    load_checkpoint(tmp_path / "all", other)
    found = other.eval()(features)
    assert all(torch.equal(found[name].values(), rows) for name, rows in expected.items())
    export_ids(model, tmp_path / "ids")
    assert pq.read_table(tmp_path / "ids").num_rows == 4


def test_ids_are_not_left_out_by_mistake(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ids", trained(ROWS, DynamicIds()))
    plain = shard(model_of(True, "adagrad"), plan_of("table_wise", 1, Random(0), ROWS))
    with pytest.raises(ConfigError, match=r"ids\.sparse\..*goods\.records, which the model lacks"):
        load_checkpoint(tmp_path / "ids", plain)
    save_checkpoint(tmp_path / "plain", plain)
    with pytest.raises(ConfigError, match=r"lacks ids\.sparse"):
        load_checkpoint(tmp_path / "plain", trained(ROWS, DynamicIds()))


def test_ids_go_through_parquet(tmp_path: Path) -> None:
    model = trained(LARGE, DynamicIds(fallback_rows=1))
    export_ids(model, tmp_path / "ids")
    other = trained(LARGE, DynamicIds(fallback_rows=1), steps=7)
    other.load_state_dict(model.state_dict())
    import_ids(other, tmp_path / "ids")
    (one,), (two,) = (each._sharded[0].id_maps.maps.values() for each in (model, other))
    assert torch.equal(one.records, two.records)
    for raw in one.records[one.records[:, 1] > 0, 0].tolist()[:5]:
        assert torch.equal(row_of(model, raw), row_of(other, raw))
    for words, ids, rows in (
        ("comes twice", [1, 1], [5, 6]),
        ("comes twice", [1, 2], [5, 5]),
        ("outside", [1], [160]),
        ("cannot have row 0", [1], [0]),
    ):
        folder = tmp_path / f"{ids} {rows}"
        folder.mkdir()
        pq.write_table(pa.table({"table": ["sparse.goods"] * len(ids), "id": ids, "row": rows}), folder / "a.parquet")
        with pytest.raises(CheckpointError, match=words):
            import_ids(other, folder)
        assert torch.equal(one.records, two.records)
    pq.write_table(pa.table({"table": ["sparse.goods"], "id": [1]}), tmp_path / "ids" / "ids-00000.parquet")
    with pytest.raises(CheckpointError, match='"row" does not exist'):
        import_ids(other, tmp_path / "ids")
    with pytest.raises(CheckpointError, match=r"no \*\.parquet"):
        import_ids(other, tmp_path)


def test_imported_ids_are_as_old_in_a_new_model_and_evicted(tmp_path: Path) -> None:
    """The old model's steps lie ahead of the new one's, where no id is ever evicted."""
    old = trained(LARGE, DynamicIds(capacity=8, evict="lru"))
    export_ids(old, tmp_path)
    new = trained(LARGE, DynamicIds(capacity=8, evict="lru"), steps=0)
    import_ids(new, tmp_path)
    (before,), (after,) = (each._sharded[0].id_maps.maps.values() for each in (old, new))
    has_id = before.records[:, 1] > 0
    assert int(has_id.sum()) == 8
    assert torch.equal(after.records[has_id, :2], before.records[has_id, :2])
    last = before.records[has_id, 2]
    assert torch.equal(after.records[has_id, 2], last - last.max())
    features = kjt({"f": [[]], "g": [[5000 + number for number in range(8)]], "h": [[]], "p": [[]]})
    new(features).sum().backward()
    assert sorted(after.records[after.records[:, 1] > 0, 0].tolist()) == list(range(5000, 5008))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"id": [1, None]}, "'id' is int64 with 1 nulls. Write it as int64"),
        ({"id": [1.0, 2.0]}, "'id' is double with 0 nulls"),
        ({"row": ["a", "b"]}, "'row' is string with"),
        ({"uses": [1.5, 2.0]}, "'uses' is double with"),
        ({"last": [1, None]}, "'last' is int64 with 1 nulls"),
        ({"table": ["sparse.goods", "goods"]}, r"ids of tables \['goods'\], those with .* \['sparse.goods'\]"),
        ({"table": ["sparse.goods", None]}, r"ids of tables \[None\]"),
        ({"id": pa.array([7, 8], pa.int32()), "row": pa.array([5, 6], pa.uint8()), "uses": pa.array([3, 4])}, ""),
    ],
)
def test_ids_in_columns_of_other_types_are_cast_or_named(tmp_path: Path, columns: Any, words: str) -> None:
    model = trained(LARGE, DynamicIds(), steps=1)
    (ids,) = model._sharded[0].id_maps.maps.values()
    before = ids.records.clone()
    pq.write_table(
        pa.table({"table": ["sparse.goods"] * 2, "id": [7, 8], "row": [5, 6], **columns}), tmp_path / "a.parquet"
    )
    if words:
        with pytest.raises(CheckpointError, match=words):
            import_ids(model, tmp_path)
        assert torch.equal(ids.records, before)
    else:
        import_ids(model, tmp_path)
        assert ids.records[5:7].tolist() == [[7, 3, 0], [8, 4, 0]]


def test_imported_ids_take_the_place_of_those_that_the_model_knows(tmp_path: Path) -> None:
    """Of all of them, and 0 and negative numbers are ids like others."""
    model = trained(LARGE, DynamicIds(fallback_rows=1))
    (ids,) = model._sharded[0].id_maps.maps.values()
    known = ids.records[ids.records[:, 1] > 0, 0].tolist()
    given = {0: 7, -1: 8, -(2**63): 9, known[0]: 159, 2**63 - 1: 1}
    assert len(known) > len(given)
    assert not {0, -1} & set(known)
    table = {"table": ["sparse.goods"] * len(given), "id": list(given), "row": list(given.values())}
    pq.write_table(pa.table(table), tmp_path / "ids.parquet")
    import_ids(model, tmp_path)
    expected = torch.zeros_like(ids.records)
    expected[0, 1] = ids.records[0, 1]  # the fallback's
    for raw, row in given.items():
        expected[row] = torch.tensor([raw, 1, 0])
    assert torch.equal(ids.records, expected)
    weight = model.state_dict()["sparse.embedding_bags.goods.weight"]
    for raw, row in {**dict.fromkeys(known[1:], 0), **given}.items():
        assert torch.equal(row_of(model, raw), weight[row]), raw
    export_ids(model, tmp_path / "out")
    found = pq.read_table(tmp_path / "out").to_pydict()
    assert dict(zip(found["id"], found["row"], strict=True)) == given
