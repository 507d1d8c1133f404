"""Changes the package at random places, one at a time, and says which changes no test notices.

::

    python -m tests.mutants.main --count 40 --seed 0 shardrec/lookup shardrec/pipeline/lookahead.py

A mutant is run in a copy of the tree, by the tests that run the changed function (``--record`` finds them out, once),
the nearest first; without a recording first by the tests of its module's name, then by those of its folder, then by
all. The first failure kills it; so does a run that takes too long, which is listed. Each survivor is printed: it shows
a hole in the tests, or behaves as the original does.

The source is changed in place: libraries for this wrap functions as they are imported, which neither TorchScript nor
the processes of the ranks survive.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, NamedTuple

from tests.mutants.mutations import Mutation, mutations
from tests.mutants.patch import is_in_functions
from tests.mutants.recording import Recording, record

ROOT = Path(__file__).parents[2]
_RECORDING = ROOT / "build" / "mutants"


class Mutant(NamedTuple):
    """A change of a file, whose path is relative to the tree."""

    path: Path
    mutation: Mutation

    def __str__(self) -> str:
        before = " ".join(self.mutation.before.split())
        return f"{self.path}:{self.mutation.line}: {before[:200]}  →  {self.mutation.text.split(chr(92))[0][:200]}"


class Tree:
    """A copy of the sources in which mutants are run.

    Args:
        root: what is copied.
        folder: where to.
        timeout: seconds that one run of tests may take.
        near: leave it at the tests of the module's folder.
        recording: of the tests that run each function, if there is one.
        seconds: how long the tests of a mutant may take by the recording.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        timeout: float,
        near: bool = False,
        recording: Recording | None = None,
        seconds: float = 120.0,
    ) -> None:
        ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__")
        self.folder = Path(shutil.copytree(root, folder, ignore=ignored))
        self.timeout = timeout
        self.near = near
        self.recording, self.seconds = recording, seconds
        self._writes = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._sound: dict[str, bool] = {}

    def close(self) -> None:
        """End its process."""
        if self._server is not None:
            self._orders.close()
            self._answers.close()
            self._server.wait()

    def run(self, mutant: Mutant) -> str:
        """What became of it: ``killed by`` tests, ``hangs in`` tests, or ``survives``."""
        path = self.folder / mutant.path
        source = path.read_text(encoding="utf-8")
        changed = mutant.mutation.apply(source)
        self._write(path, changed)
        try:
            if self.recording is not None:
                return self._run_recorded(self.recording, mutant, source, changed)
            nearest = nearest_tests(self.folder, mutant.path)
            for tests in nearest[:-1] if self.near else nearest:
                code = self._run_tests([tests])
                if code != 0:
                    return f"{'hangs in' if code is None else 'killed by'} {tests}"
        finally:
            self._write(path, source)
        return "survives"

    def _run_recorded(self, recording: Recording, mutant: Mutant, source: str, changed: str) -> str:
        """Run the tests that run the changed function."""
        path = str(self.folder / mutant.path)
        tests, count = recording.tests(mutant.path, source, mutant.mutation.line, self.seconds)
        if not tests:
            return "survives, no test runs it"
        if is_in_functions(source, changed, path):
            code, failed = self._ask_sound(self.folder / mutant.path, source, changed, tests)
        else:
            code, failed = self._run_tests(tests), f"one of {len(tests)} tests"
        if code == 0:
            sound = sum(self._sound.get(test, True) for test in tests)
            return f"survives {sound} of the {count} tests that run it"
        return f"{'hangs in' if code is None else 'killed by'} {failed}"

    def _ask_sound(self, path: Path, source: str, changed: str, tests: Sequence[str]) -> tuple[int | None, str]:
        """Whether tests fail; those that fail in a fork without the change, too, are left out."""
        order = {"path": str(path), "timeout": self.timeout}
        while sound := [test for test in tests if self._sound.get(test, True)]:
            code, failed = self._ask({**order, "source": changed, "tests": sound})
            if code == 0 or failed not in sound or self._sound.get(failed):
                return code, failed
            self._write(path, source)
            self._sound[failed] = self._ask({**order, "source": source, "tests": [failed]})[0] == 0
            self._write(path, changed)
        return 0, ""

    def _ask(self, order: Mapping[str, Any]) -> tuple[int | None, str]:
        self._serve()
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()
        code, failed = json.loads(self._answers.readline())
        return code, failed

    def _serve(self) -> None:
        """Start the session that forks, once."""
        if self._server is not None:
            return
        (orders, own_orders), (own_answers, answers) = os.pipe(), os.pipe()
        self._orders, self._answers = os.fdopen(own_orders, "w"), os.fdopen(own_answers)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        self._server = subprocess.Popen(
            [*command, "-p", "tests.mutants.server", "tests"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "CI": "1", "SHARDREC_MUTANTS": f"{orders},{answers}"},
            pass_fds=(orders, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(orders)
        os.close(answers)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        # Bytecode is taken for that of a source of the same time and size.
        self._writes += 1
        os.utime(path, (self._writes, self._writes))

    def _run_tests(self, tests: Sequence[str]) -> int | None:
        """0 if they pass, None if they take too long."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "CI": "1"}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                return 0 if process.wait(self.timeout) in (0, 5) else 1  # 5: no tests
            except subprocess.TimeoutExpired:
                return None
            finally:
                # With it end its ranks, and what else it has started.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def nearest_tests(root: Path, path: Path) -> list[str]:
    """The tests to run for a module of the package, nearest first."""
    inside = path.relative_to(path.parts[0])
    near = [Path("tests", inside.parent, f"test_{inside.name}"), Path("tests", inside.parent)]
    return [str(tests) for tests in dict.fromkeys([*near, Path("tests")]) if (root / tests).exists()]


def draw(root: Path, paths: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """So many mutants of the modules in ``paths``, which are relative to the tree."""
    found: list[Mutant] = []
    for path in map(Path, paths):
        modules = sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]
        for module in modules:
            source = module.read_text(encoding="utf-8")
            found += [Mutant(module.relative_to(root), mutation) for mutation in mutations(source)]
    return Random(seed).sample(found, min(count, len(found)))


def campaign(
    root: Path,
    mutants: Sequence[Mutant],
    workers: int,
    timeout: float,
    near: bool = False,
    recording: Recording | None = None,
    seconds: float = 120.0,
) -> dict[Mutant, str]:
    """Run mutants, so many at a time; what became of each."""
    with tempfile.TemporaryDirectory(prefix="shardrec-mutants-") as folder, ExitStack() as stack:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(workers):
            tree = Tree(root, Path(folder, str(number)), timeout, near, recording, seconds)
            stack.callback(tree.close)
            trees.put(tree)

        def run(mutant: Mutant) -> str:
            tree = trees.get()
            begin = time.monotonic()
            try:
                fate = tree.run(mutant)
            finally:
                trees.put(tree)
            print(f"{fate} ({time.monotonic() - begin:.0f} s): {mutant}", flush=True)
            return fate

        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(mutants, pool.map(run, mutants), strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Run mutants from the command line; 1 if any survives."""
    parser = argparse.ArgumentParser(description="Change the package at random places; say what no test notices.")
    parser.add_argument("paths", nargs="*", default=["shardrec"], help="modules and folders (default: shardrec)")
    parser.add_argument("--count", type=int, default=40, help="mutants (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of which they are (default: 0)")
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each run of tests (default: 900)")
    parser.add_argument("--near", action="store_true", help="leave it at the tests of a module's folder")
    parser.add_argument("--record", action="store_true", help="only record which tests run which functions")
    parser.add_argument("--recording", type=Path, default=_RECORDING, help="folder of it (default: build/mutants)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of tests for each mutant, by it (default: 120)")
    given = parser.parse_args(arguments)
    if given.record:
        record(ROOT, given.recording)
        return 0
    recording = Recording(given.recording) if (given.recording / "tests").exists() and not given.near else None
    mutants = draw(ROOT, given.paths, given.count, given.seed)
    fates = campaign(ROOT, mutants, given.workers, given.timeout, given.near, recording, given.seconds)
    for title in ("hangs", "survives"):
        chosen = [f"  {mutant} {fate.removeprefix(title)}" for mutant, fate in fates.items() if fate.startswith(title)]
        print("\n".join([f"{title}: {len(chosen)} of {len(fates)}", *chosen]))
    return 1 if any(fate.startswith("survives") for fate in fates.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
