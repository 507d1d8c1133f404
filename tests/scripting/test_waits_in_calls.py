"""Pending values given to modules, methods, functions, forks and objects: where the waits stand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

import shardrec
from tests.scripting.lookups import WIDTH, Bags, Three, batch, check, events_of, record, script


class Over(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, dense: Tensor, sparse: KeyedTensor) -> Tensor:
        hidden = record(dense.relu(), "hidden")
        return self.linear(hidden + sparse.values())


class Through(nn.Module):
    def forward(self, sparse: KeyedTensor) -> KeyedTensor:
        return sparse


def test_typed_submodules_methods_and_functions_pass_it_on() -> None:
    class Model(Three):
        def __init__(self) -> None:
            super().__init__()
            self.over = Over()
            self.through = Through()

        def choose(self, sparse: KeyedTensor, other: KeyedTensor) -> KeyedTensor:
            return pass_on(other)

        def forward(self, x: Tensor) -> Tensor:
            first = self.through(self.a(x))
            second = self.choose(first, self.b(x))
            third = pass_on(self.c(x))
            return self.over(x, second) + first.values() + third.values()

    check(Model(), batch())


def pass_on(sparse: KeyedTensor) -> KeyedTensor:
    return sparse


def test_a_submodule_that_looks_up_itself() -> None:
    class Tower(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.bags = Bags(name)

        def forward(self, x: Tensor) -> KeyedTensor:
            return self.bags(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.item = Tower("query"), Tower("item")

        def forward(self, x: Tensor) -> Tensor:
            query = self.query(x)
            item = self.item(x)
            return (query.values() * item.values()).sum(dim=1)

    check(Model(), batch())


def test_forks_get_the_value() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            future = shardrec.pending.fork(use, self.a(x))
            return shardrec.pending.join(future)

    check(Model(), batch())


def use(sparse: KeyedTensor) -> Tensor:
    return sparse.values()


def test_user_classes_hold_the_value() -> None:
    """An object's attribute cannot be pending: its class says what it is. So the wait stands before it is stored."""

    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            held = Held(self.a(x), x)
            return held.total()

    model, x = Model(), batch()
    assert torch.equal(script(model)(x), model(x))


@torch.jit.script
class Held:
    def __init__(self, sparse: KeyedTensor, dense: Tensor) -> None:
        self.sparse = sparse
        self.dense = dense

    def total(self) -> Tensor:
        return self.sparse.values() + self.dense


def test_exported_methods() -> None:
    class Model(Three):
        @torch.jit.export
        def score(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(x)
            return a.values() + b.values()

        def forward(self, x: Tensor) -> Tensor:
            return self.score(x)

    model, x = Model(), batch()
    scripted = check(model, x)
    assert torch.equal(scripted.score(x), model.score(x))
    _, events = events_of(scripted.score, x)
    assert events == ["issue a", "issue b", "wait a", "wait b"]


def seen_before(self: Through, args: tuple[KeyedTensor]) -> tuple[KeyedTensor]:
    return args


def seen_after(self: Through, args: tuple[KeyedTensor], result: KeyedTensor) -> KeyedTensor:
    return KeyedTensor(result.keys(), result.length_per_key(), result.values() + 1)


def test_hooks_of_submodules_run() -> None:
    class Model(Three):
        def __init__(self) -> None:
            super().__init__()
            self.through = Through()
            self.through.register_forward_pre_hook(seen_before)
            self.through.register_forward_hook(seen_after)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(x)
            return self.through(b).values() + a.values()

    check(Model(), batch())


def test_exported_methods_that_call_each_other() -> None:
    class Model(Three):
        @torch.jit.export
        def alone(self, x: Tensor) -> KeyedTensor:
            return self.a(x)

        @torch.jit.export
        def both(self, x: Tensor) -> Tensor:
            a = self.alone(x)
            b = self.b(x)
            return a.values() + b.values()

        def forward(self, x: Tensor) -> Tensor:
            return self.both(x) + self.alone(x).values()

    scripted = check(Model(), batch())
    assert events_of(scripted.both, batch())[1] == ["issue a", "issue b", "wait a", "wait b"]


def test_a_module_used_in_two_places_is_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Bags("first")
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).values() + self.again(x).values()

    model = Model()
    scripted = check(model, batch())
    assert len(list(scripted.parameters())) == 1


@torch.jit.interface
class AnyTower(nn.Module):
    def forward(self, x: Tensor) -> KeyedTensor:
        pass


class OneTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = Bags("bags")

    def forward(self, x: Tensor) -> KeyedTensor:
        return self.bags(x)


class ByInterface(Three):
    def __init__(self) -> None:
        super().__init__()
        self.tower = OneTower()

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        towers = self.tower.forward(x)
        return towers.values() + a.values()


# TorchScript reads the annotation itself here, not its text.
ByInterface.__annotations__ = {"tower": AnyTower}


def test_calls_by_way_of_an_interface_wait_before_they_return() -> None:
    model, x = ByInterface(), batch()
    got, events = events_of(script(model), x)
    assert torch.equal(got, model(x))
    assert events == ["issue a", "issue bags", "wait bags", "wait a"]
