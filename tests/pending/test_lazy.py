"""A lazy awaitable in the place of its value: torch functions, attributes, protocols."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedTensor

from shardrec.pending import Awaitable, LazyAwaitable, LazyNoWait
from tests.pending.counted import Counted, failing


def numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


TORCH_FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "first argument": (numbers(2), lambda x: torch.add(x, 1)),
    "second argument": (numbers(2), lambda x: torch.add(numbers(2), x)),
    "both": (numbers(2), lambda x: torch.add(x, x)),
    "keyword": (numbers(2), lambda x: torch.add(input=numbers(2), other=x)),
    "in a list": (numbers(2), lambda x: torch.cat([x, numbers(3)])),
    "in a tuple": (numbers(2), lambda x: torch.stack((x, numbers(2)))),
    "the list itself": ([numbers(2), numbers(3)], torch.cat),
    "number": (3, lambda x: torch.full((2,), x)),
    "alpha": (3, lambda x: torch.add(numbers(2), numbers(2), alpha=x)),
    "shape": ((3, 2), torch.zeros),
    "method of a tensor": (numbers(2), lambda x: numbers(2).dot(x)),
    "functional": (numbers(2, 4), lambda x: F.linear(x, numbers(3, 4), bias=numbers(3))),
    "functional with options": (numbers(2, 4), lambda x: F.layer_norm(x, (4,), eps=1e-3)),
    "python functional": (numbers(2, 4), lambda x: F.dropout(x, p=0.0, training=True)),
    "module": (numbers(2, 4), lambda x: nn.Sequential(nn.Identity(), nn.ReLU())(x)),
    "aten operator": (numbers(2), lambda x: torch.ops.aten.add.Tensor(numbers(2), x)),
    "foreach": (numbers(2), lambda x: torch._foreach_add([x, numbers(3)], 1)[0]),
    "einsum": (numbers(2, 4), lambda x: torch.einsum("ab,cb->ac", x, numbers(3, 4))),
    "index": (torch.tensor([0, 2]), lambda x: numbers(3, 4)[x]),
    "index, two dimensions": (torch.tensor([[0, 2], [1, 1]]), lambda x: numbers(3, 4)[x]),
    "index by mask": (torch.tensor([True, False, True]), lambda x: numbers(3, 4)[x]),
    "index in a tuple": (torch.tensor([0, 2]), lambda x: numbers(3, 4)[:, x]),
    "index by array": (np.array([[0, 2]]), lambda x: numbers(3, 4)[x]),
    "index by int": (1, lambda x: numbers(3, 4)[x]),
    "slice bound": (1, lambda x: numbers(3, 4)[:x]),
    "embedding": (torch.tensor([0, 2]), lambda x: F.embedding(x, numbers(3, 4))),
    "where": (torch.tensor([True, False]), lambda x: torch.where(x, numbers(2), 0.0)),
    "torch.tensor": (torch.tensor([1, 2]), lambda x: torch.as_tensor(x)),
    "as_tensor of a list": ([1, 2], torch.as_tensor),
    "as_tensor of an array": (np.ones(2), torch.as_tensor),
    "from_dlpack": (numbers(2), torch.from_dlpack),
}


@pytest.mark.parametrize("case", TORCH_FUNCTIONS)
def test_torch_function_gives_what_it_gives_for_the_value(case: str) -> None:
    value, function = TORCH_FUNCTIONS[case]
    lazy = Counted(value)
    torch.testing.assert_close(function(lazy), function(value), rtol=0, atol=0)
    assert lazy.waits == 1


def test_nested_arguments_are_found_at_any_depth() -> None:
    seen: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> None:
        seen.extend([args, kwargs])

    lazy, plain = Counted(1), [2, 3]
    args = ([lazy, {"a": (lazy, None)}], plain, slice(lazy, 5), torch.Size([1, 2]))
    LazyAwaitable.__torch_function__(record, (Counted,), args, {"key": {"deep": [lazy]}})
    assert seen == [([1, {"a": (1, None)}], [2, 3], slice(1, 5), torch.Size([1, 2])), {"key": {"deep": [1]}}]
    # A list without an awaitable may be one that the function is to fill.
    assert seen[0][1] is plain
    assert lazy.waits == 1


def test_named_tuple_argument_keeps_its_type() -> None:
    slope = torch.return_types.max((numbers(2), torch.tensor([0, 1])))
    pair = inspect.FullArgSpec(Counted(1), None, None, None, [], None, {})
    result = LazyAwaitable.__torch_function__(lambda each, _: each, (), (pair, slope))
    assert type(result) is inspect.FullArgSpec
    assert result.args == 1


def test_in_place_on_a_tensor() -> None:
    tensor = numbers(2)
    same = tensor
    tensor += Counted(numbers(2))
    assert tensor is same
    assert tensor.tolist() == [2.0, 4.0]
    tensor[0] = Counted(torch.tensor(9.0))
    tensor[Counted(torch.tensor([1]))] = 7.0
    assert tensor.tolist() == [9.0, 7.0]


def test_autograd_goes_through() -> None:
    weight = numbers(3).requires_grad_()
    lazy = Counted(weight * 2)
    (lazy * torch.ones(3) + torch.cat([lazy, lazy])[:3]).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0, 4.0]


def test_module_on_a_lazy_input_trains() -> None:
    torch.manual_seed(0)
    linear, inputs = nn.Linear(4, 2), numbers(3, 4)
    expected = linear(inputs)
    lazy = Counted(inputs)
    actual = linear(lazy)
    assert torch.equal(actual, expected)
    actual.sum().backward()
    assert linear.weight.grad is not None


def test_keyed_tensor() -> None:
    values = numbers(2, 5)
    lazy = Counted(KeyedTensor(keys=["f1", "f2"], length_per_key=[2, 3], values=values))
    assert lazy.waits == 0
    assert torch.equal(lazy["f1"], values[:, :2])
    assert torch.equal(lazy.values(), values)
    assert lazy.keys() == ["f1", "f2"]
    assert set(lazy.to_dict()) == {"f1", "f2"}
    assert torch.equal(torch.cat([lazy["f2"], lazy["f1"]], dim=1), values[:, [2, 3, 4, 0, 1]])
    assert torch.equal(KeyedTensor.regroup([lazy], [["f2"], ["f1"]])[0], values[:, 2:])
    assert lazy.waits == 1


def test_attributes_are_the_values() -> None:
    lazy = Counted(numbers(2, 3))
    assert lazy.shape == (2, 3)
    assert lazy.sum().item() == 21.0
    assert lazy._version == 0
    assert not hasattr(lazy, "no_such_name")
    lazy.requires_grad = True
    assert lazy.wait().requires_grad
    lazy.tag = "mine"
    assert lazy.wait().tag == "mine"
    del lazy.tag
    assert not hasattr(lazy.wait(), "tag")
    assert lazy.waits == 1


def test_its_own_attributes_stay_its_own() -> None:
    class Holder(LazyAwaitable[Any]):
        size = 1

        def __init__(self) -> None:
            self.before = 1
            super().__init__()
            self.after = 2

        def _wait_impl(self) -> Any:
            self.during = 3
            return type("Value", (), {})()

    holder = Holder()
    holder.before, holder.size, holder._private = 10, 20, 30
    assert (holder.before, holder.after, holder.size, holder._private) == (10, 2, 20, 30)
    assert not holder.done()
    holder.fresh = 4
    assert holder.done()
    assert holder.during == 3
    assert vars(holder.wait()) == {"fresh": 4}
    del holder._private
    assert "_private" not in vars(holder)


def test_lazy_value_assigned_to_an_attribute_or_item_is_forced() -> None:
    lazy: Any = Counted(type("Value", (), {})())
    lazy.number = Counted(5)
    assert vars(lazy.wait()) == {"number": 5}
    items = Counted([0])
    items[Counted(0)] = Counted(6)
    assert items.wait() == [6]


def test_misspelled_attribute_in_wait_impl_is_named() -> None:
    class Typo(LazyAwaitable[int]):
        def _wait_impl(self) -> int:
            result: int = self._wrok
            return result

    with pytest.raises(AttributeError, match=r"no attribute '_wrok', and its value cannot be asked while _wait_impl"):
        Typo().wait()


def test_missing_attribute_in_init_is_named() -> None:
    class Typo(LazyAwaitable[int]):
        def __init__(self) -> None:
            super().__init__()
            self.grop.size()

        def _wait_impl(self) -> int:
            return 0

    with pytest.raises(AttributeError, match=r"no attribute 'grop', and its value cannot be asked while __init__"):
        Typo()


@pytest.mark.parametrize(
    "name",
    ["__setstate__", "__torch_dispatch__", "__array_interface__", "__array_struct__", "__wrapped__", "_repr_html_"],
)
def test_protocol_probes_do_not_wait(name: str) -> None:
    lazy = Counted(np.ones(2))
    assert not hasattr(lazy, name)
    assert lazy.waits == 0


@pytest.mark.parametrize(
    "look", [repr, type, id, inspect.isawaitable, inspect.isclass, inspect.unwrap, callable, weakref.ref, gc.is_tracked]
)
def test_looking_at_it_does_not_wait(look: Any) -> None:
    lazy = Counted(1)
    look(lazy)
    assert isinstance(lazy, LazyAwaitable)
    assert isinstance(lazy, Awaitable)
    assert not isinstance(lazy, int)
    assert not torch.is_tensor(lazy)
    assert [lazy][0] is lazy
    assert lazy.waits == 0


def test_numpy_conversion() -> None:
    lazy = Counted(numbers(2))
    array = np.asarray(lazy)
    assert array.dtype == np.float32
    assert array.tolist() == [1.0, 2.0]
    assert np.asarray(lazy, dtype=np.int64).dtype == np.int64
    assert np.linalg.norm(lazy - 1) == 1.0
    assert np.add(lazy, array).tolist() == [2.0, 4.0]
    copied = np.array(lazy, copy=True)
    copied[0] = 9
    assert lazy.tolist() == [1.0, 2.0]
    assert np.from_dlpack(lazy).tolist() == [1.0, 2.0]
    assert np.arange(3)[Counted(np.array([0, 2]))].tolist() == [0, 2]
    assert lazy.waits == 1


@pytest.mark.parametrize("value", [np.ones(2), 3.0, [1.0, 2.0], np.float32(2)])
def test_numpy_operand_on_the_left(value: Any) -> None:
    array = np.array([1.0, 2.0])
    result = array + Counted(value)
    assert type(result) is np.ndarray
    assert result.tolist() == (array + value).tolist()


def test_none_is_not_waited_for_again() -> None:
    lazy = Counted(None)
    assert not lazy
    assert str(lazy) == "None"
    assert lazy == None  # noqa: E711 - the operator is what is tested
    assert lazy.waits == 1


def test_error_comes_from_every_use() -> None:
    error = ValueError("broken pipe")
    lazy = failing(error)
    uses: list[Any] = [
        lambda: lazy + 1,
        lambda: lazy.shape,
        lambda: torch.add(lazy, 1),
        lambda: lazy["f1"],
        lambda: list(lazy),
        lambda: np.asarray(lazy),
        lambda: str(lazy),
        lambda: lazy.then(len).wait(),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="broken pipe") as caught:
            use()
        assert caught.value is error
    assert lazy.waits == 1


def test_then_is_lazy_and_calls_once() -> None:
    calls: list[int] = []

    def double(value: int) -> int:
        calls.append(value)
        return value * 2

    lazy = Counted(3)
    doubled = lazy.then(double)
    assert isinstance(doubled, LazyAwaitable)
    text = doubled.then(str)
    assert (lazy.waits, calls) == (0, [])
    assert not doubled.done()
    assert text.wait() == "6"
    assert doubled + 1 == 7
    assert (lazy.waits, calls) == (1, [3])


def test_then_is_done_as_soon_as_its_parent() -> None:
    lazy = Counted(3)
    after = lazy.then(str)
    assert not after.done()
    lazy.wait()
    assert after.done()
    assert after.wait() == "3"
    assert after.done()


def test_then_keeps_its_own_error() -> None:
    lazy = Counted(0)
    broken = lazy.then(lambda value: 1 // value)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.wait()
    assert lazy.wait() == 0


def test_then_lets_go_of_its_parent() -> None:
    lazy = Counted(bytearray(8))
    gone = weakref.ref(lazy)
    length = lazy.then(len)
    assert length.wait() == 8
    del lazy
    gc.collect()
    assert gone() is None


def test_copies_hold_their_own_value() -> None:
    lazy = LazyNoWait([1])
    for same in (copy.copy(lazy), copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy))):
        same.append(2)
        assert same.wait() == [1, 2]
    assert lazy.wait() == [1]


def test_call_and_context_manager() -> None:
    class Gate:
        closed = False

        def __call__(self, a: int, b: int = 0) -> int:
            return a + b

        def __enter__(self) -> str:
            return "inside"

        def __exit__(self, *error: object) -> bool:
            self.closed = True
            return True

    lazy = Counted(Gate())
    assert lazy(1, b=2) == 3
    with lazy as inside:
        assert inside == "inside"
        raise KeyError("swallowed by the gate")
    assert lazy.closed
    with pytest.raises(TypeError, match="'int' object does not support the context manager protocol"), Counted(1):
        pass


def test_dir_lists_the_value_and_itself() -> None:
    assert {"wait", "then", "sum", "shape"} <= set(dir(Counted(numbers(2))))


def test_torchrec_spelling_of_force() -> None:
    assert LazyAwaitable._wait_async(Counted(1)) == 1
    assert LazyAwaitable._wait_async(2) == 2


def test_compiled_function_takes_one() -> None:
    lazy = Counted(numbers(2))
    compiled = torch.compile(lambda x, y: torch.cat([x, y]) * 2, backend="eager")
    assert compiled(lazy, numbers(1)).tolist() == [2.0, 4.0, 2.0]
    assert lazy.waits == 1
