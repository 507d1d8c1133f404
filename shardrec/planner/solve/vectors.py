"""The best multisets of pieces for a room, where sizes are of several quantities: time and memory, say.

What :mod:`knapsack` does for one quantity. Besides pieces, what is left of the room has a value, too, in proportion.
With several quantities, steps fine enough for sizes to be nearly exact are too many. So the sizes of the dynamic
programme are rounded to the nearest step, which makes its values wrong by a little, either way; they only guide a
search that goes back through its kinds with true sizes, and keeps the states that promise most.

Shapes: K kinds of pieces, Q quantities, S1 x ... x SQ steps of the quantities, B states.
"""

from __future__ import annotations

import numpy as np

from shardrec.planner.solve.encode import Floats, Ints

__all__ = ["VectorKnapsack"]

_LEAST = 1e-10
"""Gains that count."""
_KINDS = 120
"""Most kinds that are looked at: those with the highest gain for their size."""
_NEAR = 0.98
"""Part of the value of others in its place from which on a kind is looked at: rounding may have made the difference."""


class VectorKnapsack:
    """The knapsack of some kinds of pieces, any number of each.

    Args:
        sizes: (K, Q) of each kind, none of them 0 in all quantities.
        values: (K,).
        left: (Q,) value of what is left, per unit.
        step: (Q,) size of a step.
        steps: (Q,) how many: the largest room.

    Attributes:
        best: (S1 + 1, ..., SQ + 1) about the most that pieces within each size are worth more than what they take.
    """

    def __init__(self, sizes: Floats, values: Floats, left: Floats, step: Floats, steps: Ints) -> None:
        self._sizes, self._left, self._step, self._steps = sizes, left, step, steps
        # What a piece is worth more than what it takes: so rounding decides what fits, and not what it is worth.
        self._gain: Floats = values - sizes @ left
        self.best: Floats = np.zeros(tuple(int(size) + 1 for size in steps))
        self._before: list[tuple[int, Floats]] = []
        weights: Ints = np.rint(sizes / step).astype(np.int64)
        weights[~weights.any(axis=1)] = 1
        share = (sizes / (step * np.maximum(steps, 1))).max(axis=1)
        for kind in np.argsort(-self._gain / np.maximum(share, 1e-12), kind="stable").tolist():
            weight, gain = weights[kind], float(self._gain[kind])
            if (
                len(self._before) < _KINDS
                and (weight <= steps).all()
                and gain > self.best[tuple(weight)] * _NEAR + _LEAST
            ):
                self._before.append((kind, self.best.copy()))
                self._add(weight, gain)

    def _add(self, weight: Ints, value: float) -> None:
        best, shape = self.best, self.best.shape
        limit = int((self._steps[weight > 0] // weight[weight > 0]).min())
        times = 1
        while limit > 0:
            times = min(times, limit)
            shift = (times * weight).tolist()
            above = best[tuple(slice(each, None) for each in shift)]
            other = best[tuple(slice(None, size - each) for size, each in zip(shape, shift, strict=True))]
            other = other + times * value
            if not (other > above + _LEAST).any():
                break
            np.maximum(above, other, out=above)
            limit, times = limit - times, 2 * times

    def value(self, sizes: Floats) -> Floats:
        """(N,) about the most value within sizes (N, Q)."""
        at = np.minimum(np.rint(sizes / self._step).astype(np.int64), self._steps)
        found: Floats = self.best[tuple(at.T)] + sizes @ self._left
        return found

    def ways(self, room: Floats, states: int) -> tuple[Ints, Floats]:
        """Multisets that fit a room (Q,), the best that were found first: (B, K) numbers of pieces, and (B,) values."""
        left, counts, value = room[None].copy(), np.zeros((1, len(self._sizes)), dtype=np.int64), np.zeros(1)
        for kind, before in reversed(self._before):
            size = self._sizes[kind]
            some = size > 0
            most = np.floor(((left[:, some] + 1e-12) / size[some]).min(axis=1)).astype(np.int64)
            if most.max() <= 0:
                continue
            state = np.repeat(np.arange(len(most)), most + 1)
            times = np.arange(len(state)) - np.repeat(np.cumsum(most + 1) - most - 1, most + 1)
            after = left[state] - times[:, None] * size
            total = value[state] + times * self._gain[kind]
            at = np.minimum(np.rint(np.maximum(after, 0.0) / self._step).astype(np.int64), self._steps)
            promise = total + before[tuple(at.T)]
            if len(promise) > states:
                kept = np.argpartition(-promise, states)[:states]
                state, times, after, total = state[kept], times[kept], after[kept], total[kept]
            left, value, counts = after, total, counts[state]
            counts[:, kind] += times
        value = value + float(room @ self._left)
        order = np.argsort(-value, kind="stable")
        return counts[order], value[order]
