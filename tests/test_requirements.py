"""The pinned versions: of each supported set, what shardrec asks for, and what is published."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from shardrec._versions import MATCHING_SETS, MatchingSet

FOLDER = Path(__file__).parents[1] / "requirements"
BUILDS = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec")


def lines(name: str) -> list[str]:
    """A file's lines without comments."""
    found = [line.partition("#")[0].strip() for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    return [line for line in found if line and not line.startswith("-")]


def pins(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in lines(name) if "==" in line)


def test_there_is_a_file_for_each_set() -> None:
    assert {path.name for path in FOLDER.glob("set-*.txt")} == {f"set-{one.torch}.txt" for one in MATCHING_SETS}


@pytest.mark.parametrize("one", MATCHING_SETS, ids=lambda one: one.torch)
def test_a_set_is_the_one_that_is_checked_for(one: MatchingSet) -> None:
    found = pins(f"set-{one.torch}.txt")
    assert re.match(r"\d+\.\d+", found["torch"]).group() == one.torch  # type: ignore[union-attr]
    assert found["torchrec"] == one.torchrec
    assert {found["fbgemm-gpu"], found["fbgemm-gpu-cpu"]} == {f"{one.fbgemm}.0"}


@pytest.mark.parametrize("one", MATCHING_SETS, ids=lambda one: one.torch)
def test_every_package_has_one_version(one: MatchingSet) -> None:
    of_set = pins(f"set-{one.torch}.txt")
    for name in ("base.txt", "cpu.txt", "gpu.txt", "torchrec.txt", "dev.txt", "docs.txt"):
        unpinned = [line for line in lines(name) if "==" not in line]
        assert set(unpinned) <= set(of_set), f"{name}: no version of {unpinned}"
        assert not set(pins(name)) & set(of_set), f"{name} and the set pin the same"


def test_what_is_required_is_used() -> None:
    """By shardrec, or by torchrec, which is installed without what it requires."""
    config = configparser.ConfigParser()
    config.read(FOLDER.parent / "setup.cfg", encoding="utf-8")
    extras = config["options.extras_require"]
    asked = "".join([config["options"]["install_requires"], *(extras[name] for name in ("planner", "plots", "train"))])
    required = {re.split(r"[ ><=!]", line)[0] for line in asked.split("\n") if line and "[" not in line}
    imported: set[str] = set()
    for path in (FOLDER.parent / "shardrec").rglob("*.py"):
        for found in re.findall(r"^ *(?:from|import) ([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            imported.update(found.split("."))
    by_torchrec = {re.match(r"[\w-]+", one).group() for one in metadata.requires("torchrec") or ()}  # type: ignore[union-attr]
    modules = {"pyyaml": "yaml", "zlib-ng": "zlib_ng"}
    assert {one for one in required if modules.get(one, one) not in imported} <= by_torchrec
    assert {"pyarrow", "torch", "tqdm"} <= required


def test_setuptools_suits_every_torch() -> None:
    """torch 2.11 wants it below 82, and 2.13 at least 77.0.3."""
    assert 78 <= int(pins("base.txt")["setuptools"].partition(".")[0]) < 82


@pytest.mark.slow  # `make test` has just installed one of the sets
@pytest.mark.timeout(60)
def test_all_of_it_is_published() -> None:
    """Asked of the index that pip uses here."""

    def published(package: str) -> set[str] | None:
        command = [sys.executable, "-m", "pip", "index", "versions", package, "--timeout", "10", "--retries", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.search(r"Available versions: (.*)", done.stdout)
        return None if found is None else {one.partition("+")[0] for one in found.group(1).split(", ")}

    with ThreadPoolExecutor() as pool:
        answers = dict(zip(BUILDS, pool.map(published, BUILDS), strict=True))
    silent = [name for name, versions in answers.items() if versions is None]
    if silent:
        pytest.skip(f"pip finds no index that knows {', '.join(silent)}: no network, or another index")
    for one in MATCHING_SETS:
        for name in BUILDS:
            version = pins(f"set-{one.torch}.txt")[name]
            assert version in (answers[name] or ()), f"{name} {version} is not published"
