"""Where the waits stand: for each way of using a pending value, what the scripted model does, in eager mode's order."""

from __future__ import annotations

import torch
from torch import Tensor

import shardrec
from tests.scripting.lookups import Three, batch, check, events_of, script


def test_all_are_issued_before_the_first_wait() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(x)
            c = self.c(x)
            y = torch.relu(x)
            return torch.cat([y, c["f"], b["g"], a.values()], dim=1)

    model = Model()
    check(model, batch())
    _, events = events_of(script(model), batch())
    assert events == ["issue a", "issue b", "issue c", "wait c", "wait b", "wait a"]


def test_a_value_used_at_once_is_waited_for_at_once() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x).values()
            return a + self.b(a).values()

    check(Model(), batch())


def test_used_twice_is_waited_for_once() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(x)
            return a.values() + a["f"].sum() + b.values() + a["g"].sum()

    graph = check(Model(), batch()).forward.graph
    assert len(graph.findAllNodes("prim::awaitable_wait")) == 2


def test_methods_of_the_value() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> tuple[list[str], dict[str, Tensor], list[int]]:
            a, b, c = self.a(x), self.b(x), self.c(x)
            return b.keys(), a.to_dict(), c.length_per_key()

    check(Model(), batch())


def test_never_used_is_never_waited_for() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(x)
            if bool((x > 1e9).any()):
                return a.values()
            return b.values()

    check(Model(), batch())


def test_explicit_wait() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            a = shardrec.wait(self.a(x))
            b = self.b(x)
            shardrec.wait(b)
            c = self.c(x)
            number = shardrec.wait(3)
            future = shardrec.pending.fork(double, x)
            delayed = shardrec.pending.awaitable(double, x)
            y = a.values() + b.values() + c.values() + number
            return y + shardrec.wait(future) + shardrec.pending.join(future) + shardrec.wait(delayed)

    model = Model()
    graph = check(model, batch()).forward.graph
    assert graph.findNode("prim::awaitable_nowait") is None
    order = ["issue a", "wait a", "issue b", "wait b", "issue c", "wait c"]
    assert events_of(script(model), batch())[1] == order


def double(x: Tensor) -> Tensor:
    return 2 * x
