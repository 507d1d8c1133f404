"""What a call costs the host, counted: Python calls, files, operators. Counts do not depend on the machine's load."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardrec.exchange.shared.channel import Channel

__all__ = ["HostWork", "count_calls", "count_operators", "count_steps", "largest"]

_WAITS = (Channel._wait.__code__,)
"""Functions in which a rank waits for another one."""


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """The work of the host in a part of a step.

    Args:
        calls: Python functions entered, whoever they belong to. A generator counts each time that it goes on.
        own: of these, the package's.
        files: of the package, in which they are.
        moves: between files of the package, from one of its functions to the next one called.
        operators: torch operators called below autograd.
        by_file: calls in each file, the package's or not, most first.
        by_operator: calls of each operator, most first.
    """

    calls: int = 0
    own: int = 0
    files: int = 0
    moves: int = 0
    operators: int = 0
    by_file: Mapping[str, int] = field(default_factory=dict)
    by_operator: Mapping[str, int] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers by their names, without where they come from."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, int)}


def count_calls(run: FunctionType, own: Sequence[str]) -> HostWork:
    """Call ``run`` and count the functions that it enters on this thread.

    Not counted are C functions, and what a rank calls because another rank's message is not there yet, which differs
    from step to step.

    Args:
        run: the part of a step. A function written in Python, whose own call does not count.
        own: folders. A file whose path contains one of them is the package's.
    """
    calls: Counter[str] = Counter()
    path_of_own: list[str] = []  # of each of the package's calls
    waiting: list[FrameType] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if waiting:
            if event == "return" and frame is waiting[0]:
                waiting.clear()
        elif event == "call" and frame.f_code in _WAITS:
            waiting.append(frame)
        elif event == "call":
            path = frame.f_code.co_filename
            calls[path] += 1
            if any([folder in path for folder in own]):
                path_of_own.append(path)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection calls what waits for an object's end
    # A program compiled in whole would refuse, or compile, the function that counts.
    sys.setprofile(torch.compiler.disable(profile) if "torch._dynamo" in sys.modules else profile)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    calls[run.__code__.co_filename] -= 1  # ``run`` itself
    return HostWork(
        calls=calls.total(),
        own=len(path_of_own),
        files=len(set(path_of_own)),
        moves=sum(path != other for path, other in pairwise(path_of_own)),
        by_file={_short(path): count for path, count in calls.most_common() if count},
    )


def _short(path: str) -> str:
    """The end of a path, from the folder of its package on."""
    _, installed, inside = path.rpartition("/site-packages/")
    return inside if installed else "/".join(path.split("/")[-3:])


def count_operators(run: Callable[[], object]) -> HostWork:
    """Call ``run`` and count the operators that reach a dispatch mode."""
    with _Operators() as operators:
        run()
    return HostWork(operators=operators.seen.total(), by_operator=dict(operators.seen.most_common()))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_steps(
    forward: Callable[[Any], Tensor],
    batches: Sequence[Any],
    gradient: Tensor,
    own: Sequence[str],
    *,
    operators: bool = True,
) -> tuple[HostWork, HostWork]:
    """The work of a forward, and of its backward: the least of several steps, for what some steps alone do is left out.

    Args:
        forward: from a batch to the values that are trained.
        batches: of these, one in two is for the operators, for a dispatch mode calls functions of its own.
        gradient: of the values.
        own: see :func:`count_calls`.
        operators: whether they are counted; torch.compile's programs run under no dispatch mode.
    """
    forwards, backwards = [], []
    for number, batch in enumerate(batches):
        count: Callable[[Any], HostWork] = partial(count_calls, own=own)
        if operators and number % 2:
            count = count_operators
        values: list[Tensor] = []
        forwards.append(count(lambda: values.append(forward(batch))))  # noqa: B023  # called at once
        backwards.append(count(lambda: values.pop().backward(gradient)))  # noqa: B023
    return _least(forwards), _least(backwards)


def _least(works: Sequence[HostWork]) -> HostWork:
    calls = _merged(min, [work for work in works if work.calls])
    counted = [work for work in works if work.operators]
    if not counted:
        return calls
    operators = _merged(min, counted)
    return replace(calls, operators=operators.operators, by_operator=operators.by_operator)


def largest(of_ranks: Iterable[HostWork]) -> HostWork:
    """Of the same part of a step on several ranks, the most per kind."""
    return _merged(max, list(of_ranks))


def _merged(choose: Callable[..., Any], works: Sequence[HostWork]) -> HostWork:
    calls = choose(works, key=lambda work: work.calls)
    operators = choose(works, key=lambda work: work.operators)
    numbers = {name: choose(work.counts[name] for work in works) for name in works[0].counts}
    return HostWork(**numbers, by_file=calls.by_file, by_operator=operators.by_operator)
