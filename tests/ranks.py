"""Run a function as the ranks of a process group, in milliseconds, from an ordinary test.

::

    def test_sum_over_ranks() -> None:
        def total(offset: float) -> float:
            value = torch.tensor(dist.get_rank() + offset)
            dist.all_reduce(value)
            return value.item()

        assert ranks(2, total, 10.0) == [21.0, 21.0]

Functions, arguments and results travel as bytes (cloudpickle): a function may be a closure, what is defined in
``tests/`` goes by value, and tensors are copied. The ranks are processes that stay from test to test: environment
variables, working directory, seeds, threads, grad mode and default dtype are reset before every call, everything else
that a function changes (imports, caches, the compiler's state) stays.
"""

from __future__ import annotations

import pickle
import re
import sys
import warnings
from collections.abc import Callable, Collection
from typing import Any, TypeVar, overload

import cloudpickle  # type: ignore[import-untyped]

from tests.parcel import pack
from tests.rank_pool import MAX_RANKS, Died, Hung, Outcome, Pool
from tests.worker import Reply

__all__ = [
    "BARE",
    "POOL",
    "RankDied",
    "RankErrors",
    "RankHung",
    "UnpicklableError",
    "raises_on_all",
    "ranks",
    "run_without_shardrec",
]

T = TypeVar("T")

POOL = Pool()
"""The processes of this test session."""

BARE = Pool(["torch.distributed", "fbgemm_gpu"])
"""Others, which have imported neither shardrec nor torchrec."""

# Sent by name: these run in the ranks or hold the pool; or TorchScript evaluates their annotations in all their names.
_BY_NAME = frozenset(
    {
        "tests.conftest",
        "tests.parcel",
        "tests.rank_pool",
        "tests.ranks",
        "tests.rpc.forms",
        "tests.rpc.jobs",
        "tests.scripting.exchanges",
        "tests.scripting.scorers",
        "tests.worker",
    }
)

_SEEN: set[str] = set()
"""Names of the modules that `_send_tests_by_value` has looked at."""


class RankDied(RuntimeError):
    """A rank's process ended inside the function.

    Attributes:
        code: its exit code, or minus the number of the signal that ended it.
    """

    def __init__(self, code: int) -> None:
        self.code = code
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        super().__init__(f"the process ended inside the function ({how})")


class RankHung(RuntimeError):
    """A rank did not finish in time and was killed.

    Attributes:
        stack: Python stack of each of its threads when it was killed.
    """

    def __init__(self, seconds: float, stack: str) -> None:
        self.stack = stack
        super().__init__(f"still running after {seconds:.1f} s; killed. Its stack was:\n{stack}")


class UnpicklableError(RuntimeError):
    """Stands in for a rank's exception that cannot be pickled; the message has its type and message."""


class RankErrors(Exception):
    """One or more ranks failed.

    Attributes:
        errors: the exception of each rank that raised; `RankDied` and `RankHung` for those that died and hung.
        tracebacks: its traceback as text.
        results: the values of the ranks that returned.
        outputs: what each rank of the world wrote to stdout and stderr.
    """

    def __init__(
        self,
        errors: dict[int, BaseException],
        *,
        tracebacks: dict[int, str],
        results: dict[int, Any],
        outputs: dict[int, str],
    ) -> None:
        self.errors = errors
        self.tracebacks = tracebacks
        self.results = results
        self.outputs = outputs
        parts = [f"{len(errors)} of {len(errors) + len(results)} ranks failed:"]
        parts += [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items()]
        parts += [f"--- rank {rank}\n{trace.rstrip()}" for rank, trace in tracebacks.items() if trace]
        parts += [f"--- output of rank {rank}\n{text.rstrip()}" for rank, text in outputs.items() if text]
        super().__init__("\n".join(parts))


@overload
def ranks(
    n: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = ...,
    grace: float = ...,
    hosts: int = ...,
    **kwargs: Any,
) -> list[T]: ...


@overload
def ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = ...,
    grace: float = ...,
    hosts: int = ...,
    expect_death: Collection[int],
    **kwargs: Any,
) -> list[Any]: ...


def ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    grace: float = 10.0,
    hosts: int = 1,
    expect_death: Collection[int] = (),
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on each rank of a fresh gloo process group.

    The default group is initialised before and destroyed after the call, and the variables that torchrun sets
    (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``, …) are set. What the ranks write is
    written again, with ``[rank 0]`` before each line, to this process's stdout.

    Args:
        n: world size, 1 to `MAX_RANKS`.
        fn: function, closure or method that can be cloudpickled, as must be its arguments and its result.
        timeout: seconds that a rank may take; then it is killed, and reported with its stack.
        grace: the same, counted from the moment that another rank failed.
        hosts: spread the ranks over so many hosts, as far as the environment variables tell.
        expect_death: ranks that have to die (``os._exit``, a signal) inside the function.

    Returns:
        Each rank's value, in order of rank. With `expect_death`: each rank's outcome, which is a `RankDied` for a rank
        that was to die, and the value returned or the exception raised for every other rank.

    Raises:
        ValueError: `n` or `hosts` is impossible.
        RankErrors: a rank raised, died or hung; with `expect_death`, a rank hung, died unexpectedly, or did not die.
    """
    _check(n, hosts, expect_death)
    _send_tests_by_value()
    payload = pack((fn, args, kwargs, list(warnings.filters)))
    return _run(POOL, n, payload, hosts=hosts, timeout=timeout, grace=grace, expect_death=expect_death)


def run_without_shardrec(n: int, program: str, **names: Any) -> None:
    """Run a program's text on each rank of a fresh gloo process group, in processes that know torch and fbgemm only.

    Args:
        n: world size, 1 to `MAX_RANKS`.
        program: Python. It may import whatever it can do without, as a user's would.
        names: what it has as globals, beside ``rank`` and ``size``.

    Raises:
        ValueError: `n` is impossible.
        RankErrors: it raised, died or hung on a rank.
    """
    _check(n, 1, ())
    forget = "for name in [name for name in sys.modules if name.split('.')[0] == 'shardrec']: del sys.modules[name]"
    place = "rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])"
    whole = f"import os, sys\n{forget}  # what starts ranks\n{place}\n{program}"
    # Without the filters of warnings, which name classes of other packages.
    payload = pack((exec, (whole, names), {}, []))
    _run(BARE, n, payload, hosts=1, timeout=100.0, grace=10.0, expect_death=())


def _run(
    pool: Pool, n: int, payload: bytes, *, hosts: int, timeout: float, grace: float, expect_death: Collection[int]
) -> list[Any]:
    outcomes, texts = pool.run(n, payload, hosts=hosts, timeout=timeout, grace=grace, mortal=frozenset(expect_death))
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Reply) and outcome.returned:
            results[rank] = pickle.loads(outcome.payload)
        else:
            errors[rank] = _error(outcome)
    failed = set(errors)
    if expect_death:
        dead = {rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Died)}
        hung = {rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Hung)}
        immortal = set(expect_death) - dead
        for rank in immortal - failed:
            errors[rank] = AssertionError(f"was expected to die, but returned {results.pop(rank)!r}")
        failed = immortal | hung | dead - set(expect_death)
    if failed:
        raise RankErrors(
            dict(sorted(errors.items())),
            tracebacks={rank: o.trace for rank, o in enumerate(outcomes) if not isinstance(o, Hung) and o.trace},
            results=results,
            outputs=dict(enumerate(texts)),
        )
    for rank, text in enumerate(texts):
        for line in text.splitlines():
            print(f"[rank {rank}] {line}")
    return [errors[rank] if rank in errors else results[rank] for rank in range(n)]


def raises_on_all(
    n: int, exc_type: type[BaseException], match: str, fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[str]:
    """Assert that `fn` raises `exc_type` on every rank.

    Args:
        n: world size.
        exc_type: the class; subclasses will do.
        match: regular expression to be found in every rank's message.
        fn: see `ranks`, as for the other arguments.

    Returns:
        The messages, in order of rank.

    Raises:
        AssertionError: a rank returned or raised something else; the message has all of it.
    """
    __tracebackhide__ = True
    wanted = f"{exc_type.__name__} matching {match!r} on all {n} ranks"
    try:
        values = ranks(n, fn, *args, **kwargs)
    except RankErrors as failed:
        errors = failed.errors
        wrong = [rank for rank in range(n) if not _is_match(errors.get(rank), exc_type, match)]
        if wrong:
            raise AssertionError(f"wanted {wanted}; not so on {wrong}. {failed}") from None
        return [str(errors[rank]) for rank in range(n)]
    raise AssertionError(f"wanted {wanted}. They returned {values!r}")


def _is_match(error: BaseException | None, exc_type: type[BaseException], match: str) -> bool:
    return isinstance(error, exc_type) and re.search(match, str(error)) is not None


def _check(n: int, hosts: int, expect_death: Collection[int]) -> None:
    if not 1 <= n <= MAX_RANKS:
        raise ValueError(f"ranks: n is {n}, but the pool has at most {MAX_RANKS} processes: take 1 to {MAX_RANKS}")
    if hosts < 1 or n % hosts:
        raise ValueError(f"ranks: {n} ranks cannot be spread evenly over hosts={hosts}: take a divisor of {n}")
    strangers = sorted(set(expect_death) - set(range(n)))
    if strangers:
        raise ValueError(f"ranks: expect_death names {strangers}, but the ranks are 0 to {n - 1}")


def _error(outcome: Outcome) -> BaseException:
    if isinstance(outcome, Died):
        return RankDied(outcome.code)
    if isinstance(outcome, Hung):
        return RankHung(outcome.seconds, outcome.trace)
    try:
        error = pickle.loads(outcome.payload)
    except Exception:  # no payload, a class whose __init__ takes other arguments than its args, …
        return UnpicklableError(outcome.summary)
    return error if isinstance(error, BaseException) else UnpicklableError(outcome.summary)


def _send_tests_by_value() -> None:
    """Mark the test modules: pytest rewrites their assertions, and a rank that imported them would not."""
    for name in sys.modules.keys() - _SEEN:
        # A package would take all its modules with it.
        if name.startswith("tests.") and name not in _BY_NAME and not hasattr(sys.modules[name], "__path__"):
            cloudpickle.register_pickle_by_value(sys.modules[name])
        _SEEN.add(name)
