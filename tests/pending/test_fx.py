"""Lazy awaitables under ``torch.fx``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from shardrec.pending import LazyAwaitable, LazyGetItemMixin, LazyNoWait
from tests.pending.counted import Counted


class Sharded(nn.Module):
    """Stands for a sharded collection: its output is on its way."""

    def forward(self, x: Tensor) -> LazyAwaitable[Tensor]:
        return Counted(x * 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sharded = Sharded()
        self.over = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        lazy: Any = self.sharded(x)
        mixed = torch.cat([lazy, x], dim=0) + lazy.sum() - lazy[0]
        out: Tensor = self.over(mixed * lazy.shape[0])
        return out


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Sharded) or super().is_leaf_module(m, module_qualified_name)


def test_module_with_a_leaf_that_returns_one() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.rand(2, 3)
    graph = LeafTracer().trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["sharded", "over"]
    traced = fx.GraphModule(model, graph)
    assert torch.equal(traced(x), model(x))
    assert torch.equal(fx.Interpreter(traced).run(x), model(x))


def test_constructor_on_a_traced_value_is_recorded() -> None:
    def function(x: Tensor) -> Tensor:
        lazy = LazyNoWait(x + 1)
        return torch.cat([lazy, x])

    traced = fx.symbolic_trace(function)
    made = [node for node in traced.graph.nodes if node.target is LazyNoWait]
    assert len(made) == 1
    assert made[0].op == "call_function"
    assert torch.equal(traced(torch.ones(2)), function(torch.ones(2)))


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": (x,)}, lambda x: slice(0, x), lambda x: x])
def test_constructor_finds_nested_traced_values(wrap: Any) -> None:
    traced = fx.symbolic_trace(lambda x: LazyNoWait(wrap(x)))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_function", "output"]
    assert traced(1).wait() == wrap(1)


def test_parametrized_constructor_is_recorded() -> None:
    traced = fx.symbolic_trace(lambda x: LazyNoWait[int](obj=x))
    assert traced(3).wait() == 3


def test_constructor_on_plain_values_makes_one_while_tracing() -> None:
    def function(x: Tensor) -> Tensor:
        result: Tensor = x + LazyNoWait(2.0).wait()
        return result

    assert fx.symbolic_trace(function)(torch.ones(1)).item() == 3.0


def test_existing_one_becomes_a_constant_and_is_not_waited_for() -> None:
    lazy = Counted(torch.ones(2))
    traced = fx.symbolic_trace(lambda x: torch.add(x, lazy))
    assert lazy.waits == 0
    assert "get_attr" in [node.op for node in traced.graph.nodes]
    assert traced(torch.ones(2)).tolist() == [2.0, 2.0]
    assert lazy.waits == 1


def test_traced_argument_may_be_one_at_run_time() -> None:
    def function(x: Any, y: Tensor) -> Tensor:
        result: Tensor = (x * 2 + y - 1).sum() / x.size(0) + x[0]
        return result

    value, y = torch.rand(3), torch.rand(3)
    traced = fx.symbolic_trace(function)
    assert torch.equal(traced(Counted(value), y), function(value, y))


def test_items_stay_lazy_in_a_traced_function() -> None:
    class Features(LazyGetItemMixin[str, Tensor], Counted[Any]): ...

    features = Features({"a": torch.ones(1)})
    item = fx.symbolic_trace(lambda lazy: lazy["a"])(features)
    assert features.waits == 0
    assert item + 1 == 2


def test_making_one_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """ProxyableClassMeta's own constructor asks a global flag that logs a warning."""
    LazyNoWait(1)
    fx.symbolic_trace(lambda x: LazyNoWait(x))
    assert capfd.readouterr().err == ""
