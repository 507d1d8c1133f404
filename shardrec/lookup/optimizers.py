"""The optimizer that ``apply_optimizer_in_backward`` gave to a table's parameter, as data.

The fused optimizers change only the rows that a batch looks up. For SGD, Adagrad and rowwise Adagrad the dense
optimizer does the same, because a row without gradient keeps its value and its state. Adam and its relatives are lazy,
as in fbgemm, TorchRec and :class:`torch.optim.SparseAdam`: the moments of a row that is not looked up do not decay, and
the row does not move. Weight decay is lazy in the same way: it applies to the rows that a batch looks up, as an L2 term
of the gradient (SGD, Adagrad, rowwise Adagrad, Adam, as in torch's classes) or decoupled (the others, Loshchilov and
Hutter, 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from shardrec.errors import ConfigError


class OptimizerKind(Enum):
    """Fused optimizers, by the name of the torch class that selects them."""

    SGD = "SGD"
    ADAGRAD = "Adagrad"
    ROWWISE_ADAGRAD = "RowWiseAdagrad"
    ADAM = "Adam"
    ADAMW = "AdamW"
    PARTIAL_ROWWISE_ADAM = "PartialRowWiseAdam"
    LAMB = "LAMB"
    LION = "Lion"


@dataclass(frozen=True, kw_only=True)
class FusedOptimizer:
    """A fused optimizer and its settings, as in the torch class of that name.

    Args:
        kind: the update rule.
        lr: learning rate.
        eps: added to the root of the second moment.
        betas: decay of Adam's two moments. Lion's two weights of its moment.
        initial_accumulator_value: first value of Adagrad's sums of squares.
        weight_decay: factor with which a row that is looked up is added to its gradient or, decoupled, to its change.
    """

    kind: OptimizerKind
    lr: float
    eps: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the per-weight (or, rowwise, per-row) states, as the torch class calls them."""
        match self.kind:
            case OptimizerKind.SGD:
                return ()
            case OptimizerKind.ADAGRAD | OptimizerKind.ROWWISE_ADAGRAD:
                return ("sum",)
            case OptimizerKind.LION:
                return ("exp_avg",)
            case _:
                return ("exp_avg", "exp_avg_sq")

    @property
    def keeps_rows_without_gradient(self) -> bool:
        """Whether a gradient of zeros changes neither a row nor its state."""
        if "exp_avg" in self.states or self.weight_decay:
            return False
        return not self.states or self.eps > 1e-30  # 0 / 0 without. Above float32's smallest

    @property
    def counts_steps(self) -> bool:
        """Whether the rule depends on the number of steps so far."""
        return "exp_avg_sq" in self.states

    @property
    def row_states(self) -> tuple[str, ...]:
        """Those of ``states`` that are one value per row, from the mean square of the row's gradient."""
        match self.kind:
            case OptimizerKind.ROWWISE_ADAGRAD:
                return ("sum",)
            case OptimizerKind.PARTIAL_ROWWISE_ADAM:
                return ("exp_avg_sq",)
            case _:
                return ()

    @property
    def is_decay_decoupled(self) -> bool:
        """Whether weight decay is added to the change of a row instead of its gradient."""
        return self.kind not in _L2_DECAY


_L2_DECAY = (OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.ADAM)

_DEFAULTS: dict[OptimizerKind, dict[str, Any]] = {
    OptimizerKind.SGD: {"lr": 1e-3, "weight_decay": 0.0},
    OptimizerKind.ADAGRAD: {"lr": 1e-2, "eps": 1e-10, "initial_accumulator_value": 0.0, "weight_decay": 0.0},
    OptimizerKind.ROWWISE_ADAGRAD: {"lr": 1e-2, "eps": 1e-10, "initial_accumulator_value": 0.0, "weight_decay": 0.0},
    OptimizerKind.ADAM: {"lr": 1e-3, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0},
    OptimizerKind.ADAMW: {"lr": 1e-3, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 1e-2},
    # TorchRec's placeholders lack defaults. These are fbgemm's.
    OptimizerKind.PARTIAL_ROWWISE_ADAM: {"lr": 1e-2, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0},
    OptimizerKind.LAMB: {"lr": 1e-2, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0},
    # Chen et al., 2023. Torch lacks such a class: any class of this name with these settings selects it.
    OptimizerKind.LION: {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
}

# Settings that change the update rule. Each is accepted only at the value that does not.
_NEUTRAL: dict[str, Any] = {
    "momentum": 0.0,
    "dampening": 0.0,
    "lr_decay": 0.0,
    "nesterov": False,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": False,
}

# Settings that affect how the torch class computes, not the result.
_IRRELEVANT = frozenset({"foreach", "capturable", "differentiable", "fused"})


def fused_optimizer_of(parameter: nn.Parameter, table: str) -> FusedOptimizer | None:
    """The optimizer that ``apply_optimizer_in_backward`` gave to ``parameter``. None without one.

    Raises:
        ConfigError: for an optimizer or a setting without a fused form, or one that has states.
    """
    classes: list[type[torch.optim.Optimizer]] = getattr(parameter, "_optimizer_classes", [])
    settings: list[Mapping[str, Any]] = getattr(parameter, "_optimizer_kwargs", [])
    if not classes:
        return None
    if len(classes) > 1:
        named = ", ".join(cls.__name__ for cls in classes)
        raise ConfigError(
            f"table {table!r} was given {len(classes)} optimizers in backward ({named}). A fused table takes one"
        )
    kind = _kind_of(classes[0], table)
    values = dict(_DEFAULTS[kind])
    given: list[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", [])
    changed: dict[str, Any] = {}
    if given and hasattr(given[0], "param_groups"):  # TorchRec's placeholders have none
        group, defaults = given[0].param_groups[0], given[0].defaults
        changed = {name: group[name] for name in values if name in group and group[name] != defaults.get(name)}
        state = given[0].state.get(parameter, {})
        if state and int(state.get("step", 1)) > 0:
            raise ConfigError(
                f"table {table!r} was trained by its {classes[0].__name__} in backward before it was sharded, and the "
                "optimizer's states would be lost: shard the model before its first backward, or drop the states with "
                "parameter._in_backward_optimizers[0].state.clear()"
            )
    for name, value in {**settings[0], **changed}.items():
        if name in values:
            values[name] = value
        elif name in _NEUTRAL:
            if value != _NEUTRAL[name]:
                raise ConfigError(
                    f"table {table!r}: {classes[0].__name__}({name}={value!r}) lacks a fused form. Leave {name} at "
                    f"{_NEUTRAL[name]!r}, or give the table an ordinary optimizer"
                )
        elif name not in _IRRELEVANT:
            known = ", ".join(sorted(_DEFAULTS[kind]))
            raise ConfigError(f"table {table!r}: {classes[0].__name__} has no fused setting {name!r}. It has {known}")
    numbers: dict[str, Any] = {
        name: tuple(map(float, value)) if name == "betas" else float(value) for name, value in values.items()
    }
    return FusedOptimizer(kind=kind, **numbers)


def _kind_of(cls: type[torch.optim.Optimizer], table: str) -> OptimizerKind:
    # torchrec.optim has subclasses of the torch optimizers that ignore fbgemm's own settings. Their names differ.
    for kind in OptimizerKind:
        if cls.__name__ == kind.value:
            return kind
    known = ", ".join(kind.value for kind in OptimizerKind)
    raise ConfigError(
        f"table {table!r}: there is no fused form of {cls.__module__}.{cls.__name__}. Use one of {known}, or leave the "
        "table to an ordinary optimizer"
    )
