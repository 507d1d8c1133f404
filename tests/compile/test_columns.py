"""The output exchange behind operators: as torch wants operators to be, and as a compiled step uses it."""

from __future__ import annotations

import gc
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardrec.compile.columns import ColumnsExchange
from shardrec.exchange.assemble import Columns
from shardrec.exchange.collectives import LocalCollectives
from shardrec.exchange.route import Piece, Source
from tests.collective_counts import CollectiveOperators
from tests.compile.compiled import batch, fresh, make
from tests.ranks import ranks

CPU = torch.device("cpu")
# Columns 0-1 of the rank's own block, then the replicated table's, then columns 2-3.
PIECES = [
    Piece(width=2, sources=(Source(block=0, start=0),)),
    Piece(width=3, sources=(Source(block=1, start=0),)),
    Piece(width=2, sources=(Source(block=0, start=2),)),
]


def exchange() -> ColumnsExchange:
    """Of one rank with itself, which divides the gradient by four to show that somebody does."""
    return ColumnsExchange(LocalCollectives(), Columns(PIECES, [0.25, 1.0]), [4], "output", CPU)


def arrived(made: ColumnsExchange, pooled: Tensor, order: Tensor, ticket: Tensor, replicated: Tensor) -> Tensor:
    values: Tensor = torch.ops.shardrec.arrived_columns(
        pooled, order, ticket, replicated, pooled.size(0), made.width, made.number
    )
    return values


def test_columns_and_their_gradients() -> None:
    made = exchange()
    pooled = torch.arange(8.0).view(2, 4).requires_grad_()
    replicated = torch.full((2, 3), -1.0, requires_grad=True)
    order, ticket = made(pooled, [2])
    values = arrived(made, pooled, order, ticket, replicated)
    assert values.tolist() == [[0, 1, -1, -1, -1, 2, 3], [4, 5, -1, -1, -1, 6, 7]]
    for _ in range(2):
        values.backward(torch.full((2, 7), 2.0), retain_graph=True)
    assert pooled.grad is not None and replicated.grad is not None
    assert pooled.grad.unique().tolist() == [1.0], "two backwards, each over four"
    assert replicated.grad.unique().tolist() == [4.0]
    assert len(made._exchange._kept) == 1
    del values, order, ticket
    assert not made._exchange._kept


def test_the_operators_are_what_torch_takes_for_one() -> None:
    made = exchange()
    pooled, replicated = torch.randn(2, 4, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    # Its results are numbers of their own, so not equal from call to call: the rest of opcheck is for what is.
    tests = ("test_schema", "test_autograd_registration")
    send: Any = torch.ops.shardrec.send_columns.default
    torch.library.opcheck(send, (pooled, made.anchor, [2], made.number, True), test_utils=tests)
    order, ticket = made(pooled, [2])
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = arrived(made, torch.empty(2, 4), torch.empty(0), torch.empty((), dtype=torch.int64), torch.empty(2, 3))
        own = torch.ops.shardrec.send_column_gradients(torch.empty(2, 7), ticket, 3, made.number)[1]
        back = torch.ops.shardrec.arrived_column_gradients(torch.empty(0), ticket, 2, 4, made.number)
    real = arrived(made, pooled, order, ticket, replicated)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    assert (own.shape, back.shape) == (replicated.shape, pooled.shape)


def test_a_forward_without_an_end_leaves_nothing_behind() -> None:
    made = exchange()
    made(torch.randn(2, 4), [2])
    gc.collect()
    assert not made._exchange._kept


def all_to_alls_of_a_step(transport: str) -> dict[str, int]:
    with fresh():
        model = make("dlrm", "traced", transport=transport)
        run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        run(*batch(Random(0), 5)).sum().backward()
        with CollectiveOperators() as called:
            run(*batch(Random(1), 5)).sum().backward()
        return called.all_to_alls()


@pytest.mark.slow  # test_parity.py has the first, beside all else that it checks of the same program
@pytest.mark.parametrize(
    ("transport", "operator"), [("auto", "shardrec::all_to_all"), ("group", "c10d::alltoall_base_")]
)
def test_a_traced_step_makes_four_exchanges_by_the_models_transport(transport: str, operator: str) -> None:
    """Header, payload, output, gradient."""
    assert ranks(2, all_to_alls_of_a_step, transport, timeout=200) == [{operator: 4}] * 2
