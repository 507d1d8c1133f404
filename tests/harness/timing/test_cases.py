"""Options of ``shardrec bench``, and the cases that they stand for."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from benchmarks.harness.timing import TimingConfig
from benchmarks.harness.timing.case import Case, Job
from benchmarks.harness.timing.config import CasePreset
from benchmarks.harness.timing.matrix import cases_of
from benchmarks.harness.timing.plans import case_plan
from shardrec.errors import ConfigError


def cells(cases: list[Case], **wanted: object) -> list[Case]:
    return [case for case in cases if all(getattr(case, name) == value for name, value in wanted.items())]


class TestOptions:
    def test_every_combination(self) -> None:
        config = TimingConfig(layout=("table_wise,mixed",), batch=(16, 32), mode=("train",), malloc=("default", "keep"))
        cases = cases_of(config)
        assert len(cases) == 2 * 2 * 2
        assert {(case.layout, case.batch_size, case.malloc) for case in cases} == {
            (layout, batch, malloc)
            for layout in ("table_wise", "mixed")
            for batch in (16, 32)
            for malloc in ("default", "keep")
        }
        assert {case.sides for case in cases} == {("shardrec", "torchrec")}

    def test_sides_only_where_they_make_sense(self) -> None:
        everyone = ("shardrec", "torchrec", "torch", "kernels")
        options = {"workload": ("26x20000x64", "2x50x8"), "layout": ("row_wise",), "mode": ("train", "dlrm")}
        one, two = (cases_of(TimingConfig(**options, side=everyone, nproc=ranks)) for ranks in (1, 2))
        assert {(case.workload, case.sides) for case in cells(one, mode="train")} == {
            (workload, everyone) for workload in options["workload"]
        }
        assert {case.workload: case.sides for case in cells(two, mode="train")} == {
            "26x20000x64": everyone[:2],
            "2x50x8": everyone[:3],
        }
        assert {case.sides for case in cells(two, mode="dlrm")} == {everyone[:2]}

    def test_faults_are_told_together(self) -> None:
        with pytest.raises(ConfigError) as told:
            TimingConfig(layout=("diagonal",), steps=2, rounds=0)
        assert "layout (--layout) is ('diagonal',): give one of table_wise, row_wise" in str(told.value)
        assert "steps (--steps) is 2: it should be greater than or equal to 3" in str(told.value)
        assert "rounds (--rounds) is 0" in str(told.value)
        with pytest.raises(ConfigError, match=r"workload \(--workload\) is '5x0x3': give NUMBERxROWSxDIM"):
            TimingConfig(workload=("5x0x3",))
        with pytest.raises(ConfigError, match=r"side \(--side\) is torch: give shardrec, too"):
            TimingConfig(side=("torch",))

    def test_options_come_back_from_json(self) -> None:
        config = TimingConfig(workload=("small", "3x5x8"), batch=(3, 4), minutes=1.5, nproc=4)
        assert TimingConfig(**json.loads(json.dumps(config.to_mapping()))) == config


class TestPresets:
    @pytest.mark.parametrize("preset", get_args(CasePreset))
    def test_each_case_once_and_with_a_plan_for_its_ranks(self, preset: str) -> None:
        cases = cases_of(TimingConfig(preset=preset, max_rows=50))
        assert len({case.key for case in cases}) == len(cases)
        for case in cases:
            assert case.sides[0] == "shardrec"
            if case.layout != "planner":  # which takes a model
                plan = case_plan(case)
                assert plan.world_size == case.ranks
                assert [layout.name for layout in plan.tables] == [table.name for table in case.tables]

    def test_full_has_what_the_comparison_promises(self) -> None:
        cases = cases_of(TimingConfig(preset="full"))
        assert len(cases) <= 65  # about 14 seconds each; a quarter of an hour in all
        assert {case.workload for case in cases} == {"criteo", "multi_hot", "small"}
        assert {case.batch_size for case in cases} == {512, 4096, 16384}
        assert {case.layout for case in cases} == {"table_wise", "row_wise", "column_wise", "mixed", "planner"}
        assert {case.mode for case in cases} == {"forward", "train", "dlrm"}
        assert {case.ids for case in cases} == {"uniform", "zipf"}
        assert {case.malloc for case in cases} == {"default", "keep", "alone"}
        assert cells(cases, workload="small", layout="mixed", mode="train", malloc="default")
        assert len(cells(cases, layout="row_wise", malloc="default", transport="auto")) >= 5
        assert len(cells(cases, transport="group")) >= 3
        assert len(cells(cases, kernels="fbgemm")) >= 3

    def test_core_is_a_part_of_full(self) -> None:
        core, full = cases_of(TimingConfig(preset="core")), cases_of(TimingConfig(preset="full"))
        assert len(core) <= 14  # with turns of a second, ten minutes for three rounds
        assert {case.key for case in core} < {case.key for case in full}
        assert {case.mode for case in core} == {"forward", "train", "dlrm"}
        assert {case.workload for case in core} == {"criteo", "multi_hot", "small"}
        assert cells(core, malloc="keep")

    def test_growth_varies_one_thing_at_a_time(self) -> None:
        cases = cases_of(TimingConfig(preset="growth"))
        assert [case.ranks for case in cells(cases, group="ranks")] == [1, 2, 4]
        assert [len(case.tables) for case in cells(cases, group="tables")] == [10, 30, 100, 300, 1000]
        assert [case.batch_size for case in cells(cases, group="samples")] == [64, 256, 1024, 4096, 16384, 65536]
        many, few = cells(cases, group="200 tables as 20")
        assert (len(many.tables), len(few.tables)) == (200, 20)
        for count in (lambda t: t.pooling, lambda t: t.dim, lambda t: t.dim * t.pooling):
            totals = [case.batch_size * sum(map(count, case.tables)) for case in (many, few)]
            assert totals[0] == totals[1], "the same ids, the same output, the same bytes of rows"
        assert {case.ranks for case in cases if "kernels" in case.sides} == {1}


def test_cases_and_jobs_come_back_from_json() -> None:
    case = Case(workload="3x40x8x2", layout="mixed", batch_size=7, sides=("shardrec", "torch"), group="a group")
    job = Job(case=case, side="torch", plan=case_plan(case).to_json(), inputs="folder", steps=5)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert case.key == Case(workload="3x40x8x2", layout="mixed", batch_size=7).key
    assert case.key != Case(workload="3x40x8x2", layout="mixed", batch_size=7, malloc="keep").key
