"""Python's operators and protocols on a lazy awaitable, against the same on the value."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pending.counted import Counted

ARITHMETIC = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, divmod,
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip
BITS = [operator.and_, operator.or_, operator.xor]
SHIFTS = [operator.lshift, operator.rshift]
IN_PLACE = [
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
]  # fmt: skip
IN_PLACE_BITS = [operator.iand, operator.ior, operator.ixor]
UNARY: list[Callable[[Any], Any]] = [
    operator.neg, operator.pos, operator.abs, operator.not_, bool, int, float, complex, math.trunc, math.floor,
    math.ceil, round, hash, str,
]  # fmt: skip

INTEGERS = st.integers(-(2**40), 2**40)
FLOATS = st.floats(-1e6, 1e6)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns, or the type of what it raises."""
    try:
        result = function(*args)
    except Exception as error:
        return type(error)
    return type(result), result


def assert_same_first(function: Callable[..., Any], first: Any, *others: Any) -> None:
    """``function`` on a lazy first argument does what it does on the value.

    For functions that ask only the first argument's type: ``[1, 2][lazy]`` takes nothing but an index.
    """
    lazy = Counted(first)
    assert outcome(function, lazy, *others) == outcome(function, first, *others)
    assert lazy.waits == 1


def assert_same(function: Callable[..., Any], *values: Any) -> None:
    """The same for each argument, one at a time and all together."""
    expected = outcome(function, *values)
    for position in range(len(values)):
        lazy = [Counted(value) if number == position else value for number, value in enumerate(values)]
        assert outcome(function, *lazy) == expected
        assert lazy[position].waits == 1
    assert outcome(function, *map(Counted, values)) == expected


@pytest.mark.parametrize("function", ARITHMETIC + BITS)
@given(left=INTEGERS, right=INTEGERS)
def test_binary_on_integers(function: Callable[..., Any], left: int, right: int) -> None:
    assert_same(function, left, right)


@pytest.mark.parametrize("function", ARITHMETIC)
@given(left=FLOATS, right=FLOATS)
def test_binary_on_floats(function: Callable[..., Any], left: float, right: float) -> None:
    assert_same(function, left, right)


@pytest.mark.parametrize("function", SHIFTS)
@given(left=INTEGERS, right=st.integers(-2, 70))
def test_shifts(function: Callable[..., Any], left: int, right: int) -> None:
    assert_same(function, left, right)


@given(base=st.integers(-9, 9), exponent=st.integers(-3, 9), modulus=st.integers(1, 99))
def test_powers(base: int, exponent: int, modulus: int) -> None:
    assert_same(operator.pow, base, exponent)
    lazy = pow(Counted(base), Counted(abs(exponent)), Counted(modulus))
    assert lazy == pow(base, abs(exponent), modulus)


@pytest.mark.parametrize("function", IN_PLACE + IN_PLACE_BITS)
@given(left=INTEGERS, right=INTEGERS)
def test_in_place_on_integers(function: Callable[..., Any], left: int, right: int) -> None:
    assert_same(function, left, right)


@pytest.mark.parametrize("function", UNARY)
@given(value=INTEGERS | FLOATS)
def test_unary(function: Callable[..., Any], value: float) -> None:
    assert_same(function, value)


@given(value=INTEGERS)
def test_integer_only(value: int) -> None:
    assert_same(operator.invert, value)
    assert_same(operator.index, value)
    assert_same(lambda number: round(number, -2), value)
    assert_same(lambda number: f"{number:>+12,}", value)


@given(value=FLOATS)
def test_format_and_round_of_floats(value: float) -> None:
    assert_same(lambda number: f"{number:.3f} {number}", value)
    assert_same(lambda number: round(number, 2), value)


@given(items=st.lists(st.integers(), max_size=6), key=st.integers(-7, 7), bounds=st.slices(6))
def test_sequences(items: list[int], key: int, bounds: slice) -> None:
    assert_same(operator.getitem, items, key)
    assert_same_first(operator.getitem, items, bounds)
    assert_same_first(operator.contains, items, key)
    assert_same(len, items)
    assert_same(lambda each: list(iter(each)), items)
    assert_same(lambda each: list(reversed(each)), items)
    assert_same(lambda each: [*each], items)
    assert_same(operator.add, items, items)
    assert_same(operator.mul, items, key)
    assert_same(bool, items)


@given(items=st.lists(st.integers(), min_size=1, max_size=6), key=st.integers(-7, 7))
def test_writing_items(items: list[int], key: int) -> None:
    for write in (lambda each: operator.setitem(each, key, 5), lambda each: operator.delitem(each, key)):
        plain, lazy = list(items), Counted(list(items))
        assert outcome(write, lazy) == outcome(write, plain)
        assert lazy.wait() == plain


@given(items=st.dictionaries(st.text(max_size=3), st.integers(), max_size=4), key=st.text(max_size=3))
def test_mappings(items: dict[str, int], key: str) -> None:
    assert_same(operator.getitem, items, key)
    assert_same(operator.contains, items, key)
    assert_same(len, items)
    assert_same(sorted, items)
    assert_same(operator.or_, items, {"z": 1})
    assert dict(Counted(items)) == items
    assert dict(**Counted(items)) == items


@given(text=st.text(max_size=4), other=st.text(max_size=4))
def test_text(text: str, other: str) -> None:
    assert_same(operator.add, text, other)
    assert_same_first(operator.contains, text, other)
    assert_same(lambda each: f"{each:>8}", text)
    assert_same(lambda each: "%s" % each, text)  # noqa: UP031 - the operator is what is tested
    assert bytes(Counted(text.encode("utf-8", "replace"))) == text.encode("utf-8", "replace")


def test_iterator_value() -> None:
    lazy = Counted(iter([1, 2, 3]))
    assert next(lazy) == 1
    assert list(lazy) == [2, 3]


@pytest.mark.parametrize("function", [len, iter, operator.neg, hash, operator.index, reversed])
def test_unsupported_is_the_values_own_type_error(function: Callable[[Any], Any]) -> None:
    """A value that cannot do it gives the error that it always gives, with its own type's name in it."""
    value = [object()] if function in (operator.neg, hash, operator.index) else 1.5
    if function is operator.neg:
        value = "text"
    with pytest.raises(TypeError) as expected:
        function(value)
    with pytest.raises(TypeError) as actual:
        function(Counted(value))
    assert str(actual.value) == str(expected.value)


TENSOR_OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.matmul, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip


@pytest.mark.parametrize("function", TENSOR_OPERATORS)
@given(data=st.data())
def test_tensors(function: Callable[..., Any], data: st.DataObject) -> None:
    numbers = st.lists(st.integers(1, 9), min_size=3, max_size=3)
    left, right = (torch.tensor(data.draw(numbers), dtype=torch.float32) for _ in range(2))
    expected = function(left, right)
    for a, b in ((Counted(left), right), (left, Counted(right)), (Counted(left), Counted(right))):
        assert torch.equal(function(a, b), expected)
    if function is not operator.matmul:
        assert torch.equal(function(2.0, Counted(right)), function(2.0, right))
        assert torch.equal(function(Counted(2.0), right), function(2.0, right))


@pytest.mark.parametrize("function", [operator.iadd, operator.isub, operator.imul, operator.itruediv])
def test_in_place_writes_to_the_tensor_behind(function: Callable[..., Any]) -> None:
    value = torch.tensor([2.0, 4.0])
    lazy = Counted(value)
    expected = function(value.clone(), 2.0)
    result = function(lazy, Counted(2.0))
    assert result is value
    assert torch.equal(value, expected)


def test_length_of_an_awaited_index_is_refused() -> None:
    """With a length, torch would silently take x[lazy] for x[tuple(lazy)]."""
    for value in (torch.tensor([0, 1]), torch.tensor([True]), torch.tensor([0, 1]).numpy()):
        with pytest.raises(TypeError, match=r"use lazy.shape\[0\]"):
            len(Counted(value))
        assert list(Counted(value)) == list(value)
    assert len(Counted(torch.ones(3))) == 3
    assert len(Counted(torch.ones(3).numpy())) == 3
