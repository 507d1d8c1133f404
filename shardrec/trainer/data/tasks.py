"""``Task``: one of several labels of a row, and what a model is to predict of it."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator


class Task(BaseModel):
    """One label.

    Attributes:
        name: in metrics and scores.
        kind: ``binary``, ``regression`` or ``multiclass``.
        column: name in the files. Default: ``name``.
        above: of a binary task: labels are 1 for numbers above this. None for columns of 0 and 1.
        loss: of a regression: ``mse``, ``huber`` (quadratic up to an error of 1) or ``poisson``, whose model predicts
            the logarithm of a count's mean.
        classes: of a multiclass task, whose labels are whole numbers below this.
        weight: factor of its mean loss in the sum over the tasks.
        optional: rows may lack the label (a null, or an empty text). They add nothing to the task's loss and metrics.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    kind: Literal["binary", "regression", "multiclass"] = "binary"
    column: str = ""
    above: FiniteFloat | None = None
    loss: Literal["mse", "huber", "poisson"] | None = None
    classes: int | None = Field(default=None, ge=2, le=2**24)
    weight: FiniteFloat = Field(default=1.0, gt=0)
    optional: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Task:
        for field, kind in (("above", "binary"), ("loss", "regression"), ("classes", "multiclass")):
            if getattr(self, field) is not None and self.kind != kind:
                raise ValueError(f"{field} is for kind: {kind}")
        if self.kind == "multiclass" and self.classes is None:
            raise ValueError("kind: multiclass needs classes, their number")
        return self

    @property
    def source(self) -> str:
        """Its column in the files."""
        return self.column or self.name

    @property
    def outputs(self) -> int:
        """Columns that it has in a model's output: a logit of each class, or one number."""
        return self.classes or 1

    @property
    def words(self) -> str:
        """What is said of a value that is no label."""
        if self.kind == "binary":
            return "is not 0 or 1" if self.above is None else "is not a number"
        if self.kind == "multiclass":
            return f"is no class, a whole number from 0 to {self.outputs - 1}"
        return "is no count, a number of at least 0" if self.loss == "poisson" else "is not a finite float32 number"

    def takes(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which numbers, (N,), are labels."""
        least = 0.0 if self.loss == "poisson" else -np.inf
        is_label = (np.abs(values) <= np.finfo(np.float32).max) & (values >= least)
        if self.kind == "multiclass":
            is_label = (values >= 0) & (values < self.outputs) & (values == np.floor(values))
        elif self.kind == "binary" and self.above is None:
            is_label = (values == 0) | (values == 1)
        return np.asarray(is_label, dtype=np.bool_)
