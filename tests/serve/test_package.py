"""AOTInductor packages: eager mode's numbers for any batch, and no call that is read for another."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from examples.cpp_serving.build import missing_tool
from shardrec.errors import ConfigError, InputError
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from shardrec.serve import ExportError, Package, ServedModel, load_package, package, quantize
from tests.batches import random_bags
from tests.models import collection, feature_rows, random_configs, table_sizes
from tests.plans import cut_plan
from tests.ranks import ranks
from tests.serve.served import click_scorer, pooled_columns


class Scores(nn.Module):
    """Two scores and what they are made of, from weighted bags and dense columns."""

    def __init__(self, sparse: nn.Module, pooled: int) -> None:
        super().__init__()
        self.sparse = sparse
        torch.manual_seed(5)
        self.over = nn.Linear(pooled + 3, 2)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> dict[str, Any]:
        pooled = self.sparse(features).values()
        return {"scores": self.over(torch.cat([dense, pooled], dim=1)), "parts": (pooled, dense.sum(dim=1))}


class Pooled(nn.Module):
    """Returns what a package cannot."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        found: KeyedTensor = self.sparse(features)
        return found


def scores_model(weights: str) -> tuple[ServedModel, dict[str, int]]:
    rng = Random(5)
    configs = random_configs(rng, weighted=True)
    sizes = table_sizes(configs, "sparse")
    plan = cut_plan("grid", rng, sizes, Topology(ranks_per_host=1))
    model = shard(Scores(collection(configs, weighted=True), pooled_columns(configs)), plan).eval()
    return quantize(model, weights), feature_rows(configs)


def batch(rows: dict[str, int], size: int) -> tuple[Tensor, KeyedJaggedTensor]:
    return torch.randn(size, 3), random_bags(Random(size), rows, size, weighted=True, shuffled=False).kjt()


def plain(dense: Tensor, features: KeyedJaggedTensor) -> tuple[Tensor, ...]:
    return features.values(), features.lengths(), features.weights(), dense


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedModel, dict[str, int], Path]:
    missing = missing_tool()
    if missing is not None:
        pytest.skip(missing)
    model, rows = scores_model("int8")
    path = tmp_path_factory.mktemp("packages") / "scores.pt2"
    assert package(model, path, batch(rows, 1)) == path
    assert list(path.parent.iterdir()) == [path]
    return model, rows, path


Made = tuple[ServedModel, dict[str, int], Path]


@pytest.fixture(scope="module")
def loaded(made: Made) -> Package:
    return load_package(made[2], runners=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_batch_gets_the_models_answer(made: Made, loaded: Package) -> None:
    model, rows, _ = made
    for size in (0, 1, 2, 3, 33, 257):
        given = batch(rows, size)
        found, expected = loaded(*plain(*given)), model(*given)
        assert torch.equal(found["parts"][0], expected["parts"][0]), "quantized rows are the same"
        assert torch.allclose(found["parts"][1], expected["parts"][1], atol=1e-6, rtol=1e-6)
        assert torch.allclose(found["scores"], expected["scores"], atol=1e-5, rtol=1e-6)
    dense, features = batch(rows, 4)
    named = dict(zip(["values", "lengths", "weights", "dense"], plain(dense, features), strict=True))
    columns = dense.t().contiguous().t()
    assert torch.equal(loaded(**{**named, "dense": columns})["scores"], loaded(**named)["scores"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_threads_at_a_time(made: Made, loaded: Package) -> None:
    model, rows, _ = made
    calls = [batch(rows, size) for size in (1, 5, 9, 14)] * 5
    # More than there are runners.
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda call: loaded(*plain(*call)), calls))
    for one, call in zip(found, calls, strict=True):
        assert torch.equal(one["parts"][0], model(*call)["parts"][0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_input_is_an_error_and_the_next_call_is_answered(made: Made, loaded: Package) -> None:
    model, rows, _ = made
    given = batch(rows, 6)
    values, lengths, weights, dense = plain(*given)
    outside = values.clone()
    outside[0] = 10**6
    lost = lengths.clone()
    lost[0] = -1
    for bad, words in [
        ((outside, lengths, weights, dense), "bad input: rank 0: an id is outside its table"),
        ((-values - 1, lengths, weights, dense), "an id is outside its table, or lengths and ids do not fit"),
        ((values, lost, weights, dense), "lengths and ids do not fit"),
        ((values[:-1], lengths, weights[:-1], dense), "lengths and ids do not fit"),
        ((values[:-1], lengths, weights, dense), "weights has the shape"),
        ((values, lengths[:-1], weights, dense), "lengths has the shape"),
        (
            (values, lengths, weights, dense[:-1]),
            r"dense has the shape \[5, 3\]. The model takes \[B, 3\], where B is 6",
        ),
        ((values, lengths, weights, dense[:, :2]), r"dense has the shape \[6, 2\]"),
        (
            (values.to(torch.int32), lengths, weights, dense),
            "values is torch.int32 on cpu. The package takes torch.int64",
        ),
        ((values, lengths, weights, dense.to("meta")), "dense is torch.float32 on meta"),
        ((values, lengths, weights), "the model takes values, lengths, weights, dense, each once: give 4 tensors"),
        ((values, lengths, weights, dense, dense), "give 4 tensors"),
    ]:
        with pytest.raises(InputError, match=words):
            loaded(*bad)
        assert torch.equal(loaded(values, lengths, weights, dense)["parts"][0], model(*given)["parts"][0])
    with pytest.raises(InputError, match="and no other"):
        loaded(values, lengths, weights, other=dense)


FRESH = """
import json, sys
import torch, fbgemm_gpu
folder = sys.argv[1]
model = torch._inductor.aoti_load_package(f"{folder}/scores.pt2")
assert "shardrec" not in sys.modules and "torchrec" not in sys.modules
given = torch.load(f"{folder}/batch.pt")
torch.save(model(*given), f"{folder}/output.pt")
print(model.get_metadata()["shardrec.json"])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_that_knows_torch_and_fbgemm_only_runs_it(made: Made) -> None:
    model, rows, path = made
    given = batch(rows, 5)
    torch.save(plain(*given), path.parent / "batch.pt")
    (path.parent / "fresh.py").write_text(FRESH)
    command = [sys.executable, str(path.parent / "fresh.py"), str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(path.parent / "output.pt")["parts"][0], model(*given)["parts"][0])
    notes = json.loads(done.stdout.splitlines()[-1])
    assert notes["inputs"] == ["values", "lengths", "weights", "dense"]
    assert notes["tensors"][1] == {"name": "lengths", "dtype": "int32", "shape": [f"{len(rows)}*B"]}
    assert notes["output"] == {"parts": [1, 2], "scores": 0} or notes["output"] == {"parts": [0, 1], "scores": 2}
    assert set(notes["formats"].values()) == {"int8"}


def one_rank(cls: Any) -> tuple[ShardedModel, KeyedJaggedTensor]:
    configs = random_configs(Random(1))
    plan = cut_plan("table_wise", Random(1), table_sizes(configs, "sparse"), Topology(ranks_per_host=1))
    features = random_bags(Random(0), feature_rows(configs), 3, shuffled=False).kjt()
    return shard(cls(collection(configs)), plan).eval(), features


def test_what_cannot_be_packaged_is_named(tmp_path: Path) -> None:
    model, features = one_rank(Pooled)
    with pytest.raises(ConfigError, match=r"a package is named \*\.pt2, .* not m\.pt: rename it"):
        package(model, tmp_path / "m.pt", (features,))
    with pytest.raises(ConfigError, match=r"Pooled returns KeyedTensor, .*for example KeyedTensor\.values\(\)"):
        package(model, tmp_path / "m.pt2", (features,))
    with pytest.raises(ConfigError, match=r"is in training mode"):
        package(model.train(), tmp_path / "m.pt2", (features,))
    assert not list(tmp_path.iterdir())


def test_a_package_is_of_one_rank(tmp_path: Path) -> None:
    def rank_main() -> None:
        model, configs, _ = click_scorer(Random(5), Topology(ranks_per_host=2))
        features = random_bags(Random(0), feature_rows(configs), 3, shuffled=False).kjt()
        with pytest.raises(ConfigError, match="sharded over 2 ranks, and a package is run by one process: shard"):
            package(model, tmp_path / "m.pt2", (features,))

    ranks(2, rank_main)


def test_a_failed_compilation_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor as inductor
    from torch._inductor.exc import InvalidCxxCompiler

    def traced_once(*args: Any) -> Any:
        programs[:] = programs or [trace(*args)]
        return programs[0]

    module, programs = sys.modules[package.__module__], []
    trace = module.program_of
    monkeypatch.setattr(module, "program_of", traced_once)
    model, rows = scores_model("fp16")
    path = tmp_path / "m.pt2"
    path.write_text("the one before")
    for error, kind, words in [
        (RuntimeError("no such kernel"), ExportError, "AOTInductor cannot compile Scores: no such kernel"),
        (InvalidCxxCompiler(), ConfigError, r"found no C\+\+ compiler: install one .* or name it in"),
        (OSError("no space left"), OSError, "no space left"),
    ]:

        def fail(program: object, *, package_path: str, error: Exception = error, **_: object) -> str:
            Path(package_path).write_text("half")
            raise error

        monkeypatch.setattr(inductor, "aoti_compile_and_package", fail)
        with pytest.raises(kind, match=words):
            package(model, path, batch(rows, 2))
        assert path.read_text() == "the one before"
        assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*none\.pt2: shardrec\.serve\.package writes one"):
        load_package(tmp_path / "none.pt2")
    path = tmp_path / "other.pt2"
    torch.export.save(torch.export.export(nn.Linear(1, 1), (torch.ones(1),)), path)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .* shardrec\.serve\.package writes what can"):
        load_package(path)
