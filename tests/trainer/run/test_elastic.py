"""Under torchrun: ranks that it starts again, also fewer of them, find each other and go on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign.results import differences

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
FLAGS = (
    *("--samples", "6400", "--max-embeddings", "60", "--embedding-dim", "4", "--dense-layers", "8"),
    *("--over-layers", "8", "--holdout-samples", "512", "--evaluations", "2", "--threads", "1"),
    *("--global-batch-size", "64", "--checkpoint-every", "10", "--timeout", "20"),
)
PATIENCE_S = 300.0


class Agent:
    """One torchrun, in a session of its own."""

    def __init__(self, out: Path, log: Path, *options: str) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", *options),
                    *("-m", "shardrec.trainer.cli", "train", "--out", str(out), "--resume", *FLAGS),
                ],
                cwd=ROOT,
                # torchrun leaves a folder for its log where temporary files go.
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": "lo",
                    "TMPDIR": str(log.parent),
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/failures.md
                },
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def saved(self, after: int = 0) -> int:
        """Wait until a step after ``after`` is saved, and return it."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            text = self.log.read_text(encoding="utf-8", errors="replace")
            steps = [int(step) for step in re.findall(r"^saved the checkpoint of step (\d+)", text, re.MULTILINE)]
            if steps and steps[-1] > after:
                return steps[-1]
            assert self.process.poll() is None, text
            assert time.monotonic() < give_up, text
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="utf-8")
        return [int(pid) for pid in children.split()]

    def kill(self) -> None:
        """With its ranks, as a host that fails."""
        for pid in [*self.ranks(), self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    started: list[Agent] = []
    yield started
    for agent in started:
        if agent.process.poll() is None:
            os.killpg(agent.process.pid, signal.SIGKILL)
            agent.process.wait()


def test_a_rank_that_dies_comes_back(agents: list[Agent], tmp_path: Path) -> None:
    whole = Agent(tmp_path / "whole", tmp_path / "whole.log", "--standalone", "--nproc-per-node", "2")
    agents.append(whole)
    assert whole.process.wait(PATIENCE_S) == 0
    agent = Agent(
        tmp_path / "broken", tmp_path / "broken.log", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"
    )
    agents.append(agent)
    agent.saved()
    os.kill(agent.ranks()[1], signal.SIGKILL)
    assert agent.process.wait(PATIENCE_S) == 0, agent.log.read_text(encoding="utf-8")
    assert "continuing from the checkpoint of step" in agent.log.read_text(encoding="utf-8")
    assert differences(tmp_path / "broken", tmp_path / "whole") == []


def test_a_run_goes_on_with_the_hosts_that_are_left(agents: list[Agent], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run"),
        *("--local-addr", "127.0.0.1", "--rdzv-conf"),
    ]
    # The agents meet at the first one, which stays, also where the second one is up before it.
    first = Agent(tmp_path / "out", tmp_path / "first.log", *options, "last_call_timeout=3,is_host=true")
    agents.append(first)
    second = Agent(tmp_path / "out", tmp_path / "second.log", *options, "last_call_timeout=3,is_host=false")
    agents.append(second)
    give_up = time.monotonic() + PATIENCE_S
    while not (tmp_path / "out" / "checkpoints").exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    said = "training dlrm on 2 ranks"
    lead = next(one for one in agents if said in one.log.read_text(encoding="utf-8"))
    step = lead.saved()
    second.kill()
    assert first.process.wait(PATIENCE_S) == 0, first.log.read_text(encoding="utf-8")
    text = first.log.read_text(encoding="utf-8")
    (resumed,) = re.findall(r"^continuing from the checkpoint of step (\d+)", text, re.MULTILINE)
    assert int(resumed) >= step
    assert "training dlrm on 1 rank with 1 thread, 64 rows a step" in text
