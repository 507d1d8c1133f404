"""Optimizers that torch has not, or not for some rows only: dense, by hand, on the rows whose gradient is not zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LAMB", "AdamW", "Lion", "PartialRowWiseAdam"]


class _OnRows(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not for these
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(t=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
                state["t"] += 1
                for row in parameter.grad.any(dim=1).nonzero().squeeze(1).tolist():
                    change = self.change(
                        parameter[row], parameter.grad[row], state["m"][row], state["v"][row], state["t"], group
                    )
                    parameter[row] -= group["lr"] * change

    def change(self, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, t: int, group: dict[str, Any]) -> Tensor:
        """(w) from a row (w), its gradient and its moments, which it updates, at step ``t``."""
        beta1, beta2 = group["betas"]
        m += (1 - beta1) * (gradient - m)
        v += (1 - beta2) * (self.square(gradient) - v)
        ratio: Tensor = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
        return ratio + group["weight_decay"] * weight

    def square(self, gradient: Tensor) -> Tensor:
        """What the second moment averages."""
        return gradient**2


class AdamW(_OnRows):
    pass


class PartialRowWiseAdam(_OnRows):
    def square(self, gradient: Tensor) -> Tensor:
        return (gradient**2).mean().expand_as(gradient)


class LAMB(_OnRows):
    def change(self, weight: Tensor, *args: Any) -> Tensor:
        change = super().change(weight, *args)
        size, step = weight.norm(), change.norm()
        return change * (size / step) if size > 0 and step > 0 else change


class Lion(_OnRows):
    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, 0.0, weight_decay)

    def change(self, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, t: int, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        sign = (m + (1 - beta1) * (gradient - m)).sign()
        m += (1 - beta2) * (gradient - m)
        return sign + group["weight_decay"] * weight
