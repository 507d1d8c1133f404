"""Random forwards: what users write with pending values, in the Python that TorchScript knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

__all__ = ["programs"]

_HEADER = """
from typing import Dict, List, Optional, Tuple
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor
import shardrec
from tests.scripting.lookups import Bags, Numbers, Rows, record

def same(sparse: KeyedTensor) -> KeyedTensor:
    return sparse

def first_of(many: List[KeyedTensor]) -> KeyedTensor:
    return many[0]

class Through(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Bags("own")

    def forward(self, sparse: KeyedTensor, x: Tensor, again: bool) -> KeyedTensor:
        if again:
            return self.own(x)
        return sparse

class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Bags("a"), Bags("b")
        self.m, self.n = Numbers("m"), Numbers("n")
        self.r = Rows("r")
        self.through = Through()

    def forward(self, x: Tensor, flag: bool, times: int) -> Tuple[Tensor, List[Tensor]]:
        t0 = self.m(x)
        k0 = self.a(x)
        p0 = [t0]
        l0 = [k0]
        d0 = {"f": k0}
        r0 = self.r(x)
        j0 = r0["g"]
"""


class _Writer:
    """Writes statements; ``names`` has the variables of each kind that are assigned wherever it stands."""

    def __init__(self, draw: DrawFn) -> None:
        self._draw = draw
        self._lines: list[str] = []
        self._depth = 2
        self._count = 0
        self.names = {kind: [f"{kind}0"] for kind in "tkpldrj"}

    @property
    def text(self) -> str:
        return _HEADER + "\n".join(self._lines) + "\n"

    def line(self, text: str) -> None:
        self._lines.append("    " * self._depth + text)

    def some(self, kind: str) -> str:
        return self._draw(st.sampled_from(self.names[kind]))

    def assign(self, kind: str, expression: str) -> None:
        """To a variable that is there, or to a new one."""
        if self._draw(st.booleans()):
            self.line(f"{self.some(kind)} = {expression}")
        else:
            self._count += 1
            name = f"{kind}{self._count}"
            self.line(f"{name} = {expression}")
            self.names[kind].append(name)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(head)
        names = {kind: list(found) for kind, found in self.names.items()}
        self._depth += 1
        self.line("pass")
        yield
        self._depth -= 1
        self.names = names

    def statements(self, most: int) -> None:
        for _ in range(self._draw(st.integers(1, most))):
            self._draw(st.sampled_from(_STATEMENTS))(self)


def _mark(w: _Writer) -> None:
    w.assign("t", f'record({w.some("t")} * 0.5, "mark")')


def _branch(w: _Writer) -> None:
    if w._depth > 3:
        return
    with w.block("if flag:"):
        w.statements(3)
    if w._draw(st.booleans()):
        with w.block("else:"):
            w.statements(3)


def _loop(w: _Writer) -> None:
    if w._depth > 3:
        return
    with w.block("for step in range(times):"):
        w.statements(3)
        if w._draw(st.booleans()):
            with w.block("if step == 1:"):
                w.line(w._draw(st.sampled_from(["break", "continue"])))
            w.statements(2)


def _each(w: _Writer) -> None:
    total = w.some("t")
    with w.block(f"for one in {w.some('l')}:"):
        w.line(f"{total} = {total} * 0.5 + one.values()")


def _items(w: _Writer) -> None:
    total = w.some("t")
    with w.block(f"for key, one in {w.some('d')}.items():"), w.block('if key != "h":'):
        w.line(f"{total} = {total} * 0.5 + one.values()")


def _optional(w: _Writer) -> None:
    w._count += 1
    name = f"o{w._count}"
    w.line(f"{name}: Optional[KeyedTensor] = None")
    with w.block("if flag:"):
        w.line(f"{name} = {w.some('k')}")
    w.statements(2)
    total = w.some("t")
    with w.block(f"if {name} is not None:"):
        w.line(f"{total} = {total} * 0.5 + {name}.values()")


def _pair(w: _Writer) -> None:
    w._count += 1
    name = f"both{w._count}"
    w.line(f"{name} = ({w.some('k')}, {w.some('t')})")
    w.line(f"{w.some('k')}, {w.some('t')} = {name}")


def _early_return(w: _Writer) -> None:
    if w._depth > 3:
        return
    with w.block("if flag:"):
        w.line(f"return {w.some('t')}, {w.some('p')}")


_STATEMENTS = [
    _branch,
    _loop,
    _each,
    _items,
    _optional,
    _pair,
    _mark,
    _early_return,
    lambda w: w.assign("k", w._draw(st.sampled_from(["self.a(x)", "self.b(x)"]))),
    lambda w: w.assign("t", w._draw(st.sampled_from(["self.m(x)", "self.n(x)"]))),
    lambda w: w.assign("r", "self.r(x)"),
    lambda w: w.assign("j", f'{w.some("r")}["f"]'),
    lambda w: w.assign("k", w.some("k")),
    lambda w: w.assign("k", f"same({w.some('k')})"),
    lambda w: w.assign("k", f"self.through({w.some('k')}, x, flag)"),
    lambda w: w.assign("k", f"first_of({w.some('l')})"),
    lambda w: w.assign("t", f"shardrec.wait({w.some('k')}).values() * 0.5"),
    lambda w: w.assign("k", f"{w.some('l')}[-1]"),
    lambda w: w.assign("k", f'{w.some("d")}["f"]'),
    lambda w: w.assign("t", f"{w.some('k')}.values()"),
    lambda w: w.assign("t", f'{w.some("k")}["g"].repeat(1, 2)'),
    lambda w: w.assign("t", f"{w.some('j')}.values().repeat(1, 2)"),
    lambda w: w.assign("t", f"{w.some('t')} * 0.5 + {w.some('t')}"),
    lambda w: w.assign("t", f"torch.stack({w.some('p')}).mean(0)"),
    lambda w: w.assign("t", f"torch.stack([{w.some('t')}, {w.some('t')}]).mean(0)"),
    lambda w: w.assign("t", f"{w.some('p')}[0]"),
    lambda w: w.assign("l", f"[{w.some('k')}, {w.some('k')}]"),
    lambda w: w.assign("l", f"{w.some('l')}[:2] + [{w.some('k')}]"),
    lambda w: w.assign("p", f"[{w.some('t')}]"),
    lambda w: w.assign("d", f'{{"f": {w.some("k")}, "h": {w.some("k")}}}'),
    lambda w: w.line(f"{w.some('l')}.append({w.some('k')})"),
    lambda w: w.line(f"{w.some('p')}.append({w.some('t')})"),
    lambda w: w.line(f'{w.some("d")}["{w._draw(st.sampled_from("fg"))}"] = {w.some("k")}'),
]


@st.composite
def programs(draw: DrawFn) -> str:
    """The source of a module with a class ``Model``, whose forward takes a tensor, a flag and a number of steps."""
    writer = _Writer(draw)
    writer.statements(12)
    writer.line(f"return {writer.some('t')}, {writer.some('p')}")
    return writer.text
