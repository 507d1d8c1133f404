"""Servers as processes of the command line, and trainers: both ways lose the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_losses_are_those_of_collectives(staleness: int) -> None:
    program = [sys.executable, "-m", "examples.parameter_server.main", "8", str(staleness)]
    done = subprocess.run(
        program, check=True, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2]
    )
    found = re.search(r"largest difference of a step's loss: (\S+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    # With a staleness, an update may be made in time all the same.
    assert staleness or float(found[1]) <= 1e-6
