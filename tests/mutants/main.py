"""Changes the package at random places, one at a time, and says which changes no test notices.

::

    python -m tests.mutants.main --count 40 --seed 0 shardrec/lookup shardrec/pipeline/lookahead.py

A mutant is run in a copy of the tree: first by the tests of its module's name, then by those of its folder, then by
all. The first failure kills it; so does a run that takes too long, which is listed. Each survivor is printed: it shows
a hole in the tests, or behaves as the original does.

The source is changed in place: libraries for this wrap functions as they are imported, which neither TorchScript nor
the processes of the ranks survive.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import NamedTuple

from tests.mutants.mutations import Mutation, mutations

ROOT = Path(__file__).parents[2]


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
    """

    def __init__(self, root: Path, folder: Path, timeout: float, near: bool = False) -> None:
        ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__")
        self.folder = Path(shutil.copytree(root, folder, ignore=ignored))
        self.timeout = timeout
        self.near = near
        self._writes = 0

    def run(self, mutant: Mutant) -> str:
        """What became of it: ``killed by`` tests, ``hangs in`` tests, or ``survives``."""
        path = self.folder / mutant.path
        source = path.read_text(encoding="utf-8")
        self._write(path, mutant.mutation.apply(source))
        try:
            chosen = nearest_tests(self.folder, mutant.path)
            for tests in chosen[:-1] if self.near else chosen:
                code = self._run_tests(tests)
                if code != 0:
                    return f"{'hangs in' if code is None else 'killed by'} {tests}"
        finally:
            self._write(path, source)
        return "survives"

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        # Bytecode is taken for that of a source of the same time and size.
        self._writes += 1
        os.utime(path, (self._writes, self._writes))

    def _run_tests(self, tests: str) -> int | None:
        """0 if they pass, None if they take too long."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", tests]
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
    root: Path, mutants: Sequence[Mutant], workers: int, timeout: float, near: bool = False
) -> dict[Mutant, str]:
    """Run mutants, so many at a time; what became of each."""
    with tempfile.TemporaryDirectory(prefix="shardrec-mutants-") as folder:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(workers):
            trees.put(Tree(root, Path(folder, str(number)), timeout, near))

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
    given = parser.parse_args(arguments)
    mutants = draw(ROOT, given.paths, given.count, given.seed)
    fates = campaign(ROOT, mutants, given.workers, given.timeout, given.near)
    for title in ("hangs", "survives"):
        chosen = [f"  {mutant} {fate.removeprefix(title)}" for mutant, fate in fates.items() if fate.startswith(title)]
        print("\n".join([f"{title}: {len(chosen)} of {len(fates)}", *chosen]))
    return 1 if "survives" in fates.values() else 0


if __name__ == "__main__":
    sys.exit(main())
