"""Pending values and control flow: where the waits stand in branches, optionals and loops."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from tests.scripting.lookups import Three, batch, check, record, script


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
