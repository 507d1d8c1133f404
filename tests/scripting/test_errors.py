"""What cannot be scripted: the message has the user's file, line and remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrec
from shardrec.pending import Await, LazyAwaitable
from shardrec.scripting import ScriptError
from tests.scripting.lookups import Bags, batch


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of a function that has a text in it."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (number for number, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{first + offset}"


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = Bags("bags")


def test_methods_of_the_lazy_awaitable() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            pending = self.bags(x)
            return pending.wait().values()

    with pytest.raises(ScriptError) as raised:
        shardrec.script(Model())
    text = str(raised.value)
    assert text.startswith(f"Model cannot be scripted at {line_of(Model.forward, '.wait()')}: ")
    assert "lacks .wait(): write shardrec.wait(value)" in text


def test_annotated_as_lazy_awaitable() -> None:
    class Through(nn.Module):
        def forward(self, pending: LazyAwaitable[Tensor]) -> Tensor:
            return pending

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.through = Through()

        def forward(self, x: Tensor) -> Tensor:
            return self.through(self.bags(x))

    with pytest.raises(ScriptError, match="annotate with the type of the value, such as KeyedTensor") as raised:
        shardrec.script(Model())
    assert line_of(Through.forward, "def forward") in str(raised.value)


def test_what_torchscript_has_no_words_for() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with open("file"):
                yield x

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.bags(x).values())

    with pytest.raises(ScriptError, match="the Python that TorchScript knows") as raised:
        shardrec.script(Model())
    assert "test_errors.py:" in str(raised.value).split("TorchScript says")[0]


def test_a_function_of_the_users_that_is_called() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return helper(x)

    with pytest.raises(ScriptError) as raised:
        shardrec.script(Model())
    assert f"at {line_of(helper, 'no_such')}" in str(raised.value)


def helper(x: Tensor) -> Tensor:
    return x.no_such_method()  # type: ignore[operator]


def test_errors_leave_nothing_behind() -> None:
    """A function that was compiled before the error is of torch's operators, and torch.jit.script takes it."""

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return waits(x) + self.bags(x).nothing

    with pytest.raises(ScriptError):
        shardrec.script(Model())
    with pytest.warns(DeprecationWarning):
        compiled = torch.jit.script(waits)
    x = batch()
    assert torch.equal(compiled(x), 2 * x)
    assert compiled.graph.findNode("aten::wait") is not None


def double(x: Tensor) -> Tensor:
    return 2 * x


def waits(x: Tensor) -> Tensor:
    return shardrec.wait(shardrec.pending.fork(double, x))


def test_no_module() -> None:
    with pytest.raises(shardrec.ConfigError, match=r"takes an nn\.Module, not function"):
        shardrec.script(double)  # type: ignore[arg-type]


class Twinned(nn.Module):
    def __init__(self, twin: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_twin", twin)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def scripted_twin(self) -> nn.Module:
        twin: nn.Module = self._twin
        return twin


class Unannotated(nn.Module):
    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        return shardrec.pending.awaitable(double, x)


class Taken(nn.Module):
    def issue(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Await[Tensor]:
        return shardrec.pending.awaitable(double, x)


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Await[Tensor]:
        return shardrec.pending.awaitable(break_down, x)


def break_down(x: Tensor) -> Tensor:
    raise ValueError("rank 1 is gone")


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Await[NoSuchType]:  # type: ignore[name-defined]  # noqa: F821
        return shardrec.pending.awaitable(double, x)


@pytest.mark.parametrize(
    "twin, words",
    [
        (3, "returned a int: return an nn.Module"),
        (Taken(), "has an attribute 'issue'"),
        (Unknown(), "cannot be resolved .*NoSuchType"),
    ],
)
def test_twins_that_break_the_protocol(twin: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Twinned(twin))
    with pytest.raises(ScriptError, match=words):
        shardrec.script(model)


def test_hooks_that_the_twin_would_not_run() -> None:
    model = Base()
    model.bags.register_forward_hook(lambda module, args, result: result)
    with pytest.raises(ScriptError, match=r"bags \(Bags\) has forward hooks, .* take them off"):
        shardrec.script(model)


def test_a_twin_that_does_not_say_what_it_returns() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twinned = Twinned(Unannotated())

        def forward(self, x: Tensor) -> Tensor:
            return self.twinned(x) + 1

    with pytest.raises(ScriptError, match=r"annotate its forward with -> Await\[T\]") as raised:
        shardrec.script(Model())
    assert f"at {line_of(Model.forward, '+ 1')}" in str(raised.value)


def test_an_error_in_a_wait_is_told_at_the_line_that_needed_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.breaking = Twinned(Breaking())

        def forward(self, x: Tensor) -> Tensor:
            pending = self.breaking(x)
            hidden = x.relu()
            return hidden - pending

    scripted: Any = shardrec.script(Model())
    with pytest.raises(torch.jit.Error) as raised:
        scripted(batch())
    assert "rank 1 is gone" in str(raised.value)
    assert f"line {line_of(Model.forward, 'hidden -').rsplit(':')[-1]}, in forward" in str(raised.value)
