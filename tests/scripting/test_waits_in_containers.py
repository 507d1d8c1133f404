"""Pending values in lists, dicts and tuples: where the waits stand."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

import shardrec
from shardrec.pending import Await
from tests.scripting.lookups import Bags, Three, batch, check, events_of, record, script


def test_lists() -> None:
    class Model(Three):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ModuleList([Bags("x"), Bags("y"), Bags("z")])

        def forward(self, x: Tensor) -> Tensor:
            outs: list[KeyedTensor] = []
            for lookup in self.many:
                outs.append(lookup(x))
            outs.insert(0, self.a(x))
            outs += [self.b(x)]
            outs[1] = outs[2]
            outs.extend([self.c(x)])
            last = outs.pop()
            y = outs[-1].values()
            for out in outs[1:]:
                y = y + out["f"].sum()
            values = [out.values() for out in outs]
            return torch.stack(values).sum(0) + y + last.values()

    check(Model(), batch())


def test_lists_of_tensors_are_waited_for_as_a_whole() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            outs: list[Tensor] = []
            outs.append(self.m(x))
            outs.append(self.n(x))
            hidden = record(x.relu(), "hidden")
            return torch.cat(outs, dim=1) + hidden.sum(), outs

    check(Model(), batch())


def test_a_literal_list_is_waited_for_where_it_is_used() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            m = self.m(x)
            n = self.n(x)
            return torch.cat([m, x, n], dim=1)

    graph = check(Model(), batch()).forward.graph
    assert graph.findNode("prim::Loop") is None


def test_a_list_that_is_used_later_is_not_a_literal() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            both = [self.m(x), self.n(x)]
            a = self.a(x)
            return torch.stack(both).sum(0) + a.values()

    model = Model()
    check(model, batch())
    assert events_of(script(model), batch())[1] == ["issue m", "issue n", "issue a", "wait m", "wait n", "wait a"]


def test_nested_lists_of_tensors() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> list[list[Tensor]]:
            row: list[Tensor] = []
            row.append(self.m(x))
            table: list[list[Tensor]] = []
            table.append(row)
            table.append([self.n(x), x])
            return table

    check(Model(), batch())


def test_a_list_that_is_changed_by_what_uses_it() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            outs: list[Tensor] = []
            outs.append(self.m(x))
            outs.append(self.n(x))
            torch._foreach_mul_(outs, 2.0)
            return outs[0] + outs[1]

    model, x = Model(), batch()
    assert torch.equal(script(model)(x), model(x))


def test_dicts() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            outs = {"a": self.a(x)}
            outs["b"] = self.b(x)
            outs["c"] = self.c(x)
            y = outs["b"].values()
            for key, out in outs.items():
                if key != "c":
                    y = y + out.values()
            if "c" in outs:
                y = y * outs.pop("c").values()
            found = outs.get("a")
            if found is not None:
                y = y + found.values()
            for out in outs.values():
                y = y - out["g"].sum()
            return y

    check(Model(), batch())


def test_dicts_of_tensors_returned() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            outs: dict[str, Tensor] = {}
            outs["m"] = self.m(x)
            outs["x"] = x
            outs["n"] = self.n(x)
            return outs

    check(Model(), batch())


class Pair(NamedTuple):
    left: KeyedTensor
    right: KeyedTensor


def test_tuples() -> None:
    class Model(Three):
        def both(self, x: Tensor) -> tuple[KeyedTensor, KeyedTensor]:
            return self.a(x), self.b(x)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.both(x)
            pair = (self.c(x), x)
            named = Pair(a, self.a(x))
            hidden = record(x.relu(), "hidden")
            return named.right.values() + b.values() + pair[0].values() + named.left.values() + pair[1] + hidden

    check(Model(), batch())


def test_returned_in_tuples_and_alone() -> None:
    class Pairs(Three):
        def forward(self, x: Tensor) -> tuple[KeyedTensor, Tensor, tuple[Tensor, int]]:
            return self.a(x), self.m(x), (self.n(x), 3)

    class Alone(Three):
        def forward(self, x: Tensor) -> KeyedTensor:
            return self.a(x)

    check(Pairs(), batch())
    check(Alone(), batch())
    check(Bags("alone"), batch())


def test_items_of_a_pending_dict_are_pending() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            left = self.r(x)["f"]
            right = self.s(x)["g"]
            held = {"left": left}
            hidden = record(x.relu(), "hidden")
            return hidden[:, :2] + right.values() * held["left"].values()

    model = Model()
    check(model, batch())
    assert events_of(script(model), batch())[1] == ["issue r", "issue s", "hidden", "wait s", "wait r"]


def test_items_of_either_dict() -> None:
    class Model(Three):
        def forward(self, x: Tensor, pending: bool) -> Tensor:
            found = {"f": JaggedTensor(x[:, :2], lengths=torch.ones(3, dtype=torch.int64))}
            if pending:
                found = self.s(x)
            item = found["f"]
            hidden = record(x.relu(), "hidden")
            return hidden.sum() + item.values()

    check(Model(), batch(), True)
    check(Model(), batch(), False)


def test_a_whole_pending_dict() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            r, s = self.r(x), self.s(x)
            y = torch.zeros(3, 2)
            for key, item in s.items():
                y = y + item.values() * len(key)
            if "f" in r:
                y = y + r["f"].values()
            return y + len(s)

    check(Model(), batch())


def two_halves(x: Tensor) -> list[Tensor]:
    return [x[:, :2], x[:, 2:]]


class Halves(nn.Module):
    """Its own twin; what is pending is a list."""

    def forward(self, x: Tensor) -> Await[list[Tensor]]:
        return shardrec.pending.awaitable(two_halves, x)

    def scripted_twin(self) -> nn.Module:
        return self


def test_a_pending_list_takes_in_others() -> None:
    class Model(Three):
        def __init__(self) -> None:
            super().__init__()
            self.halves = Halves()

        def forward(self, x: Tensor) -> Tensor:
            many = self.halves(x)
            many.append(self.m(x))
            more = self.halves(x + 1)
            more += [self.n(x)]
            return torch.cat(many + more, dim=1)

    model, x = Model(), batch()
    expected = torch.cat([x, shardrec.wait(model.m(x)), x + 1, shardrec.wait(model.n(x))], dim=1)
    assert torch.equal(script(model)(x), expected)
