"""Both programs: their losses are equal, and the example's README.md shows the lines in which they differ."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from examples.dlrm_torchrec_migration import after, before
from tests.ranks import ranks

ROOT = Path(__file__).parents[2]


def changed_lines() -> list[str]:
    """The lines in which the training functions differ, as ``ndiff`` marks them."""
    old, new = (inspect.getsource(program.train).splitlines() for program in (before, after))
    return [line for line in difflib.ndiff(old, new) if line[0] in "+-"]


def shown_in(page: Path) -> list[str]:
    blocks = re.findall(r"```diff\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [f"{line[0]} {line[1:]}" for block in blocks for line in block.splitlines()]


def test_the_example_s_readme_shows_the_difference() -> None:
    assert sorted(shown_in(ROOT / "examples/dlrm_torchrec_migration/README.md")) == sorted(changed_lines())


def test_the_readme_shows_the_two_imports() -> None:
    assert shown_in(ROOT / "README.md") == shown_in(ROOT / "docs/migration.md")


RUNS = ((12, 12), (18, 6))
"""The last step of a run and of the next one, which goes on from the checkpoint, and how many steps each makes."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[float]]]:
    """Of each run and rank, the losses of the steps and of the INT8 model after them, by TorchRec."""
    folder = tmp_path_factory.mktemp("theirs")
    return [ranks(2, before.train, folder / "checkpoint", steps) for steps, _ in RUNS]


def assert_losses_equal(mine: list[list[float]], theirs: list[list[float]], trained: int) -> None:
    for losses, expected in zip(mine, theirs, strict=True):
        assert len(losses) == trained + 1
        assert losses[:trained] == pytest.approx(expected[:trained], abs=1e-4)
    assert mine[0][trained] == pytest.approx(theirs[0][trained], abs=2e-4)  # TorchRec's INT8 model is on rank 0 only


def test_losses_are_torchrec_s_and_the_next_run_continues(tmp_path: Path, theirs: list[list[list[float]]]) -> None:
    means = []
    for (steps, trained), expected in zip(RUNS, theirs, strict=True):
        ours = ranks(2, after.train, tmp_path / "ours", steps)
        assert_losses_equal(ours, expected, trained)
        means.append(sum(ours[0][:trained]) / trained)
    assert means[1] < means[0]


def test_two_imports_move_the_program(tmp_path: Path, theirs: list[list[list[float]]]) -> None:
    """As docs/migration.md changes them: TorchRec's planner, sharders, optimizers and quantization stay."""
    source = Path(before.__file__).read_text(encoding="utf-8")
    lines = [line[2:] for line in shown_in(ROOT / "docs/migration.md")]
    assert len(lines) == 4
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert f"{old}\n" in source
        source = source.replace(f"{old}\n", f"{new}\n")
    (tmp_path / "program.py").write_text(source, encoding="utf-8")

    def train(folder: Path, steps: int) -> list[float]:
        losses: list[float] = runpy.run_path(str(tmp_path / "program.py"))["train"](folder, steps)
        return losses

    for (steps, trained), expected in zip(RUNS, theirs, strict=True):
        assert_losses_equal(ranks(2, train, tmp_path / "ours", steps), expected, trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["before", "after"])
def test_the_command_of_the_readme(name: str, tmp_path: Path) -> None:
    program = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program += ["-m", f"examples.dlrm_torchrec_migration.{name}", str(tmp_path / name), "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d\.\d{4}", done.stdout)) == 6
