"""The operators of compiled models: fbgemm's, with our fake kernels, and our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardrec.compile.agreement import Agreement
from shardrec.compile.fakes import FAKES, has_fake, register_fakes
from shardrec.exchange.live import Live
from shardrec.compile.lookups import TablesLookup
from shardrec.errors import ConfigError, InputError
from shardrec.exchange.batch import Expectation
from shardrec.exchange.collectives import LocalCollectives
from shardrec.exchange.step import StepContext
from shardrec.lookup.bank import TableBank
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind

CPU = torch.device("cpu")
LENGTHS = torch.tensor([[1, 2], [0, 1], [2, 1]], dtype=torch.int32)
FORWARD_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")
OPTIMIZERS: dict[str, FusedOptimizer | None] = {
    "none": None,
    **{
        kind.name.lower(): FusedOptimizer(kind=kind, lr=0.1)
        for kind in (OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)
    },
}


class Catch(TorchFunctionMode):
    """Keeps the calls of fbgemm's lookups."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if "split_embedding_codegen_lookup" in str(func):
            self.calls.append((func, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def bank(optimizer: FusedOptimizer | None, *, pooled: bool = True) -> TableBank:
    made = TableBank([(10, 4), (20, 4)], [0, 1, 1], optimizer, CPU, pooled=pooled)
    torch.manual_seed(0)
    for weight in made.weights:
        torch.nn.init.normal_(weight)
    return made


def ids() -> Tensor:
    return torch.tensor([1, 9, 3, 0, 5, 9, 5])


def test_what_is_missing_is_registered_once() -> None:
    register_fakes()
    assert register_fakes() == ()
    assert all(has_fake(name) for name in FAKES)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("pooled", "weighted"), [(True, False), (True, True), (False, False)])
def test_fbgemm_lookups_pass_opcheck(optimizer: str, pooled: bool, weighted: bool) -> None:
    register_fakes()
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(LENGTHS.reshape(-1)).to(torch.int64)
    with Catch() as caught, torch.no_grad():
        bank(OPTIMIZERS[optimizer], pooled=pooled).kernel(ids(), offsets, torch.rand(7) if weighted else None)
    ((operator, arguments),) = caught.calls
    # It is there to get a gradient function, whose backward is not traced.
    arguments["placeholder_autograd_tensor"] = torch.zeros(0)
    torch.library.opcheck(operator.default, (), arguments, test_utils=FORWARD_TESTS)


ORDER = torch.tensor([2, 0, 1], dtype=torch.int32)
OTHERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "asynchronous_complete_cumsum": ((LENGTHS.reshape(-1),), {}),
    "permute_2D_sparse_data": ((ORDER, LENGTHS, ids(), None, 7), {}),
    "permute_1D_sparse_data": ((ORDER, torch.tensor([3, 1, 3], dtype=torch.int32), ids(), torch.rand(7), 7), {}),
    "block_bucketize_sparse_features": (
        (LENGTHS.reshape(-1), ids(), False, True, torch.tensor([5, 10, 10]), 2, torch.rand(7)),
        {"block_bucketize_pos": [torch.tensor([0, 5, 10]), torch.tensor([0, 10, 20]), torch.tensor([0, 10, 20])]},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_fbgemm_other_operators_pass_opcheck(name: str) -> None:
    args, kwargs = OTHERS[name]
    torch.library.opcheck(getattr(torch.ops.fbgemm, name).default, args, kwargs, test_utils=FORWARD_TESTS)


@pytest.mark.parametrize("pooled", [True, False])
def test_our_lookup_passes_opcheck(pooled: bool) -> None:
    kernel = bank(OPTIMIZERS["sgd"], pooled=pooled)
    lookup = TablesLookup(kernel.look_up, 12 if pooled else 4, pooled=pooled, device=CPU)
    rest = (ids(), LENGTHS, None, lookup.number, lookup.width, pooled)
    torch.library.opcheck(
        torch.ops.shardrec.look_up_tables.default, (lookup.anchor, *rest, True), test_utils=FORWARD_TESTS
    )
    rows, ticket = torch.ops.shardrec.look_up_tables(lookup.anchor, *rest, True)
    arguments = (torch.ones_like(rows), ticket, lookup.number)
    torch.library.opcheck(torch.ops.shardrec.update_tables.default, arguments, test_utils=FORWARD_TESTS)


@pytest.mark.parametrize("pooled", [True, False])
def test_our_lookup_updates_the_tables_as_the_kernel_does(pooled: bool) -> None:
    for optimizer in ("sgd", "rowwise_adagrad"):
        one, other = (bank(OPTIMIZERS[optimizer], pooled=pooled) for _ in range(2))
        lookup = TablesLookup(one.look_up, 12 if pooled else 4, pooled=pooled, device=CPU)
        for _ in range(2):
            rows, expected = lookup(ids(), LENGTHS, None), other.look_up(ids(), LENGTHS, None)
            assert torch.equal(rows, expected)
            for found in (rows, expected):
                found.square().sum().backward()
            assert all(torch.equal(*pair) for pair in zip(one.weights, other.weights, strict=True))
        with torch.no_grad():
            assert torch.equal(lookup(ids(), LENGTHS, None), other.look_up(ids(), LENGTHS, None))


def test_what_a_lookup_keeps_goes_with_its_graph() -> None:
    lookup = TablesLookup(bank(OPTIMIZERS["sgd"]).look_up, 12, pooled=True, device=CPU)
    rows = lookup(ids(), LENGTHS, None)
    assert len(lookup._tables._kept) == 1
    del rows
    assert not lookup._tables._kept


def agreement() -> Agreement:
    expect = Expectation(tables=(("a", "t", 10), ("b", "t", 10), ("c", "t", 10)), weighted=False, device=CPU)
    context = StepContext(LocalCollectives(), CPU)
    context.header_columns += 8
    return Agreement(context, expect)


def test_our_header_passes_opcheck_and_tells_the_sizes() -> None:
    agree = agreement()
    counts = torch.tensor([[4, 3, 2]])
    arguments = (counts, torch.tensor(0), LENGTHS.reshape(-1), ids(), ["a", "b", "c"], True, agree.number)
    torch.library.opcheck(torch.ops.shardrec.agree.default, arguments, test_utils=FORWARD_TESTS)
    assert agree(*arguments[:5]).tolist() == [4, 3, 2, 4, 3]


def test_our_header_raises_in_words() -> None:
    with pytest.raises(InputError, match=r"rank 0: feature 'a' of table 't': id 99 in sample 0 .*is outside \[0, 10\)"):
        agreement()(torch.tensor([[7, 2]]), torch.tensor(1), LENGTHS.reshape(-1), ids() + 98, ["a", "b", "c"])
    with pytest.raises(InputError, match="rank 0: the input lacks a feature"):
        agreement()(torch.tensor([[7, 2]]), torch.tensor(2), LENGTHS.reshape(-1), ids(), ["a", "b", "x"])


def test_objects_live_as_long_as_their_owners() -> None:
    class Owned:
        pass

    live: Live[Owned] = Live("things")
    owned = Owned()
    number = live.add(owned)
    assert live[number] is owned
    del owned
    with pytest.raises(ConfigError, match=f"uses things number {number} of a sharded model that is gone"):
        live[number]


def test_no_operator_of_python_goes_into_a_cuda_graph() -> None:
    """Replaying a captured graph runs its kernels and leaves out the Python around them."""
    import shardrec.compile.columns
    import shardrec.lookup.rows_operator  # noqa: F401 - imported for their operators

    names = ["agree", "send_columns", "arrived_columns", "send_column_gradients", "arrived_column_gradients"]
    names += ["look_up_tables", "update_tables", "look_up_rows"]
    unsafe = [name for name in names if torch.Tag.cudagraph_unsafe in getattr(torch.ops.shardrec, name).default.tags]
    assert unsafe == names
