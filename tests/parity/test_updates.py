"""Every cell with ``update="step"``: several backward calls and a step are one backward of all their batches.

A 16-bit parameter that keeps a gradient rounds it after each backward, as in torch, and so is left out here: tables
without an optimizer in backward, and replicated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest

from tests.parity.cases import WEIGHTS, WORLDS, Case, bag_cases, sequence_cases, some_of, topology_of
from tests.parity.check import check_all
from tests.ranks import ranks

MICRO_BATCHES = (1, 2, 4)


def exact(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases, with the cells whose gradients are summed in float32."""
    for case in cases:
        rounds = {layout.name for layout in case.plan().tables if layout.replicated}
        kept = [
            cell for cell in case.cells if cell.dtype == "fp32" or not (cell.optimizer == "none" or cell.name in rounds)
        ]
        if kept:
            yield replace(case, cells=kept)


@pytest.mark.parametrize(
    ("world_size", "weights", "micro_batches"),
    some_of(
        product(WORLDS, WEIGHTS, MICRO_BATCHES), [(1, "learned", 4), (2, "none", 2), (2, "given", 1), (4, "none", 4)]
    ),
)
def test_bags(world_size: int, weights: str, micro_batches: int) -> None:
    cases = list(exact(bag_cases(world_size, weights)))
    ranks(world_size, check_all, cases, 2, micro_batches, hosts=topology_of(world_size).hosts, timeout=200)


@pytest.mark.parametrize(
    ("world_size", "dedup", "micro_batches"),
    some_of(product(WORLDS, [True, False], MICRO_BATCHES), [(1, True, 1), (2, False, 2), (4, True, 4)]),
)
def test_sequences(world_size: int, dedup: bool, micro_batches: int) -> None:
    cases = list(exact(sequence_cases(world_size, dedup)))
    ranks(world_size, check_all, cases, 2, micro_batches, hosts=topology_of(world_size).hosts, timeout=200)
