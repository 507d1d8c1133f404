"""Stash and pop, outside of a pipeline."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError, PipelineError
from shardrec.pending import LazyNoWait
from shardrec.pipeline.skip import (
    Namespace,
    Skippable,
    SkipTracker,
    current_skip_tracker,
    pop,
    skippable,
    stash,
    use_skip_tracker,
)
from tests.pipeline.skip.layers import Both, Carry, Drop, Pop, Scale, Stash, popping, stashing


def yielding(*what: Any, **declared: Any) -> Skippable:
    """A skippable whose forward yields these."""

    class Yields(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield from (one for one in what)
            return input

    return skippable(**declared)(Yields)()


def test_a_value_goes_from_stash_to_pop_and_so_does_its_gradient() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    output = nn.Sequential(Stash(), nn.ReLU(), Pop())(x)
    assert output.tolist() == [11.0, 22.0]
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [11.0, 11.0]


def test_a_plain_forward_is_let_through() -> None:
    assert Scale()(torch.ones(2)).tolist() == [2.0, 2.0]


def test_none_is_stashed() -> None:
    assert nn.Sequential(Drop(), Carry())(torch.zeros(1)).item() == 1


def test_an_awaitable_is_handed_on_as_it_is() -> None:
    lazy = LazyNoWait(torch.ones(2))
    first = yielding(stash("x", lazy), stash=["x"])
    assert nn.Sequential(first, Pop())(torch.zeros(2)).tolist() == [10.0, 10.0]


def test_input_and_output_may_be_tuples() -> None:
    @skippable(stash=["a"])
    class First(nn.Module):
        def forward(self, input: tuple[Tensor, Tensor]) -> Any:
            yield stash("a", input[1])
            return input[0], (input[1],)

    @skippable(pop=["a"])
    class Last(nn.Module):
        def forward(self, input: tuple[Tensor, tuple[Tensor]]) -> Any:
            return input[0] + input[1][0] + (yield pop("a"))

    assert nn.Sequential(First(), Last())((torch.ones(1), torch.ones(1))).item() == 3


def test_the_same_name_in_two_namespaces_that_cross() -> None:
    #   stash ns1 ──────── pop ns1
    #        stash ns2 ───────── pop ns2
    ns1, ns2 = Namespace(), Namespace()
    model = nn.Sequential(Stash().isolate(ns1), Scale(), Stash().isolate(ns2), Pop().isolate(ns1), Pop().isolate(ns2))
    # 1 -> stash 1 -> 2 -> stash 2 -> 2 + 10 -> 12 + 20
    assert model(torch.ones(1)).item() == 32


def test_the_interface_that_torchgpipe_published() -> None:
    layer = Both(4)
    assert isinstance(layer, Skippable)
    assert issubclass(Both, Skippable)
    assert Both.__name__ == "Both"
    assert Both.module_cls.__name__ == "Both"
    assert Both.stashable_names == frozenset({"late"})
    assert Both.poppable_names == frozenset({"early"})
    assert isinstance(layer.module, Both.module_cls)
    assert layer.namespaces == {}
    assert layer.namespaced("late") == (None, "late")
    ns = Namespace()
    assert layer.isolate(ns) is layer
    assert list(layer.stashable()) == [(ns, "late")]
    assert list(layer.poppable()) == [(ns, "early")]
    assert repr(Scale()) == "@skippable(Scale())"
    stashed: dict[str, Any] = {}
    layer.dispatch(torch.zeros(1, 4), stashed.__setitem__, lambda name: torch.ones(1, 4))
    assert stashed["late"].tolist() == [[2.0] * 4]


def test_isolate_only_some_names_then_the_others() -> None:
    first, second = Namespace(), Namespace()
    layer = Both().isolate(first, only=["early"])
    assert [layer.namespaced(name)[0] for name in ("early", "late")] == [first, None]
    layer.isolate(second, only=["late"])
    assert [layer.namespaced(name)[0] for name in ("early", "late")] == [first, second]
    layer.isolate(second)
    assert [layer.namespaced(name)[0] for name in ("early", "late")] == [second, second]


def test_isolate_refuses_what_is_not_declared() -> None:
    with pytest.raises(ConfigError, match=r"isolate\(only=\['eraly'\]\).*declares \['early', 'late'\]"):
        Both().isolate(Namespace(), only=["eraly"])
    with pytest.raises(TypeError, match=r"only='early': give a list"):
        Both().isolate(Namespace(), only="early")


def test_records_are_slotted_and_small() -> None:
    for record in (stash("a", None), pop("a")):
        assert not hasattr(record, "__dict__")
    assert stash("a", 1).tensor == 1
    assert pop("a").name == "a"


class Plain(nn.Module):
    """For decorations that fail."""


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("x", TypeError, r"stash='x': give a list of names, such as \['x'\]"),
        ([1], TypeError, r"stash=\[1\]: 1 is a int, and skip names are strings"),
        (["a", "b", "a"], ConfigError, r"'a' is there twice"),
    ],
)
def test_bad_declarations(names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        skippable(stash=names)(Plain)
    with pytest.raises(error, match=message.replace("stash", "pop")):
        skippable(pop=names)(Plain)


def test_only_modules_are_decorated() -> None:
    with pytest.raises(TypeError, match=r"@skippable decorates an nn.Module class"):
        skippable(stash=["x"])(dict)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"@skippable decorates an nn.Module class"):
        skippable(stash=["x"])(nn.ReLU())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (yielding(stash("y", None)), r"Yields.forward yielded stash\('y'\), which is not declared.*stash=\['y'\]"),
        (yielding(pop("y")), r"Yields.forward yielded pop\('y'\), which is not declared.*pop=\['y'\]"),
        (yielding(stash=["b", "a"]), r"Yields declares stash of 'a', 'b', and its forward ended without"),
        (yielding(pop=["a"]), r"Yields declares pop of 'a', and its forward ended without"),
        (yielding(pop("a"), pop=["a"]), r"Yields.forward popped 'a', which no earlier layer has stashed: put"),
        (
            yielding(pop("a"), pop=["a"]).isolate(Namespace()),
            r"Yields.forward popped 'a', which no earlier layer has stashed in that namespace",
        ),
        (yielding(stash("a", None), stash("a", None), stash=["a"]), r"yielded stash\('a'\) twice"),
    ],
)
def test_faults_at_run_time(layer: Skippable, message: str) -> None:
    with use_skip_tracker(SkipTracker()), pytest.raises(PipelineError, match=message) as caught:
        layer(torch.zeros(1))
    assert isinstance(caught.value, RuntimeError)


def test_popped_twice() -> None:
    model = nn.Sequential(Stash(), yielding(pop("x"), pop("x"), pop=["x"]))
    with pytest.raises(PipelineError, match=r"yielded pop\('x'\) twice"):
        model(torch.zeros(1))


@pytest.mark.parametrize("thing", [None, "x", torch.zeros(1)])
def test_what_is_yielded_is_a_stash_or_a_pop(thing: Any) -> None:
    with pytest.raises(TypeError, match=rf"Yields.forward yielded {type(thing).__name__}: a skippable's forward"):
        yielding(thing)(torch.zeros(1))


def test_a_stashed_tensor_is_not_changed_in_place() -> None:
    model = nn.Sequential(Stash(), nn.ReLU(inplace=True), Pop())
    with pytest.raises(PipelineError, match=r"the tensor stashed as 'x' was changed in place.*x\.clone\(\)"):
        model(torch.zeros(2))
    tracker = SkipTracker()
    tracker.save((None, "x"), {"in a nest": [x := torch.zeros(2)]})
    x.add_(1)
    with pytest.raises(PipelineError, match="'x' was changed in place"):
        tracker.load((None, "x"))
    with torch.inference_mode():  # whose tensors count no changes
        assert nn.Sequential(Stash(), Pop())(torch.ones(1)).item() == 11


def test_a_failed_forward_leaves_the_next_one_alone() -> None:
    class Broken(nn.Module):
        fails = True

        def forward(self, input: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("on purpose")
            return input

    broken = Broken()
    model = nn.Sequential(Stash(), broken, Pop())
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.ones(1))
    broken.fails = False
    assert model(torch.full((1,), 2.0)).item() == 22


def test_nothing_keeps_what_was_popped() -> None:
    alive: list[bool] = []
    refs: list[weakref.ref[Any]] = []

    class First(nn.Module):
        def forward(self, input: Tensor) -> Any:
            skip = input * 2
            refs.append(weakref.ref(skip))
            yield stash("x", skip)
            del skip
            return input

    class Last(nn.Module):
        def forward(self, input: Tensor) -> Any:
            return input + (yield pop("x"))

    class After(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            alive.append(refs[0]() is not None)
            return input

    first, last = skippable(stash=["x"])(First)(), skippable(pop=["x"])(Last)()
    nn.Sequential(first, After(), last, After())(torch.ones(2))
    assert alive == [True, False]


def test_threads_have_trackers_of_their_own() -> None:
    trackers = [current_skip_tracker()]
    thread = threading.Thread(target=lambda: trackers.append(current_skip_tracker()))
    thread.start()
    thread.join()
    assert trackers[0] is not trackers[1]


def test_the_tracker_saves_and_loads_by_namespace_and_name() -> None:
    tracker, ns = SkipTracker(), Namespace()
    for number, key in enumerate([(None, "a"), (ns, "a"), (None, "b")]):
        tracker.save(key, number)
    assert [tracker.load((None, "b")), tracker.load((ns, "a"))] == [2, 1]
    with pytest.raises(KeyError):
        tracker.load((ns, "a"))


def test_modules_stay_what_they_were() -> None:
    model = nn.Sequential(Both(2), Scale())
    assert list(model.state_dict()) == ["0.module.linear.weight", "0.module.linear.bias"]
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
    assert "Linear(in_features=2" in repr(model)
    ns = Namespace()
    model[0].isolate(ns)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is Both
        assert other[0].namespaced("late") == (ns, "late")
        assert other[0].module.linear.weight is not model[0].module.linear.weight
        torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_skips_of_several_names() -> None:
    model = nn.Sequential(stashing("a", "b"), stashing("c"), popping("b"), popping("a", "c"))
    assert model(torch.ones(1)).item() == 4
