"""The C++ example: built against the installed torch, its answers are Python's, and no request ends it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.cpp_serving import build as building
from examples.cpp_serving.build import OPERATORS, build, missing_tool, run
from examples.cpp_serving.export import Saved, export, requests
from examples.cpp_serving.main import TOLERANCE, compare
from examples.cpp_serving.model import DENSE

ASKED = list(requests([1, 5, 33]))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As many as the program has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = missing_tool()
    if missing is not None:
        pytest.skip(missing)
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def saved(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {one.path.name: one for one in export(tmp_path_factory.mktemp("models"), ASKED)}


def ask(program: Path, saved: Saved, *bodies: Any) -> list[dict[str, Any]]:
    lines = "".join((body if isinstance(body, str) else json.dumps(body)) + "\n" for body in bodies)
    return [json.loads(line) for line in run(program, saved.path, lines).splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_answers_are_pythons(program: Path, saved: dict[str, Saved]) -> None:
    assert {path.removeprefix("float") for path in saved} >= {".pt", ".pt2", "int8.pt", "int8.pt2"}
    for name, one in saved.items():
        assert compare(program, one, ASKED) <= (TOLERANCE if one.name == "float" else 0.0), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_there_is_no_python_in_the_process(program: Path, saved: dict[str, Saved]) -> None:
    linked = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in linked
    for model in ("int8.pt", "int8.pt2"):
        loaded = [Path(line).name for line in run(program, saved[model].path, "", "--libraries").splitlines()]
        assert any(name.startswith("fbgemm_gpu_tbe_inference") for name in loaded)
        names = [*loaded, *(line.split()[0] for line in linked.splitlines())]
        assert not [name for name in names if "python" in name.lower()]


def good(**changes: Any) -> dict[str, Any]:
    body = {"values": [1, 2, 3, 4], "lengths": [1, 1, 1, 1], "dense": [[0.5] * DENSE]}
    return {**body, **changes}


BAD = [
    ("hello", "not JSON: there is no value at character 1"),
    ("{", "not JSON: a key in quotes is missing at character 2"),
    ("[1]", 'a request is an object, {"values": [...], ...}'),
    ("[" * 100_000, "not JSON: more than 64 nested brackets at character 66"),
    ('{"values": [1], "values": [2]}', 'not JSON: the key "values" comes twice'),
    ('{"values": [99999999999999999999]}', "not JSON: a whole number is beyond 64 bits"),
    ('{"values": [01]}', "not JSON: a number begins with 0"),
    ('{"\\ud800": 1}', "not JSON: half a surrogate pair is missing"),
    ({"values": [1]}, '"lengths" is missing'),
    (good(values=[1, 2, 3, 400_000]), "bad input: rank 0: an id is outside its table"),
    (good(values=[1, 2, 3, -4]), "bad input: rank 0: an id is outside its table"),
    (good(values=[1, 2, 3]), "bad input: rank 0: an id is outside its table, or lengths and ids do not fit"),
    (good(values=[1.5, 2, 3, 4]), '"values" has something else than whole numbers'),
    (good(values={}), '"values" is not an array'),
    (good(lengths=[1, 1, -1, 3]), "bad input: rank 0"),
    (good(lengths=[2**32 + 1, 1, 1, 1]), "bad input: rank 0"),
    (good(lengths=[1, 1, 2]), '"lengths" has 3 entries; give one for each of 4 features and each sample'),
    (good(values=[], lengths=[], dense=[]), '"lengths" has 0 entries'),
    (good(dense=[[1, 2, 3, 4], [1]]), '"dense" has rows of several lengths'),
    (good(dense=[[1, 2, 3, [4]]]), '"dense" has numbers and arrays side by side'),
    (good(dense=[[1, 2, 3, 1e300]]), '"dense" has a number beyond the range of a float'),
    (good(dense=[[1, 2, 3, "4"]]), '"dense" has something else than numbers'),
    (good(other=[1]), 'the model takes no "other"'),
]

# Of a shape that the model cannot take: TorchScript's operators say so, a package is not asked.
MISSHAPEN = [
    (good(dense=[[1, 2]]), "cannot be multiplied", '"dense" has the shape [1, 2]; the model takes [B, 4]'),
    (good(dense=[[1, 2, 3, 4]] * 2), "Sizes of tensors must match", "the model takes [B, 4], and B is 1"),
    (good(dense=[1, 2, 3, 4]), "Dimension out of range", '"dense" has the shape [4]; the model takes [B, 4]'),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["int4.pt", "int8.pt2"])
def test_a_bad_request_gets_an_error_and_the_next_one_an_answer(
    program: Path, saved: dict[str, Saved], model: str
) -> None:
    bad_ones = [*BAD, *((body, packaged if model.endswith("2") else words) for body, words, packaged in MISSHAPEN)]
    bodies = [body for bad, _ in bad_ones for body in (bad, good())]
    answers = ask(program, saved[model], *bodies)
    assert len(answers) == len(bodies)
    for (body, words), answer in zip(bad_ones, answers[::2], strict=True):
        assert words in answer.get("error", ""), (str(body)[:80], answer)
    assert all(answer == answers[1] and len(answer["output"]) == 1 for answer in answers[1::2])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tritons_configuration_is_the_models(saved: dict[str, Saved]) -> None:
    text = (Path(building.HERE) / "triton" / "click" / "config.pbtxt").read_text()
    pattern = r'name: "(\w+)", data_type: TYPE_(\w+), dims: \[ ([-\d, ]+) \]'
    given = {name: (kind, dims) for name, kind, dims in re.findall(pattern, text)}
    module = torch.jit.load(str(saved["int8.pt"].path))
    names = [one.name for one in module.forward.schema.arguments[1:]]
    batch = {"values": ASKED[0].features.values(), "lengths": ASKED[0].features.lengths(), "dense": ASKED[0].dense}
    batch["OUTPUT__0"] = module(*(batch[name] for name in names))
    kinds = {torch.int64: "INT64", torch.float32: "FP32"}
    assert list(given) == [*names, "OUTPUT__0"]
    assert given == {
        name: (kinds[one.dtype], ", ".join(["-1", *map(str, one.shape[1:])])) for name, one in batch.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_it_cannot_start_with_is_said(program: Path, saved: dict[str, Saved], tmp_path: Path) -> None:
    def start(*options: str) -> tuple[int, str]:
        done = subprocess.run([program, *options], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert start()[0] == 2
    model = str(saved["int8.pt"].path)
    code, said = start("--model", model, "--operators", str(tmp_path))
    assert (code, "give the folder of the Python package fbgemm_gpu" in said) == (1, True)
    code, said = start("--model", str(tmp_path / "none.pt"), "--operators", str(OPERATORS))
    assert (code, "cannot load" in said) == (1, True)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "other.pt")
    code, said = start("--model", str(tmp_path / "other.pt"), "--operators", str(OPERATORS))
    assert (code, "was not written by shardrec.serve.save" in said) == (1, True)
    code, said = start("--model", str(tmp_path / "none.pt2"), "--operators", str(OPERATORS))
    assert (code, "there is no such file" in said) == (1, True)
    (tmp_path / "other.pt2").write_bytes((tmp_path / "other.pt").read_bytes())
    code, said = start("--model", str(tmp_path / "other.pt2"), "--operators", str(OPERATORS))
    assert (code, "cannot load" in said) == (1, True)
