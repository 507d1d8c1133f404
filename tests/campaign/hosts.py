"""Kills ranks and hosts of `shardrec train` under torchrun at random, and looks at what was learned in the end.

::

    python -m tests.campaign.hosts --form nnodes --blows 10 --seed 0
    python -m tests.campaign.hosts --form replicas --blows 10 --seed 0

A host is a torchrun with a rank, in a session of its own; there are two. With ``nnodes`` they are one job
(``--nnodes 1:2``), which goes on from the last checkpoint on the hosts that are there; with ``replicas`` each is a
replica (``--elastic``), and training does not stop. A blow is SIGKILL of a rank, which its torchrun starts again, or of
a host, which comes back after a while, also of the one that writes. The agents and the replicas meet at stores of this
process, so that each host may be lost. A torchrun of ``nnodes`` may fail by itself, a minute after a rendezvous that
was disturbed, and closes the rendezvous of its id for all: the job is then started again under another id.

At the end each host has ended well, the loss on held-out rows is that of an undisturbed run within ``--noise``, and
rows were trained on as they should be: each forward had rows of one step, and none was left out, but with ``replicas``
those of replicas that died in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec.launch.ranks import RankInfo
from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.dlrm import DLRM
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.source import Source

__all__ = ["Counted", "main"]

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 900.0
_ROWS = 64
_CONFIG: dict[str, Any] = {
    "samples": 600 * _ROWS,
    "global_batch_size": _ROWS,
    "max_embeddings": 60,
    "embedding_dim": 4,
    "dense_layers": (8,),
    "over_layers": (8,),
    "holdout_samples": 4096,
    "evaluations": 2,
    "threads": 1,
    "checkpoint_every": "5",
}
_FOLDER = "SHARDREC_CAMPAIGN_FOLDER"
_SAVED = re.compile(r"^saved the checkpoint of step ([\d,]+)", re.MULTILINE)


def keys_of(dense: Tensor) -> list[float]:
    """Numbers that tell rows (B, D) apart, most of them."""
    return [round(key, 6) for key in dense.double().pow(2).sum(1).tolist()]


class Counted(DLRM):
    """DLRM that writes down which rows it is trained on, and takes its time while hosts are killed."""

    def __init__(self, schema: ClickSchema) -> None:
        super().__init__(schema, dim=4, dense_layers=(8,), hidden=(8,))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """As DLRM."""
        folder = os.environ.get(_FOLDER)
        if folder is not None and self.training:
            with Path(folder, f"rows-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), "rows": keys_of(dense)}) + "\n")
            time.sleep(0.5 if Path(folder, "slow").exists() else 0.0)
        logits: Tensor = super().forward(dense, sparse)
        return logits


class Host:
    """A torchrun and its rank.

    Args:
        folder: for the log of each start.
        options: of torchrun.
        flags: of ``shardrec train``.
    """

    def __init__(self, folder: Path, options: list[str], flags: list[str]) -> None:
        self.folder, self.options, self._flags = folder, options, flags
        self.is_lost = False
        self.start()

    def start(self) -> None:
        """Again, if it was killed."""
        self.is_lost = False
        with (self.folder / f"host-{time.time_ns()}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1000", *self.options),
                    *("-m", "shardrec.trainer.cli", "train", "--resume", *self._flags),
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": "lo",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/failures.md
                    "TMPDIR": str(self.folder),
                    _FOLDER: str(self.folder),
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """The process ids of its ranks."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text(encoding="utf-8").split()]

    def kill(self) -> None:
        """With its ranks, as a host that fails."""
        self.is_lost = True
        for pid in [*self.ranks(), self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Campaign:
    """A run on two hosts.

    Args:
        folder: for results, rows and logs.
        form: "nnodes" or "replicas".
        seed: of the blows.
    """

    def __init__(self, folder: Path, form: str, seed: int) -> None:
        (folder / "slow").touch()
        self._form = form
        self._rng, self.blows, self.folder = random.Random(seed), Counter[str](), folder
        self._stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
        agents, replicas = (f"127.0.0.1:{store.port}" for store in self._stores)
        flags = [*_flags(_CONFIG), "--model", "tests.campaign.hosts:Counted", "--out", str(folder / "out")]
        if form == "nnodes":
            options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", agents, "--rdzv-id", "run"]
            options += ["--rdzv-conf", "is_host=false,last_call_timeout=3", "--local-addr", "127.0.0.1"]
        else:
            options = ["--standalone"]
            flags += ["--replicas", "2", "--elastic", replicas]
        self.hosts = [Host(folder, [*options, "--nproc-per-node", "1"], flags) for _ in range(2)]

    def run(self, blows: int) -> dict[str, Any]:
        """To the end; returns the figures."""
        pauses = []
        for _ in range(blows):
            self._wait_for_checkpoints(2)
            self._wait(lambda: all(self._trains(host) for host in self.hosts), "both hosts to train")
            time.sleep(self._rng.uniform(0, 3))
            pauses.append(self._strike())
        (self.folder / "slow").unlink()
        self._wait(lambda: all(host.process.poll() == 0 for host in self.hosts), "the end")
        assert [host.process.poll() for host in self.hosts] == [0, 0], self._logs()
        return {"blows": dict(self.blows), "pauses": [round(pause, 1) for pause in pauses]}

    def _strike(self) -> float:
        """Returns the seconds until a step is made again."""
        blow, host = self._rng.choice(("rank", "host")), self._rng.choice(self.hosts)
        begin = time.time()
        if blow == "rank" and host.ranks():
            os.kill(self._rng.choice(host.ranks()), signal.SIGKILL)
        else:
            blow = "host"
            host.kill()
        self.blows[blow] += 1
        # A rank that goes on begins at most one more forward before it needs the dead one.
        self._wait(lambda: bool(self._second_forwards(begin)), "a step")
        pause = min(self._second_forwards(begin)) - begin
        print(f"{self.blows['rank'] + self.blows['host']:>3}  {blow}: a step after {pause:.1f} s", flush=True)
        if host.is_lost:  # else the job was started again
            time.sleep(self._rng.uniform(0, 10))
            host.start()
        return pause

    def _second_forwards(self, begin: float) -> list[float]:
        """When each process began its second forward after ``begin``, if it has."""
        paths = [path for path in self.folder.glob("rows-*") if path.stat().st_mtime > begin]
        times = [[at for at, _ in _forwards(path, last=9) if at > begin] for path in paths]
        return [after[1] for after in times if len(after) > 1]

    def _trains(self, host: Host) -> bool:
        pids = host.ranks()
        return bool(pids) and all(Path(self.folder, f"rows-{pid}.jsonl").exists() for pid in pids)

    def _wait_for_checkpoints(self, count: int) -> None:
        """That are new."""
        seen = self._saved()
        self._wait(lambda: self._saved() >= seen + count, "checkpoints")

    def _saved(self) -> int:
        """Checkpoints so far."""
        return sum(len(_SAVED.findall(path.read_text("utf-8", "replace"))) for path in self.folder.glob("host-*.log"))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up, f"waited for {what}:\n{self._logs()}"
            if any(not host.is_lost and host.process.poll() not in (None, 0) for host in self.hosts):
                assert self._form == "nnodes", f"a torchrun has failed:\n{self._logs()}"
                self.blows["job that failed by itself"] += 1
                self.end()
                new_id = f"run{time.time_ns()}"
                for host in self.hosts:
                    host.options += ["--rdzv-id", new_id]
                    host.start()
            time.sleep(0.05)

    def _logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text('utf-8', 'replace')[-1500:]}" for path in self.folder.glob("host-*.log")
        )

    def end(self) -> None:
        """End what still runs."""
        for host in self.hosts:
            if host.process.poll() is None:
                host.kill()


def _flags(config: dict[str, Any]) -> Iterator[str]:
    own = ("embedding_dim", "dense_layers", "over_layers")  # which the model has of itself
    for name, value in config.items():
        if name not in own:
            yield from (f"--{name.replace('_', '-')}", str(value))


def _forwards(path: Path, *, last: int = 0) -> Iterator[tuple[float, list[float]]]:
    """Of a process, the time and the rows of each forward; or of the last ones."""
    for line in path.read_text(encoding="utf-8").splitlines()[-last:]:
        if line.endswith("}"):
            forward = json.loads(line)
            yield forward["time"], forward["rows"]


def _faults(folder: Path, lost_most: int) -> tuple[list[str], int]:
    """What rows were not trained on as they should be, and how many were never."""
    alone = RankInfo(rank=0, world_size=1, device=torch.device("cpu"), threads=1)
    whole = [keys_of(batch.dense) for batch in Source(TrainConfig(**_CONFIG), alone).train_batches()]
    steps: dict[float, set[int]] = {}
    for step, keys in enumerate(whole):
        for key in keys:
            steps.setdefault(key, set()).add(step)
    faults, seen = [], Counter[float]()
    for path in folder.glob("rows-*"):
        for _, rows in _forwards(path):
            seen.update(rows)
            if rows and not set.intersection(*(steps.get(key, set()) for key in rows)):
                faults.append(f"{path.name}: {len(rows)} rows that are not of one step")
    lost = sum(key not in seen for keys in whole for key in keys)
    if lost > lost_most:
        faults.append(f"{lost} rows were not trained on")
    return faults, lost


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The campaign; returns its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=("nnodes", "replicas"), default="nnodes")
    parser.add_argument("--blows", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.005)
    options = parser.parse_args(arguments)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and so its hosts
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = subprocess.run(
            [
                *(sys.executable, "-m", "shardrec.trainer.cli", "train", *_flags(_CONFIG)),
                *("--model", "tests.campaign.hosts:Counted", "--out", f"{folder}/alone"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert undisturbed.returncode == 0, undisturbed.stderr
        Path(folder, "hosts").mkdir()
        campaign = Campaign(Path(folder, "hosts"), options.form, options.seed)
        try:
            figures = campaign.run(options.blows)
        finally:
            campaign.end()
            signal.signal(signal.SIGTERM, before)
        faults, lost = _faults(campaign.folder, options.blows * _ROWS if options.form == "replicas" else 0)
        losses = [
            json.loads(Path(folder, out, "metrics.json").read_text(encoding="utf-8"))["final"]["logloss"]
            for out in ("alone", "hosts/out")
        ]
    print({**figures, "lost rows": lost, "undisturbed": losses[0], "under blows": losses[1]}, flush=True)
    assert not faults, "\n".join(faults[:10])
    assert abs(losses[1] - losses[0]) < options.noise, losses
    return figures


if __name__ == "__main__":
    main()
