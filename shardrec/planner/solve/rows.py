"""Rows over "how many tables take which option": what every choice of options that can be placed keeps to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.solve.encode import Floats

__all__ = ["Rows"]


@dataclass(frozen=True, eq=False)
class Rows:
    """Sums over the options chosen that are limited whatever the placement: at most ``limits + slopes * c``.

    Args:
        matrix: (N, O).
        limits: (N,).
        slopes: (N,).
        fits: (O,) whether an option is possible at all.
    """

    matrix: Floats
    limits: Floats
    slopes: Floats
    fits: NDArray[np.bool_]
