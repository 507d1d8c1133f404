"""Two hosts on one Linux machine, and one is lost: ``python -m examples.cluster.main [FOLDER]``, as root.

A host is a network namespace, with an address and a link to a switch, and a process namespace, which ends with its
first process. Each runs ``torchrun.sh`` with two ranks. They read rows from a URL, publish to one, and share a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import yaml

from shardrec.trainer.data import write_parquet

__all__ = ["RANKS_PER_HOST", "Host", "Switch", "main", "why_not"]

RANKS_PER_HOST = 2

_ROWS, _FILES = 12_000, 4
_RUN = {
    "samples": 40_000,
    "holdout_samples": 4_000,
    "global_batch_size": 256,
    "max_embeddings": 1_000,
    "embedding_dim": 8,
    "dense_layers": [16],
    "over_layers": [32],
    "evaluations": 2,
    "threads": 1,
    "timeout": 20,
    "constraint": {"t_*": "row_wise"},
    "checkpoint_every": 20,
    "publish_every": 40,
}
_PATIENCE_S = 600.0
# They end with this process, however it ends, and the namespaces and links with them.
_NETWORK = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net")
_PROCESSES = ("--pid", "--mount-proc", "--fork", "--kill-child")
_SLOW = (
    "{ tc qdisc add dev eth0 root netem delay 1ms rate 200mbit 2>/dev/null"
    " || tc qdisc add dev eth0 root tbf rate 200mbit burst 64kb latency 50ms; }"  # rate alone, of kernels without netem
)


def why_not(*, slow: bool = False) -> str | None:
    """Why hosts, or slow links between them, cannot be made here. None if they can."""
    script = "ip link add type bridge && ip link add eth0 type veth" + (f" && {_SLOW}" if slow else "")
    try:
        tried = subprocess.run([*_NETWORK, *_PROCESSES, "sh", "-c", script], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return f"namespaces or links cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


class Switch:
    """A network namespace with a bridge, in which each link of a host ends."""

    def __init__(self) -> None:
        script = "ip link add switch type bridge && ip link set switch up && echo up && exec sleep infinity"
        self._process = subprocess.Popen([*_NETWORK, "sh", "-c", script], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def connect(self, number: int, process: int) -> None:
        """Give the network namespace of a process a link, ``eth0`` there."""
        ends = ("eth0", "netns", str(process), "type", "veth", "peer", f"port{number}", "netns", str(self._process.pid))
        subprocess.run(["ip", "link", "add", *ends], check=True)
        self._set(number, "master", "switch", "up")

    def disconnect(self, number: int) -> None:
        """Let nothing of a host arrive any more, nor that its connections are closed."""
        self._set(number, "down")

    def stop(self) -> None:
        """Remove it, with all links."""
        self._process.kill()
        self._process.communicate()

    def _set(self, number: int, *change: str) -> None:
        inside = ("nsenter", "--target", str(self._process.pid), "--net")
        subprocess.run([*inside, "ip", "link", "set", f"port{number}", *change], check=True)


class Host:
    """A host that runs ``torchrun.sh`` as its first process.

    Args:
        number: from 0, the host where the agents meet.
        switch: the switch that the host is connected to.
        config: YAML file of the run.
        log: file for the output of its processes.
        slow: whether its link is slow.
    """

    def __init__(self, number: int, switch: Switch, config: Path, log: IO[str], *, slow: bool) -> None:
        self._number, self._switch = number, switch
        address = f"10.77.0.{number + 1}"
        script = f"read connected; ip link set lo up; ip address add {address}/24 dev eth0; ip link set eth0 up"
        script += (f"; {_SLOW}" if slow else "") + '; exec bash "$@"'
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HEAD": "10.77.0.1",
            "NODES": "2",
            "RANKS_PER_HOST": str(RANKS_PER_HOST),
            # What hosts with names in DNS need not be told.
            "PET_LOCAL_ADDR": address,
            "PET_RDZV_CONF": f"is_host={number == 0},last_call_timeout=10",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        self._process = subprocess.Popen(
            [
                *_NETWORK,
                *_PROCESSES,
                "sh",
                "-c",
                script,
                "sh",
                str(Path(__file__).with_name("torchrun.sh")),
                str(config),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | environment,
        )
        switch.connect(number, self._first_process())
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.close()

    @property
    def ended(self) -> bool:
        """Whether its agent has ended."""
        return self._process.poll() is not None

    def wait(self) -> int:
        """The exit code of its agent."""
        return self._process.wait(_PATIENCE_S)

    def lose(self) -> None:
        """Cut its link, and end all its processes."""
        self._switch.disconnect(self._number)
        self.stop()

    def stop(self) -> None:
        """End all its processes."""
        self._process.kill()
        self._process.wait()

    def _first_process(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while not children.read_text(encoding="utf-8"):
            time.sleep(0.01)
        return int(children.read_text(encoding="utf-8"))


def main(folder: Path, *, loses_host: bool = True, slow: bool = False) -> dict[str, float]:
    """Train on two hosts and, if one is lost after the first checkpoint, continue with the other. Return the final
    metrics.

    Args:
        folder: for rows, logs and results.
        loses_host: whether the second host is lost.
        slow: whether the links have 200 Mbit/s and, where the kernel can, a millisecond more.

    Raises:
        SystemExit: if hosts cannot be made here, or the run fails.
    """
    reason = why_not(slow=slow)
    if reason:
        raise SystemExit(reason)
    folder = folder.absolute()
    (folder / "rows").mkdir(parents=True)
    for part in range(_FILES):
        write_parquet(folder / f"rows/part_{part}.parquet", _ROWS, seed=part)
    urls = {"data": f"file://{folder}/rows/part_*.parquet", "publish": f"file://{folder}/model"}
    config, run = folder / "run.yaml", folder / "run"
    config.write_text(yaml.safe_dump({**_RUN, **urls, "out": str(run)}), encoding="utf-8")
    with ExitStack() as stack:
        switch = Switch()
        stack.callback(switch.stop)
        hosts = []
        for number in range(2):
            log = stack.enter_context((folder / f"host{number}.log").open("w", encoding="utf-8"))
            hosts.append(Host(number, switch, config, log, slow=slow))
            stack.callback(hosts[-1].stop)
        if loses_host:
            give_up = time.monotonic() + _PATIENCE_S
            while not (run / "checkpoints").is_dir() or not list((run / "checkpoints").glob("step-*/manifest.json")):
                if time.monotonic() > give_up or any(host.ended for host in hosts):
                    raise SystemExit(f"no checkpoint was saved: see {folder}/host0.log")
                time.sleep(0.05)
            hosts.pop().lose()
        codes = [host.wait() for host in hosts]
    if any(codes):
        raise SystemExit(f"the agents ended with {codes}: see {folder}/host0.log")
    final: dict[str, float] = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["final"]
    return final


if __name__ == "__main__":
    results = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/cluster")
    print(f"one of two hosts was lost: AUC {main(results)['auc']:.4f}; {results}/host0.log has the other host's output")
