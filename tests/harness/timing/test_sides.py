"""Every side computes the same, as the harness makes sure before it reports a figure."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.module import unsharded_module
from benchmarks.harness.timing import rank
from benchmarks.harness.timing.case import Case, Job
from benchmarks.harness.timing.dense import click_model
from benchmarks.harness.timing.digest import differing
from benchmarks.harness.timing.plans import case_plan
from benchmarks.harness.timing.probe import probe
from benchmarks.harness.timing.rank import measure
from benchmarks.harness.timing.sides import make_side
from benchmarks.harness.timing.sides.dense import DensePart
from benchmarks.harness.timing.sides.sharded import ShardrecSide
from benchmarks.harness.workload import parse_tables
from shardrec.errors import ConfigError
from shardrec.launch.ranks import RankInfo
from tests.cuda_double import cuda_double, cuda_is_there
from tests.harness.timing.blocks import small_blocks
from tests.ranks import raises_on_all, ranks

TINY: dict[str, Any] = {"workload": "4x30x16x2", "batch_size": 6}


def own_place(device: str = "cpu") -> RankInfo:
    return RankInfo(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device(device), threads=1)


def measured(job: Job) -> dict[str, Any]:
    return measure(job.to_json(), own_place())


def on_ranks(case: Case, side: str) -> dict[str, Any]:
    job = Job(case=case, side=side, plan=case_plan(case).to_json(), inputs="", steps=3, seconds=0.01)
    first, *others = ranks(case.ranks, measured, job)
    assert all(other == first for other in others)
    return first


def differences(case: Case, one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[str]]:
    return {
        when: sorted(
            {key for a, b in zip(one["digests"], other["digests"], strict=True) for key in differing(a[when], b[when])}
        )
        for when in one["digests"][0]
    }


def measure_on_cuda() -> tuple[dict[str, Any], list[str], int]:
    """A measurement on the double, whose steps take 100 ms; what was done with its memory, and steps in all."""
    case = Case(layout="table_wise", ranks=1, optimizer="sgd", sides=("shardrec",), **TINY)
    job = Job(case=case, side="shardrec", plan=case_plan(case).to_json(), inputs="", steps=200, seconds=1.0)
    done: list[str] = []
    steps = 0

    def clock(step: Any, inputs: Any, device: Any) -> list[float]:
        for one in inputs:
            step(one)
        return [100.0] * len(inputs)

    def counted(self: Any, inputs: Any, step: Any = ShardrecSide.step) -> Any:
        nonlocal steps
        steps += 1
        return step(self, inputs)

    garbage = Garbage()
    weakref.finalize(garbage, done.append, "collected")
    del garbage
    with cuda_is_there(), cuda_double() as double, double.may_wait(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "time_steps", clock)
        patch.setattr(ShardrecSide, "step", counted)
        patch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("reset"))
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
        return measure(job.to_json(), own_place("cuda:0")), done, steps


class Garbage:
    """In a circle, as models are."""

    def __init__(self) -> None:
        self.itself = self


def test_a_device_is_warm_and_its_memory_counted_from_the_side_s_begin() -> None:
    ((found, done, steps),) = ranks(1, measure_on_cuda)
    assert done[:3] == ["collected", "freed", "reset"]
    assert found["peak_bytes"] == 7
    assert len(found["step_ms"]) == 10, "as many as fit into a second"
    assert steps == 3 + 1 + 5 + 1 + 10, "first ones, one timed, half a second to warm up, one timed, and the turn"


def test_the_dense_part_waits_for_nothing_on_cuda() -> None:
    """So that it can be captured as a CUDA graph, and is the least that a step takes."""
    with cuda_is_there(), cuda_double() as double:
        with double.may_wait():
            tables = parse_tables(["4x30x16x2"], max_rows=30)
            collection: Any = unsharded_module(tables, pooled=True, weighted=False, optimizer="sgd")
            part = DensePart(click_model(collection, torch.device("cuda:0")))
            values, pooled = torch.rand(6, 13).to("cuda"), torch.rand(6, 4, 16).to("cuda")
            double.waits.clear()
        part(values, pooled).sum().backward()
        assert not double.waits


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("case", "sides"),
    [
        (Case(layout="row_wise", mode="train", **TINY), ("torchrec", "torch")),
        (Case(layout="mixed", mode="dlrm", optimizer="adagrad", **TINY), ("torchrec",)),
        (Case(layout="planner", mode="forward", ids="zipf", **TINY), ("torchrec",)),
        (Case(layout="table_wise", mode="train", ranks=1, **TINY), ("torchrec", "torch", "kernels")),
        (Case(layout="table_wise", mode="train", transport="group", **TINY), ()),
        pytest.param(
            Case(layout="mixed", mode="train", optimizer="adagrad", kernels="fbgemm", **TINY),
            ("torchrec",),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.key if isinstance(value, Case) else "",
)
def test_the_sides_agree(case: Case, sides: tuple[str, ...]) -> None:
    mine = on_ranks(case, "shardrec")
    assert len(mine["step_ms"]) == 3
    assert min(mine["step_ms"]) > 0
    assert mine["peak_bytes"] > 0
    whens = ["first", "trained"] if case.trains else ["first"]
    assert [list(one) for one in mine["digests"]] == [whens] * case.ranks
    for side in sides:
        assert differences(case, mine, on_ranks(case, side)) == {when: [] for when in whens}, side


@pytest.mark.slow
def test_torchrec_has_another_rule_on_column_cuts_only() -> None:
    case = Case(layout="mixed", mode="train", **TINY)
    found = differences(case, on_ranks(case, "shardrec"), on_ranks(case, "torchrec"))
    assert found == {"first": [], "trained": ["f_t2"]}  # table-wise, row-wise, column-wise, table-wise
    mine, peer = on_ranks(case, "shardrec"), on_ranks(case, "torch")
    assert differences(case, mine, peer) == {"first": [], "trained": []}


def test_training_changes_what_the_digests_say() -> None:
    case = Case(layout="table_wise", mode="train", **TINY)
    (first, *_) = on_ranks(case, "shardrec")["digests"]
    assert len(differing(first["first"], first["trained"])) == 4


def test_a_side_that_cannot_make_the_step_says_so() -> None:
    def make(case: Case, side: str) -> None:
        make_side(Job(case=case, side=side, plan=case_plan(case).to_json(), inputs=""), own_place())

    case = Case(layout="table_wise", mode="train", **TINY)
    raises_on_all(2, ConfigError, "side 'kernels' is for one rank", make, case, "kernels")
    large = Case(workload="1x300000x64", layout="table_wise", batch_size=4)
    raises_on_all(2, ConfigError, "side 'torch' is for modes forward and train", make, large, "torch")
    widths = Case(workload="4x30x16x2", layout="table_wise", batch_size=4, mode="dlrm")
    raises_on_all(1, ConfigError, "there is no side 'another'", make, widths, "another")


def probed() -> dict[str, float]:
    with small_blocks():
        return probe({}, own_place())


def test_the_machine_is_measured() -> None:
    found, other = ranks(2, probed)
    assert found == other
    assert min(found["memory"], found["gather"], found["scatter"]) > 1e7
    assert found["link"] > 1e6
    assert 0 < found["latency"] < 1
    (alone,) = ranks(1, probed)
    assert (alone["link"], alone["latency"]) == (0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("side", ["shardrec", "torchrec", "kernels", "torch"])
def test_on_cuda(side: str) -> None:
    def run(job: Job) -> dict[str, Any]:
        return measure(job.to_json(), own_place("cuda"))

    case = Case(layout="table_wise", mode="train", ranks=1, **TINY)
    job = Job(case=case, side=side, plan=case_plan(case).to_json(), inputs="", steps=3, device="cuda")
    (found,) = ranks(1, run, job)
    on_cpu = on_ranks(case, "shardrec")
    assert differences(case, on_cpu, found) == {"first": [], "trained": []}
    assert found["peak_bytes"] >= 4 * 30 * 16 * 4
    assert all(time > 0 for time in found["step_ms"])
