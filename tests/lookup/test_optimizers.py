"""Fused optimizers as data: what ``apply_optimizer_in_backward`` asked for, or an error; never something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from shardrec.errors import ConfigError
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind, fused_optimizer_of


def given(cls: type[torch.optim.Optimizer], **settings: Any) -> FusedOptimizer | None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    apply_optimizer_in_backward(cls, [parameter], settings)
    return fused_optimizer_of(parameter, "movies")


CLASSES = [
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torchrec.optim.RowWiseAdagrad,
]
OF_TORCHREC = [
    *(torchrec.optim.SGD, torchrec.optim.Adagrad, torchrec.optim.Adam),
    *(torchrec.optim.LAMB, torchrec.optim.PartialRowWiseAdam),
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("settings", [{}, {"lr": 0.25}], ids=["defaults", "lr"])
def test_settings_and_defaults_are_those_of_the_class(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    fused = given(cls, **settings)
    assert fused is not None
    assert fused.kind.value == cls.__name__
    group = cls([nn.Parameter(torch.zeros(3, 4))], **settings).param_groups[0]
    assert fused.lr == group["lr"]
    if "eps" in group:
        assert fused.eps == group["eps"]
    if "betas" in group:
        assert fused.betas == tuple(group["betas"])
    if "weight_decay" in group:
        assert fused.weight_decay == group["weight_decay"]
    if "initial_accumulator_value" in group:
        assert fused.initial_accumulator_value == group["initial_accumulator_value"]


@pytest.mark.parametrize("cls", OF_TORCHREC, ids=lambda cls: cls.__name__)
def test_torchrecs_classes_stand_for_the_same_optimizers(cls: type[torch.optim.Optimizer]) -> None:
    fused = given(cls, lr=0.5)
    assert fused is not None
    assert (fused.kind.value, fused.lr) == (cls.__name__, 0.5)


def test_every_setting() -> None:
    assert given(
        torch.optim.Adam, lr=0.5, betas=(0.5, 0.75), eps=1e-3, weight_decay=0, amsgrad=False
    ) == FusedOptimizer(kind=OptimizerKind.ADAM, lr=0.5, betas=(0.5, 0.75), eps=1e-3)
    assert given(torch.optim.SGD, lr=0.5, weight_decay=0.25) == FusedOptimizer(
        kind=OptimizerKind.SGD, lr=0.5, weight_decay=0.25
    )
    assert given(torch.optim.Adagrad, lr=torch.tensor(0.5), eps=1e-3, initial_accumulator_value=2) == FusedOptimizer(
        kind=OptimizerKind.ADAGRAD, lr=0.5, eps=1e-3, initial_accumulator_value=2.0
    )
    assert given(torch.optim.SGD, lr=0.5, momentum=0, foreach=False) == FusedOptimizer(kind=OptimizerKind.SGD, lr=0.5)


def test_none_was_given() -> None:
    assert fused_optimizer_of(nn.Parameter(torch.zeros(3, 4)), "movies") is None


@pytest.mark.parametrize(
    ("cls", "settings", "words"),
    [
        (
            torch.optim.SGD,
            {"lr": 1, "momentum": 0.9},
            r"SGD\(momentum=0\.9\) lacks a fused form. Leave momentum at 0\.0, or",
        ),
        (
            torch.optim.SGD,
            {"lr": 1, "maximize": True},
            r"SGD\(maximize=True\) lacks a fused form. Leave maximize at False",
        ),
        (torch.optim.SGD, {"lr": 1, "momentum": 0.9, "nesterov": True}, r"lacks a fused form"),
        (
            torch.optim.Adagrad,
            {"lr_decay": 0.1},
            r"Adagrad\(lr_decay=0\.1\) lacks a fused form. Leave lr_decay at 0\.0",
        ),
        (torch.optim.Adam, {"amsgrad": True}, r"Adam\(amsgrad=True\) lacks a fused form. Leave amsgrad at False"),
        (
            torch.optim.RMSprop,
            {},
            r"no fused form of .*RMSprop. Use one of SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, PartialRowWiseAdam, "
            "LAMB, Lion, or leave the table to an ordinary optimizer",
        ),
        (torch.optim.SparseAdam, {}, r"no fused form of torch\.optim\.\w+\.SparseAdam"),
        (torchrec.optim.LarsSGD, {}, r"no fused form of .*LarsSGD"),
    ],
)
def test_what_has_no_fused_form(cls: type[torch.optim.Optimizer], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        given(cls, **settings)
    assert str(caught.value).startswith("table 'movies': ")


def test_a_setting_that_only_fbgemm_knows() -> None:
    with pytest.raises(ConfigError, match=r"SGD has no fused setting 'max_gradient'. It has lr, weight_decay"):
        given(torchrec.optim.SGD, lr=0.5, max_gradient=1.0)


def test_two_optimizers() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 1})
    apply_optimizer_in_backward(torch.optim.Adam, [parameter], {})
    with pytest.raises(ConfigError, match=r"'movies' was given 2 optimizers in backward \(SGD, Adam\)\. .* takes one"):
        fused_optimizer_of(parameter, "movies")


@pytest.mark.parametrize(
    ("kind", "states", "row_states"),
    [
        (OptimizerKind.SGD, (), ()),
        (OptimizerKind.ADAGRAD, ("sum",), ()),
        (OptimizerKind.ROWWISE_ADAGRAD, ("sum",), ("sum",)),
        (OptimizerKind.ADAM, ("exp_avg", "exp_avg_sq"), ()),
        (OptimizerKind.ADAMW, ("exp_avg", "exp_avg_sq"), ()),
        (OptimizerKind.PARTIAL_ROWWISE_ADAM, ("exp_avg", "exp_avg_sq"), ("exp_avg_sq",)),
        (OptimizerKind.LAMB, ("exp_avg", "exp_avg_sq"), ()),
        (OptimizerKind.LION, ("exp_avg",), ()),
    ],
)
def test_states(kind: OptimizerKind, states: tuple[str, ...], row_states: tuple[str, ...]) -> None:
    optimizer = FusedOptimizer(kind=kind, lr=1.0)
    assert (optimizer.states, optimizer.row_states) == (states, row_states)
    assert optimizer.counts_steps == ("exp_avg_sq" in states)
