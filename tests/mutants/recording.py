"""Which tests run which functions of the package, recorded once by a run of all the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType

__all__ = ["Recording", "record"]

_RECORDER = Path(__file__).parent / "recorder"


def record(root: Path, folder: Path, tests: Sequence[str] = ("tests",)) -> None:
    """Run tests and write what they run to ``folder``; it takes about twice the time of the tests."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("hits", "tests"):
        (folder / name).unlink(missing_ok=True)
    (folder / "test").write_bytes(bytes(8))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(_RECORDER)]),
        "CI": "1",
        "SHARDREC_RECORD": str(folder),
        "SHARDREC_RECORD_PACKAGE": str(root / "shardrec"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.mutants.plugin", *tests]
    subprocess.run(command, cwd=root, env=environment, check=False)  # a test that fails has run functions, too


class Recording:
    """What :func:`record` has written.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self._seconds: dict[str, float] = {}
        names: dict[str, str] = {}
        for line in (folder / "tests").read_text(encoding="utf-8").splitlines():
            number, seconds, outcome, name = line.split(" ", 3)
            if outcome == "passed":
                names[number], self._seconds[name] = name, float(seconds)
        self._tests: defaultdict[str, set[str]] = defaultdict(set)
        self._of_module: defaultdict[str, set[str]] = defaultdict(set)
        for line in (folder / "hits").read_text(encoding="utf-8").splitlines():
            number, _, function = line.partition(" ")
            if number in names:
                self._tests[function].add(names[number])
                self._of_module[function.partition(":")[0]].add(names[number])

    def tests(self, path: Path, source: str, line: int, seconds: float) -> tuple[list[str], int]:
        """The tests that run the function at a line, or any function of the module if the line is in none.

        Args:
            path: of the module, relative to the tree.
            source: of it.
            line: from 1.
            seconds: how long they may take together, by the recording.

        Returns:
            The tests of the module's name, those of its folder, then the others; in each the fastest first. How many
            there are, also of those that would take too long.
        """
        inside = path.relative_to("shardrec")
        module = inside.as_posix()
        function = _function_at(source, line)
        tests = self._of_module[module] if function is None else self._tests[f"{module}:{function}"]
        near = Path("tests", inside.parent).as_posix()

        def distance(test: str) -> tuple[int, float]:
            file = test.partition("::")[0]
            steps = 0 if file == f"{near}/test_{inside.name}" else 1 if file.startswith(f"{near}/") else 2
            return steps, self._seconds[test]

        chosen: list[str] = []
        for test in sorted(tests, key=distance):
            if self._seconds[test] <= seconds:
                seconds -= self._seconds[test]
                chosen.append(test)
        return chosen, len(tests)


def _function_at(source: str, line: int) -> str | None:
    """The qualified name of the innermost function at a line; None if it is in none."""
    candidates = [(last - first, name) for first, last, name in _functions(source) if first <= line <= last]
    return min(candidates)[1] if candidates else None


@cache
def _functions(source: str) -> list[tuple[int, int, str]]:
    """First line, last line and qualified name of the functions of a module."""

    def inside(code: CodeType) -> Iterator[tuple[int, int, str]]:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                if constant.co_flags & 2:  # a function's variables are not a dict, as a class body's are
                    last = max(line for *_, line in constant.co_lines() if line is not None)
                    yield constant.co_firstlineno, last, constant.co_qualname
                yield from inside(constant)

    return list(inside(compile(source, "module", "exec")))
