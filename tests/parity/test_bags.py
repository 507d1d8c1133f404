"""Every cell of a sharded EmbeddingBagCollection is trained as TorchRec's unsharded one: values, gradients, states.

The product is cut x pooling x dtype x optimizer (270 tables) x weights of the ids x kind of batch x number of ranks.
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
    WEIGHTS,
    WORLDS,
    all_cells,
    bag_cases,
    one_by_one,
    some_of,
    topology_of,
    wire_cases,
)
from tests.parity.check import check_all
from tests.plans import CUTS, topologies_of
from tests.ranks import ranks

CELLS = len(all_cells(pooled=True))


def test_the_product_is_whole() -> None:
    assert CELLS == (len(CUTS) + 1) * 2 * 3 * 5 == 270
    for sizes in SIZES:
        names = [cell.name for case in bag_cases(2, "none") if case.sizes == sizes for cell in case.cells]
        assert len(set(names)) == len(names) == CELLS


@pytest.mark.parametrize(
    ("world_size", "weights", "sizes"),
    some_of(
        product(WORLDS, WEIGHTS, SIZES),
        [(1, "given", "one"), (2, "none", "each"), (2, "learned", "one"), (4, "learned", "each")],
    ),
)
def test_every_cell(world_size: int, weights: str, sizes: str) -> None:
    """With one batch size, or with one per feature and inverse indices."""
    cases = [case for case in bag_cases(world_size, weights) if case.sizes == sizes]
    found = ranks(world_size, check_all, cases, hosts=topology_of(world_size).hosts, timeout=200)
    assert found == [CELLS] * world_size


@pytest.mark.parametrize(("world_size", "comms"), some_of(product(WORLDS, FORMATS), FEW_FORMATS))
def test_every_cut_in_every_format_on_the_wire(world_size: int, comms: WireType) -> None:
    """Within the bounds that the format has; on one rank nothing travels, and nothing differs."""
    ranks(world_size, check_all, list(wire_cases(world_size, comms, pooled=True)), 2, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_cell_with_more_seeds(world_size: int, weights: str, seed: int) -> None:
    ranks(world_size, check_all, list(bag_cases(world_size, weights, seed=seed)), 5, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("comms", FORMATS)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_format_on_the_wire_with_more_seeds(world_size: int, seed: int, comms: WireType) -> None:
    ranks(world_size, check_all, list(wire_cases(world_size, comms, pooled=True, seed=seed)), 2, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [*CUTS, MIXTURE])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_cell_alone(world_size: int, cut: str) -> None:
    """On every way to spread the ranks over hosts."""
    for topology in topologies_of(world_size):
        cases = list(one_by_one(cut, topology, pooled=True, seed=7))
        ranks(world_size, check_all, cases, hosts=topology.hosts, timeout=200)
