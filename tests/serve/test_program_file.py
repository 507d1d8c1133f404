"""Files that torch and fbgemm run without shardrec, by plain tensors."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._torchscript import quiet
from shardrec.checkpoint.parts import as_matrix
from shardrec.errors import ConfigError
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from shardrec.serve import from_tensors, quantize, save
from shardrec.serve.exporter import export
from shardrec.serve.published import served_tensors
from tests.batches import random_bags
from tests.models import ClickModel, collection, feature_rows, random_configs, table_sizes
from tests.plans import cut_plan, random_plan
from tests.ranks import ranks, run_without_shardrec
from tests.scripting.scorers import Three
from tests.serve.served import click_scorer, pooled_columns

LOADED = """
import json, sys
import torch, fbgemm_gpu
notes = {"shardrec.json": ""}
model = torch.jit.load(f"{folder}/model{rank}.pt", _extra_files=notes)
notes = json.loads(notes["shardrec.json"])
assert "shardrec" not in sys.modules and "torchrec" not in sys.modules
assert (notes["rank"], notes["world_size"]) == (rank, size)
given = torch.load(f"{folder}/batch{rank}.pt")
torch.save(model(*[given[name] for name in notes["inputs"]]), f"{folder}/output{rank}.pt")
"""


@pytest.mark.slow
def test_every_ranks_file_is_run_by_a_process_that_knows_torch_and_fbgemm_only(tmp_path: Path) -> None:
    def rank_main() -> None:
        rank = dist.get_rank()
        rng = Random(5)
        model, configs, _ = click_scorer(rng, Topology(ranks_per_host=2), weighted=True)
        rows = feature_rows(configs)
        served = quantize(model, "int8", tables={f"sparse.{configs[0].name}": "int4"})
        assert save(served, tmp_path / "model{rank}.pt", features=list(rows)) == tmp_path / f"model{rank}.pt"
        features = random_bags(Random(rank), rows, 3, weighted=True, shuffled=False).kjt()
        given = {"values": features.values(), "lengths": features.lengths(), "weights": features.weights()}
        torch.save(given, tmp_path / f"batch{rank}.pt")
        torch.save(served(features), tmp_path / f"expected{rank}.pt")

    ranks(2, rank_main)
    run_without_shardrec(2, LOADED, folder=str(tmp_path))
    for rank in range(2):
        found, expected = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("output", "expected"))
        assert torch.equal(found, expected)


def click_model(*, weighted: bool = False) -> tuple[ShardedModel, dict[str, int]]:
    """On one rank."""
    rng = Random(1)
    configs = random_configs(rng, weighted=weighted)
    plan = random_plan(rng, table_sizes(configs, "sparse"), Topology(ranks_per_host=1))
    bags = collection(configs, weighted=weighted, optimizers="sgd")
    return shard(ClickModel(bags, pooled=pooled_columns(configs)), plan).eval(), feature_rows(configs)


@pytest.mark.some(1)
@pytest.mark.parametrize("weights", ["", "int4"])
def test_a_file_answers_what_the_model_does(tmp_path: Path, weights: str) -> None:
    model, rows = click_model()
    if weights:
        model = quantize(model, weights)
    notes = {"shardrec.json": ""}
    with quiet():
        loaded = torch.jit.load(save(model, tmp_path / "m.pt", features=list(rows)), _extra_files=notes)
    said = json.loads(notes["shardrec.json"])
    assert said["inputs"] == ["values", "lengths", "dense"]
    assert said["features"] == list(rows)
    assert said["formats"] == ({name: weights for name in model.plan.by_name} if weights else {})
    for size in (0, 1, 4):
        features = random_bags(Random(size), rows, size, shuffled=False).kjt()
        dense = torch.randn(size, 3)
        found = loaded(features.values(), features.lengths(), dense)
        assert not found.requires_grad
        with torch.no_grad():
            assert torch.equal(found, model(dense, features))
    with pytest.raises(Exception, match="an id is outside its table"):
        loaded(torch.tensor([10**6]), torch.tensor([1] + [0] * (len(rows) - 1)), torch.randn(1, 3))


def test_the_entry_is_the_model_in_eager_mode_too() -> None:
    model, rows = click_model(weighted=True)
    entry = from_tensors(model, list(rows))
    assert entry.inputs == ("values", "lengths", "weights", "dense")
    features = random_bags(Random(0), rows, 3, weighted=True, shuffled=False).kjt()
    dense = torch.randn(3, 3)
    found = entry(features.values(), features.lengths(), features.weights(), dense)
    assert torch.equal(found, model(dense, features))


def test_a_half_written_file_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = click_model()
    path = tmp_path / "m.pt"
    path.write_text("the one before")

    def fail(scripted: object, where: str, **_: object) -> None:
        Path(where).write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(torch.jit, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        save(model, path, features=list(rows))
    assert path.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    model, rows = click_model()
    with pytest.raises(ConfigError, match=r"No such file or directory\. Give a file in a folder that can be"):
        save(model, tmp_path / "x" / "m.pt", features=list(rows))


def test_ranks_do_not_write_one_file(tmp_path: Path) -> None:
    def rank_main() -> None:
        model, configs, _ = click_scorer(Random(5), Topology(ranks_per_host=2))
        with pytest.raises(ConfigError, match=r"2 ranks would all write .*: put \{rank\} into its name"):
            save(model, tmp_path / "model.pt", features=list(feature_rows(configs)))

    ranks(2, rank_main)


class TwoInputs(nn.Module):
    def forward(self, one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> Tensor:
        return one.values() + other.values()


class TakesText(nn.Module):
    def forward(self, features: KeyedJaggedTensor, name: str) -> Tensor:
        return features.values()


class TakesValues(nn.Module):
    def forward(self, features: KeyedJaggedTensor, values: Tensor) -> Tensor:
        return features.values() + values


class TakesMore(nn.Module):
    def forward(self, dense: Tensor, scale: float = 2.0, *, features: KeyedJaggedTensor) -> Tensor:
        return dense * scale + features.lengths().sum()


def test_what_cannot_be_given_plain_tensors_is_named(tmp_path: Path) -> None:
    model, rows = click_model()
    keys = list(rows)
    with pytest.raises(ConfigError, match=f"features lacks {keys[0]!r}, which the model looks up"):
        from_tensors(model, keys[1:])
    with pytest.raises(ConfigError, match=f"features has {keys[0]!r} more than once"):
        from_tensors(model, [*keys, keys[0]])
    with pytest.raises(
        ConfigError, match=r"takes 2 KeyedJaggedTensors: .* features=\{'one': \[\.\.\.\], 'other': \[\.\.\.\]\}"
    ):
        from_tensors(TwoInputs(), ["f"])
    with pytest.raises(ConfigError, match=r"features is for 'two', and TwoInputs\.forward takes .* as 'one', 'other'"):
        from_tensors(TwoInputs(), {"two": ["f"]})
    with pytest.raises(ConfigError, match="takes no parameter annotated KeyedJaggedTensor"):
        from_tensors(nn.Linear(1, 1), ["f"])
    with pytest.raises(ConfigError, match="Linear holds 0 sharded models, not one"):
        save(nn.Linear(1, 1).eval(), tmp_path / "m.pt", features=["f"])
    with pytest.raises(ConfigError, match="its 'name' is neither a KeyedJaggedTensor nor a Tensor"):
        from_tensors(TakesText(), ["f"])
    with pytest.raises(ConfigError, match="its 'values' has the name of an argument that the entry has already"):
        from_tensors(TakesValues(), ["f"])
    with pytest.raises(ConfigError, match="is in training mode"):
        save(model.train(), tmp_path / "m.pt", features=keys)


def test_arguments_with_a_default_are_left_out() -> None:
    entry = from_tensors(TakesMore(), ["f"])
    assert entry.inputs == ("values", "lengths", "dense")
    assert entry(torch.tensor([7, 8]), torch.tensor([2]), torch.ones(1)).tolist() == [4.0]


def bags_of(prefix: str, *, weighted: bool) -> EmbeddingBagCollection:
    torch.manual_seed(len(prefix))
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"{prefix}{n}", num_embeddings=9, embedding_dim=8, feature_names=[f"{prefix}_{n}"])
            for n in range(2)
        ],
        is_weighted=weighted,
    )


class TwoTowers(nn.Module):
    """One of its KeyedJaggedTensors has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = bags_of("user", weighted=False), bags_of("item", weighted=True)

    def forward(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> Tensor:
        return (self.users(user).values() * self.items(item).values()).sum(dim=1)


class OneForAll(TwoTowers):
    """One with weights for both collections."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # type: ignore[override]
        return (self.users(features).values() * self.items(features).values()).sum(dim=1)


class Probability(nn.Module):
    """Around a model that is sharded already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return torch.sigmoid(self.model(features))


def request(*prefixes: str) -> dict[str, Tensor]:
    count = 2 * len(prefixes)
    return {
        "values": torch.arange(2 * count) % 9,
        "lengths": torch.tensor([2, 0, 1, 1] * len(prefixes)),
        "weights": torch.linspace(0.5, 2, 2 * count),
    }


@pytest.mark.slow
def test_a_model_of_two_keyed_jagged_tensors_is_saved(tmp_path: Path) -> None:
    model = shard(TwoTowers()).eval()
    keys = {"user": ["user_0", "user_1"], "item": ["item_0", "item_1"]}
    notes = {"shardrec.json": ""}
    with quiet():
        loaded = torch.jit.load(save(model, tmp_path / "m.pt", features=keys), _extra_files=notes)
    said = json.loads(notes["shardrec.json"])
    assert said["inputs"] == ["user_values", "user_lengths", "item_values", "item_lengths", "item_weights"]
    assert said["features"] == keys
    user, item = request("user"), request("item")
    expected = model(
        KeyedJaggedTensor(keys["user"], user["values"], lengths=user["lengths"]),
        KeyedJaggedTensor(keys["item"], **item),
    )
    found = loaded(user["values"], user["lengths"], item["values"], item["lengths"], item["weights"])
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_one_weighted_request_serves_weighted_and_unweighted_collections(tmp_path: Path) -> None:
    """As in the unsharded model, which ignores the weights where a collection is not weighted."""
    model, unsharded = shard(OneForAll()).eval(), OneForAll()
    keys = ["user_0", "user_1", "item_0", "item_1"]
    given = request("user", "item")
    expected = unsharded(KeyedJaggedTensor(keys, **given))
    torch.testing.assert_close(model(KeyedJaggedTensor(keys, **given)), expected)
    around = Probability(model).eval()
    for one, answer in ((quantize(model, "fp32"), expected), (around, expected.sigmoid())):
        with quiet():
            loaded = torch.jit.load(save(one, tmp_path / "m.pt", features=keys))
        torch.testing.assert_close(loaded(*given.values()), answer.detach())
    with pytest.raises(ConfigError, match=r"which Probability holds as 'model': give it that one"):
        export(around, (KeyedJaggedTensor(keys, **given),))
    program = export(model, (KeyedJaggedTensor(keys, **given),))
    torch.testing.assert_close(program.module()(*given.values()), expected.detach())


@pytest.mark.some(1)
@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8", "int4"])
def test_a_file_says_where_it_has_what_is_published(tmp_path: Path, weights: str) -> None:
    model, rows = click_model()
    served = quantize(model, weights)
    notes = {"shardrec.json": ""}
    with quiet():
        loaded = torch.jit.load(save(served, tmp_path / "m.pt", features=list(rows)), _extra_files=notes)
    attributes = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    published = json.loads(notes["shardrec.json"])["published"]
    tensors = served_tensors(served, served.formats)
    assert published.keys() == tensors.keys()
    for name, note in published.items():
        assert (note["shape"], note["same_cut"]) == (list(tensors[name].shape), False)
        for (top, bottom, left, right, attribute, offset, stride), part in zip(
            note["parts"], tensors[name].parts, strict=True
        ):
            assert (top, bottom, left, right) == part.rect
            memory = attributes[attribute].detach().view(-1).view(torch.uint8)
            width = (right - left) * note["itemsize"]
            found = memory.as_strided((bottom - top, width), (stride, 1), offset)
            assert torch.equal(found, as_matrix(part.values).contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_dense_part_runs_while_something_travels(world_size: int, tmp_path: Path) -> None:
    """On one rank nothing does, and the program is left as it is, which is faster to load."""

    def rank_main() -> list[str]:
        bags = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["a"])]
        words = [EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["a"])]
        model = Three(collection(bags), collection(bags), EmbeddingCollection(tables=words), columns=8, dim=4)
        tables = {f"{path}.t": (9, 4) for path in ("left", "right", "words")}
        plan = cut_plan("row_wise", Random(0), tables, Topology(ranks_per_host=world_size))
        with mock.patch.object(torch.jit, "save", wraps=torch.jit.save) as saved:  # to load one takes seconds
            save(quantize(shard(model, plan).eval()), tmp_path / "{rank}.pt", features=["a"])
        nodes = saved.call_args.args[0].inlined_graph.nodes()
        return [kind for node in nodes if (kind := node.kind()) in ("aten::relu", "prim::awaitable_wait")]

    first, *others = ranks(world_size, rank_main)[0]
    assert others and (first == "aten::relu") == (world_size > 1)
