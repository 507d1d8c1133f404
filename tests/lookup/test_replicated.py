"""Replicated tables on one rank: looked up as torch does, updated by their optimizers at the end of backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.exchange.collectives import LocalCollectives
from shardrec.exchange.gradients import Gradients
from shardrec.exchange.life_cycle import LifeCycle
from shardrec.layout import cuts
from shardrec.lookup.groups import LookupTable
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.lookup.replicated import ReplicatedLookup

CPU = torch.device("cpu")
SGD = FusedOptimizer(kind=OptimizerKind.SGD, lr=0.5)
ADAGRAD = FusedOptimizer(kind=OptimizerKind.ADAGRAD, lr=0.25, eps=1e-3)
ROWS, DIM = 5, 4


def gradients(*, are_reduced: bool = True) -> Gradients:
    return Gradients(LocalCollectives().report_failure, LifeCycle(), are_reduced=are_reduced)


def replicated(
    optimizers: list[FusedOptimizer | None],
    slot_tables: list[int] | None = None,
    dtypes: list[torch.dtype] | None = None,
    step: Gradients | None = None,
) -> ReplicatedLookup:
    """Tables of random values, each looked up by one slot unless slots are given."""
    tables = [
        LookupTable(layout=cuts.data_parallel(f"t{number}", ROWS, DIM), optimizer=optimizer, dtype=dtype)
        for number, (optimizer, dtype) in enumerate(
            zip(optimizers, dtypes or [torch.float32] * len(optimizers), strict=True)
        )
    ]
    lookup = ReplicatedLookup(tables, slot_tables or list(range(len(tables))), step or gradients(), CPU)
    for parameter in lookup.parameters:
        with torch.no_grad():
            parameter.copy_(torch.randn(ROWS, DIM))
    return lookup


def values(lookup: ReplicatedLookup) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in lookup.parameters]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "dtypes", [[torch.float32] * 3, [torch.float32, torch.float16, torch.float16], [torch.bfloat16, torch.float32]]
)
def test_pooled_columns_and_their_gradients(dtypes: list[torch.dtype], weighted: bool) -> None:
    slots = [0, 0, *range(1, len(dtypes))]
    lookup = replicated([None] * len(dtypes), slots, dtypes)
    counts = [[1, 2], [0, 3], [2, 2], [3, 0]][: len(slots)]
    ids = torch.randint(ROWS, (sum(map(sum, counts)),))
    weights = torch.rand(len(ids)) if weighted else None
    pooled = lookup(ids, torch.tensor(counts), weights, [sum(count) for count in counts])
    whole = [parameter.detach().float().requires_grad_() for parameter in lookup.parameters]
    expected, at = [], 0
    for slot, bags in zip(slots, counts, strict=True):
        columns = []
        for count in bags:
            chosen = slice(at, at := at + count)
            scale = torch.ones(count, 1) if weights is None else weights[chosen].unsqueeze(1)
            columns.append((whole[slot][ids[chosen]] * scale).sum(0))
        expected.append(torch.stack(columns))
    assert pooled.dtype is torch.float32
    assert torch.allclose(pooled, torch.cat(expected, dim=1), atol=1e-5)
    gradient = torch.randn_like(pooled)
    pooled.backward(gradient)
    torch.cat(expected, dim=1).backward(gradient)
    for parameter, reference in zip(lookup.parameters, whole, strict=True):
        assert parameter.grad is not None and reference.grad is not None
        assert parameter.grad.dtype is parameter.dtype
        assert torch.equal(parameter.grad, reference.grad.to(parameter.dtype)) or torch.allclose(
            parameter.grad.float(), reference.grad, rtol=1e-2 if parameter.dtype is not torch.float32 else 1e-5
        )


def test_rows_of_sixteen_bits_have_a_gradient_summed_in_float32() -> None:
    lookup = replicated([None], dtypes=[torch.bfloat16])
    ids = torch.tensor([2] * 300)
    rows = lookup.rows(0, ids)
    assert rows.dtype is torch.float32
    assert torch.equal(rows[0], lookup.parameters[0][2].float())
    rows.sum().backward()
    # One by one in bfloat16 the sum would stay at 256.
    assert lookup.parameters[0].grad is not None
    assert lookup.parameters[0].grad.tolist() == [[300.0 if row == 2 else 0.0] * DIM for row in range(ROWS)]


@pytest.mark.parametrize(
    ("fused", "ordinary", "settings"),
    [(SGD, torch.optim.SGD, {"lr": 0.5}), (ADAGRAD, torch.optim.Adagrad, {"lr": 0.25, "eps": 1e-3})],
)
def test_each_backward_is_a_step_of_the_optimizer(
    fused: FusedOptimizer, ordinary: type[torch.optim.Optimizer], settings: dict[str, float]
) -> None:
    lookup = replicated([fused, None])
    weight = nn.Parameter(lookup.parameters[0].detach().clone())
    optimizer = ordinary([weight], **settings)  # type: ignore[arg-type]
    for _ in range(3):
        ids = torch.randint(ROWS, (3,))
        lookup.rows(0, ids).square().sum().backward()
        optimizer.zero_grad()
        nn.functional.embedding(ids, weight).square().sum().backward()
        optimizer.step()
        assert torch.allclose(lookup.parameters[0], weight, atol=1e-6)
        assert lookup.parameters[0].grad is None
    lookup.rows(1, ids).sum().backward()
    assert lookup.parameters[1].grad is not None, "it is its owner's"


def test_a_table_out_of_the_loss_stays_as_it_is() -> None:
    lookup = replicated([SGD, ADAGRAD])
    first, second = values(lookup)
    used, unused = lookup.rows(0, torch.tensor([1])), lookup.rows(1, torch.tensor([1]))
    used.sum().backward()
    assert not torch.equal(lookup.parameters[0], first)
    assert torch.equal(lookup.parameters[1], second)
    unused.sum().backward()
    assert not torch.equal(lookup.parameters[1], second)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_backward_that_raises_does_not_stop_the_next(pooled: bool) -> None:
    def look_up() -> Tensor:
        ids = torch.tensor([1])
        return lookup(ids, torch.tensor([[0], [1]]), None, [0, 1]) if pooled else lookup.rows(1, ids)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("in backward")

    lookup = replicated([SGD, SGD])
    failing = lookup.rows(0, torch.tensor([1]))  # autograd comes to what was made first last
    failing.register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"):
        (failing.sum() + look_up().sum()).backward()
    assert lookup.parameters[1].grad is not None, "its gradient came before the failure"
    before = values(lookup)[1]
    look_up().sum().backward()
    assert torch.equal(lookup.parameters[1][1], before[1] - 0.5)


def test_gradients_are_kept_while_they_are_accumulated() -> None:
    step = gradients()
    lookup = replicated([SGD], step=step)
    before = values(lookup)[0]
    step.reduce_this_backward = False
    lookup.rows(0, torch.tensor([1])).sum().backward()
    assert torch.equal(lookup.parameters[0], before)
    step.reduce_this_backward = True
    lookup.rows(0, torch.tensor([1])).sum().backward()
    assert torch.equal(lookup.parameters[0][1], before[1] - 0.5 * 2)


def test_several_ranks_need_somebody_who_averages() -> None:
    lookup = replicated([SGD], step=gradients(are_reduced=False))
    before = values(lookup)[0]
    with pytest.raises(ConfigError, match="'t0' need their gradients averaged"):
        lookup.rows(0, torch.tensor([1])).sum().backward()
    assert torch.equal(lookup.parameters[0], before)


def test_counts_and_learning_rates_go_by_table() -> None:
    lookup = replicated([SGD, ADAGRAD, None])
    lookup.rows(1, torch.tensor([1])).sum().backward()
    assert lookup.step_counts() == {"t0": 0, "t1": 1, "t2": 0}
    lookup.load_step_counts({"t0": 7, "t2": 3})
    assert lookup.step_counts() == {"t0": 7, "t1": 0, "t2": 0}
    lookup.set_learning_rate(SGD, 2.0)
    before = values(lookup)
    (lookup.rows(0, torch.tensor([1])).sum() + lookup.rows(1, torch.tensor([2])).sum()).backward()
    assert torch.equal(lookup.parameters[0][1], before[0][1] - 2.0)
    assert torch.allclose(before[1][2] - lookup.parameters[1][2], torch.full((DIM,), 0.25), atol=1e-3)
    assert set(lookup.states(1)) == {"sum"} and lookup.states(2) == {}
