"""The C++ example: built against the installed torch, its answers are Python's, and no request ends it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from examples.cpp_serving import build as building
from examples.cpp_serving.build import OPERATORS, build, missing_tool, run, start
from examples.cpp_serving.export import Saved, export, requests
from examples.cpp_serving.main import TOLERANCE, compare
from examples.cpp_serving.model import DENSE
from shardrec import Publisher, shard
from shardrec.ids import DynamicIds
from shardrec.layout import Topology
from shardrec.modules import ShardedModel
from shardrec.serve import Follower, quantize, save
from shardrec.serve.published import version_name
from tests.ids.oracle import DIM, FEATURES, dynamic_step, model_of, raw_batches
from tests.ids.oracle import ROWS as TABLES
from tests.plans import cut_plan
from tests.serve.published import reveal
from tests.serve.ticks import ROWS, models, rows_at, set_tick

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
    (good(lengths=[1, 1, 2]), '"lengths" has 3 entries. Give one for each of 4 features and each sample'),
    (good(values=[], lengths=[], dense=[]), '"lengths" has 0 entries'),
    (good(dense=[[1, 2, 3, 4], [1]]), '"dense" has rows of several lengths'),
    (good(dense=[[1, 2, 3, [4]]]), '"dense" has numbers and arrays side by side'),
    (good(dense=[[1, 2, 3, 1e300]]), '"dense" has a number beyond the range of a float'),
    (good(dense=[[1, 2, 3, "4"]]), '"dense" has something else than numbers'),
    (good(other=[1]), 'the model takes no "other"'),
]

# Of a shape that the model cannot take: TorchScript's operators say so, a package is not asked.
MISSHAPEN = [
    (good(dense=[[1, 2]]), "cannot be multiplied", '"dense" has the shape [1, 2]. The model takes [B, 4]'),
    (good(dense=[[1, 2, 3, 4]] * 2), "Sizes of tensors must match", "the model takes [B, 4], and B is 1"),
    (good(dense=[1, 2, 3, 4]), "Dimension out of range", '"dense" has the shape [4]. The model takes [B, 4]'),
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
    for interval in ("0", "nan", "inf", "1e7"):
        assert start("--model", "model.pt", "--follow", str(tmp_path), "--interval", interval)[0] == 2
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


class Server:
    """The program, asked line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def at(self, request: Any, version: int, faults: int = 0) -> dict[str, Any]:
        """The first answer of this version, with so many faults at least."""
        while True:
            answer = self.ask(request)
            assert answer["version"] <= version
            if answer["version"] == version and answer["faults"] >= faults:
                return answer
            time.sleep(0.01)

    def end(self) -> str:
        """What it said on stderr."""
        _, said = self.process.communicate()
        assert self.process.returncode == 0, said
        return said


@contextmanager
def following(program: Path, model: Path, folder: Path) -> Iterator[Server]:
    process = start(program, model, "--follow", str(folder), "--interval", "0.01")
    try:
        yield Server(process)
    finally:
        process.kill()
        process.communicate()


def dynamic(cut: str) -> ShardedModel:
    """Tables with dynamic ids, in the blocks of two ranks."""
    sizes = {f"sparse.{name}": (rows, DIM) for name, rows in TABLES.items()}
    plan = cut_plan(cut, Random(1), sizes, Topology(ranks_per_host=2)).on_one_rank()
    options = {"users": DynamicIds(evict="lru", fallback_rows=1), "goods": DynamicIds(evict="lru")}
    return shard(model_of(True, "sgd"), plan, dynamic_ids=options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("weights", "cut", "served_cut"),
    [("fp32", "row_wise", "row_wise"), ("fp16", "column_wise", "table_wise"), ("int8", "table_wise", "column_wise")],
)
def test_it_follows_as_python_does(
    one_thread: None, program: Path, tmp_path: Path, weights: str, cut: str, served_cut: str
) -> None:
    """Bases and deltas, ids that are evicted: to the bit, by each version in turn, and from a later one on."""
    model, served = dynamic(cut), quantize(dynamic(served_cut), weights)
    publisher = Publisher(model, tmp_path / "published", weights, keep_bases=9)
    steps = raw_batches(Random(3), 24, 1)
    for number, (bags,) in enumerate(steps):
        dynamic_step(model, bags, number)
        if number % 3 == 2:
            publisher.publish(full=number == 14)
    shown = tmp_path / "shown"
    follower = Follower(served, served.formats, shown, interval=1.0)
    file = save(served, tmp_path / "model.pt", features=list(FEATURES))
    ids = sorted({raw for (bags,) in steps for feature in "fgh" for bag in bags[feature] for raw in bag})
    plain = [number % TABLES["plain"] for number in range(len(ids))]
    request = {"values": [*ids, *ids, *ids, *plain], "lengths": [1] * (4 * len(ids))}
    features = KeyedJaggedTensor(
        list(FEATURES), torch.tensor(request["values"]), lengths=torch.tensor(request["lengths"])
    )
    has_row = []
    with following(program, file, shown) as server:
        first = server.ask(request)
        assert (first["version"], first["age"], first["faults"]) == (0, None, 0)
        for version in range(1, publisher.version + 1):
            reveal(tmp_path / "published", version, shown)
            assert follower.poll()
            answer, expected = server.at(request, version), served(features)
            assert torch.equal(torch.tensor(answer["output"]), expected), version
            assert (answer["faults"], answer["age"] > 0) == (0, True)
            has_row.append(expected[:, DIM : 2 * DIM].any(dim=1))
        with following(program, file, shown) as late:
            assert late.at(request, version)["output"] == answer["output"]
            assert late.end() == ""
        assert server.end() == ""
    assert len(has_row) == 8
    assert any(bool((before & ~after).any()) for before, after in pairwise(has_row)), "no id was evicted"


ALL_ROWS = {"values": [*range(ROWS), *range(ROWS)], "lengths": [1] * (2 * ROWS)}


def tick_of(output: Any) -> int:
    tick, *tables = output
    for table in tables:
        assert torch.equal(torch.tensor(table), rows_at(int(tick))), f"half of {tick}"
    return int(tick)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_applies_nothing_that_is_damaged_or_of_another_model(program: Path, tmp_path: Path) -> None:
    model, publisher, served = models(tmp_path / "good", "fp32")
    file = save(served, tmp_path / "model.pt", features=["a", "b"])
    shown, request = tmp_path / "shown", ALL_ROWS
    for tick in range(1, 7):
        set_tick(model, tick)
        publisher.publish(full=tick == 4)
    shutil.copytree(tmp_path / "good", shown)
    for version in range(2, 7):
        (shown / version_name(version)).unlink()

    def show(version: int, data: bytes | None = None) -> None:
        (shown / "partial").write_bytes(data or (tmp_path / "good" / version_name(version)).read_bytes())
        (shown / "partial").rename(shown / version_name(version))

    with following(program, file, shown) as server:
        assert tick_of(server.at(request, version=1)["output"]) == 1
        (delta,) = shown.glob("*/*.000000000002.safetensors")
        good = delta.read_bytes()
        delta.write_bytes(good[:-1] + bytes([good[-1] ^ 4]))
        show(3)  # which takes that file, too
        answer = server.at(request, version=1, faults=1)
        delta.write_bytes(good[:-1])
        server.at(request, version=1, faults=answer["faults"] + 2)
        delta.write_bytes(good)
        assert tick_of(server.at(request, version=3)["output"]) == 3  # version 2 never was there
        (delta,) = shown.glob("*/*.000000000005.safetensors")
        delta.rename(shown / "delta")
        show(5)
        server.at(request, version=3, faults=server.ask(request)["faults"] + 1)
        show(4)  # a base, which is not the newest version
        assert tick_of(server.at(request, version=4)["output"]) == 4
        (shown / "delta").rename(delta)
        assert tick_of(server.at(request, version=5)["output"]) == 5
        text = (tmp_path / "good" / version_name(6)).read_bytes()
        show(6, text.replace(b'"version": 6', b'"version": 7'))
        answer = server.at(request, version=5, faults=server.ask(request)["faults"] + 1)
        show(7, text)
        server.at(request, version=5, faults=answer["faults"] + 2)
        show(6)
        assert tick_of(server.at(request, version=6)["output"]) == 6
        os.mkfifo(shown / version_name(8))
        server.at(request, version=6, faults=server.ask(request)["faults"] + 1)
        said = server.end()
    for version in (7, 8):
        (shown / version_name(version)).unlink()
    for words in (
        "no regular file",
        "is damaged",
        "another size",
        "its checksum is not",
        "manifest of another version",
        "keeps version 5",
    ):
        assert words in said, said
    for weights, words in (("int8", "other formats"), ("fp32", "model cannot follow")):
        served = models(tmp_path, weights)[2] if weights == "int8" else model.eval()
        file = save(served, tmp_path / "other.pt", features=["a", "b"])
        process = start(program, file, "--follow", str(shown))
        assert words in process.communicate("")[1]


Lie = Callable[[dict[str, Any], list[Any]], object]
LIES: dict[str, Lie] = {
    "is outside of it": lambda manifest, part: part.__setitem__(slice(2, 4), [-(2**61), 2**61]),
    "are not all of it": lambda manifest, part: part.__setitem__(1, part[1] - 1),
    "checksums for": lambda manifest, part: manifest["files"][part[4]].update(checksums=[]),
    "as many rows as that": lambda manifest, part: part.append([*part[4:6], 0, part[1] + 1]),
    "another kind": lambda manifest, part: part.__setitem__(0, [[]]),
}
"""By what is said of it: changes of a manifest, and of a part in it, that its writer signs."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signed_manifest_that_lies_is_refused(program: Path, tmp_path: Path) -> None:
    model, publisher, served = models(tmp_path / "good", "fp32")
    file = save(served, tmp_path / "model.pt", features=["a", "b"])
    set_tick(model, 1)
    publisher.publish()
    text = (tmp_path / "good" / version_name(1)).read_text()
    shown = tmp_path / "good" / version_name(2)
    for words, lie in LIES.items():
        manifest = json.loads(text)
        del manifest["sha256"]
        manifest["extra"]["version"] = 2
        lie(manifest, next(iter(manifest["tensors"].values()))["parts"][0])
        body = json.dumps(manifest).encode().removesuffix(b"}")
        shown.write_bytes(body + b',\n"sha256": "%s"}\n' % hashlib.sha256(body).hexdigest().encode())
        answer, said = start(program, file, "--follow", str(shown.parent)).communicate(json.dumps(ALL_ROWS))
        assert tick_of(json.loads(answer)["output"]) == 1
        assert "version 2 is not applied" in said and words in said, said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_sees_half_of_a_version(program: Path, tmp_path: Path) -> None:
    model, publisher, served = models(tmp_path / "published", "int8", keep_bases=99)
    file = save(served, tmp_path / "model.pt", features=["a", "b"])
    options = ("--follow", str(tmp_path / "published"), "--interval", "0.001", "--clients", "3", "--answers")
    process = start(program, file, *options, "--seconds", "1", "--windows", "6")
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(ALL_ROWS), file=process.stdin)
    process.stdin.close()
    tick = 0
    for _ in range(6):
        process.stdout.readline()
        for _ in range(5):
            tick += 1
            set_tick(model, tick)
            publisher.publish(full=tick % 5 == 0)
    answers = [json.loads(line)[1] for line in process.stdout]
    assert process.wait() == 0
    for answer in answers:
        assert tick_of(answer["output"]) == answer["version"]
    assert len(answers) > 4
