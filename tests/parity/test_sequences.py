"""Every cell of a sharded EmbeddingCollection is trained as TorchRec's unsharded one: rows, gradients, states.

The product is cut x dtype x optimizer (135 tables) x dedup x kind of batch x number of ranks.
"""

from __future__ import annotations

from itertools import product

import pytest

from shardrec.exchange.wire import WireType
from tests.parity.cases import (
    FEW_FORMATS,
    FORMATS,
    MIXTURE,
    SIZES,
    WORLDS,
    all_cells,
    one_by_one,
    sequence_cases,
    some_of,
    topology_of,
    wire_cases,
)
from tests.parity.check import check_all
from tests.plans import CUTS, topologies_of
from tests.ranks import ranks

CELLS = len(all_cells(pooled=False))


def test_the_product_is_whole() -> None:
    assert CELLS == (len(CUTS) + 1) * 3 * 5 == 135
    for sizes in SIZES:
        names = [cell.name for case in sequence_cases(2, dedup=True) if case.sizes == sizes for cell in case.cells]
        assert len(set(names)) == len(names) == CELLS


@pytest.mark.parametrize(
    ("world_size", "dedup", "sizes"),
    some_of(product(WORLDS, [True, False], SIZES), [(1, True, "one"), (2, False, "one"), (4, True, "each")]),
)
def test_every_cell(world_size: int, dedup: bool, sizes: str) -> None:
    """With one batch size, or with one per feature, with inverse indices and without."""
    cases = [case for case in sequence_cases(world_size, dedup) if case.sizes == sizes]
    found = ranks(world_size, check_all, cases, hosts=topology_of(world_size).hosts, timeout=200)
    assert found == [CELLS] * world_size


@pytest.mark.parametrize(("world_size", "comms"), some_of(product(WORLDS, FORMATS), FEW_FORMATS))
def test_every_cut_in_every_format_on_the_wire(world_size: int, comms: WireType) -> None:
    """Within the bounds that the format has; on one rank nothing travels, and nothing differs."""
    ranks(world_size, check_all, list(wire_cases(world_size, comms, pooled=False)), 2, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_cell_with_more_seeds(world_size: int, dedup: bool, seed: int) -> None:
    ranks(world_size, check_all, list(sequence_cases(world_size, dedup, seed=seed)), 5, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("comms", FORMATS)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_format_on_the_wire_with_more_seeds(world_size: int, seed: int, comms: WireType) -> None:
    ranks(world_size, check_all, list(wire_cases(world_size, comms, pooled=False, seed=seed)), 2, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [*CUTS, MIXTURE])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_cell_alone(world_size: int, cut: str) -> None:
    """On every way to spread the ranks over hosts."""
    for topology in topologies_of(world_size):
        cases = list(one_by_one(cut, topology, pooled=False, seed=7))
        ranks(world_size, check_all, cases, hosts=topology.hosts, timeout=200)
