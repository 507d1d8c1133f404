"""Both programs, as the README starts them: they differ in the lines it shows, and their losses do not."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "dlrm_torchrec_migration"


def test_the_readme_shows_the_difference() -> None:
    before, after = (
        (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:] for name in ("before", "after")
    )
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    shown = re.findall(r"^([+-])(.*)$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(f"{sign} {text}" for sign, text in shown) == sorted(changed)


@pytest.mark.slow
def test_losses_are_the_same() -> None:
    def losses(name: str) -> list[float]:
        program = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program += ["-m", f"examples.dlrm_torchrec_migration.{name}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return [float(number) for number in re.findall(r"loss (\S+)", done.stdout)]

    before, after = losses("before"), losses("after")
    assert len(before) == 5
    assert before[-1] < before[0]
    assert after == pytest.approx(before, abs=5e-4)
