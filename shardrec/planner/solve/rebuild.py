"""Local search: a few tables are taken off their ranks and put back, each with whichever option suits the moment best.

What is lowered is not the highest load alone but a soft maximum of all ranks' loads,

    sum over ranks of exp(p (load / T - 1)),        T the least cost so far, p its sharpness

which sees every rank that stands in the way. :mod:`rounds` says what a round does; the search goes through them in
cycles, each longer than the one before, in which p grows and less and less of a loss is gone on from. C++ does the
rounds where it was compiled, Python where it was not, with the same results.

Ruin and recreate is from Schrimpf et al. (2000). The random numbers have a fixed seed: the result is a function of the
problem and of the number of rounds.

Shapes: R ranks, D dimensions of a size (load, then bytes of each memory tier), N tables.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardrec.planner.native import address, library
from shardrec.planner.solve.choices import Choices, choices_of
from shardrec.planner.solve.encode import Encoded, Floats
from shardrec.planner.solve.packing import Packing
from shardrec.planner.solve.rounds import DRAWS, Rounds, State, Steep

__all__ = ["Rebuilder"]

_SHARPNESS = (60.0, 120.0)
"""p at the beginning of a cycle and at its end."""
_PATIENCE = 5e-4
"""A state that is so much worse, at most, is gone on from; less towards the end of a cycle."""
_CYCLE = 1024
"""Rounds of the first cycle; each is twice as long as the one before."""
_BATCH = 128
"""Rounds between two questions whether to stop."""
_STEEPEST = 230.0
"""Largest exponent: what is so far above the cost, how far makes no difference."""


class Rebuilder:
    """The search.

    Args:
        encoded: the problem.
        value: (n,) of room on a rank, in even steps.
        seed: of the random numbers.
        native: whether C++ does the rounds, if it is there.
        only: (O,) the options that tables may change to, some of each group; else all but those that do much more work.
    """

    def __init__(
        self,
        encoded: Encoded,
        value: Floats,
        seed: int = 0,
        native: bool = True,
        only: NDArray[np.bool_] | None = None,
    ) -> None:
        self.encoded, self._only = encoded, only
        # Values of sizes that no plan used so far come from knapsacks of others and are low; a part is their share.
        self._value = np.ascontiguousarray(0.6 * value + 0.4 * np.linspace(0, 1, len(value)))
        self._rng = np.random.default_rng(seed)
        self._library = library() if native else None

    def run(self, start: Packing, rounds: int, stop: Callable[[], bool], floor: float = 0.0) -> Packing | None:
        """A better packing than one that there is.

        Args:
            start: where to begin.
            rounds: of taking off and putting back.
            stop: asked now and then; ends the search.
            floor: a cost with which to be content.

        Returns:
            The best found; None if nothing is better than ``start``.
        """
        choices = choices_of(self.encoded, start.cost, self._only)
        state = self._unpacked(choices, start)
        flat = _structure(choices, 1 + len(self.encoded.capacity), len(state.option)), _structure(state)
        done, first, length = 0, 0, _CYCLE
        while done < rounds and state.cost[1] > floor and not stop():
            if done == first + length:
                first, length = done, 2 * length
            batch = min(_BATCH, rounds - done, first + length - done)
            part = (done - first) / length
            sharpness = _SHARPNESS[0] * (_SHARPNESS[1] / _SHARPNESS[0]) ** part
            patience = sharpness * _PATIENCE * (1 - part) * self._rng.random(batch) ** 2
            drawn, allowed = self._rng.random((batch, DRAWS)), np.exp(patience)
            steep = self._steep(choices, state, sharpness)
            if self._library is None:
                Rounds(choices, state, steep).run(drawn, allowed)
            else:
                self._library.shardrec_solve_rebuild(
                    *map(ctypes.byref, (*flat, _structure(steep, len(steep.value) - 1))),
                    *map(ctypes.c_int64, drawn.shape),
                    *map(address, (drawn, allowed)),
                )
            done += batch
        return self._packed(choices, state) if state.cost[1] < start.cost * (1 - 1e-9) else None

    def _steep(self, choices: Choices, state: State, sharpness: float) -> Steep:
        factor = sharpness / float(state.cost.min())
        grow, rise = (np.exp(np.minimum(factor * each[:, 0], _STEEPEST)) for each in (choices.size, choices.base))
        return Steep(
            terms=np.exp(np.minimum(factor * state.sums[0] - sharpness, _STEEPEST)),
            lift=np.exp(np.minimum(factor * state.base[:1], _STEEPEST)),
            grow=grow,
            shrink=1 / grow,
            rise=rise,
            fall=1 / rise,
            value=self._value,
        )

    def _unpacked(self, choices: Choices, packing: Packing) -> State:
        """The state of a packing: which of equal parts is whose does not matter."""
        encoded = self.encoded
        left = {block: [p for p, n in enumerate(at) for _ in range(int(n))] for block, at in packing.at.items()}
        option = np.repeat(np.arange(len(packing.counts)), packing.counts)
        spot = np.zeros((len(option), choices.slots), dtype=np.int32)
        on = np.zeros((encoded.ranks, len(option)), dtype=np.int32)
        for table, each in enumerate(option.tolist()):
            parts = range(*choices.option_first[each : each + 2].tolist())
            blocks = np.repeat(choices.part_kind[parts], choices.part_count[parts]).tolist()
            for slot, block in enumerate(blocks):
                place = spot[table, slot] = left[block].pop()
                np.add.at(on, (encoded.blocks[block].places[place], table), 1)
        base = packing.counts.astype(np.float64) @ choices.base
        return State(
            sums=np.ascontiguousarray(np.column_stack([packing.loads, packing.memory]).T - base[:, None]),
            base=base,
            option=option,
            spot=spot,
            on=on,
            cost=np.full(2, packing.cost),
            best_option=option.copy(),
            best_spot=spot.copy(),
        )

    def _packed(self, choices: Choices, state: State) -> Packing | None:
        packing = Packing(self.encoded, np.bincount(state.best_option, minlength=len(self.encoded.options)))
        for option, spots in zip(state.best_option.tolist(), state.best_spot.tolist(), strict=True):
            parts = range(*choices.option_first[option : option + 2].tolist())
            blocks = np.repeat(choices.part_kind[parts], choices.part_count[parts]).tolist()
            for block, place in zip(blocks, spots, strict=False):
                packing.put(block, place)
        return packing if packing.fits() else None


def _structure(arrays: Any, *sizes: int) -> ctypes.Structure:
    """Where the arrays of a dataclass are, in its order, then whole numbers, as C++ has them."""
    values = [getattr(arrays, field.name) for field in fields(arrays)]
    members = [address(each) if isinstance(each, np.ndarray) else ctypes.c_int64(each) for each in (*values, *sizes)]
    kind = type("Arrays", (ctypes.Structure,), {"_fields_": [(f"f{n}", type(each)) for n, each in enumerate(members)]})
    return kind(*members)  # type: ignore[no-any-return]
