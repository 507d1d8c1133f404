"""The matching of torch, fbgemm-gpu and torchrec, with the installed versions replaced by those of each case."""

from __future__ import annotations

import configparser
import logging
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardrec import _versions
from shardrec._versions import MATCHING_SETS, check_extra, check_versions
from shardrec.errors import VersionError

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes the metadata say what a test wants; imports succeed unless the test says otherwise."""

    def pretend(modules: tuple[str, ...] = (), fails: Exception | None = None, **versions: str) -> None:
        def version(name: str) -> str:
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise metadata.PackageNotFoundError(name) from None

        def load(name: str) -> SimpleNamespace:
            if fails is not None:
                raise fails
            operators = SimpleNamespace(permute_2D_sparse_data=len)
            return SimpleNamespace(ops=SimpleNamespace(fbgemm=operators))

        monkeypatch.setattr(_versions.metadata, "version", version)
        monkeypatch.setattr(_versions.util, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(_versions.importlib, "import_module", load)

    check_versions.cache_clear()
    yield pretend
    check_versions.cache_clear()


def test_an_extra_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in _versions.EXTRAS.keys() - {"avro", "kafka"}:
        check_extra(extra)  # all of these are, where the tests run
    check_extra.cache_clear()
    monkeypatch.setattr(_versions.util, "find_spec", lambda name: None if name in ("scipy", "highspy") else name)
    with pytest.raises(VersionError, match=r"without highspy, scipy, .* pip install 'shardrec\[planner\]'"):
        check_extra("planner")
    check_extra("plots")
    check_extra.cache_clear()


def test_extras_are_those_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[1] / "setup.cfg", encoding="utf-8")
    extras = config["options.extras_require"]
    for extra, modules in _versions.EXTRAS.items():
        named = extras[extra].replace("shardrec[planner, plots]", extras["planner"] + extras["plots"]).split("\n")
        assert {line.split()[0].replace("-", "_") for line in named if line} == set(modules)


def message() -> str:
    with pytest.raises(VersionError) as caught:
        check_versions()
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


@pytest.mark.parametrize("each", MATCHING_SETS, ids=lambda each: each.torch)
@pytest.mark.parametrize("build", ["fbgemm_gpu", "fbgemm_gpu_cpu"])
def test_matching_sets_pass(install: Install, each: _versions.MatchingSet, build: str) -> None:
    install(torch=f"{each.torch}.1+cpu", torchrec=each.torchrec, **{build: f"{each.fbgemm}.0"})
    check_versions()


@pytest.mark.parametrize(
    ("torch", "fbgemm", "torchrec"),
    [
        ("2.13.0", "1.7.0", "1.8.0"),
        ("2.13.0", "1.8.0", "1.7.0"),
        ("2.11.0", "1.8.0", "1.6.1"),
        ("2.12.0", "1.7.0", "1.7.0"),
        ("2.1.0", "1.8.0", "1.8.0"),
        ("2.130.0", "1.8.0", "1.8.0"),
        ("2.14.0a0+git1234567", "1.9.0", "1.9.0"),
    ],
)
def test_mismatch_names_all_three(install: Install, torch: str, fbgemm: str, torchrec: str) -> None:
    install(torch=torch, fbgemm_gpu_cpu=fbgemm, torchrec=torchrec)
    text = message()
    assert f"torch {torch}, fbgemm-gpu-cpu {fbgemm} and torchrec {torchrec}" in text


def test_remedy_keeps_the_installed_torch(install: Install) -> None:
    install(torch="2.11.1", fbgemm_gpu="1.8.0", torchrec="1.8.0")
    text = message()
    assert "torch==2.11.0 and fbgemm-gpu==1.6.0, and torchrec==1.6.1" in text
    assert "torch 2.11 goes with fbgemm-gpu 1.6 and torchrec 1.6.1 (torch 2.13 with 1.8 and 1.8.0)" in text


@pytest.mark.parametrize("missing", ["torch", "fbgemm_gpu_cpu", "torchrec"])
def test_missing_package(install: Install, missing: str) -> None:
    versions = {"torch": "2.13.0", "fbgemm_gpu_cpu": "1.8.0", "torchrec": "1.8.0"}
    del versions[missing]
    install(**versions)
    assert f"no {missing.removesuffix('_cpu').replace('_', '-')}" in message()


def test_plain_folder_without_metadata_is_accepted(install: Install) -> None:
    install(torch="2.13.0", torchrec="1.8.0", modules=("fbgemm_gpu",))
    check_versions()


def test_plain_folder_that_does_not_import(install: Install) -> None:
    install(torch="2.13.0", torchrec="1.8.0", modules=("fbgemm_gpu",), fails=ImportError("no module named yaml"))
    assert "fbgemm-gpu of unknown version" in message()


def test_linker_error_becomes_one_sentence(install: Install) -> None:
    linker = OSError("libfoo.so: undefined symbol: _ZN2at4_ops\nand a second line that helps nobody.")
    install(torch="2.13.0", torchrec="1.8.0", fbgemm_gpu_cpu="1.8.0", fails=linker)
    text = message()
    assert "does not load (libfoo.so: undefined symbol: _ZN2at4_ops)" in text
    assert "second line" not in text


def test_both_builds_over_each_other(install: Install) -> None:
    install(torch="2.13.0", torchrec="1.8.0", fbgemm_gpu_cpu="1.8.0", fbgemm_gpu="1.8.0", fails=OSError("libcuda.so.1"))
    text = message()
    assert "uninstall both builds" in text
    assert "libcuda.so.1" in text


def test_the_warning_of_fbgemm_about_itself_is_left_out(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(torch="2.11.0", torchrec="1.6.1", fbgemm_gpu_cpu="1.6.0")
    load = _versions.importlib.import_module

    def warns(name: str) -> object:
        if name == "fbgemm_gpu":
            logging.warning("_fbgemm_torch_compat_table has no entry for 1.6.0 of FBGEMM")
        logging.warning("another warning")
        return load(name)

    monkeypatch.setattr(_versions.importlib, "import_module", warns)
    handlers = list(logging.root.handlers)
    check_versions()
    assert {record.getMessage() for record in caplog.records} == {"another warning"}
    assert logging.root.handlers == handlers
    assert not logging.root.filters


def test_failure_is_not_remembered_and_success_is(install: Install) -> None:
    install(torch="2.13.0", torchrec="1.7.0", fbgemm_gpu="1.8.0")
    message()
    install(torch="2.13.0", torchrec="1.8.0", fbgemm_gpu="1.8.0")
    check_versions()
    install()
    check_versions()


def test_installed_set_matches() -> None:
    """The real packages of this environment: nothing here is pretended."""
    check_versions.cache_clear()
    check_versions()
