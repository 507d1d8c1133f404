"""Stands for hypothesis while TorchRec's tests are imported.

Its tests draw combinations of a few settings each. Here they are drawn from the product of a test's strategies, with
the test's name as the seed, and each is run on its own: one that fails hides no other, and a run can be repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from random import Random
from types import ModuleType
from typing import Any

__all__ = ["Unsatisfied", "examples_of", "stand_in"]


class Unsatisfied(Exception):
    """An example is not one of the test's (``assume``)."""


class Strategy:
    """The values that an argument of a test may have."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    def map(self, function: Callable[[Any], Any]) -> Strategy:
        return Strategy(map(function, self.values))

    def filter(self, function: Callable[[Any], bool]) -> Strategy:
        return Strategy(filter(function, self.values))


def _given(*positional: Strategy, **named: Strategy) -> Callable[[Any], Any]:
    def decorate(test: Any) -> Any:
        names = test.__code__.co_varnames[: test.__code__.co_argcount]
        test.strategies = dict(zip(names[len(names) - len(positional) :], positional, strict=True)) | named
        return test

    return decorate


class _Settings:
    """Whoever runs the tests says how many examples there are."""

    phases = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, test: Any) -> Any:
        return test

    @staticmethod
    def register_profile(*_: Any, **__: Any) -> None:
        """There is one."""

    load_profile = register_profile


def _assume(condition: object) -> bool:
    if not condition:
        raise Unsatisfied
    return True


class _Any:
    """Whatever is read of it, for ``HealthCheck``, ``Phase`` and ``Verbosity``."""

    def __getattr__(self, name: str) -> None:
        return None


def _ends_and_middle(first: float, last: float) -> Strategy:
    middle = (first + last) // 2 if isinstance(first, int) and isinstance(last, int) else (first + last) / 2
    return Strategy(dict.fromkeys([first, middle, last]))


def stand_in() -> None:
    """Make ``import hypothesis`` give this, in this process."""
    module, strategies = ModuleType("hypothesis"), ModuleType("hypothesis.strategies")
    vars(strategies).update(
        SearchStrategy=Strategy,
        booleans=lambda: Strategy([False, True]),
        floats=lambda min_value=0.0, max_value=1.0, **_: _ends_and_middle(min_value, max_value),
        integers=lambda min_value=0, max_value=10: _ends_and_middle(min_value, max_value),
        just=lambda value: Strategy([value]),
        lists=lambda elements, max_size=3, **_: Strategy([elements.values[:max_size]]),
        none=lambda: Strategy([None]),
        one_of=lambda *each: Strategy(value for strategy in each for value in strategy.values),
        sampled_from=Strategy,
        tuples=lambda *each: Strategy(product(*(strategy.values for strategy in each))),
    )
    vars(module).update(
        HealthCheck=_Any(),
        Phase=_Any(),
        Verbosity=_Any(),
        assume=_assume,
        given=_given,
        settings=_Settings,
        strategies=strategies,
    )
    sys.modules.update({"hypothesis": module, "hypothesis.strategies": strategies})


def examples_of(test: Any) -> Iterator[Mapping[str, Any]]:
    """All examples of a test, in a drawn order; of a test without strategies, one without arguments."""
    strategies: dict[str, Strategy] = getattr(test, "strategies", {})
    values = list(product(*(strategy.values for strategy in strategies.values())))
    Random(test.__name__).shuffle(values)
    for each in values:
        yield dict(zip(strategies, each, strict=True))
