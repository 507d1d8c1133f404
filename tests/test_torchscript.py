"""Each workaround for TorchScript: that it is needed, and that it gives what TorchScript or eager mode gives."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrec
from shardrec import _torchscript

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch.jit:DeprecationWarning")

X = torch.tensor([1.0, -2.0])


def double(x: Tensor) -> Tensor:
    return 2 * x


def first_value(values: torch.IntTensor) -> Tensor:
    return values[0]


def last_value(values: torch.IntTensor) -> Tensor:
    return values[-1]


def test_quiet_silences_two_warnings_of_torchs() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with _torchscript.quiet():
            torch.jit.script(first_value)
            warnings.warn("yours", DeprecationWarning, stacklevel=1)
        torch.jit.script(last_value)
    assert [str(each.message)[:30] for each in seen if each.category is UserWarning] == [
        "TorchScript will treat type an"
    ]
    others = [str(each.message) for each in seen if each.category is DeprecationWarning]
    assert ["yours" in other for other in others] == [True, False]
    assert "torch.jit.script" in others[1]


def test_compiles_to_is_needed() -> None:
    def wait(pending: Any) -> Any:
        return pending

    def run(x: Tensor) -> Tensor:
        return wait(torch.jit._awaitable(double, x)) + 1

    with pytest.raises(RuntimeError):
        torch.jit.script(run)
    _torchscript.compiles_to(wait, "prim::awaitable_wait")
    assert torch.equal(torch.jit.script(run)(X), 2 * X + 1)


def test_compiled_nowait_is_needed() -> None:
    def run(pending: shardrec.pending.Await[Tensor]) -> Tensor:
        return shardrec.pending.awaitable_wait(pending) + 1

    scripted = torch.jit.script(run)
    with pytest.raises(RuntimeError, match="got PyObject"):
        scripted(torch.jit._awaitable_nowait(X))
    assert torch.equal(scripted(_torchscript.compiled_nowait(X)), X + 1)
    assert _torchscript.compiled_nowait({1, 2}) is None


def deferring(x: Tensor) -> Tensor:
    # What defer("torch.jit._awaitable(double, x)") spells.
    return torch.jit._awaitable_wait(
        torch.jit._awaitable_wait(torch.jit._awaitable_nowait(torch.jit._awaitable(double, x)))
    )


def test_deferred_waits_mean_what_they_say_if_nobody_looks() -> None:
    spelled = _torchscript.defer("torch.jit._awaitable(double, x)")
    assert torch.equal(eval(spelled, {"torch": torch, "double": double, "x": X}), 2 * X)
    scripted = torch.jit.script(deferring)
    assert torch.equal(scripted(X), 2 * X)
    ((inner, outer),) = _torchscript.deferred_waits(scripted.graph)
    assert inner.output().type().annotation_str == "Await[Tensor]"
    assert outer.output().type().annotation_str == "Tensor"


def test_other_waits_are_not_deferred() -> None:
    def run(x: Tensor) -> Tensor:
        first = shardrec.pending.awaitable_wait(shardrec.pending.awaitable_nowait(x))
        return first + shardrec.pending.awaitable_wait(torch.jit._awaitable(double, x))

    assert _torchscript.deferred_waits(torch.jit.script(run).graph) == []


def waiting_for_all(x: Tensor) -> Tensor:
    total = shardrec.wait(shardrec.pending.awaitable(double, x))
    return total + shardrec.wait(shardrec.pending.fork(double, x)) + shardrec.wait(x)


def test_one_wait_for_three_kinds_of_values() -> None:
    with pytest.raises(RuntimeError, match="Await"):
        torch.jit.script(waiting_for_all)
    with _torchscript.generic_wait(shardrec.wait):
        scripted = torch.jit.script(waiting_for_all)
    assert torch.equal(scripted(X), waiting_for_all(X))
    kinds = [node.kind() for node in scripted.graph.nodes()]
    assert "prim::CallFunction" not in kinds
    assert kinds.count("aten::wait") == 1
    assert not [node for node in scripted.graph.findAllNodes("prim::Constant") if node.output().type().kind() == "Any"]


def only_await(x: Tensor) -> Tensor:
    return shardrec.wait(shardrec.pending.awaitable(double, x))


def only_future(x: Tensor) -> Tensor:
    return shardrec.wait(shardrec.pending.fork(double, x))


def test_generic_wait_ends_with_its_block_and_after_errors() -> None:
    with pytest.raises(KeyError), _torchscript.generic_wait(shardrec.wait):
        raise KeyError
    assert torch.equal(torch.jit.script(only_await)(X), 2 * X)
    with pytest.raises(RuntimeError):
        torch.jit.script(only_future)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return double(x) + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 3


def replace_adds(graph: Any) -> None:
    for node in graph.findAllNodes("aten::add"):
        other = graph.create("aten::sub", list(node.inputs()), 1)
        other.insertBefore(node)
        node.output().replaceAllUsesWith(other.output())
        node.destroy()


@pytest.mark.parametrize("apart", [True, False])
def test_a_method_that_was_inlined_runs_its_changed_graph(apart: bool) -> None:
    """Without the workaround it runs the graph that it had then."""

    class Fresh(Inner):
        pass

    outer = Outer()
    outer.inner = Fresh()
    scripted = torch.jit.script(outer)
    if apart:
        assert _torchscript.inlined(scripted.forward.graph).findNode("prim::CallMethod") is None
    else:
        assert scripted.forward.inlined_graph.findNode("prim::CallMethod") is None
    replace_adds(scripted.inner.forward.graph)
    assert torch.equal(scripted.inner(X), 2 * X - 1 if apart else 2 * X + 1)


def test_inlining_goes_all_the_way_and_computes_the_same() -> None:
    scripted = torch.jit.script(Outer())
    graph = scripted.forward.graph
    _torchscript.inline(graph)
    assert not [node.kind() for node in graph.nodes() if node.kind().startswith("prim::Call")]
    graph.lint()
    assert torch.equal(scripted(X), Outer()(X))
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._get_graph_executor_optimize()


def test_methods_of_each_module_once() -> None:
    scripted = torch.jit.script(nn.Sequential(Inner(), Inner(), nn.Sequential(Outer())))
    names = [method.owner.qualified_name.rsplit(".")[-1] for method in _torchscript.methods_of(scripted)]
    assert sorted(set(names)) == ["Inner", "Outer", "Sequential"]
    assert names.count("Inner") == 1


def test_what_operators_do_with_their_arguments() -> None:
    def run(x: Tensor) -> list[Tensor]:
        many = [x, x]
        many.append(torch.cat(many))
        many.reverse()
        return many

    found = {
        node.kind(): [_torchscript.writes_or_aliases(node, index) for index in range(node.inputsSize())]
        for node in torch.jit.script(run).graph.nodes()
    }
    assert found["aten::cat"] == [False, False]
    assert found["aten::append"] == [True, True]
    assert found["aten::reverse"] == [True]
    assert found["prim::ListConstruct"] == [True, True]
