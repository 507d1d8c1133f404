"""The Python examples of docs/guide.md run from top to bottom and print what the page says; so does its last script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SCRIPT = Path(__file__).parents[2] / "examples" / "own_model" / "train.py"


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) >= 6
    exec(compile("\n".join(BLOCKS), "docs/guide.md", "exec"), {"__name__": "guide"})
    printed = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out.strip() == printed[0].strip()


def test_the_script_runs_on_two_ranks_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    assert "    torchrun --nproc-per-node 2 examples/own_model/train.py\n" in PAGE
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    losses = []
    for begin in (0, 100):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        first, *steps = done.stdout.splitlines()
        assert first == f"begins at step {begin}"
        assert f"`{first}`" in PAGE
        assert [int(re.findall(r"step (\d+): loss", line)[0]) for line in steps] == [begin + 50, begin + 100]
        losses += [float(line.split()[-1]) for line in steps]
    assert losses[-1] < losses[0] < 0.69
