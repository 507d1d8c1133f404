"""Runs TorchRec's own tests on shardrec: ``make peers TORCHREC=path``.

They run on the CPU, on at most two ranks: worlds of 4 and 8 run as two hosts of a rank each. Whatever fails has to be a
known difference (:mod:`tests.peers.known`).
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
import unittest
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.peers.counterparts import COMMS, NoCounterpart
from tests.peers.examples import Unsatisfied, examples_of
from tests.peers.known import DIFFERENCES, LEFT_OUT
from tests.peers.rank_processes import RankProcesses
from tests.peers.upstream import SUITES, classes_of, prepare

RANKS = 2
OUTCOMES = ("passed", "known", "left out", "failed")


class Outcome(NamedTuple):
    """Of one example of a test.

    Args:
        name: suite, class, test and arguments.
        kind: one of :data:`OUTCOMES`.
        text: the error, or the reason.
    """

    name: str
    kind: str
    text: str


class OnRank:
    """The function of a multi-process test, with what the counterparts have to know on each rank.

    Args:
        function: of the test.
        config: its ``QCommsConfig``.
    """

    def __init__(self, function: Any, config: Any) -> None:
        self._function, self._config = function, config

    def __call__(self, **kwargs: Any) -> None:
        COMMS[0] = self._config
        self._function(**kwargs)


def of_two_ranks(world_size: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a multi-process test on two ranks: sizes of groups shrink as the number of ranks does."""
    made = {**kwargs, "backend": "gloo"}
    for name in ("local_size", "world_size_2D", "node_group_size", "pod_size"):
        if made.get(name) and world_size > RANKS:
            made[name] = max(1, made[name] * RANKS // world_size)
    return made


def reason_for(name: str, reasons: Mapping[str, str]) -> str:
    """Why an example is left out, by the first pattern that its name has; "" if none."""
    return next((reason for pattern, reason in reasons.items() if re.search(pattern, name)), "")


def known_difference(name: str, text: str) -> str:
    """Why an example fails with the error ``text``; "" if nobody knows."""
    for pattern, (reason, error) in DIFFERENCES.items():
        if re.search(pattern, name):
            return reason if re.search(error, text) else ""
    return ""


def outcomes(suite: str, only: str, most: int) -> Iterator[Outcome]:
    """Run the tests of a suite.

    Args:
        suite: one of :data:`SUITES`.
        only: part of the names of those to run.
        most: examples of a test.
    """
    for cls in classes_of(suite):
        for test_name in unittest.TestLoader().getTestCaseNames(cls):
            test, run, left_out = getattr(cls, test_name), 0, 0
            for arguments in examples_of(test):
                words = " ".join(f"{key}={str(value)[:60]}" for key, value in arguments.items())
                name = f"{suite} {cls.__name__}::{test_name} {words}".strip()
                if only not in name or run >= most:
                    continue
                if reason := reason_for(name, LEFT_OUT):
                    left_out += 1
                    if left_out <= most:
                        yield Outcome(name, "left out", reason)
                    continue
                try:
                    text = failure(cls(test_name), test_name, arguments)
                except Unsatisfied:
                    continue
                run += 1
                if not text:
                    yield Outcome(name, "passed", "")
                elif text.startswith("left out: "):
                    yield Outcome(name, "left out", text.removeprefix("left out: "))
                else:
                    reason = known_difference(name, text)
                    yield Outcome(name, "known" if reason else "failed", reason or text)


def failure(case: unittest.TestCase, test_name: str, arguments: Mapping[str, Any]) -> str:
    """Run one example; what failed, or ""."""
    try:
        case.setUp()
        getattr(case, test_name)(**arguments)
    except Unsatisfied:
        raise
    except (NoCounterpart, unittest.SkipTest) as error:
        return f"left out: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if "NoCounterpart: " in str(error):
            return f"left out: {str(error).partition('NoCounterpart: ')[2].splitlines()[0]}"
        if "Torch not compiled with CUDA" in str(error):
            return "left out: it makes CUDA streams"
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        case.doCleanups()
        try:
            case.tearDown()
        except Exception as error:  # after a failure, of what it had not made
            print(f"  tearDown: {type(error).__name__}: {error}", file=sys.stderr)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of TorchRec's repository, at the installed release")
    parser.add_argument("--suite", choices=SUITES, action="append", help="default: all")
    parser.add_argument("--only", default="", help="part of the names of the tests to run")
    parser.add_argument("--examples", type=int, default=6, help="most of a test")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for an example of several ranks")
    options = parser.parse_args()
    if not (options.checkout / "torchrec" / "distributed" / "tests").is_dir():
        parser.error(f"{options.checkout} has no torchrec/distributed/tests: give a checkout of TorchRec's repository")
    prepare(options.checkout)
    from torchrec.distributed.test_utils.multi_process import MultiProcessTestBase  # as prepared

    processes = RankProcesses(prepare, options.checkout)

    def run_multi_process_test(_: Any, *, callable: Any, world_size: int = RANKS, **kwargs: Any) -> None:
        function = OnRank(callable, kwargs.get("qcomms_config"))
        for _ in range(3):
            text = processes.run(function, of_two_ranks(world_size, kwargs), min(world_size, RANKS), options.limit)
            if "EADDRINUSE" not in text:  # another process took the port
                break
        if text:
            raise AssertionError(text)

    MultiProcessTestBase._run_multi_process_test = run_multi_process_test
    failed = 0
    try:
        for suite in options.suite or SUITES:
            counts: Counter[str] = Counter()
            reasons: Counter[str] = Counter()
            for outcome in outcomes(suite, options.only, options.examples):
                counts[outcome.kind] += 1
                reasons[f"{outcome.kind}: {outcome.text}"] += outcome.kind in ("known", "left out")
                text = outcome.text if outcome.kind == "failed" else outcome.text.partition("\n")[0]
                print(f"{outcome.kind:8}  {outcome.name}  {text}".rstrip(), flush=True)
            print(f"\n{suite}: " + ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES))
            for reason, count in reasons.most_common():
                print(f"  {count:4}  {reason}" if count else "", end="\n" if count else "")
            print(flush=True)
            failed += counts["failed"]
    finally:
        processes.stop()
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
