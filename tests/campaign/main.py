"""Kills and stops a training run at random moments, until it has survived as many as one likes, and says what was lost.

::

    python -m tests.campaign.main --kills 200 --seed 0

An undisturbed run gives the reference. Then runs of the same options are disturbed: a rank, the launcher or all of them
are killed (SIGKILL), stopped (SIGSTOP) or told to end (SIGTERM), while they start, load, make steps or save. A run goes
on by itself, or, where its launcher is gone, by ``--resume``. It must not go on from before a checkpoint that it had
said to be saved; in the end its weights, optimizer states and curve must equal the reference's to the bit; and no
process, no shared memory, no temporary file may be left that the reference does not leave, too.

The phases are struck equally often: each strike waits for one of those that were struck least. A run that has saved its
last step is left alone and compared, and the next one begins. SIGTERM ends a campaign with the run that is under way.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.campaign.job import Job
from tests.campaign.results import differences, leftovers, shared_memory

_REACTION_S = 180.0
"""A run that does nothing for so long hangs. Far above what any step takes on a busy machine."""

_PHASES = ("start", "load", "step", "save")
_BLOWS = {
    "kill a rank": 6,
    "kill the launcher": 4,
    "kill all": 3,
    "stop a rank": 3,
    "stop the launcher": 1,
    "end the launcher": 3,
}
_SAVED_EXIT, _STOPPED_EXIT = 75, 130


class Campaign:
    """Runs in ``folder``, each disturbed until it has come to its end.

    Args:
        folder: for results and temporary files.
        ranks: of each run.
        seed: of what is done when.
        timeout: seconds after which ranks take one that is stopped for dead.
    """

    def __init__(self, folder: Path, *, ranks: int, seed: int, timeout: float) -> None:
        self._folder = folder
        self._ranks = ranks
        self._timeout = timeout
        self._random = random.Random(seed)
        self._start_s = 0.0
        self._jobs: list[Job] = []
        self.lost: list[str] = []
        self.blows: Counter[tuple[str, str]] = Counter()
        self.compared = 0
        self._last_step = 0
        self._kills = 0

    @property
    def struck(self) -> int:
        """Kills and stops so far."""
        return sum(self.blows.values())

    def run(self, kills: int) -> None:
        """Strike ``kills`` times, and compare every run that comes to its end, the last one included."""
        self._kills = kills
        before = shared_memory()
        reference = self._job("reference")
        reference.start()
        begin = time.monotonic()
        reference.reach("load", 0.0, 0.0, _REACTION_S)
        self._start_s = time.monotonic() - begin
        if reference.wait(_REACTION_S) != 0:
            raise SystemExit(f"the undisturbed run failed:\n{reference.log()}")
        self._last_step = reference.acknowledged
        usual = leftovers(self._folder, before)
        while self.struck < self._kills:
            self._disturbed(self._job(f"run-{self.compared}"), reference)
            self.lost += [f"left behind: {item}" for item in leftovers(self._folder, before) if item not in usual]

    def strike_no_more(self) -> None:
        """Let the run under way come to its end, and end with it."""
        self._kills = self.struck

    def end(self) -> None:
        """End whatever still runs."""
        for job in self._jobs:
            job.kill_all()

    def _job(self, name: str) -> Job:
        job = Job(self._folder / name, ranks=self._ranks, timeout=self._timeout, temporary=self._folder / "tmp")
        self._jobs.append(job)
        return job

    def _disturbed(self, job: Job, reference: Job) -> None:
        job.start()
        while job.alive():
            if self.struck < self._kills and job.acknowledged < self._last_step:
                self._strike(job)
            elif job.wait(_REACTION_S) is None:
                self._lose(job, "hangs")
                return
            if not job.alive() and not self._over(job):
                job.start()
        self.compared += 1
        self.lost += [f"{job.folder.name}: {fault}" for fault in differences(job.folder, reference.folder)]
        print(f"{job.folder.name}: {job.starts} launches, final state compared", flush=True)

    def _over(self, job: Job) -> bool:
        """Whether the run is done; what it left, unless that is as it should be, is lost."""
        code = job.wait(_REACTION_S)
        if not job.gone(10.0):
            self._lose(job, "ranks outlive their launcher")
        if code not in (0, _SAVED_EXIT, _STOPPED_EXIT, -signal.SIGKILL, -signal.SIGTERM):
            self._lose(job, f"ended with exit code {code}")
        return code == 0

    def _strike(self, job: Job) -> None:
        """Wait for a moment, strike, and wait until the run goes on or its launcher has ended."""
        phase = self._least_struck(without="" if job.acknowledged else "load")
        blow = self._random.choices(list(_BLOWS), list(_BLOWS.values()))[0]
        if not job.reach(phase, self._random.random(), self._start_s, _REACTION_S):
            return
        hit, step, begin = job.phase(), job.acknowledged, time.monotonic()
        if not self._do(job, blow):
            return
        self.blows[blow, hit] += 1
        went_on = job.goes_on(_REACTION_S)
        seconds = time.monotonic() - begin
        if went_on is None:
            self._lose(job, f"hangs after: {blow}, {hit}")
            job.kill_all()
        for fault in job.broken_promises():
            self._lose(job, fault)
        then = f"went on after {seconds:.1f} s" if went_on else f"ended after {seconds:.1f} s"
        print(f"{self.struck:>4}  {job.folder.name}, saved step {step}: {blow}, {hit}; {then}", flush=True)

    def _least_struck(self, without: str) -> str:
        hits = {phase: sum(n for (_, hit), n in self.blows.items() if hit == phase) for phase in _PHASES}
        hits.pop(without, None)
        return self._random.choice([phase for phase, n in hits.items() if n == min(hits.values())])

    def _do(self, job: Job, blow: str) -> bool:
        """Strike; False if there was nothing to be struck."""
        ranks = job.rank_pids()
        if blow in ("kill a rank", "stop a rank"):
            if not ranks:
                return False
            number = signal.SIGKILL if blow == "kill a rank" else signal.SIGSTOP
            return job.signal(self._random.choice(ranks), number)
        if blow == "kill all":
            for pid in self._random.sample(ranks, len(ranks)):
                job.signal(pid, signal.SIGKILL)
            return job.signal_launcher(signal.SIGKILL)
        if blow == "stop the launcher":
            # Nothing but a kill ends it then, as a supervisor's would.
            stopped = job.signal_launcher(signal.SIGSTOP)
            time.sleep(self._random.random())
            return job.signal_launcher(signal.SIGKILL) and stopped
        return job.signal_launcher(signal.SIGKILL if blow == "kill the launcher" else signal.SIGTERM)

    def _lose(self, job: Job, what: str) -> None:
        print(f"LOST {job.folder.name}: {what}", flush=True)
        self.lost.append(f"{job.folder.name}: {what}\n{job.log()[-3000:]}")


def histogram(blows: Mapping[tuple[str, str], int]) -> str:
    """A table of what was done in which phase."""
    hits = [*_PHASES, *sorted({hit for _, hit in blows} - set(_PHASES))]
    lines = ["".join(f"{title:>9}" for title in (*hits, "all"))]
    for blow in (*_BLOWS, "all"):
        counts = [sum(n for one, n in blows.items() if blow in (one[0], "all") and one[1] == hit) for hit in hits]
        lines.append("".join(f"{count:>9}" for count in (*counts, sum(counts))) + f"  {blow}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign from the command line; 1 if anything was lost."""
    parser = argparse.ArgumentParser(description="Kill and stop training runs at random; say what was lost.")
    parser.add_argument("--kills", type=int, default=200, help="kills and stops (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of what is done when (default: 0)")
    parser.add_argument("--ranks", type=int, default=2, help="of each run (default: 2)")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds until a stopped rank is dead (default: 3)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="shardrec-campaign-") as folder:
        campaign = Campaign(Path(folder), ranks=given.ranks, seed=given.seed, timeout=given.timeout)
        signal.signal(signal.SIGTERM, lambda *_: campaign.strike_no_more())
        begin = time.monotonic()
        try:
            campaign.run(given.kills)
        finally:
            campaign.end()
    seconds = time.monotonic() - begin
    print(histogram(campaign.blows))
    compared = f"{campaign.compared} runs compared with the undisturbed one"
    print(f"{campaign.struck} kills and stops in {seconds:.0f} s; {compared}")
    print(f"lost: {len(campaign.lost)}" if campaign.lost else "lost: nothing")
    for what in campaign.lost:
        print(f"  {what}")
    return 1 if campaign.lost else 0


if __name__ == "__main__":
    sys.exit(main())
