"""Kills a run on a feed that publishes, and a server that follows it, at random moments, and says what was lost.

::

    python -m tests.campaign.feed --kills 100 --seed 0 [--topic]

A producer delivers files, or records of a topic. Ranks, one or two from attempt to attempt, train on them, save and
publish; a server follows. A rank, all of them, the server or the process that writes a topic to files are killed
(SIGKILL), from their start to their end, and started again. When a run has come to its end, each row must have been
trained on once, in the steps that count (those that a later attempt does not make again); what the servers had of a
version must be equal, whichever versions they came from; and the last version must be, bit for bit, what ``quantize``
gives of the last checkpoint.

Processes are forked from one that has imported torch (:class:`RankTemplate`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.harness.template import RankTemplate
from tests.trainer.run.topics import Brokers

__all__ = ["Campaign"]

_FILES, _ROWS, _PERIOD_S = 40, 96, 0.1
_REACTION_S, _ALONE_S = 120.0, 15.0
_BLOWS = {"a rank": 4, "all ranks": 3, "the server": 7}
_BLOWS_OF_A_TOPIC = _BLOWS | {"the ingester": 8}
_MODULES = [
    *("torch", "torchrec", "fbgemm_gpu", "shardrec", "matplotlib.figure"),
    *("shardrec.planner", "shardrec.trainer.run.session", "shardrec.serve.publisher", "shardrec.serve.follower"),
]


class Campaign:
    """Runs in ``folder``, each struck until it has come to its end.

    Args:
        folder: for everything.
        seed: of what is done when.
        topic: whether rows are records of a topic, in place of files.
    """

    def __init__(self, folder: Path, seed: int, *, topic: bool = False) -> None:
        self._folder, self._random, self._topic = folder, random.Random(seed), topic
        self._template = RankTemplate(_MODULES)
        self._server: BaseProcess | None = None
        self.blows: Counter[str] = Counter()
        self.lost: list[str] = []
        self.steps = self.versions = self.runs = 0

    def run(self, kills: int) -> None:
        """Strike ``kills`` times, and look at each run that comes to its end."""
        with self._template:
            brokers = Brokers() if self._topic else None
            while self.blows.total() < kills:
                folder = self._folder / str(self.runs)
                (folder / "in").mkdir(parents=True)
                (folder / "features.yaml").write_text(
                    "label: click\nfeatures:\n  - {name: number, kind: dense, std: 10000}\n"
                    "  - {name: site, kind: id, rows: 50}\n"
                    "  - {name: user, kind: id, rows: 60, dynamic_ids: {evict: lru}}\n",
                    encoding="utf-8",
                )
                data = f"feed:{folder / 'in'}"
                if brokers is not None:
                    data = f"feed:{brokers.deliver(f'run-{self.runs}', [])}"
                producer = threading.Thread(target=_produce, args=(folder / "in", brokers, f"run-{self.runs}"))
                producer.start()
                self._to_its_end(folder, data, producer, kills)
                self._look_at(folder)
                self.runs += 1

    def _to_its_end(self, folder: Path, data: str, producer: threading.Thread, kills: int) -> None:
        attempt, size = 0, 2
        while True:
            size, port = size if self._random.random() < 0.75 else 3 - size, _free_port()
            ranks = [self._template.start(_train, folder, data, rank, size, port, attempt) for rank in range(size)]
            if self._server is None or not self._server.is_alive():
                self._server = self._template.start(_serve, folder)
            if self._struck(folder, ranks, attempt, kills):
                for rank in ranks:  # one that waits for the others to start is ended by the launcher of a real run
                    rank.join(_ALONE_S)
                    if rank.is_alive() and not (folder / f"rows-{attempt}-0").exists():
                        rank.kill()
                self._ended(ranks, folder)
            elif self._ended(ranks, folder) == [0] * size and not producer.is_alive():
                break
            attempt += 1
        self._server.kill()
        self._server.join()

    def _struck(self, folder: Path, ranks: list[BaseProcess], attempt: int, kills: int) -> bool:
        """Strike at a random moment; False if the ranks have ended before, or are to be left alone."""
        if self.blows.total() >= kills:
            return False
        stepped, give_up = self._random.random() < 0.8, time.monotonic() + _REACTION_S
        while stepped and not (folder / f"rows-{attempt}-0").exists() and time.monotonic() < give_up:
            if not all(rank.is_alive() for rank in ranks):
                return False
            time.sleep(0.005)
        time.sleep(self._random.random() * 1.5)
        blows = _BLOWS_OF_A_TOPIC if self._topic else _BLOWS
        blow = self._random.choices(list(blows), list(blows.values()))[0]
        if not all(rank.is_alive() for rank in ranks):
            return False
        if blow == "the ingester":
            for ingester in _ingesters(ranks[0]):
                os.kill(ingester, signal.SIGKILL)
                self.blows[blow] += 1
            return self._struck(folder, ranks, attempt, kills)
        self.blows[blow] += 1
        if blow == "the server":
            assert self._server is not None, "it was started with the ranks"
            self._server.kill()
            self._server.join()
            self._server = self._template.start(_serve, folder)
            return self._struck(folder, ranks, attempt, kills)
        for rank in self._random.sample(ranks, 1 if blow == "a rank" else len(ranks)):
            rank.kill()
        return True

    def _ended(self, ranks: list[BaseProcess], folder: Path) -> list[int | None]:
        for rank in ranks:
            rank.join(_REACTION_S)
            if rank.is_alive():
                self.lost.append(f"{folder}: a rank hangs")
                rank.kill()
                rank.join()
        codes = [rank.exitcode for rank in ranks]
        self.lost += [f"{folder}: a rank ended with exit code {code}" for code in codes if code not in (0, 3, -9)]
        return codes

    def _look_at(self, folder: Path) -> None:
        import torch

        from shardrec.serve import quantize
        from shardrec.serve.lookup import served_memory
        from shardrec.trainer.run.runs import RunFolder

        rows = _counted_rows(folder)
        numbers = sorted(number for ranks in rows.values() for step in ranks.values() for number in step)
        if numbers != list(range(_FILES * _ROWS)):
            counts = Counter(numbers)
            missing = _FILES * _ROWS - len(counts)
            self.lost.append(f"{folder}: {missing} rows lost, {sum(n > 1 for n in counts.values())} repeated")
        digests: dict[int, set[str]] = {}
        for line in (folder / "served").read_text(encoding="utf-8").splitlines():
            version, digest = line.split()
            digests.setdefault(int(version), set()).add(digest)
        self.lost += [f"{folder}: version {n} was served in {len(d)} ways" for n, d in digests.items() if len(d) > 1]
        run = RunFolder(folder / "run")
        served, trained = (
            run.following(str(folder / "published")),
            quantize(run.model(), run.config.output.publish_weights),
        )
        served.follower.close()
        for one, other in zip(served.sharded_collections, trained.sharded_collections, strict=True):
            for name, memory in served_memory(one).items():
                if not torch.equal(memory, served_memory(other)[name]):
                    self.lost.append(f"{folder}: table {name} of the last version is not that of the last checkpoint")
        self.steps, self.versions = self.steps + len(rows), self.versions + len(digests)
        print(
            f"run {self.runs}: {len(rows)} steps, {len(digests)} versions seen, {self.blows.total()} strikes",
            flush=True,
        )


def _ingesters(rank: BaseProcess) -> list[int]:
    """The process that rank 0 has started to write the topic to files, if it has."""
    started = []
    for thread in Path(f"/proc/{rank.pid}/task").glob("*/children"):
        with suppress(OSError):
            pids = thread.read_text(encoding="ascii").split()
            started += [int(pid) for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return started


def _produce(folder: Path, brokers: Brokers | None, topic: str) -> None:
    for file in range(_FILES):
        numbers = range(file * _ROWS, (file + 1) * _ROWS)
        if brokers is not None:
            rows = [{"click": int(n % 3 == 0), "number": n, "site": n % 40, "user": n // 30} for n in numbers]
            brokers.deliver(topic, rows)
            time.sleep(_PERIOD_S)
            continue
        lines = [f"{number % 3 == 0:d},{number},{number % 40},{number // 30}" for number in numbers]
        beside = folder / f".{file:03}.csv"
        beside.write_text("\n".join(["click,number,site,user", *lines]) + "\n", encoding="utf-8")
        beside.rename(folder / f"{file:03}.csv")
        time.sleep(_PERIOD_S)


def _counted_rows(folder: Path) -> dict[int, dict[int, list[int]]]:
    """The rows of each step by rank, of the attempt that made it last."""
    rows: dict[int, dict[int, list[int]]] = {}
    attempts = sorted({int(path.name.split("-")[1]) for path in folder.glob("rows-*")})
    for attempt in attempts:
        steps: dict[int, dict[int, list[int]]] = {}
        for path in folder.glob(f"rows-{attempt}-*"):
            for line in path.read_text(encoding="utf-8").splitlines():
                step, numbers = json.loads(line)
                steps.setdefault(step, {})[int(path.name.split("-")[2])] = numbers
        if steps:
            rows = {step: ranks for step, ranks in rows.items() if step < min(steps)} | steps
    return rows


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _train(folder: Path, data: str, rank: int, size: int, port: int, attempt: int) -> None:
    """A rank, which writes down the rows of each step before the step can be saved."""
    if size > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}})
    _says(folder / f"log-{attempt}-{rank}")
    from shardrec.errors import PeerError
    from shardrec.trainer.run import TrainConfig, loop, session
    from shardrec.trainer.run.saving import Saver

    config = TrainConfig(
        data=data,
        features=str(folder / "features.yaml"),
        out=str(folder / "run"),
        publish=str(folder / "published"),
        publish_every="3",
        publish_weights="int8",
        checkpoint_every="5",
        feed_idle=1.0,
        global_batch_size=32,
        batch_size=16,
        holdout_samples=1000,
        streams=3,
        embedding_dim=4,
        dense_layers=(8,),
        over_layers=(8,),
        embedding_optimizer="adam",
        timeout=20.0,
        threads=1,
    )
    rows: list[int] = []
    batch_loss, after_step = loop.batch_loss, Saver.after_step

    def recorded(name: str, model: Any, batch: Any, *rest: Any) -> Any:
        rows[:] = [round(10_000 * number) for number in batch.dense[:, 0].tolist()]
        return batch_loss(name, model, batch, *rest)

    def saved(saver: Saver, *, idle: bool = False) -> None:
        if not idle:
            with (folder / f"rows-{attempt}-{rank}").open("a", encoding="utf-8") as file:
                file.write(json.dumps([saver._progress.steps, rows]) + "\n")
        after_step(saver, idle=idle)

    loop.batch_loss, Saver.after_step = recorded, saved  # type: ignore[method-assign]
    session.write_curve = lambda report, path: path.write_bytes(b"")
    session.Board = lambda shown, run: shown  # type: ignore[assignment,misc]  # a second of imports
    try:
        session.run_rank(config, resume=True)
    except PeerError:
        sys.exit(3)


def _serve(folder: Path) -> None:
    """A server, which writes down what it has of each version."""
    _says(folder / "log-server")
    from shardrec.serve.lookup import served_memory
    from shardrec.trainer.run.runs import RunFolder

    while not (folder / "run" / "plan.json").exists():
        time.sleep(0.02)
    served = RunFolder(folder / "run").following(str(folder / "published"))
    follower: Any = served.follower
    follower.close()
    version = 0
    while True:
        follower.poll()
        if follower.version != version:
            version = follower.version
            digest = hashlib.sha256()
            for collection in served.sharded_collections:
                for memory in served_memory(collection).values():
                    digest.update(memory.numpy().tobytes())
            with (folder / "served").open("a", encoding="utf-8") as file:
                file.write(f"{version} {digest.hexdigest()}\n")
        time.sleep(0.02)


def _says(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign from the command line; 1 if anything was lost."""
    parser = argparse.ArgumentParser(description="Kill a run on a feed and its server at random; say what was lost.")
    parser.add_argument("--kills", type=int, default=100, help="of ranks, servers and ingesters (100)")
    parser.add_argument("--seed", type=int, default=0, help="of what is done when (0)")
    parser.add_argument("--topic", action="store_true", help="records of a topic, in place of files")
    parser.add_argument("--keep", type=Path, help="folder to work in, which stays (a temporary one)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="shardrec-feed-") as folder:
        campaign = Campaign(given.keep or Path(folder), given.seed, topic=given.topic)
        campaign.run(given.kills)
    print("\n".join(campaign.lost))
    print(
        f"{campaign.blows.total()} strikes ({dict(campaign.blows)}) on {campaign.runs} runs, {campaign.steps} steps, "
        f"{campaign.versions} versions seen; lost: {len(campaign.lost)}"
    )
    return 1 if campaign.lost else 0


if __name__ == "__main__":
    sys.exit(main())
