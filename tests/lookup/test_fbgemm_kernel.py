"""fbgemm's operator called directly, beside its module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_codegen_lookup_invokers import lookup_adam, lookup_args, lookup_partial_rowwise_adam
from hypothesis import given
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardrec.lookup.fbgemm_kernel import DirectCall, make_kernel
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from tests.plans import randoms

CPU = torch.device("cpu")
OPTIMIZERS = [
    None,
    FusedOptimizer(kind=OptimizerKind.SGD, lr=0.3),
    FusedOptimizer(kind=OptimizerKind.ADAGRAD, lr=0.1, eps=1e-8, initial_accumulator_value=0.25),
    FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.5, eps=1e-3),
]


class OperatorCalls(TorchFunctionMode):
    """Keeps the calls of fbgemm's lookups, and makes none if ``runs`` is false."""

    def __init__(self, *, runs: bool = True) -> None:
        super().__init__()
        self.runs = runs
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any]]] = []

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if "split_embedding_codegen_lookup" in str(function):
            self.calls.append((function, args, dict(kwargs or {})))
            if not self.runs:
                return None
        return function(*args, **(kwargs or {}))


def made(rng: Random) -> tuple[list[Any], FusedOptimizer | None, int, bool]:
    """Two kernels with the same tables, their optimizer, their number of features, and whether bags are summed."""
    pooled = rng.random() < 0.7
    shapes = [(rng.choice([1, 5, 40]), rng.choice([4, 8, 20]) if pooled else 8) for _ in range(rng.randint(1, 3))]
    tables = sorted([*range(len(shapes)), *rng.choices(range(len(shapes)), k=rng.randrange(3))])
    optimizer = rng.choice(OPTIMIZERS)
    dtype = torch.float32
    if optimizer is None or optimizer.kind is OptimizerKind.ROWWISE_ADAGRAD:
        dtype = rng.choice([torch.float32, torch.float16])
    kernels = [make_kernel(shapes, tables, optimizer, CPU, pooled=pooled, dtype=dtype) for _ in range(2)]
    for mine, other in zip(*(kernel.split_embedding_weights() for kernel in kernels), strict=True):
        torch.nn.init.normal_(mine)
        other.copy_(mine)
    return kernels, optimizer, len(tables), pooled


def a_batch(rng: Random, kernel: Any, features: int, pooled: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, offsets, and weights of ids or None."""
    samples = rng.choice([1, 2, 9])
    lengths = torch.tensor([rng.randrange(4) for _ in range(features * samples)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = [kernel.embedding_specs[table][0] for table in kernel.feature_table_map for _ in range(samples)]
    ids = torch.tensor([rng.randrange(most) for most, count in zip(rows, lengths, strict=True) for _ in range(count)])
    id_weights = torch.rand(len(ids)) if pooled and rng.random() < 0.5 else None
    return ids.to(torch.int64), offsets, id_weights


@given(rng=randoms())
def test_the_direct_call_gives_and_updates_what_the_module_does(rng: Random) -> None:
    """Over several steps, with another learning rate in between; bit-identical."""
    (module, kernel), optimizer, features, pooled = made(rng)
    direct = DirectCall(kernel)
    for step in range(3):
        if step == 2:
            module.set_learning_rate(0.03)
            kernel.set_learning_rate(0.03)
        batch = a_batch(rng, module, features, pooled)
        expected, found = module(*batch), direct(*batch)
        assert torch.equal(found, expected)
        gradient = torch.rand_like(found)
        expected.backward(gradient)
        found.backward(gradient)
    of_module, of_direct = (
        [*one.split_embedding_weights(), *(s for states in one.split_optimizer_states() for s in states)]
        if optimizer is not None and optimizer.states
        else one.split_embedding_weights()
        for one in (module, kernel)
    )
    for mine, other in zip(of_module, of_direct, strict=True):
        assert torch.equal(mine, other)


@given(rng=randoms())
def test_it_passes_what_the_module_passes(rng: Random) -> None:
    """By the operator's schema, every argument, of another batch than the one that was recorded."""
    (kernel, _), _, features, pooled = made(rng)
    direct = DirectCall(kernel)
    batch = a_batch(rng, kernel, features, pooled)
    with torch.no_grad(), OperatorCalls() as calls:
        kernel(*batch)
        direct(*batch)
    (operator, _, expected), (overload, found, _) = calls.calls
    assert overload is operator.default
    names = [argument.name for argument in overload._schema.arguments]
    assert expected.keys() <= set(names)
    defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}
    for name, value in zip(names, found, strict=True):
        assert are_same(value, expected.get(name, defaults[name])), name


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_same, one, other))
    return one is other if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("invoker", [lookup_adam, lookup_partial_rowwise_adam])
def test_the_number_of_the_update_is_the_first_of_its_integers(invoker: Any) -> None:
    """Of the optimizers that count, which fbgemm's CPU build does not make."""
    nothing = torch.zeros(0)
    fields = dict.fromkeys(lookup_args.CommonArgs._fields, None) | {"host_weights": nothing, "info_B_num_bits": 26}
    common = lookup_args.CommonArgs(**fields | {"vbe_metadata": lookup_args.VBEMetadata(None, None, None)})
    settings = lookup_args.OptimizerArgs(**dict.fromkeys(lookup_args.OptimizerArgs._fields, 0))
    moment = lookup_args.Momentum(*[nothing] * 5)
    with OperatorCalls(runs=False) as calls:
        invoker.invoke(common, settings, moment, moment, 7)
    ((_, _, arguments),) = calls.calls
    assert arguments["aux_int"][:2] == [7, 26]


def test_an_update_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next call has its own."""
    kernel = make_kernel([(5, 8)], [0], OPTIMIZERS[3], CPU)
    direct = DirectCall(kernel)
    arguments = copy.copy(direct._arguments)
    numbers = []
    monkeypatch.setattr(direct, "_operator", lambda *given: numbers.append(given[direct._integers]))
    for update in (3, 0, 4):
        direct(torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), None, update)
    assert [number[0] for number in numbers] == [3, arguments[direct._integers][0], 4]
    assert all(number[1:] == numbers[0][1:] for number in numbers)
