"""The fixtures and settings that every test has."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.conftest import find_data


def test_data_dir_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDREC_DATA", str(tmp_path))
    assert find_data() == tmp_path
    monkeypatch.setenv("SHARDREC_DATA", str(tmp_path / "missing"))
    with pytest.raises(pytest.skip.Exception, match="missing: set SHARDREC_DATA"):
        find_data()


def test_data_dir_is_a_folder(data_dir: Path) -> None:
    assert data_dir.is_dir()


def test_hypothesis_has_no_deadline_and_no_database() -> None:
    settings = hypothesis.settings()
    assert settings.deadline is None
    assert settings.database is None
    assert settings.derandomize == bool(os.environ.get("CI"))


@pytest.mark.parametrize("_time", [1, 2])
def test_every_test_starts_with_the_seed(seed: int, _time: int) -> None:
    drawn = torch.rand(()).item(), random.random()
    torch.manual_seed(seed)
    random.seed(seed)
    assert drawn == (torch.rand(()).item(), random.random())


@pytest.mark.parametrize(
    ("module", "heard"), [("torch.jit._script", 0), ("torchrec", 0), ("shardrec.lookup", 1), ("torchy", 1)]
)
def test_only_warnings_of_third_parties_are_silenced(module: str, heard: int) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit("old", FutureWarning, "file.py", 1, module=module, registry={})
    assert len(seen) == heard
