"""A training run as the processes, the log and the files that a supervisor sees."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Job"]

_ROOT = Path(__file__).parents[2]
_FLAGS = (
    *("--samples", "19200", "--batch-size", "32", "--max-embeddings", "2000", "--embedding-dim", "4"),
    *("--dense-layers", "8", "--over-layers", "8", "--embedding-optimizer", "adam", "--embedding-lr", "0.01"),
    *("--holdout-samples", "512", "--evaluations", "4", "--threads", "1"),
    *("--checkpoint-every", "10", "--checkpoint-incremental", "3", "--max-restarts", "1000"),
)
_MARK = "SHARDREC_CAMPAIGN"
_POLL_S = 0.005
_STEPPING_S, _SAVING_S = 0.3, 0.04
"""About how long a run makes steps between two saves, and saves."""
_MAX_SAVES = 3

_SAVED = re.compile(r"^saved the checkpoint of step ([\d,]+)", re.MULTILINE)
_RESUMED = re.compile(r"^continuing from the checkpoint of step ([\d,]+)", re.MULTILINE)
_TRAINING = re.compile(r"^training dlrm", re.MULTILINE)
_RESULTS = re.compile(r"^[\d,]+ (?:held-out|test) rows, [\d.]+% clicked", re.MULTILINE)
_AGAIN = re.compile(r"^shardrec: starting the ranks again", re.MULTILINE)


class Job:
    """One run, over all its launches.

    Args:
        folder: of its results; its log is beside it.
        ranks: that the launcher starts.
        timeout: that the run is given.
        temporary: folder for the processes' temporary files.

    Attributes:
        folder: the same.
        starts: launches so far.
    """

    def __init__(self, folder: Path, *, ranks: int, timeout: float, temporary: Path) -> None:
        self.folder = folder
        self.starts = 0
        self._ranks = ranks
        self._timeout = timeout
        self._temporary = temporary
        self._log = folder.with_suffix(".log")
        self._begin = 0
        self._since = 0.0
        self._load_s = 0.1
        self._launcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Launch the run; again, with ``--resume``, if it was launched before."""
        self._temporary.mkdir(exist_ok=True)
        self.starts += 1
        self._since = time.time()
        with self._log.open("ab") as log:
            self._begin = log.tell()
            self._launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "shardrec.trainer.cli", "train", "--out", str(self.folder), "--resume"),
                    *(*_FLAGS, "--nproc", str(self._ranks), "--timeout", str(self._timeout)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                env={**os.environ, _MARK: str(self.folder), "TMPDIR": str(self._temporary)},
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Whether the launcher is."""
        return self._launcher is not None and self._launcher.poll() is None

    def wait(self, seconds: float) -> int | None:
        """The launcher's exit code, or None if it does not end in time."""
        assert self._launcher is not None, "the run was launched"
        try:
            return self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    # ------------------------------------------------------------------------------------------------- what it says

    def log(self) -> str:
        """All that the run has said so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _attempt(self) -> str:
        """What these ranks have said: since the launch, or since the launcher started them again."""
        text = self._log.read_bytes()[self._begin :].decode(errors="replace")
        again = [found.end() for found in _AGAIN.finditer(text)]
        return text[again[-1] :] if again else text

    @property
    def acknowledged(self) -> int:
        """The last step that the run has said to be saved."""
        return max(map(_number, _SAVED.finditer(self.log())), default=0)

    def broken_promises(self) -> list[str]:
        """Each time that the run went on from before a step that it had said to be saved."""
        found = []
        saved = 0
        for line in self.log().splitlines():
            done, resumed = _SAVED.match(line), _RESUMED.match(line)
            if done is not None and _number(done) < saved:
                found.append(f"step {saved} was saved, and step {_number(done)} made again after a new beginning")
            if resumed is not None and _number(resumed) < saved:
                found.append(f"step {saved} was saved, and the run went on from step {_number(resumed)}")
            saved = max(saved, _number(done) if done else 0)
        return found

    def phase(self) -> str:
        """What the run is doing, as far as one can see from here."""
        said = self._attempt()
        if _TRAINING.search(said) is None:
            return "start"
        if _RESUMED.search(said) is None and _SAVED.search(said) is None and self._any_checkpoint():
            return "load"
        if _RESULTS.search(said) is not None:
            return "results"
        return "save" if self._saves() else "step"

    def _saves(self) -> bool:
        """Whether a checkpoint is being written, and is not what an earlier attempt has left."""
        for path in self.folder.glob("checkpoints/step-*"):
            # Unless it has just been removed.
            with suppress(FileNotFoundError):
                if not (path / "manifest.json").exists() and path.stat().st_mtime >= self._since:
                    return True
        return False

    def _any_checkpoint(self) -> bool:
        """Whether there is one that has its manifest, which is written last."""
        return any(self.folder.glob("checkpoints/step-*/manifest.json"))

    # ---------------------------------------------------------------------------------------------------- moments

    def reach(self, phase: str, share: float, start_s: float, limit: float) -> bool:
        """Wait for a moment in a phase, ``share`` of the way into it, or past it; False if the launcher has ended."""
        if phase == "start":
            self._until(lambda: _TRAINING.search(self._attempt()) is not None, share * start_s)
            return self.alive()
        self._until(lambda: _TRAINING.search(self._attempt()) is not None, limit)
        if phase == "load":
            time.sleep(share * self._load_s)
            return self.alive()
        begin = time.monotonic()
        self._until(lambda: self.phase() != "load", limit)
        self._load_s = 0.5 * (self._load_s + time.monotonic() - begin)
        # After some saves, so that a run comes to its end however slow the machine is.
        saves, share = divmod(share * _MAX_SAVES, 1.0)
        self._until(lambda: len(_SAVED.findall(self._attempt())) >= saves, limit)
        if phase == "step":
            self._until(lambda: False, share * _STEPPING_S)
        else:
            self._until(self._saves, 10 * _STEPPING_S)
            time.sleep(share * _SAVING_S)
        return self.alive()

    def goes_on(self, limit: float) -> bool | None:
        """True when the launcher starts the ranks again, False when it has ended, None if neither comes."""
        before = len(_AGAIN.findall(self.log()))
        self._until(lambda: len(_AGAIN.findall(self.log())) > before, limit)
        if not self.alive():
            return False
        self._since = time.time()
        return True if len(_AGAIN.findall(self.log())) > before else None

    def _until(self, reached: Callable[[], bool], limit: float) -> None:
        """Wait for a condition, the end of the launcher, or the limit."""
        give_up = time.monotonic() + limit
        while self.alive() and not reached() and time.monotonic() < give_up:
            time.sleep(_POLL_S)

    # ---------------------------------------------------------------------------------------------------- processes

    def rank_pids(self) -> list[int]:
        """The ranks' processes: the launcher's children, without Python's own helper."""
        assert self._launcher is not None, "the run was launched"
        try:
            children = Path(f"/proc/{self._launcher.pid}/task/{self._launcher.pid}/children").read_text(
                encoding="utf-8"
            )
            return [pid for pid in map(int, children.split()) if b"spawn_main" in _read(pid, "cmdline")]
        except OSError:
            return []

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to one of this run's processes; False if it has ended."""
        if not self._owns(pid):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def signal_launcher(self, number: signal.Signals) -> bool:
        """Send a signal to the launcher; False if it has ended."""
        assert self._launcher is not None, "the run was launched"
        return self.alive() and self.signal(self._launcher.pid, number)

    def gone(self, seconds: float) -> bool:
        """Whether all of the run's processes have ended, within some time."""
        give_up = time.monotonic() + seconds
        while any(True for _ in self._processes()):
            if time.monotonic() > give_up:
                return False
            time.sleep(_POLL_S)
        return True

    def kill_all(self) -> None:
        """End whatever is left of the run."""
        for pid in self._processes():
            self.signal(pid, signal.SIGKILL)
        self.wait(10.0)

    def _processes(self) -> Iterator[int]:
        return (int(path.name) for path in Path("/proc").glob("[0-9]*") if self._owns(int(path.name)))

    def _owns(self, pid: int) -> bool:
        # A process that has ended, and that nobody has asked about yet, has no environment.
        return f"{_MARK}={self.folder}\0".encode() in _read(pid, "environ") + b"\0"


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _number(found: re.Match[str]) -> int:
    return int(found[1].replace(",", ""))
