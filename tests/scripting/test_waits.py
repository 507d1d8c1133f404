"""Where the waits stand: for each way of using a pending value, what the scripted model does, in eager mode's order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

import shardrec
from shardrec import Await
from tests.scripting.lookups import WIDTH, Bags, Numbers, Rows, batch, check, events_of, record, script


class Three(nn.Module):
    """The base of the models: three lookups of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Bags("a"), Bags("b"), Bags("c")
        self.r, self.s = Rows("r"), Rows("s")
        self.m, self.n = Numbers("m"), Numbers("n")


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


def test_branches() -> None:
    class Model(Three):
        def forward(self, x: Tensor, left: bool, nothing: bool) -> Tensor:
            a = self.a(x)
            chosen = a
            if left:
                chosen = self.b(x)
            hidden = record(x.relu(), "hidden")
            if nothing:
                return hidden
            elif left:
                y = chosen.values()
            else:
                y = hidden
            return y + a["f"].sum() + chosen["g"].sum()

    for left in (True, False):
        for nothing in (True, False):
            check(Model(), batch(), left, nothing)


def test_a_branch_with_a_value_that_is_there() -> None:
    class Model(Three):
        def forward(self, x: Tensor, there: bool) -> Tensor:
            chosen = KeyedTensor(["f", "g"], [2, 2], x) if there else self.a(x)
            hidden = record(x.relu(), "hidden")
            return chosen.values() + hidden

    check(Model(), batch(), True)
    check(Model(), batch(), False)


def test_early_returns_of_pending_values() -> None:
    class Model(Three):
        def pick(self, x: Tensor, which: int) -> KeyedTensor:
            if which == 0:
                return self.a(x)
            for _ in range(3):
                if which == 1:
                    return self.b(x)
                which -= 1
            return self.c(x)

        def forward(self, x: Tensor, which: int) -> Tensor:
            picked = self.pick(x, which)
            hidden = record(x.relu(), "hidden")
            return picked.values() + hidden

    for which in range(6):
        check(Model(), batch(), which)


def test_optional_values() -> None:
    class Model(Three):
        def forward(self, x: Tensor, want: bool) -> Tensor:
            found: KeyedTensor | None = None
            if want:
                found = self.a(x)
            hidden = record(x.relu(), "hidden")
            if found is not None:
                return hidden + found.values()
            return hidden

    check(Model(), batch(), True)
    check(Model(), batch(), False)


def test_an_optional_that_goes_where_none_can_wait() -> None:
    """There a wait stands early: at the end of the branch. The value is right, and the order is not eager mode's."""

    class Model(Three):
        def forward(self, x: Tensor, want: bool) -> Tensor:
            found: Tensor | None = None
            if want:
                found = self.m(x)
            return nn.functional.linear(x, self.a.weight, found) if found is None else x + found

    class Clamped(Three):
        def forward(self, x: Tensor, want: bool) -> Tensor:
            low: Tensor | None = None
            if want:
                low = self.m(x)
            return torch.clamp(x, low, x + 100)

    class Chosen(Three):
        def forward(self, x: Tensor, want: bool) -> Tensor:
            low: Tensor | None = None
            if want:
                low = self.m(x)
            chosen = low
            if bool((x > 1e9).any()):
                chosen = x
            return torch.clamp(x, chosen, x + 100)

    for model in (Model(), Clamped(), Chosen()):
        for want in (True, False):
            x = batch()
            assert torch.equal(script(model)(x, want), model(x, want))


def test_an_optional_that_may_be_the_callers() -> None:
    class Model(Three):
        def forward(self, x: Tensor, given: Tensor | None, want: bool) -> Tensor:
            found: Tensor | None = None
            if want:
                found = self.m(x)
            chosen = given
            if chosen is None:
                chosen = found
            return x if chosen is None else x + chosen

    model, x = Model(), batch()
    scripted = script(model)
    for given in (None, 2 * x):
        for want in (True, False):
            assert torch.equal(scripted(x, given, want), model(x, given, want))


def test_loops_wait_in_the_body_that_uses() -> None:
    class Model(Three):
        def forward(self, x: Tensor, times: int) -> Tensor:
            a = self.a(x)
            b = self.b(x)
            y = x
            for step in range(times):
                y = y + a.values()
                if step > 0:
                    y = y * b.values()
            return y

    for times in range(3):
        check(Model(), batch(), times)


def test_carried_through_a_loop() -> None:
    class Model(Three):
        def forward(self, x: Tensor, times: int) -> Tensor:
            carried = KeyedTensor(["f", "g"], [2, 2], x)
            spare = self.c(x)
            while times > 0:
                carried, spare = spare, self.a(x)
                times -= 1
            hidden = record(x.relu(), "hidden")
            return carried.values() + spare.values() + hidden

    for times in range(3):
        check(Model(), batch(), times)


def test_break_and_continue() -> None:
    class Model(Three):
        def forward(self, x: Tensor, times: int) -> Tensor:
            found = self.a(x)
            y = x
            for step in range(times):
                if step == 1:
                    continue
                if step == 3:
                    break
                found = self.b(y)
                y = y + 1
            return found.values() + y

    for times in range(5):
        check(Model(), batch(), times)


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


def test_explicit_wait() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            a = shardrec.wait(self.a(x))
            b = self.b(x)
            shardrec.wait(b)
            c = self.c(x)
            number = shardrec.wait(3)
            future = shardrec.fork(double, x)
            delayed = shardrec.awaitable(double, x)
            y = a.values() + b.values() + c.values() + number
            return y + shardrec.wait(future) + shardrec.join(future) + shardrec.wait(delayed)

    model = Model()
    graph = check(model, batch()).forward.graph
    assert graph.findNode("prim::awaitable_nowait") is None
    order = ["issue a", "wait a", "issue b", "wait b", "issue c", "wait c"]
    assert events_of(script(model), batch())[1] == order


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_forks_get_the_value() -> None:
    class Model(Three):
        def forward(self, x: Tensor) -> Tensor:
            future = shardrec.fork(use, self.a(x))
            return shardrec.join(future)

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


def two_halves(x: Tensor) -> list[Tensor]:
    return [x[:, :2], x[:, 2:]]


class Halves(nn.Module):
    """Its own twin; what is pending is a list."""

    def forward(self, x: Tensor) -> Await[list[Tensor]]:
        return shardrec.awaitable(two_halves, x)

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
