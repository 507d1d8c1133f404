"""``Await`` under shardrec's names: the same in eager mode and compiled, and there and back from ``LazyAwaitable``."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

import shardrec
from shardrec.pending import Await, LazyAwaitable, LazyNoWait, NoWait, awaitable_nowait, awaitable_wait
from tests.pending.counted import Counted, CountedPlain

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch.jit:DeprecationWarning")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    scripted: Callable[..., Any] = torch.jit.script(function)
    return scripted


def reloaded(function: Callable[..., Any]) -> Callable[..., Any]:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(function), buffer)
    buffer.seek(0)
    loaded: Callable[..., Any] = torch.jit.load(buffer)
    _ALIVE.append(loaded)
    return loaded


# An Await does not keep alive the code that it will run. What is compiled lives as long as the process, what is loaded
# only as long as somebody has it; to wait after that ends the process.
_ALIVE: list[Any] = []


def as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


modes = pytest.mark.parametrize("mode", [as_is, compiled, reloaded])


def double(x: Tensor) -> Tensor:
    return 2 * x


def delayed(x: Tensor) -> Await[Tensor]:
    return shardrec.pending.awaitable(double, x)


X = torch.tensor([1.0, -2.0])


@modes
def test_waited_for_inside(mode: Any) -> None:
    def run(x: Tensor) -> Tensor:
        pending = shardrec.pending.awaitable(double, x)
        again = delayed(x)
        return shardrec.pending.awaitable_wait(pending) + shardrec.wait(again) + shardrec.wait(pending)

    assert torch.equal(mode(run)(X), 6 * X)


@modes
def test_waited_for_outside(mode: Any) -> None:
    pending = mode(delayed)(X)
    assert isinstance(pending, torch._C._Await)
    assert torch.equal(awaitable_wait(pending), 2 * X)
    assert torch.equal(shardrec.wait(pending), 2 * X)


def test_acts_as_its_value_outside() -> None:
    pending = compiled(delayed)(X)
    assert pending.shape == X.shape
    assert torch.equal(pending.neg(), -2 * X)


def test_eager_mode_takes_what_torchscript_has_no_type_for() -> None:
    class Odd:
        def __init__(self) -> None:
            self.inside = {1, 2}

    pending = shardrec.pending.awaitable(lambda odd, more: odd.inside | more, Odd(), {3})
    assert awaitable_wait(pending) == {1, 2, 3}
    assert pending.__len__() == 3


def test_runs_once_and_only_when_waited_for() -> None:
    calls = []
    pending = shardrec.pending.awaitable(calls.append, 1)
    assert calls == []
    awaitable_wait(pending)
    awaitable_wait(pending)
    assert calls == [1]


@modes
def test_nowait(mode: Any) -> None:
    def run(x: Tensor, whether: bool) -> Await[Tensor]:
        if whether:
            return delayed(x)
        return shardrec.pending.awaitable_nowait(x)

    assert torch.equal(awaitable_wait(mode(run)(X, True)), 2 * X)
    assert torch.equal(awaitable_wait(mode(run)(X, False)), X)


@modes
def test_argument_of_a_function(mode: Any) -> None:
    def plus(pending: Await[Tensor], x: Tensor) -> Tensor:
        return shardrec.wait(pending) + x

    def run(x: Tensor) -> Tensor:
        pending = delayed(x)
        return plus(pending, x) + plus(pending, x)

    assert torch.equal(mode(run)(X), 6 * X)


@torch.jit.script
class Pair:
    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left = left
        self.right = right

    def total(self) -> Tensor:
        return self.left + self.right


def test_class_as_argument_and_as_value() -> None:
    def swap(pair: Pair) -> Pair:
        return Pair(pair.right, pair.left - pair.right)

    def run(x: Tensor) -> Tensor:
        pending = shardrec.pending.awaitable(swap, Pair(x, 3 * x))
        # Attributes and methods wait by themselves.
        return pending.left + pending.total() + shardrec.wait(pending).right

    assert torch.equal(compiled(run)(X), (3 + 1 - 2) * X)
    assert torch.equal(run(X), (3 + 1 - 2) * X)


@modes
def test_nested(mode: Any) -> None:
    def later(x: Tensor) -> Await[Await[Tensor]]:
        return shardrec.pending.awaitable(delayed, x)

    def run(x: Tensor) -> Tensor:
        return shardrec.wait(shardrec.wait(later(x)))

    assert torch.equal(mode(run)(X), 2 * X)
    assert torch.equal(awaitable_wait(awaitable_wait(mode(later)(X))), 2 * X)


@modes
def test_tuples_lists_and_dicts(mode: Any) -> None:
    def parts(x: Tensor, by: int) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        return x * by, [x, x], {"x": x}

    def run(x: Tensor) -> Tensor:
        pending = shardrec.pending.awaitable(parts, x, 5)
        first, many, named = shardrec.wait(pending)
        return first + many[1] + named["x"]

    def several(x: Tensor) -> tuple[Await[Tensor], list[Await[Tensor]], dict[str, Await[Tensor]]]:
        return delayed(x), [delayed(x), shardrec.pending.awaitable_nowait(x)], {"x": delayed(x)}

    assert torch.equal(mode(run)(X), 7 * X)
    first, many, named = mode(several)(X)
    assert torch.equal(shardrec.wait(first) + shardrec.wait(many[1]) + shardrec.wait(named["x"]), 5 * X)


@modes
def test_several_arguments_defaults_and_names(mode: Any) -> None:
    def weigh(x: Tensor, by: float, plus: int = 1) -> Tensor:
        return x * by + plus

    def run(x: Tensor) -> Tensor:
        one = shardrec.pending.awaitable(weigh, x, 2.0)
        two = shardrec.pending.awaitable(weigh, x, 2.0, 3)
        return shardrec.wait(one) + shardrec.wait(two)

    assert torch.equal(mode(run)(X), 4 * X + 4)


def test_methods_of_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(3.0))

        def later(self, x: Tensor) -> Tensor:
            return x * self.weight

        def forward(self, x: Tensor) -> Tensor:
            return shardrec.wait(shardrec.pending.awaitable(self.later, x))

    model = Model()
    for run in (model, compiled(model), reloaded(model)):
        result = run(X)
        result.sum().backward()
        assert torch.equal(result, 3 * X)
    assert model.weight.grad == 2 * X.sum()


def test_tracing_goes_through() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return awaitable_wait(delayed(x)) + shardrec.wait(awaitable_nowait(x))

    traced = torch.jit.trace(Model(), (X,))
    assert torch.equal(traced(3 * X), 9 * X)


def test_errors_come_out_of_the_wait() -> None:
    def refuse(x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x

    def run(x: Tensor) -> Tensor:
        pending = shardrec.pending.awaitable(refuse, x)
        return shardrec.wait(pending)

    for mode in (as_is, compiled):
        with pytest.raises(Exception, match="negative"):
            mode(run)(X)


def test_to_lazy() -> None:
    lazy = shardrec.pending.as_lazy(compiled(delayed)(X))
    assert isinstance(lazy, LazyAwaitable)
    assert not lazy.done()
    assert torch.equal(lazy + 1, 2 * X + 1)
    assert torch.equal(lazy, lazy.wait())
    assert shardrec.pending.as_lazy(lazy) is lazy
    assert lazy.done()


@pytest.mark.parametrize("pending", [3, NoWait(3), LazyNoWait(3), CountedPlain(3), Counted(3), awaitable_nowait(3)])
def test_to_lazy_and_to_await_from_everything(pending: Any) -> None:
    assert shardrec.pending.as_lazy(pending) + 1 == 4
    assert awaitable_wait(shardrec.pending.as_await(pending)) == 3


def test_to_await_waits_once_and_late() -> None:
    lazy = Counted(X)
    pending = shardrec.pending.as_await(lazy)
    assert lazy.waits == 0
    assert torch.equal(awaitable_wait(pending), X)
    assert torch.equal(awaitable_wait(pending), X)
    assert lazy.waits == 1
    assert shardrec.pending.as_await(pending) is pending


def test_to_await_keeps_the_error() -> None:
    def fail() -> int:
        raise ValueError("broken")

    lazy: LazyAwaitable[int] = LazyNoWait(1).then(lambda _: fail())
    with pytest.raises(ValueError, match="broken"):
        awaitable_wait(shardrec.pending.as_await(lazy))


def test_compiled_code_takes_an_await_of_what_is_there() -> None:
    def use(pending: Await[Tensor], named: Await[dict[str, Tensor]]) -> Tensor:
        return shardrec.wait(pending) + shardrec.wait(named)["x"]

    scripted = compiled(use)
    lazy = Counted(X)
    lazy.wait()
    assert torch.equal(scripted(shardrec.pending.as_await(lazy), shardrec.pending.as_await({"x": X})), 2 * X)
    with pytest.raises(RuntimeError, match="PyObject"):
        scripted(shardrec.pending.as_await(Counted(X)), shardrec.pending.as_await({"x": X}))


@modes
def test_fork_and_join(mode: Any) -> None:
    def run(x: Tensor) -> Tensor:
        futures = [shardrec.pending.fork(double, x), shardrec.pending.fork(double, 10 * x)]
        total = x
        for future in futures:
            total = total + shardrec.pending.join(future)
        return total

    assert torch.equal(mode(run)(X), 23 * X)


def test_futures_are_awaitables() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        forked = shardrec.pending.fork(double, X)
    assert torch.equal(shardrec.wait(forked), 2 * X)
    assert torch.equal(shardrec.pending.as_lazy(forked) + 1, 2 * X + 1)
    assert torch.equal(awaitable_wait(shardrec.pending.as_await(forked)), 2 * X)
    future: Future[int] = Future()
    lazy = shardrec.pending.as_lazy(future)
    assert not lazy.done()
    future.set_result(5)
    assert lazy.done()
    assert lazy == 5
    assert shardrec.pending.join(future) == 5


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


def test_keywords_are_bound_in_eager_mode_too() -> None:
    def program(x: Tensor) -> Tensor:
        return shardrec.pending.awaitable_wait(shardrec.pending.awaitable(scaled, x, by=3.0))

    given = torch.ones(2)
    assert torch.equal(program(given), 3 * given)
    assert torch.equal(torch.jit.script(program)(given), 3 * given)
    assert torch.jit._awaitable(scaled, given).fn() is scaled, "torch's own interface"


def test_an_eager_await_is_one_and_acts_as_its_value() -> None:
    pending: Any = shardrec.pending.awaitable(scaled, torch.arange(3.0), 2.0)
    assert isinstance(pending, shardrec.pending.Await)
    assert not isinstance(3, shardrec.pending.Await)
    assert (pending + 1).tolist() == (1 + pending).tolist() == [1, 3, 5]
    assert pending[1] == 2
    assert len(pending) == 3
    assert [float(one) for one in pending] == [0, 2, 4]
    assert (-pending @ pending) == -20
    assert pending.sum() == 6


def test_an_eager_await_that_failed_keeps_its_error() -> None:
    calls = []

    def failing(x: int) -> int:
        calls.append(x)
        raise ValueError("no value")

    pending: Any = shardrec.pending.awaitable(failing, 3)
    errors = []
    for use in (shardrec.wait, shardrec.pending.awaitable_wait, lambda one: one + 1, lambda one: one.real):
        with pytest.raises(ValueError, match="no value") as caught:
            use(pending)
        errors.append(caught.value)
    assert calls == [3]
    assert all(one is errors[0] for one in errors)


def test_an_eager_fork_of_what_is_lazy() -> None:
    """torch keeps values that TorchScript has types for; one that is lazy is kept as it is."""
    counted = Counted(torch.ones(2))
    future = shardrec.pending.fork(lambda: counted)
    assert counted.waits == 0, "it is on its way already"
    assert (shardrec.pending.join(future) + 1).tolist() == [2, 2]
    assert shardrec.pending.join(shardrec.pending.fork(scaled, torch.ones(2), by=2.0)).tolist() == [2, 2]
    with pytest.raises(ZeroDivisionError):
        shardrec.pending.fork(lambda: 1 // 0)
