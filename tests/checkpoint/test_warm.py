"""Warm starts: what a changed model takes from a checkpoint, under any plan, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from shardrec import (
    CheckpointError,
    ConfigError,
    DynamicIds,
    ShardrecError,
    load_checkpoint,
    save_checkpoint,
    shard,
    warm_start,
)
from shardrec.checkpoint.manifest import read_manifest
from shardrec.checkpoint.state import model_tensors
from shardrec.checkpoint.warm import match
from shardrec.modules import ShardedModel
from tests.batches import random_bags
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.plans import cut_plan, topologies_of
from tests.ranks import raises_on_all, ranks

Sizes = Mapping[str, tuple[int, int]]
"""Rows and columns of tables."""

OLD: Sizes = {"users": (13, 8), "books": (21, 8), "gone": (9, 4)}
NEW: Sizes = {"users": (13, 8), "goods": (17, 12), "fresh": (6, 4)}


class Net(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
                for name, (rows, dim) in sizes.items()
            ]
        )
        self.mid = nn.Linear(sum(dim for _, dim in sizes.values()), 3)
        self.top = nn.Linear(3, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        value: Tensor = self.top(self.mid(self.bags(features).values()))
        return value


def make(
    sizes: Sizes, cut: str = "table_wise", optimizer: str = "adagrad", seed: int = 1, **kwargs: Any
) -> ShardedModel:
    torch.manual_seed(seed)
    module = Net(sizes)
    choice = OPTIMIZERS[optimizer]
    assert choice.optimizer is not None
    apply_optimizer_in_backward(choice.optimizer, module.bags.parameters(), dict(choice.settings))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    shapes = {f"bags.{name}": size for name, size in sizes.items()}
    return shard(module, cut_plan(cut, Random(cut), shapes, topologies_of(world_size)[0]), **kwargs)


def train(model: ShardedModel, sizes: Sizes, steps: range) -> None:
    """The same batch on every rank."""
    rows = {name: size for name, (size, _) in sizes.items()}
    for step in steps:
        (model(random_bags(Random(step), rows, 6).kjt()) - 1.0).square().mean().backward()


def values(model: ShardedModel) -> dict[str, list[tuple[Any, Tensor]]]:
    """Of this rank, each tensor's parts."""
    return {
        name: [(part.rect, part.values.detach().clone().reshape(part.rect.numel)) for part in tensor.parts]
        for name, tensor in model_tensors(model).items()
    }


def whole(of_ranks: list[tuple[dict[str, tuple[int, ...]], dict[str, list[tuple[Any, Tensor]]]]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shapes, parts_of in of_ranks:
        for name, parts in parts_of.items():
            for rect, part in parts:
                shape = shapes[name]
                value = tensors.setdefault(
                    name, torch.full((shape or (1,)), float("nan")).reshape(shape[0] if shape else 1, -1)
                )
                rows, columns = slice(rect.row_start, rect.row_end), slice(rect.col_start, rect.col_end)
                value[rows, columns] = part.view(rect.row_end - rect.row_start, rect.cols).float()
    return tensors


def shapes(model: ShardedModel) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in model_tensors(model).items()}


def save_main(folder: Path, cut: str) -> tuple[Any, Any]:
    model = make(OLD, cut)
    train(model, OLD, range(3))
    save_checkpoint(folder, model)
    return shapes(model), values(model)


def start_main(folder: Path, cut: str, trained: int) -> tuple[str, tuple[Any, Any], tuple[Any, Any]]:
    model = make(NEW, cut, seed=2)
    train(model, NEW, range(trained))
    before = values(model)
    report = warm_start(folder, model, rename={"books": "goods"}, resize=["grow", "truncate"], optimizer=True)
    return str(report), (shapes(model), before), (shapes(model), values(model))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("cuts", "worlds"), [(("grid", "row_wise_uneven"), (2, 4)), (("data_parallel", "column_wise"), (4, 1))]
)
def test_a_changed_model_takes_what_both_have(tmp_path: Path, cuts: tuple[str, str], worlds: tuple[int, int]) -> None:
    saved = whole(ranks(worlds[0], save_main, tmp_path / "ckpt", cuts[0]))
    started = ranks(worlds[1], start_main, tmp_path / "ckpt", cuts[1], 2)
    assert len({report for report, _, _ in started}) == 1
    before, after = (whole([rank[place] for rank in started]) for place in (1, 2))
    for kind, end in (("model", "weight"), ("fused", "sum")):
        old, new = (
            {name: after_or[f"{kind}.bags.embedding_bags.{name}.{end}"] for name in names}
            for after_or, names in ((saved, OLD), (after, NEW))
        )
        assert torch.equal(new["users"], old["users"])
        assert torch.equal(new["goods"][:17, :8], old["books"][:17])
        assert torch.equal(new["goods"][:, 8:], before[f"{kind}.bags.embedding_bags.goods.{end}"][:, 8:])
        assert torch.equal(new["fresh"], before[f"{kind}.bags.embedding_bags.fresh.{end}"])
    assert torch.equal(after["model.top.weight"], saved["model.top.weight"])
    assert torch.equal(after["model.mid.weight"], before["model.mid.weight"])
    assert started[0][0].splitlines() == [
        "loaded    bags.embedding_bags.users.weight (13, 8)",
        "resized   bags.embedding_bags.goods.weight (21, 8) -> (17, 12) from bags.embedding_bags.books.weight",
        "new       bags.embedding_bags.fresh.weight (6, 4)",
        "new       mid.weight (3, 20) -> (3, 24)",
        "loaded    mid.bias (3,)",
        "loaded    top.weight (1, 3)",
        "loaded    top.bias (1,)",
        "left out  bags.embedding_bags.gone.weight (9, 4)",
        "4 loaded, 1 resized, 2 new, 1 left out",
    ]


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_training_goes_on_as_after_a_load(tmp_path: Path, optimizer: str) -> None:
    """States and step counts go with the tables, under their new names; without optimizer=True they do not."""
    renamed = {f"new_{name}": size for name, size in OLD.items()}
    model = make(OLD, optimizer=optimizer)
    train(model, OLD, range(3))
    save_checkpoint(tmp_path / "ckpt", model)
    load_checkpoint(tmp_path / "ckpt", expected := make(OLD, "row_wise", optimizer, seed=2))
    starts = [make(renamed, "column_wise", optimizer, seed=3) for _ in range(2)]
    names = {name: f"new_{name}" for name in OLD}
    assert not warm_start(tmp_path / "ckpt", starts[0], rename=names, optimizer=True).names(
        "new", "left out", "resized"
    )
    warm_start(tmp_path / "ckpt", starts[1], rename=names)
    train(expected, OLD, range(3, 5))
    for start in starts:
        train(start, renamed, range(3, 5))
    weights = [whole([(shapes(one), values(one))]) for one in (expected, *starts)]
    for name in OLD:
        first, second, third = (
            of[f"model.bags.embedding_bags.{prefix}{name}.weight"]
            for of, prefix in zip(weights, ("", "new_", "new_"), strict=True)
        )
        assert torch.equal(first, second)
        assert not torch.equal(first, third)


@given(data=st.data())
def test_each_tensor_is_loaded_from_its_source_or_kept(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Drawn tables, renamed and resized at random, against slices of the saved ones."""
    names = st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 6), st.sampled_from((4, 8))), min_size=1)
    old, new = data.draw(names), data.draw(names)
    sources = data.draw(st.permutations(sorted(old)))
    rename = dict(zip(sources, data.draw(st.permutations(sorted(new))), strict=False))
    rename = {name: rename[name] for name in data.draw(st.sets(st.sampled_from(sorted(rename))))}
    source_of = {name: name for name in new if name in old and name not in rename} | {b: a for a, b in rename.items()}
    folder = tmp_path_factory.mktemp("warm") / "ckpt"
    saved_model, model = make(old, optimizer="sgd", seed=3), make(new, optimizer="sgd", seed=4)
    save_checkpoint(folder, saved_model)
    saved, before = (whole([(shapes(one), values(one))]) for one in (saved_model, model))
    report = warm_start(folder, model, rename=rename, resize=["grow", "truncate"])
    after = whole([(shapes(model), values(model))])
    key = "model.bags.embedding_bags.{}.weight".format
    for name in new:
        expected = before[key(name)].clone()
        if name in source_of:
            source = saved[key(source_of[name])]
            rows, columns = min(len(source), len(expected)), min(source.size(1), expected.size(1))
            expected[:rows, :columns] = source[:rows, :columns]
        assert torch.equal(after[key(name)], expected)
    tables = [tensor for tensor in report.tensors if "embedding_bags" in tensor.name]
    assert {t.name.split(".")[2] for t in tables if t.outcome in ("loaded", "resized")} == set(source_of)
    assert {t.name.split(".")[2] for t in tables if t.outcome == "left out"} == set(old) - set(source_of.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rename": {"book": "goods"}}, "the checkpoint has no 'book'. Near it are books"),
        ({"rename": {"books": "good"}}, "the model has no 'good'. Near it are goods"),
        ({"rename": {"books": "goods", "gone": "goods"}}, "would be loaded twice"),
        ({"rename": {"books": "top"}}, r"books.weight has shape \(21, 8\) and top.weight \(1, 3\)"),
        ({"rename": {"books": "bags"}}, "'books' and 'bags' have no tensor in common"),
        ({"only": ["nothing"]}, "only: the model has no 'nothing'"),
        (
            {"rename": {"books": "goods"}},
            r"goods.weight has shape \(17, 12\), and \(21, 8\) in .*resize=\['grow', 'truncate'\]",
        ),
        ({"rename": {"books": "goods"}, "resize": "grow"}, "give resize='truncate'"),
        ({"resize": "shrink"}, "resize='shrink'. Give 'grow', 'truncate'"),
        ({"strict": True}, "differ in .*goods.weight.* with strict=True"),
        ({"only": ["fresh"]}, "has nothing under a name of the model's"),
    ],
)
def test_what_is_refused_changes_nothing(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    save_checkpoint(tmp_path / "ckpt", make(OLD))
    model = make(NEW, seed=2)
    before = whole([(shapes(model), values(model))])
    with pytest.raises(ConfigError, match=message):
        warm_start(tmp_path / "ckpt", model, **arguments)
    after = whole([(shapes(model), values(model))])
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ckpt", make(OLD))
    file = next((tmp_path / "ckpt").glob("data-*/rank-00000.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        warm_start(tmp_path / "ckpt", make(OLD))


def test_a_table_name_of_two_collections_is_ambiguous(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ckpt", make(OLD))
    manifest, held = read_manifest(tmp_path / "ckpt"), model_tensors(make(NEW))
    twice = {**manifest.tensors, "model.other.embedding_bags.books.weight": manifest.tensors["model.top.weight"]}
    with pytest.raises(ConfigError, match="'books' is a table of the checkpoint 2 times"):
        match(replace(manifest, tensors=twice), held, rename={"books": "goods"}, only=None, resize=(), optimizer=False)


def dynamic_main(folder: Path) -> list[dict[int, list[float]]]:
    """Rows by id, of the saved and of the started model."""
    old, new = {"users": (32, 8), "books": (21, 8)}, {"people": (64, 8), "books": (21, 8)}
    models = [
        make(sizes, "row_wise", "adagrad", seed, dynamic_ids={f"bags.{name}": DynamicIds()})
        for seed, (sizes, name) in enumerate(((old, "users"), (new, "people")))
    ]
    rows_of = []
    for model, name in zip(models, ("users", "people"), strict=True):
        if name == "users":
            for seed in range(3):
                batch = KeyedJaggedTensor.from_lengths_sync(
                    keys=["users", "books"],
                    values=torch.tensor([10**12 + seed, 7 + seed, 3, 4]),
                    lengths=torch.tensor([2, 0, 1, 1]),
                )
                (model(batch) - 1.0).square().mean().backward()
            save_checkpoint(folder, model)
        else:
            with pytest.raises(ConfigError, match="has dynamic ids in the model only"):
                warm_start(folder, model, rename={"books": "people"})
            warm_start(folder, model, rename={"users": "people"}, optimizer=True)
        collection = model.module.bags
        assert collection.id_maps is not None
        rows: dict[int, list[float]] = {}
        for (shard_, *_), id_map in collection.id_maps.blocks(f"bags.{name}"):
            weight = collection.tables()[name].locals[shard_]
            for row in (id_map.records[:, 1] > 0).nonzero().flatten().tolist():
                rows[int(id_map.records[row, 0])] = weight[row].tolist()
        rows_of.append(rows)
    return rows_of


def test_dynamic_ids_go_with_a_renamed_table_of_another_size(tmp_path: Path) -> None:
    saved, started = ({}, {})
    for of_rank in ranks(2, dynamic_main, tmp_path / "ckpt"):
        saved |= of_rank[0]
        started |= of_rank[1]
    assert saved.keys() == {10**12, 10**12 + 1, 10**12 + 2, 7, 8, 9}
    assert saved == started


def test_averages_go_with_their_step_count(tmp_path: Path) -> None:
    """Else the average of a row that has not changed since would be weighted for steps that were never made."""
    old = make(OLD, optimizer="sgd", update="step")
    for collection in old.sharded_collections:
        collection.keep_averages(0.9)
    for step in range(30):
        train(old, OLD, range(step, step + 1))
        old.fused_optimizer.step()
        old.fused_optimizer.zero_grad()
    save_checkpoint(tmp_path / "ckpt", old)
    new = make(OLD, "row_wise", "sgd", seed=2, update="step")
    averages = [rows for collection in new.sharded_collections for rows in collection.keep_averages(0.9)]
    warm_start(tmp_path / "ckpt", new, optimizer=True)
    train(new, OLD, range(31, 32))
    new.fused_optimizer.step()
    largest = max(float(values.abs().max()) for rows in averages for _, values in rows.averages())
    weights = [table.weight for child in new.sharded_collections for table in child.tables().values()]
    assert largest <= 2 * max(float(weight.detach().abs().max()) for weight in weights)


def begins_anew(folder: Path, optimizer: str) -> None:
    """With the loaded rows, a model that has trained goes on as one that has not."""
    for path, rows in ((folder / "ckpt", None), (None, {"books": folder / "rows.npy"})):
        tables = {name: OLD[name] for name in (OLD if rows is None else ["books"])}
        models = [make(tables, "row_wise", optimizer, update="step") for _ in range(2)]
        averages = [
            [part for collection in model.sharded_collections for part in collection.keep_averages(0.9)]
            for model in models
        ]
        for model, steps in zip(models, (3, 0), strict=True):
            for step in [*range(steps), "load", 9]:
                if step == "load":
                    warm_start(path, model, rows=rows)
                else:
                    train(model, tables, range(step, step + 1))
                    model.fused_optimizer.step()
        for trained, fresh in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(trained, fresh)
        kept = [[values for part in parts for _, values in part.averages()] for parts in averages]
        assert all(torch.equal(trained, fresh) for trained, fresh in zip(*kept, strict=True))


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_states_that_are_not_loaded_begin_anew(tmp_path: Path, optimizer: str) -> None:
    save_checkpoint(tmp_path / "ckpt", make(OLD, seed=5))
    np.save(tmp_path / "rows.npy", np.ones(OLD["books"], np.float32))
    ranks(2, begins_anew, tmp_path, optimizer)


@pytest.mark.parametrize(("saved", "held_by"), [("adagrad", "rowwise_adagrad"), ("rowwise_adagrad", "adagrad")])
def test_states_of_another_kind_of_optimizer_are_not_loaded(tmp_path: Path, saved: str, held_by: str) -> None:
    old = make(OLD, optimizer=saved)
    train(old, OLD, range(3))
    save_checkpoint(tmp_path / "ckpt", old)
    model = make(OLD, optimizer=held_by, seed=2)
    before = whole([(shapes(model), values(model))])
    warm_start(tmp_path / "ckpt", model, optimizer=True)
    after = whole([(shapes(model), values(model))])
    assert all(torch.equal(after[name], before[name]) for name in after if name.startswith("fused."))
    assert not torch.equal(*(of["model.bags.embedding_bags.users.weight"] for of in (after, before)))


def row_files(folder: Path) -> dict[str, tuple[Path, Tensor]]:
    """Files with the same rows, in each form, of the ids -1 to 20 (0 to 20) in any order; and the rows of 0 to 20."""
    ids = torch.randperm(22, generator=torch.Generator().manual_seed(3)) - 1
    rows = torch.arange(22 * 8).view(22, 8).float()
    in_order = rows[ids.argsort()]
    lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.view(-1).numpy(), pa.float64()), 8)
    pq.write_table(pa.table({"id": ids.numpy(), "row": lists}), folder / "fixed.parquet", row_group_size=5)
    pq.write_table(pa.table({"id": ids.int().numpy(), "row": lists.to_pylist()}), folder / "lists.parquet")
    columns = {f"c{number}": rows[:, number].numpy() for number in range(8)}
    pq.write_table(pa.table({"id": pa.array(ids.numpy()).dictionary_encode()} | columns), folder / "columns.parquet")
    np.savez(folder / "plain.npz", ids=ids.numpy(), rows=rows.half().numpy())
    np.savez_compressed(folder / "packed.npz", ids=ids.numpy(), rows=rows.int().numpy())
    np.save(folder / "numbered.npy", in_order[1:].double().numpy())  # ids 0 to 20
    names = ["fixed.parquet", "columns.parquet", "lists.parquet", "plain.npz", "packed.npz", "numbered.npy"]
    return {name: (folder / name, in_order[1:]) for name in names}


def rows_main(folder: Path, cut: str, paths: list[str]) -> list[tuple[str, tuple[Any, Any]]]:
    started = []
    for path in paths:
        model = make(OLD | {"tall": (30, 8)}, cut)
        report = warm_start(None, model, rows={"books": path, "bags.tall": path})
        started.append((str(report), (shapes(model), values(model))))
    model = make(OLD, cut)
    report = warm_start(folder / "ckpt", model, rows={"books": paths[0]})
    return [*started, (str(report), (shapes(model), values(model)))]


@pytest.mark.some(1)
@pytest.mark.parametrize(("cut", "world"), [("grid", 2), ("data_parallel", 1), ("row_wise_uneven", 4)])
def test_rows_of_files_by_id(tmp_path: Path, cut: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrec.checkpoint.rows.BLOCK_BYTES", 7 * 8 * 4 + 1)  # of one rank; seven rows
    files = row_files(tmp_path)
    save_checkpoint(tmp_path / "ckpt", make(OLD, seed=5))
    of_ranks = ranks(world, rows_main, tmp_path, cut, [str(path) for path, _ in files.values()])
    before = whole([(shapes(one), values(one)) for one in [make(OLD | {"tall": (30, 8)})]])
    key = "model.bags.embedding_bags.{}.weight".format
    for number, (path, rows) in enumerate(files.values()):
        started = whole([rank[number][1] for rank in of_ranks])
        assert torch.equal(started[key("books")], rows)
        assert torch.equal(started[key("tall")][:21], rows)
        assert torch.equal(started[key("tall")][21:], before[key("tall")][21:])
        assert torch.equal(started[key("users")], before[key("users")])
        report = of_ranks[0][number][0]
        without = "" if path.suffix == ".npy" else ", 1 ids are not in the table"
        size = 21 if path.suffix == ".npy" else 22
        shown = f"({size}, 8) -> (21, 8)" if size == 22 else "(21, 8)"
        assert f"loaded    bags.embedding_bags.books.weight {shown} from {path}: 21 rows{without}\n" in report
        assert report.endswith("6 new, 2 loaded")
    with_checkpoint = whole([rank[-1][1] for rank in of_ranks])
    saved = whole([(shapes(one), values(one)) for one in [make(OLD, seed=5)]])
    assert torch.equal(with_checkpoint[key("books")], next(iter(files.values()))[1])
    assert torch.equal(with_checkpoint[key("users")], saved[key("users")])
    assert "left out  bags.embedding_bags.books.weight (21, 8)" in of_ranks[0][-1][0]


def dynamic_rows_main(path: str) -> tuple[str, dict[int, list[float]]]:
    model = make({"users": (64, 8)}, "row_wise", dynamic_ids={"bags.users": DynamicIds(fallback_rows=1)})
    train_on = torch.tensor([5, 6])
    for seed in range(2):  # whose ids go
        batch = KeyedJaggedTensor.from_lengths_sync(
            keys=["users"], values=train_on + seed, lengths=torch.tensor([1, 1])
        )
        (model(batch) - 1.0).square().mean().backward()
    report = warm_start(None, model, rows={"users": path})
    collection = model.module.bags
    assert collection.id_maps is not None
    rows: dict[int, list[float]] = {}
    for (shard_, *_), id_map in collection.id_maps.blocks("bags.users"):
        weight = collection.tables()["users"].locals[shard_]
        for row in (id_map.records[:, 1] > 0).nonzero().flatten().tolist():
            rows[int(id_map.records[row, 0])] = weight[row].tolist()
    return str(report), rows


@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_dynamic_ids(tmp_path: Path, world: int) -> None:
    ids = [10**12, -5, None, *range(7, 27)]
    rows = torch.arange(23 * 8).view(23, 8).float()
    table = pa.table({"id": pa.array(ids, pa.int64()), "row": rows.tolist()})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=4)
    loaded: dict[int, list[float]] = {}
    for report, of_rank in ranks(world, dynamic_rows_main, str(tmp_path / "rows.parquet")):
        assert "(23, 8) -> (64, 8)" in report
        assert ": 22 rows, 1 ids are not in the table\n" in report
        loaded |= of_rank
    assert loaded == {each: row for each, row in zip(ids, rows.tolist(), strict=True) if each is not None}


def refused_rows_main(folder: Path, name: str) -> bool:
    model = make(OLD, "row_wise")
    before = values(model)
    try:
        warm_start(None, model, rows={"books": folder / name})
    finally:
        assert all(
            torch.equal(old[1], new[1])
            for key in before
            for old, new in zip(before[key], values(model)[key], strict=True)
        )
    return True


REFUSED_ROWS = {
    "wide.npy": "wide.npy has rows of 9 values, and bags.embedding_bags.books.weight of the model shape .21, 8.: give",
    "nan.npy": "row 20 of .*nan.npy has nan in column 1: write finite numbers",
    "large.npy": "row 3 of .*large.npy has inf in column 7: write",
    "twice.npz": "twice.npz .it has id 7 twice.: give Parquet with",
    "short.npz": r"its rows have shape \(4, 8\), for 3 ids",
    "texts.npz": "the ids of table 'bags.books' are of type .*string: give whole numbers",
    "far.npz": "no id of .*far.npz is in bags.embedding_bags.books.weight",
    "lacks.npz": "There is no item named 'rows.npy' in the archive",
    "objects.npy": "its rows are of object, by row, not numbers by row",
    "turned.npy": "its rows are of float64, by column",
    "ragged.parquet": "its lists have other lengths than 8",
    "cut.parquet": "cannot be read from .*cut.parquet",
    "cut.npy": "cannot be read from .*cut.npy",
    "rows.csv": "its name says no format",
    "absent.npy": "^rows of a table cannot be read from .*absent.npy .No such file or directory.: give Parquet",
    "pipe.npy": "^rows of a table cannot be read from .*pipe.npy .it is not a regular file .*: give Parquet",
    "unsigned.npz": "no id of .*unsigned.npz is in bags",
}


@pytest.mark.parametrize("name", REFUSED_ROWS)
def test_rows_that_are_refused_change_nothing(name: str, tmp_path: Path) -> None:
    rows = np.zeros((21, 8))
    arrays: dict[str, Any] = {"wide": np.zeros((21, 9)), "nan": rows.copy(), "large": rows.copy()}
    arrays["nan"][20, 1], arrays["large"][3, 7] = np.nan, 1e39
    arrays |= {"objects": np.array([[None] * 8]), "turned": np.asfortranarray(rows)}
    for stem, array in arrays.items():
        np.save(tmp_path / f"{stem}.npy", array)
    np.savez(tmp_path / "twice.npz", ids=np.array([1, 7, 7]), rows=rows[:3])
    np.savez(tmp_path / "short.npz", ids=np.array([1, 7, 8]), rows=rows[:4])
    np.savez(tmp_path / "texts.npz", ids=np.array(["a", "b", "c"]), rows=rows[:3])
    np.savez(tmp_path / "far.npz", ids=np.array([-1, 21, 99]), rows=rows[:3])
    np.savez(tmp_path / "lacks.npz", ids=np.array([1]))
    lists = [[0.0] * 8, [0.0] * 9, [0.0] * 7]
    pq.write_table(pa.table({"id": [1, 2, 3], "row": lists}), tmp_path / "ragged.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "ragged.parquet").read_bytes()[:-20])
    (tmp_path / "cut.npy").write_bytes((tmp_path / "nan.npy").read_bytes()[:900])
    (tmp_path / "rows.csv").write_bytes(b"1,2")
    os.mkfifo(tmp_path / "pipe.npy")
    np.savez(tmp_path / "unsigned.npz", ids=np.array([2**63 + 5, 2**64 - 1], np.uint64), rows=rows[:2])
    with pytest.raises(ShardrecError, match=REFUSED_ROWS[name]):
        refused_rows_main(tmp_path, name)
    if name in ("nan.npy", "twice.npz"):
        raises_on_all(2, ConfigError, REFUSED_ROWS[name], refused_rows_main, tmp_path, name)
