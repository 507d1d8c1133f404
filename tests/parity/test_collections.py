"""Every cell of a sharded collection trains as TorchRec's unsharded one, by each executor: values, gradients, states.

The product of a table is cut x pooling x dtype x optimizer (270 of an EmbeddingBagCollection, 135 of an
EmbeddingCollection, which pools nothing). Its collection adds weights of the ids, dedup, kind of batch, format on the
wire, number of ranks, and what runs it. A portable program infers beside the training, with the weights that it trains.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings

from shardrec.exchange.wire_format import WireType
from tests.cuda_ranks import DEVICES, cuda_ranks
from tests.cuda_ranks import WORLDS as CUDA_WORLDS
from tests.executors import EXECUTORS
from tests.parity import check
from tests.parity.cases import (
    FORMATS,
    KINDS,
    SIZES,
    WORLDS,
    Case,
    Kind,
    all_cells,
    drawn_cases,
    every_cell,
    some_of,
    topology_of,
    wire_cases,
)
from tests.parity.check import check_all
from tests.ranks import ranks

CELLS = {True: 270, False: 135}
"""Of a pooled collection, and of the other."""


def test_the_product_is_whole() -> None:
    for kind, sizes in product(KINDS, SIZES):
        names = [cell.name for case in every_cell(2, kind, sizes) for cell in case.cells]
        assert len(set(names)) == len(names) == len(all_cells(pooled=kind.pooled)) == CELLS[kind.pooled]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("executor", "world_size", "kind", "sizes"),
    some_of(
        [list(EXECUTORS), WORLDS, KINDS, SIZES],
        {
            ("eager", 1, Kind(weights="given"), "one"),
            ("eager", 2, Kind(), "each"),
            ("eager", 2, Kind(weights="learned"), "one"),
            ("eager", 4, Kind(weights="learned"), "each"),
            ("eager", 1, Kind(pooled=False, dedup=True), "one"),
            ("eager", 2, Kind(pooled=False), "one"),
            ("eager", 4, Kind(pooled=False, dedup=True), "each"),
            ("live script", 2, Kind(weights="learned"), "each"),
            ("live script", 2, Kind(pooled=False, dedup=True), "one"),
            ("traced", 2, Kind(weights="learned"), "each"),
        },
    ),
)
def test_every_cell(executor: str, world_size: int, kind: Kind, sizes: str) -> None:
    """With one batch size, or with one per feature; then with inverse indices, of sequences also without."""
    by = "cut" if executor == "eager" and sizes == "one" else "dtype"
    cases = [replace(case, executor=executor) for case in every_cell(world_size, kind, sizes, by=by)]
    checked = ranks(world_size, check_all, cases, hosts=topology_of(world_size).hosts, timeout=300)
    assert checked == [CELLS[kind.pooled]] * world_size


def check_on_cuda(world_size: int, pooled: bool) -> None:
    check.ATOL = 1e-4  # the kernels add rows up in an order that is not fixed
    for kind, sizes in product(KINDS, SIZES):
        if kind.pooled == pooled:
            check_all(list(every_cell(world_size, kind, sizes)), device="cuda")
    for comms in FORMATS:
        check_all(list(wire_cases(world_size, comms, pooled=pooled)), device="cuda")


@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("world_size", CUDA_WORLDS)
@pytest.mark.parametrize("pooled", [True, False])
def test_on_cuda(pooled: bool, world_size: int) -> None:
    cuda_ranks(world_size, check_on_cuda, world_size, pooled)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("executor", "pooled", "world_size", "comms"),
    some_of(
        [["eager", "live script", "traced"], [True, False], WORLDS, FORMATS],
        {
            *(("eager", pooled, *few) for pooled in (True, False) for few in [(1, "fp16"), (2, "bf16"), (4, "int8")]),
            ("live script", True, 2, "int8"),
            ("traced", True, 2, "fp16"),
        },
    ),
)
def test_every_format_on_the_wire(executor: str, pooled: bool, world_size: int, comms: WireType) -> None:
    """Within the bounds that the format has; on one rank nothing travels, and nothing differs."""
    cases = [replace(case, executor=executor) for case in wire_cases(world_size, comms, pooled=pooled)]
    ranks(world_size, check_all, cases, timeout=300)


@settings(max_examples=3)
@given(case=drawn_cases())
def test_a_drawn_collection(case: Case) -> None:
    """Few tables, on any topology and transport, by any executor but the compiler."""
    ranks(case.topology.world_size, check_all, [case], 3, hosts=case.topology.hosts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_more_seeds(world_size: int, kind: Kind, seed: int) -> None:
    cases = [case for sizes in SIZES for case in every_cell(world_size, kind, sizes, seed=seed)]
    cases += [case for comms in FORMATS for case in wire_cases(world_size, comms, pooled=kind.pooled, seed=seed)]
    ranks(world_size, check_all, cases, 5, timeout=400)
