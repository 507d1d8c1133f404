"""The model of benchmarks/scaling/README.md: by hand where it can be, and against the page."""

from __future__ import annotations

import pytest

from benchmarks.harness.scaling import DLRM_DCN_V2, Assumptions, DensePart, ScalingPoint, predict
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.layout.machine import Machine
from shardrec.planner.cost import TableLoad

MACHINE = Machine(
    name="even", kind="cpu", memory_bandwidth=1e12, host_link=1e9, network=1e8, latency=100e-6, source="for tests"
)
DENSE = DensePart(layers=((10, 20), (20, 1)))


def point(hosts: int, per_host: int, **options: object) -> ScalingPoint:
    topology = Topology(hosts=hosts, ranks_per_host=per_host, machine=MACHINE)
    world = topology.world_size
    tables = {f"t{rank}": TableLoad(num_embeddings=1000, embedding_dim=8) for rank in range(world)}
    layouts = tuple(cuts.table_wise(name, 1000, 8, rank=rank) for rank, name in enumerate(tables))
    plan = ShardingPlan(topology=topology, tables=layouts)
    return predict(tables, plan, batch_size=100, machine=MACHINE, dense=DENSE, **options)  # type: ignore[arg-type]


def test_the_dense_part_by_hand() -> None:
    assert DENSE.flops == 3 * 2 * (10 * 20 + 20)
    assert DENSE.bytes == 4 * (10 * 20 + 20 + 20 + 1)
    wide = 27 * 128
    bottom = 13 * 512 + 512 * 256 + 256 * 128
    cross = 3 * 2 * wide * 512
    top = wide * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert DLRM_DCN_V2.flops == 6 * (bottom + cross + top)


def test_a_step_by_hand() -> None:
    found = point(1, 2, assumptions=Assumptions(dense_flops=1e9, peer_us=5.0, links=0.5))
    assert found.ranks == 2
    assert found.dense == pytest.approx(1e3 * 100 * 1320 / 1e9)
    assert found.reduce == pytest.approx(1e3 * 2 * 0.5 * DENSE.bytes / (0.5 * 1e9))
    assert found.latency == pytest.approx(1e-3 * (4 * (100 + 5) + 100))
    # Half of it leaves the rank, at 0.7 of the link: columns of a table and their gradients, ids and lengths.
    assert found.links == pytest.approx(1e3 * (2 * 100 * 2 * 8 * 4 + 100 * 2 * 8) / 2 / 0.7e9, rel=0.05)
    parts = (found.work, found.links, found.dense, found.reduce, found.sync, found.latency)
    assert found.serial == pytest.approx(sum(parts))
    assert found.overlapped < found.serial
    assert found.samples_per_second == pytest.approx(2 * 100 / (found.serial / 1e3))


def test_copies_exchange_less_and_are_averaged() -> None:
    one, four = point(8, 1), point(2, 1, replicas=4)
    assert (one.ranks, four.ranks, four.replicas) == (8, 8, 4)
    assert four.links < one.links
    assert four.latency < one.latency
    assert four.reduce == pytest.approx(one.reduce), "the dense part is on all ranks"
    assert one.sync == 0
    # The table of a rank, on four copies, over the network, every hundred steps.
    assert four.sync == pytest.approx(1e3 * 2 * 0.75 * 1000 * 8 * 4 / (0.7 * 1e8) / 100)
    assert four.serial - four.sync > four.overlapped - four.sync > four.work
