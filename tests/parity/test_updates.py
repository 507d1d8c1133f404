"""Every cell with ``update="step"``: several backward calls and a step are one backward of all their batches.

A 16-bit parameter that keeps a gradient rounds it after each backward, as in torch, and so is left out here: tables
without an optimizer in backward, and replicated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from tests.parity.cases import KINDS, WORLDS, Case, Kind, every_cell, some_of, topology_of
from tests.parity.check import check_all
from tests.ranks import ranks


def exact(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases, with the cells whose gradients are summed in float32."""
    for case in cases:
        replicated = {layout.name for layout in case.plan().tables if layout.replicated}
        kept = [
            cell
            for cell in case.cells
            if cell.dtype == "fp32" or not (cell.optimizer == "none" or cell.name in replicated)
        ]
        if kept:
            yield replace(case, cells=kept)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("executor", "world_size", "kind", "micro_batches"),
    some_of(
        [["eager", "live script"], WORLDS, KINDS, (1, 2, 4)],
        {
            ("eager", 1, Kind(weights="learned"), 4),
            ("eager", 2, Kind(weights="none"), 2),
            ("eager", 2, Kind(weights="given"), 1),
            ("live script", 2, Kind(weights="none"), 2),
            ("eager", 4, Kind(weights="none"), 2),
            ("eager", 2, Kind(pooled=False, dedup=True), 2),
            ("eager", 4, Kind(pooled=False, dedup=False), 2),
        },
    ),
)
def test_every_cell(executor: str, world_size: int, kind: Kind, micro_batches: int) -> None:
    cases = [replace(case, executor=executor) for case in exact(every_cell(world_size, kind, "one"))]
    ranks(world_size, check_all, cases, 2, micro_batches, hosts=topology_of(world_size).hosts, timeout=300)
