"""A run on two hosts, both of them this machine: ``python -m examples.multi_host.main [FOLDER]``.

Each host has a torchrun agent with two ranks of its own, as two machines would; they meet at a port of the first one.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["HOSTS", "RANKS_PER_HOST", "agent", "main"]

HOSTS = 2
RANKS_PER_HOST = 2
RUN = ["--global-batch-size", "1024", "--threads", "1", "--evaluations", "2", "--constraint", "t_*=row_wise"]


def agent(host: int, endpoint: str, arguments: list[str]) -> list[str]:
    """The command that each host runs; only ``--node-rank`` differs.

    Args:
        host: its number, from 0.
        endpoint: ``address:port`` of the first host, where the agents meet.
        arguments: of ``shardrec train``.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(HOSTS), "--nproc-per-node", str(RANKS_PER_HOST), "--node-rank", str(host)),
        *("--master-addr", endpoint.partition(":")[0], "--master-port", endpoint.partition(":")[2]),
        *("-m", "shardrec.cli", "train", *arguments),
    ]


def main(folder: Path, samples: int = 40_000) -> dict[str, float]:
    """Start both hosts' agents and wait for them; the metrics of the run.

    Args:
        folder: of the results; all hosts have to see it.
        samples: generated rows to train on.

    Raises:
        SystemExit: if an agent fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [*RUN, "--samples", str(samples), "--holdout-samples", "10_000", "--out", str(folder)]
    agents = [subprocess.Popen(agent(host, endpoint, arguments)) for host in range(HOSTS)]
    try:
        codes = [one.wait() for one in agents]
    finally:
        for one in agents:
            one.terminate()
    if any(codes):
        raise SystemExit(f"the agents ended with {codes}")
    found: dict[str, float] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["final"]
    return found


if __name__ == "__main__":
    final = main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/multi_host"))
    print(f"{HOSTS} hosts with {RANKS_PER_HOST} ranks each: AUC {final['auc']:.4f}")
