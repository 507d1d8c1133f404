"""Modules that return something pending, with twins, which tell when they issue and when they are waited for.

The same events come from the eager module and from the scripted one, so that the one says what the other has to do.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

import shardrec
from shardrec.pending import Await, LazyAwaitable, LazyGetItemMixin, awaitable

__all__ = [
    "BATCH",
    "WIDTH",
    "Bags",
    "Numbers",
    "Rows",
    "Three",
    "assert_equal",
    "batch",
    "check",
    "events_of",
    "record",
    "reload",
    "script",
]

BATCH, WIDTH = 3, 4

_EVENTS: list[str] = []

# An operator, so that Python sees it, of which TorchScript's optimizer has to think that it may do anything: it neither
# drops it nor moves it.
_LIBRARY = torch.library.Library("shardrec_tests", "DEF")
_LIBRARY.define("record(Tensor value, str event) -> Tensor", "CONSERVATIVE")


def _record(value: Tensor, event: str) -> Tensor:
    _EVENTS.append(event)
    return value.clone()


_LIBRARY.impl("record", _record, "CompositeImplicitAutograd")


def record(value: Tensor, event: str) -> Tensor:
    return torch.ops.shardrec_tests.record(value, event)


def finish_bags(values: Tensor, name: str, keys: list[str]) -> KeyedTensor:
    return KeyedTensor(keys, [2, 2], record(values, "wait " + name))


def finish_rows(values: Tensor, name: str, keys: list[str]) -> dict[str, JaggedTensor]:
    values = record(values, "wait " + name)
    found: dict[str, JaggedTensor] = {}
    for number, key in enumerate(keys):
        lengths = torch.ones(values.size(0), dtype=torch.int64)
        found[key] = JaggedTensor(values[:, 2 * number : 2 * number + 2], lengths=lengths)
    return found


def finish_numbers(values: Tensor, name: str, keys: list[str]) -> Tensor:
    return record(values, "wait " + name)


class _Lazy(LazyAwaitable[Any]):
    def __init__(self, finish: Any, *args: Any) -> None:
        super().__init__()
        self._finish, self._args = finish, args

    def _wait_impl(self) -> Any:
        return self._finish(*self._args)


class _LazyItems(LazyGetItemMixin[str, Any], _Lazy):
    pass


class _Lookup(nn.Module):
    """A weight times the input; the eager half of the examples."""

    def __init__(self, name: str, keys: str = "fg") -> None:
        super().__init__()
        self.name = name
        self.keys = list(keys)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def issue(self, x: Tensor) -> Tensor:
        return record(x @ self.weight, "issue " + self.name)


class Bags(_Lookup):
    """Like a ShardedEmbeddingBagCollection: a KeyedTensor of keys f and g, two columns each."""

    def forward(self, x: Tensor) -> LazyAwaitable[KeyedTensor]:
        return _Lazy(finish_bags, self.issue(x), self.name, self.keys)

    def scripted_twin(self) -> nn.Module:
        return BagsTwin(self)


class Rows(_Lookup):
    """Like a ShardedEmbeddingCollection: a dict of JaggedTensors, whose items are lazy, too."""

    def forward(self, x: Tensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return _LazyItems(finish_rows, self.issue(x), self.name, self.keys)

    def scripted_twin(self) -> nn.Module:
        return RowsTwin(self)


class Numbers(_Lookup):
    """A plain tensor."""

    def forward(self, x: Tensor) -> LazyAwaitable[Tensor]:
        return _Lazy(finish_numbers, self.issue(x), self.name, self.keys)

    def scripted_twin(self) -> nn.Module:
        return NumbersTwin(self)


class _Twin(nn.Module):
    def __init__(self, original: _Lookup) -> None:
        super().__init__()
        self.name = original.name
        self.keys = original.keys
        self.weight = original.weight


class BagsTwin(_Twin):
    def forward(self, x: Tensor) -> Await[KeyedTensor]:
        return awaitable(finish_bags, record(x @ self.weight, "issue " + self.name), self.name, self.keys)


class RowsTwin(_Twin):
    def forward(self, x: Tensor) -> Await[dict[str, JaggedTensor]]:
        return awaitable(finish_rows, record(x @ self.weight, "issue " + self.name), self.name, self.keys)


class NumbersTwin(_Twin):
    def forward(self, x: Tensor) -> Await[Tensor]:
        return awaitable(finish_numbers, record(x @ self.weight, "issue " + self.name), self.name, self.keys)


def batch() -> Tensor:
    """An input of the modules: (BATCH, WIDTH)."""
    return torch.randn(BATCH, WIDTH)


def script(model: nn.Module) -> torch.jit.ScriptModule:
    """``shardrec.script``, its graphs checked by torch's own verifier."""
    scripted = shardrec.script(model)
    for module in scripted.modules():
        for name in module._c._method_names():
            module._c._get_method(name).graph.lint()
    return scripted


def reload(scripted: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Saved and loaded."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(scripted, buffer)
        buffer.seek(0)
        return torch.jit.load(buffer)


def events_of(model: nn.Module, *args: Any) -> tuple[Any, list[str]]:
    """What a model returns, everything in it waited for, and what happened on the way until it returned."""
    _EVENTS.clear()
    result = model(*args)
    events = list(_EVENTS)
    return _plain(result), events


def check(model: nn.Module, *args: Any) -> torch.jit.ScriptModule:
    """A model scripted; asserts that it does what it does in eager mode, in the same order, also after save and load.

    The order may differ in what is waited for when all is done: eager mode may return something pending.
    """
    expected, order = events_of(model, *args)
    scripted = script(model)
    for again in (scripted, scripted, reload(scripted)):
        got, its_order = events_of(again, *args)
        assert its_order[: len(order)] == order
        assert all(event.startswith("wait") for event in its_order[len(order) :])
        assert_equal(got, expected)
    return scripted


def _plain(value: Any) -> Any:
    if isinstance(value, LazyAwaitable):
        return _plain(value.wait())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, JaggedTensor) or type(value).__name__ == "JaggedTensor":
        return [value.values(), value.lengths()]
    if hasattr(value, "to_dict"):
        return dict(value.to_dict())
    return value


def assert_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for mine, its in zip(got, expected, strict=True):
            assert_equal(mine, its)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, its in expected.items():
            assert_equal(got[key], its)
    else:
        assert got == expected


class Three(nn.Module):
    """The base of the models: three lookups of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Bags("a"), Bags("b"), Bags("c")
        self.r, self.s = Rows("r"), Rows("s")
        self.m, self.n = Numbers("m"), Numbers("n")
