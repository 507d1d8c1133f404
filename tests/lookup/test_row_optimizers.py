"""Row by row, each rule is the torch optimizer of that name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
import torchrec
from hypothesis import given, settings
from torch import Tensor, nn

from shardrec.lookup.group_shards import RowGradient, WidthClass
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.lookup.row_optimizers import RowOptimizer
from tests import row_references
from tests.cuda_double import cuda_double, cuda_is_there
from tests.plans import randoms

OPTIMIZERS = [
    FusedOptimizer(kind=OptimizerKind.SGD, lr=0.5),
    FusedOptimizer(kind=OptimizerKind.ADAGRAD, lr=0.5, eps=1e-3),
    FusedOptimizer(kind=OptimizerKind.ADAGRAD, lr=0.1, eps=1e-10, initial_accumulator_value=0.25),
    FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.5, eps=1e-3, initial_accumulator_value=0.25),
    FusedOptimizer(kind=OptimizerKind.ADAM, lr=0.1, eps=1e-8, betas=(0.9, 0.999)),
    FusedOptimizer(kind=OptimizerKind.ADAM, lr=0.1, eps=1e-2, betas=(0.5, 0.75)),
    FusedOptimizer(kind=OptimizerKind.SGD, lr=0.25, weight_decay=0.5),
    FusedOptimizer(kind=OptimizerKind.ADAGRAD, lr=0.25, eps=1e-3, weight_decay=0.5),
    FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.25, eps=1e-3, weight_decay=0.5),
    FusedOptimizer(kind=OptimizerKind.ADAM, lr=0.2, eps=1e-8, betas=(0.9, 0.999), weight_decay=0.5),
    FusedOptimizer(kind=OptimizerKind.ADAMW, lr=0.2, eps=1e-8, betas=(0.9, 0.999), weight_decay=0.5),
]

ON_ROWS = {
    OptimizerKind.ADAMW: row_references.AdamW,
    OptimizerKind.PARTIAL_ROWWISE_ADAM: row_references.PartialRowWiseAdam,
    OptimizerKind.LAMB: row_references.LAMB,
    OptimizerKind.LION: row_references.Lion,
}
"""Where torch has no class, or none that leaves rows alone."""


def torch_optimizer(spec: FusedOptimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
    match spec.kind:
        case OptimizerKind.SGD:
            return torch.optim.SGD([parameter], lr=spec.lr, weight_decay=spec.weight_decay)
        case OptimizerKind.ADAM | OptimizerKind.ADAMW:
            adam = torch.optim.Adam if spec.kind is OptimizerKind.ADAM else torch.optim.AdamW
            return adam([parameter], lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
        case OptimizerKind.ADAGRAD:
            cls: Callable[..., torch.optim.Optimizer] = torch.optim.Adagrad
        case _:
            cls = torchrec.optim.RowWiseAdagrad
    first = spec.initial_accumulator_value
    return cls([parameter], lr=spec.lr, eps=spec.eps, initial_accumulator_value=first, weight_decay=spec.weight_decay)


def one_class(weight: Tensor, rows_of_tables: list[int]) -> WidthClass:
    bases = [0]
    for rows in rows_of_tables:
        bases.append(bases[-1] + rows)
    return WidthClass(
        width=weight.size(1),
        tables=tuple(range(len(rows_of_tables))),
        bases=tuple(bases),
        weight=weight,
        slot_bases=torch.zeros(0, dtype=torch.int64),
    )


@pytest.mark.some(5)
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: f"{spec.kind.value}-{spec.lr}")
@settings(max_examples=15)
@given(rng=randoms())
def test_steps_as_torch_does(spec: FusedOptimizer, rng: Random) -> None:
    rows, width = rng.randint(1, 8), 4 * rng.randint(1, 2)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    parameter = nn.Parameter(torch.randn(rows, width, generator=generator))
    weight = parameter.detach().clone()
    fused = RowOptimizer([one_class(weight, [rows])], 1, spec)
    optimizer = torch_optimizer(spec, parameter)
    for _ in range(4):
        # Only Adam and weight decay would do something to a row without gradient, which the fused ones leave alone.
        few = rows if spec.counts_steps or spec.weight_decay else rng.randint(0, rows)
        chosen = torch.tensor(sorted(rng.sample(range(rows), few)), dtype=torch.int64)
        values = torch.randn(len(chosen), width, generator=generator)
        parameter.grad = torch.zeros(rows, width).index_copy_(0, chosen, values)
        optimizer.step()
        fused.step(fused.decayed([RowGradient(rows=chosen, values=values)]))
        assert torch.allclose(weight, parameter, atol=1e-6)
    assert fused.step_count == 4


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", ON_ROWS, ids=lambda kind: kind.value)
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@settings(max_examples=15)
@given(rng=randoms())
def test_steps_on_some_rows_as_the_reference_does(kind: OptimizerKind, weight_decay: float, rng: Random) -> None:
    rows, width = rng.randint(1, 8), 4 * rng.randint(1, 2)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    parameter = nn.Parameter(torch.randn(rows, width, generator=generator))
    with torch.no_grad():
        parameter[0] = 0.0  # LAMB has no ratio for it
    weight = parameter.detach().clone()
    settings = {"lr": 0.1, "betas": (0.6, 0.8), "weight_decay": weight_decay}
    fused = RowOptimizer([one_class(weight, [rows])], 1, FusedOptimizer(kind=kind, **settings, eps=1e-6))  # type: ignore[arg-type]
    reference = ON_ROWS[kind]([parameter], **settings, **({} if kind is OptimizerKind.LION else {"eps": 1e-6}))
    for _ in range(4):
        chosen = torch.tensor(sorted(rng.sample(range(rows), rng.randint(0, rows))), dtype=torch.int64)
        values = torch.randn(len(chosen), width, generator=generator)
        parameter.grad = torch.zeros(rows, width).index_copy_(0, chosen, values)
        reference.step()
        fused.step(fused.decayed([RowGradient(rows=chosen, values=values)]))
        assert torch.allclose(weight, parameter, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("kind", OptimizerKind, ids=lambda kind: kind.value)
def test_which_optimizers_keep_a_row_whose_gradient_is_zero(kind: OptimizerKind, weight_decay: float) -> None:
    spec = FusedOptimizer(kind=kind, lr=0.5, eps=1e-8, betas=(0.9, 0.99), weight_decay=weight_decay)
    weight = torch.ones(1, 4)
    fused = RowOptimizer([one_class(weight, [1])], 1, spec)
    for value in (1.0, 0.0):
        before = [tensor.clone() for tensor in (weight, *fused.states()[0].values())]
        fused.step(fused.decayed([RowGradient(rows=torch.tensor([0]), values=torch.full((1, 4), value))]))
    after = [weight, *fused.states()[0].values()]
    assert spec.keeps_rows_without_gradient == all(map(torch.equal, before, after))


def test_lamb_of_rows_and_gradients_of_zeros_is_finite() -> None:
    weight = torch.zeros(2, 4)
    fused = RowOptimizer([one_class(weight, [2])], 1, FusedOptimizer(kind=OptimizerKind.LAMB, lr=0.5, eps=1e-8))
    fused.step([RowGradient(rows=torch.tensor([0, 1]), values=torch.tensor([[0.0] * 4, [1.0] * 4]))])
    assert weight[0].tolist() == [0.0] * 4
    assert torch.allclose(weight[1], torch.tensor(-0.5)), "a row of zeros moves"


def test_adam_leaves_rows_alone_that_are_not_looked_up() -> None:
    """Neither moved nor decayed; the step count goes on for all the rows."""
    spec = FusedOptimizer(kind=OptimizerKind.ADAM, lr=0.1, eps=1e-8, betas=(0.9, 0.999))
    weight = torch.ones(2, 4)
    fused = RowOptimizer([one_class(weight, [2])], 1, spec)
    fused.step([RowGradient(rows=torch.tensor([0, 1]), values=torch.full((2, 4), 0.5))])
    before = weight[1].clone(), fused.states()[0]["exp_avg"][1].clone(), fused.states()[0]["exp_avg_sq"][1].clone()
    fused.step([RowGradient(rows=torch.tensor([0]), values=torch.full((1, 4), 0.5))])
    after = weight[1], fused.states()[0]["exp_avg"][1], fused.states()[0]["exp_avg_sq"][1]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    fused.step([RowGradient(rows=torch.tensor([1]), values=torch.full((1, 4), 0.5))])
    first = (0.9 * 0.05 + 0.1 * 0.5) / (1 - 0.9**3)
    second = (0.999 * 0.00025 + 0.001 * 0.25) / (1 - 0.999**3)
    assert torch.allclose(weight[1], before[0] - 0.1 * first / second**0.5, atol=1e-6)


def test_states_are_views_by_table() -> None:
    weight = torch.zeros(5, 4)
    fused = RowOptimizer([one_class(weight, [2, 3])], 2, FusedOptimizer(kind=OptimizerKind.ADAM, lr=1.0, eps=1e-8))
    first, second = fused.states()
    assert first.keys() == second.keys() == {"exp_avg", "exp_avg_sq"}
    assert (first["exp_avg"].shape, second["exp_avg"].shape) == ((2, 4), (3, 4))
    second["exp_avg"].fill_(7.0)
    assert fused.states()[1]["exp_avg"].eq(7).all()
    assert fused.states()[0]["exp_avg"].eq(0).all()


def test_the_mean_square_of_a_whole_row_can_be_given() -> None:
    """As when this rank holds a part of the row's columns."""
    spec = FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=1.0)
    weight = torch.zeros(3, 4)
    fused = RowOptimizer([one_class(weight, [3])], 1, spec)
    gradient = RowGradient(rows=torch.tensor([2]), values=torch.full((1, 4), 6.0))
    fused.step([gradient], [torch.tensor([9.0])])
    assert fused.states()[0]["sum"].tolist() == [0.0, 0.0, 9.0]
    assert weight[2].tolist() == [-2.0] * 4


def test_the_learning_rate_may_change() -> None:
    weight = torch.zeros(1, 4)
    fused = RowOptimizer([one_class(weight, [1])], 1, FusedOptimizer(kind=OptimizerKind.SGD, lr=1.0))
    fused.lr = 0.25
    fused.step([RowGradient(rows=torch.tensor([0]), values=torch.ones(1, 4))])
    assert weight.tolist() == [[-0.25] * 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=str)
def test_rows_of_16_bits_are_float32_during_the_update(spec: FusedOptimizer, dtype: torch.dtype) -> None:
    """To the last bit those of a float32 table that is rounded to nearest after each step; states are float32."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 8, generator=generator).to(dtype)
    single = weight.float()
    halves, singles = (RowOptimizer([one_class(one, [6])], 1, spec) for one in (weight, single))
    for _ in range(4):
        rows = torch.randperm(6, generator=generator)[:4].sort().values
        gradient = RowGradient(rows=rows, values=torch.randn(4, 8, generator=generator))
        halves.step([gradient])
        singles.step([gradient])
        single.copy_(single.to(dtype))
        assert torch.equal(weight.float(), single)
    for name, state in halves.states()[0].items():
        assert state.dtype is torch.float32
        assert torch.equal(state, singles.states()[0][name])


def test_averages_of_rows_wait_for_nothing() -> None:
    def optimizer(device: str) -> tuple[RowOptimizer, list[RowGradient]]:
        cls = one_class((torch.arange(24.0).view(6, 4) / 10).to(device), [6])
        rows = RowOptimizer([cls], 1, FusedOptimizer(kind=OptimizerKind.ADAGRAD, lr=0.1, eps=1e-8))
        rows.keep_averages(0.9)
        return rows, [
            RowGradient(rows=torch.tensor(touched).to(device), values=torch.ones(2, 4).to(device))
            for touched in ([0, 2], [2, 5], [0, 5])
        ]

    def average(rows: RowOptimizer, gradients: list[RowGradient]) -> Tensor:
        for gradient in gradients:
            rows.step([gradient])
        ((_, averages),) = rows.averages()
        return averages

    expected = average(*optimizer("cpu"))
    with cuda_is_there(), cuda_double() as double:
        with double.may_wait():
            made = optimizer("cuda:0")
            double.waits.clear()
        found = average(*made)
        assert not double.waits
    torch.testing.assert_close(found.inner, expected)  # type: ignore[attr-defined]  # the double's own tensor
