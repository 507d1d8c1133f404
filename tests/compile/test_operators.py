"""The operators of compiled models: fbgemm's, with our fake kernels, and our own."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._torchscript import plain
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.lookup.fakes import FAKES, has_fake, register_fakes
from shardrec.lookup.group_shards import TableBank
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.modules.bags import ShardedEmbeddingBagCollection
from tests.models import apply_optimizer_in_backward

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
    kernel = bank(OPTIMIZERS[optimizer], pooled=pooled).kernel
    with Catch() as caught, torch.no_grad():
        kernel(ids(), offsets, torch.rand(7) if weighted else None)
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


class Pooled(torch.nn.Module):
    """One collection, on one rank, and its twin of operators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["a", "b"])]
        whole = EmbeddingBagCollection(tables=tables)
        apply_optimizer_in_backward(torch.optim.SGD, whole.parameters(), {"lr": 0.1})
        plan = ShardingPlan(topology=Topology(), tables=(cuts.table_wise("t", 20, 4, rank=0),))
        self.sharded = ShardedEmbeddingBagCollection(whole, plan)
        self.twin: Any = plain(self.sharded.scripted_twin())


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.tensor([1, 9, 3, 0]), lengths=torch.tensor([1, 2, 0, 1]))


def test_our_operators_are_what_torch_takes_for_one() -> None:
    model = Pooled()
    given, twin = features(), model.twin
    # Their results are numbers of their own, so not equal from call to call: the rest of opcheck is for what is.
    tests = ("test_schema", "test_autograd_registration")
    rest = (["a", "b"], [], 2, twin.number, False, True, 0)
    issue: Any = torch.ops.shardrec.issue_lookup.default
    arguments = (twin.anchor, [], given.values(), given.lengths(), None, None, None, None, *rest)
    torch.library.opcheck(issue, arguments, test_utils=tests)
    order, ticket = twin.begin(given)
    rest = (2, 8, 0, False, torch.float32, twin.number)
    values, *_ = torch.ops.shardrec.arrive(order, ticket, order, *rest)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake, *_ = torch.ops.shardrec.arrive(torch.empty(0), ticket, torch.empty(0), *rest)
        back = torch.ops.shardrec.finish_backward(torch.empty(0), ticket, 4, [torch.empty(3, 2)], twin.number)
    assert (fake.shape, fake.dtype) == (values.shape, values.dtype)
    assert [tuple(one.shape) for one in back] == [(4,), (3, 2)]


def test_our_operators_update_the_tables_as_the_module_does() -> None:
    one, other = Pooled(), Pooled()
    for _ in range(2):
        found, expected = one.twin.traced(features()).values(), other.sharded(features()).values()
        assert torch.equal(found, expected)
        for values in (found, expected):
            values.square().sum().backward(retain_graph=True)
            values.sum().backward()
        assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(one.twin.traced(features()).values(), other.sharded(features()).values())


def test_what_a_lookup_keeps_goes_with_its_graph() -> None:
    model = Pooled()
    values = model.twin.traced(features()).values()
    assert len(model.twin.program._kept) == 1
    del values
    gc.collect()
    assert not model.twin.program._kept
    model.twin.begin(features())
    gc.collect()
    assert not model.twin.program._kept, "a forward without an end leaves nothing behind"


def test_a_program_of_a_model_that_is_gone_is_refused() -> None:
    model = Pooled()
    number = model.twin.program.number
    arguments = (torch.zeros(0), torch.tensor(0), torch.zeros(0), 1, 4, 0, False, torch.float32, number)
    with pytest.raises(KeyError):  # of the ticket
        torch.ops.shardrec.arrive(*arguments)
    del model
    gc.collect()
    with pytest.raises(ConfigError, match=f"uses sharded module number {number} of a sharded model that is gone"):
        torch.ops.shardrec.arrive(*arguments)


def test_no_operator_of_python_goes_into_a_cuda_graph() -> None:
    """Replaying a captured graph runs its kernels and leaves out the Python around them."""

    names = ["issue_lookup", "arrive", "give_gradient", "finish_backward"]
    unsafe = [name for name in names if torch.Tag.cudagraph_unsafe in getattr(torch.ops.shardrec, name).default.tags]
    assert unsafe == names
