"""Kills elastic replicas at random moments and starts them again, while the others train on.

::

    python -m tests.campaign.elastic --kills 20 --ranks 2 --seeds 5

For each seed, replicas train a click model with a known truth, once undisturbed and once under kills: SIGKILL of a rank
of a replica that trains, or of one that joins, or SIGSTOP of one until the others have gone on. At least one replica is
left each time. Printed are the longest pauses between two steps of the run, the kills, and the loss on held-out rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from benchmarks.harness.template import RankTemplate
from shardrec.replicas.elastic_model import ElasticModel
from tests.models import apply_optimizer_in_backward

ROWS, FEATURES, DIM, BATCH = 200, 4, 8, 64
TEMPLATE = ("torch.distributed", "torch.distributed.optim", "fbgemm_gpu", "torchrec", "tests.campaign.elastic")
_PATIENCE_S = 1.0
_REACTION_S = 120.0
_REST_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of a replica.

    Args:
        port: of the store.
        run: name of the run.
        number: of the start.
        ranks: of the replica.
        replicas: that begin together.
        sync_every: steps between two averagings.
        seed: of the model and the data.
        steps: of the run.
        folder: for the logs of the ranks.
        pause_s: after each step.
    """

    port: int
    run: str
    number: int
    ranks: int
    replicas: int
    sync_every: int
    seed: int
    steps: int
    folder: Path
    pause_s: float

    def log(self, rank: int) -> Path:
        return self.folder / f"{self.run}-{self.number}-{rank}.jsonl"


class Model(nn.Module):
    """Bags of four features, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
            for n in range(FEATURES)
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.over = nn.Sequential(nn.Linear(FEATURES * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(self.bags(features).values()).squeeze(1)
        return logits


def batch_of(generator: torch.Generator, truth: Tensor, size: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """A batch of ``size`` samples, whose clicks follow the truth (FEATURES, ROWS)."""
    ids = torch.randint(0, ROWS, (FEATURES, size), generator=generator)
    clicks = torch.rand(size, generator=generator) < truth.gather(1, ids).sum(0).sigmoid()
    keys, lengths = [f"f{n}" for n in range(FEATURES)], torch.ones(FEATURES * size, dtype=torch.int32)
    return KeyedJaggedTensor(keys=keys, values=ids.view(-1), lengths=lengths), clicks.float()


def run_rank(job: Job, rank: int) -> None:
    """A rank of a replica, from start to end."""
    with job.log(rank).open("w", buffering=1) as log:

        def say(**what: Any) -> None:
            log.write(json.dumps({"time": time.time(), **what}) + "\n")

        try:
            train(job, rank, say)
        except Exception as error:  # the campaign reads it
            say(error=f"{type(error).__name__}: {error}")
            os._exit(1)


def train(job: Job, rank: int, say: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, wait_for_workers=False)
    named = dist.PrefixStore(f"job/{job.run}/{job.number}", store)
    dist.init_process_group("gloo", store=named, rank=rank, world_size=job.ranks)
    torch.manual_seed(job.seed)
    module = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, module.bags.parameters(), {"lr": 0.1})
    replicas = shardrec.Replicas(
        job.replicas,
        sync_every=job.sync_every,
        elastic=f"127.0.0.1:{job.port}/{job.run}",
        patience_s=_PATIENCE_S,
    )
    model = shardrec.shard(module, replicas=replicas)
    assert isinstance(model, ElasticModel)
    dense = torch.optim.Adam(model.dense_parameters(), lr=0.01)
    truth = torch.randn(FEATURES, ROWS, generator=torch.Generator().manual_seed(job.seed))
    data = torch.Generator().manual_seed(10_000 * job.seed + 10 * job.number + rank)
    model.join(dense)
    say(joined=model.steps)
    while model.steps < job.steps:
        features, clicks = batch_of(data, truth, BATCH // job.ranks)
        nn.functional.binary_cross_entropy_with_logits(model(features), clicks).backward()
        dense.step()
        dense.zero_grad()
        say(step=model.steps, replicas=model.replicas)
        time.sleep(job.pause_s)
    model.sync_replicas()
    held_out = torch.Generator().manual_seed(7)
    with torch.no_grad():
        features, clicks = batch_of(held_out, truth, 8192)
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), clicks)
    say(loss=loss.item(), sums=[float(one.detach().double().sum()) for one in (*model._tensors(), *model._states())])


@dataclass
class Replica:
    """A place of a replica, and the process of each rank of its present start."""

    job: Job
    processes: list[BaseProcess] = field(default_factory=list)

    def lines(self) -> list[dict[str, Any]]:
        """What rank 0 has said."""
        path = self.job.log(0)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def trains(self) -> bool:
        return all(process.is_alive() for process in self.processes) and any("step" in line for line in self.lines())


class Run:
    """Replicas that train together, under kills until there were enough of them."""

    def __init__(self, template: RankTemplate, folder: Path, *, kills: int, **job: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._template, self._kills, self._rng = template, kills, random.Random(job["seed"])
        self._job = {"port": self._store.port, "folder": folder, "run": f"seed{job['seed']}-kills{kills}", **job}
        self._starts = 0
        self.blows: Counter[str] = Counter()
        self.jobs: list[Job] = []
        self.replicas = [self._start() for _ in range(job["replicas"])]

    def _start(self) -> Replica:
        self._starts += 1
        job = Job(number=self._starts, **self._job)
        self.jobs.append(job)
        return Replica(job, [self._template.start(run_rank, job, rank) for rank in range(job.ranks)])

    def _wait(self, condition: Any, what: str, most_s: float = _REACTION_S) -> None:
        give_up = time.monotonic() + most_s
        while not condition():
            if time.monotonic() > give_up:
                raise AssertionError(f"waited for {what}; errors {self.errors()}")
            time.sleep(0.01)

    def errors(self) -> list[str]:
        """What ranks have raised."""
        paths = [job.log(rank) for job in self.jobs for rank in range(job.ranks)]
        lines = [line for path in paths if path.exists() for line in path.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if '"error"' in line]

    def run(self) -> dict[str, Any]:
        """To the end of all replicas; returns the figures."""
        try:
            while self.blows.total() < self._kills:
                self._wait(lambda: all(replica.trains() for replica in self.replicas), "all to train")
                self._strike()
            self._wait(
                lambda: not any(process.is_alive() for replica in self.replicas for process in replica.processes),
                "the end",
                _REST_S,
            )
        finally:
            for replica in self.replicas:
                for process in replica.processes:
                    process.kill()
        codes = [process.exitcode for replica in self.replicas for process in replica.processes]
        assert not any(codes), (codes, self.errors())
        ends = [replica.lines()[-1] for replica in self.replicas]
        times: dict[int, float] = {}
        for job in self.jobs:
            for line in Replica(job).lines():
                if "step" in line:
                    times[line["step"]] = min(line["time"], times.get(line["step"], line["time"]))
        steps = sorted(times)
        assert steps == list(range(1, self._job["steps"] + 1)), f"steps are missing; errors {self.errors()}"
        pauses = sorted((times[after] - times[before] for before, after in itertools.pairwise(steps)), reverse=True)
        assert all("loss" in end for end in ends), (ends, self.errors())
        return {
            "loss": ends[0]["loss"],
            "alike": all(end["sums"] == ends[0]["sums"] for end in ends),
            "pauses": pauses[:5],
            "blows": dict(self.blows),
            "starts": self._starts,
        }

    def _strike(self) -> None:
        time.sleep(self._rng.uniform(0, 0.5))
        place = self._rng.randrange(len(self.replicas))
        blow = self._rng.choice(("kill", "kill", "kill one that joins", "stop and kill", "stop and continue"))
        victim = self.replicas[place]
        target = self._rng.choice(victim.processes)
        assert target.pid is not None
        self.blows[blow] += 1
        if blow.startswith("stop"):
            os.kill(target.pid, signal.SIGSTOP)
            time.sleep(2 * _PATIENCE_S)
        if blow == "stop and continue":
            os.kill(target.pid, signal.SIGCONT)
            seen = len(victim.lines())
            self._wait(lambda: victim.lines()[seen + 10 :], "the replica to go on")
            return
        for process in [target] if blow == "kill" else victim.processes:
            process.kill()
        for process in victim.processes:
            process.join(_REACTION_S)
        self.replicas[place] = self._start()
        if blow == "kill one that joins":
            self._wait(lambda: self.replicas[place].job.log(0).exists(), "a start")
            time.sleep(self._rng.uniform(0, 0.6))
            for process in self.replicas[place].processes:
                process.kill()
                process.join(_REACTION_S)
            self.replicas[place] = self._start()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """The campaign; returns the figures of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sync-every", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--pause", type=float, default=0.06, help="seconds after each step of a run under kills")
    options = parser.parse_args(arguments)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    results = []
    with RankTemplate(TEMPLATE) as template, tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for kills in (0, options.kills):
                pause = options.pause if kills else 0.0
                job: dict[str, Any] = {
                    "pause_s": pause,
                    "replicas": options.replicas,
                    "ranks": options.ranks,
                    "sync_every": options.sync_every,
                }
                run = Run(template, Path(folder), kills=kills, seed=seed, steps=options.steps, **job)
                results.append({"seed": seed, "kills": kills, **run.run()})
                print(results[-1], flush=True)
    losses = {
        disturbed: [one["loss"] for one in results if bool(one["kills"]) == disturbed] for disturbed in (False, True)
    }
    for disturbed, values in losses.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{'under kills' if disturbed else 'undisturbed'}: loss {statistics.mean(values):.4f} ± {spread:.4f}")
    return results


if __name__ == "__main__":
    main()
