"""Warm starts: what a changed model takes from a checkpoint, under any plan, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from shardrec import CheckpointError, ConfigError, DynamicIds, load_checkpoint, save_checkpoint, shard, warm_start
from shardrec.checkpoint.manifest import read_manifest
from shardrec.checkpoint.state import model_tensors
from shardrec.checkpoint.warm import match
from shardrec.modules import ShardedModel
from tests.batches import random_bags
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.plans import cut_plan, topologies_of
from tests.ranks import ranks

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
        ({"rename": {"book": "goods"}}, "the checkpoint has no 'book'; near it are books"),
        ({"rename": {"books": "good"}}, "the model has no 'good'; near it are goods"),
        ({"rename": {"books": "goods", "gone": "goods"}}, "would be loaded twice"),
        ({"rename": {"books": "top"}}, r"books.weight has shape \(21, 8\) and top.weight \(1, 3\)"),
        ({"rename": {"books": "bags"}}, "'books' and 'bags' have no tensor in common"),
        ({"only": ["nothing"]}, "only: the model has no 'nothing'"),
        (
            {"rename": {"books": "goods"}},
            r"goods.weight has shape \(17, 12\), and \(21, 8\) in .*resize=\['grow', 'truncate'\]",
        ),
        ({"rename": {"books": "goods"}, "resize": "grow"}, "give resize='truncate'"),
        ({"resize": "shrink"}, "resize='shrink'; give 'grow', 'truncate'"),
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
