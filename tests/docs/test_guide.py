"""The Python examples of docs/guide.md run from top to bottom and print what the page says; so does its last script."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import ranks

PAGE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SCRIPT = Path(__file__).parents[2] / "examples" / "own_model" / "train.py"


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) >= 6
    exec(compile("\n".join(BLOCKS), "docs/guide.md", "exec"), {"__name__": "guide"})
    printed = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out.strip() == printed[0].strip()


def printed_lines(folder: Path, port: int) -> list[str]:
    """What this rank prints, started as torchrun starts it, with a store at the port."""
    dist.destroy_process_group()  # the script makes its own
    os.environ["MASTER_PORT"] = str(port)
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return out.getvalue().splitlines()


def launched(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "how",
    [
        "ranks",
        # Six processes that import torch: what torchrun does beside setting variables is torch's.
        pytest.param("torchrun", marks=pytest.mark.slow),
    ],
)
def test_the_script_runs_on_two_ranks_and_continues_from_its_checkpoint(how: str, tmp_path: Path) -> None:
    assert "    torchrun --nproc-per-node 2 examples/own_model/train.py\n" in PAGE
    losses = []
    for begin, size in ((0, 2), (100, 1)):
        if how == "ranks":
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            lines, *silent = ranks(size, printed_lines, tmp_path, store.port)
            assert not any(silent)
        else:
            lines = launched(tmp_path)
        first, *steps = lines
        assert first == f"begins at step {begin}"
        assert f"`{first}`" in PAGE
        assert [int(re.findall(r"step (\d+): loss", line)[0]) for line in steps] == [begin + 50, begin + 100]
        losses += [float(line.split()[-1]) for line in steps]
    assert losses[-1] < losses[0] < 0.69
