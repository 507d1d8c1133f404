"""What commit 161d61a3, before the trainer had a folder of its own, has written: it loads and goes on, to the bit.

The former code is taken from git, and runs without C++ operators, as does the present one beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardrec.serve import quantize
from shardrec.trainer.run import RunFolder
from tests.campaign.results import differences
from tests.serve.published import assert_same, held
from tests.trainer.run.broken_off import FEW_TABLES

FORMER = "161d61a3"
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow

RUN = """
import sys
from {tests}.broken_off import SMALL, broken_off

cut, resume = sys.argv[1:]
config = SMALL.changed(out="run", checkpoint_every="6", publish="published", publish_every="6")
print(broken_off(config, cut_after=int(cut) or None, resume=bool(resume)))
"""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the former commit."""
    folder = tmp_path_factory.mktemp("former")
    archive = subprocess.run(["git", "archive", FORMER], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"this checkout has no commit {FORMER} ({archive.stderr.decode().strip()})")
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    return folder


def train(tree: Path, folder: Path, *, cut: int = 0, resume: bool = False) -> str:
    """Run the code of a tree in a folder, up to a step; returns the steps that it has made."""
    tests = "tests.train" if (tree / "shardrec" / "train").is_dir() else "tests.trainer.run"
    environment = {**os.environ, "PYTHONPATH": str(tree), "SHARDREC_NATIVE": "0"}
    command = [sys.executable, "-W", "ignore", "-c", RUN.format(tests=tests), str(cut), "1" * resume]
    folder.mkdir(exist_ok=True)
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def test_a_run_goes_on_to_the_bit(former: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its checkpoint, its plan and its published versions; and the present code's own run is the same."""
    whole = tmp_path / "whole"
    assert train(former, whole) == str(list(range(1, 25)))
    monkeypatch.setattr("shardrec.trainer.data.schema.CRITEO_CARDINALITIES", FEW_TABLES)
    served = RunFolder(whole / "run").following(str(whole / "published"))
    assert_same(served, [held(quantize(RunFolder(whole / "run").model(), "fp32"))])
    assert train(former, tmp_path / "cut", cut=15) == str(list(range(1, 16)))
    assert train(ROOT, tmp_path / "cut", resume=True) == str(list(range(13, 25)))
    assert differences(tmp_path / "cut" / "run", whole / "run") == []
    assert train(ROOT, tmp_path / "now") == str(list(range(1, 25)))
    assert differences(tmp_path / "now" / "run", whole / "run") == []
