"""``shardrec bench --bytes`` on real ranks: what they send is what the formula says, for every cut and option."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from benchmarks.harness import BenchConfig, bench
from benchmarks.harness.batches import BatchMaker
from benchmarks.harness.bytes import count_bytes
from benchmarks.harness.config import Cut
from benchmarks.harness.layouts import cut_plan
from benchmarks.harness.report import ByteReport
from benchmarks.harness.traffic import counted_traffic
from benchmarks.harness.volume import EXCHANGES
from benchmarks.harness.workload import parse_tables
from shardrec.errors import ConfigError, PlanError
from shardrec.layout import Topology
from tests.ranks import ranks

SMALL: dict[str, Any] = {"tables": ("5x60x16x2", "2x7x8"), "batch_size": 12, "steps": 2, "threads": 1}
SEQUENCE: dict[str, Any] = {**SMALL, "tables": ("3x60x16x3", "1x7x16"), "module": "sequence"}


def report_of(world_size: int, **options: Any) -> ByteReport:
    first, *others = ranks(world_size, lambda: count_bytes(BenchConfig(**options)))
    assert first is not None
    assert others == [None] * (world_size - 1)
    return first


@pytest.mark.some(4)
@pytest.mark.parametrize("cut", get_args(Cut))
def test_every_cut(cut: str) -> None:
    report = report_of(4, **SMALL, cut=cut, hosts=2)
    assert report.mismatches == ()
    assert report.measured == report.formula
    if cut == "data_parallel":
        assert report.measured.sent() == report.measured.sent(exchange="header")
        assert report.all_reduced == 4 * (5 * 60 * 16 + 2 * 7 * 8)
    else:
        assert report.measured.sent(exchange="output") > 0
    if cut == "planner":
        return
    assert bool(report.calls["partial sums"]) == (cut in ("row_wise", "table_row_wise", "grid", "mixed"))
    assert bool(report.calls["row norm"]) == (cut in ("column_wise", "table_column_wise", "grid", "mixed"))


@pytest.mark.parametrize(
    "options",
    [
        {**SMALL, "cut": "row_wise", "weights": "learned", "ids": "zipf"},
        {**SMALL, "cut": "mixed", "weights": "given", "output_comms": "int8", "gradient_comms": "bf16"},
        {**SMALL, "cut": "grid", "step": "forward", "optimizer": "sgd"},
        {**SEQUENCE, "cut": "row_wise", "output_comms": "int8"},
        {**SEQUENCE, "cut": "column_wise", "ids": "zipf", "dedup": "off"},
        {**SEQUENCE, "cut": "mixed", "optimizer": "adam"},
    ],
    ids=lambda options: " ".join(str(value) for name, value in options.items() if name not in ("tables", "steps")),
)
def test_options(options: dict[str, Any]) -> None:
    report = report_of(2, **options)
    assert report.mismatches == ()
    assert report.measured.sent(exchange="payload") > 0
    assert bool(report.measured.sent(exchange="weight gradient")) == (options.get("weights") == "learned")
    assert bool(report.measured.sent(exchange="gradient")) == (options.get("step") != "forward")


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    tables = parse_tables(SMALL["tables"], max_rows=1)
    cut_plan(tables, "grid", Topology(hosts=2, ranks_per_host=1)).save(path)
    report = report_of(2, **SMALL, plan=str(path))
    assert report.mismatches == ()
    assert {layout.cut for layout in report.plan.tables} == {"grid"}


def test_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    """On one rank, this process."""
    path = tmp_path / "plan.json"
    cut_plan(parse_tables(SMALL["tables"], max_rows=1), "row_wise", Topology(ranks_per_host=2)).save(path)
    with pytest.raises(ConfigError, match="is for 2 ranks and there are 1: start 2"):
        count_bytes(BenchConfig(**SMALL, plan=str(path)))
    with pytest.raises(PlanError, match=r"table 't0' is \(9, 4\) in the model"):
        count_bytes(BenchConfig(**{**SMALL, "tables": ("1x9x4",)}, plan=str(path)))
    with pytest.raises(ConfigError, match=r"plan \(--plan\) is 'none.json': No such file"):
        count_bytes(BenchConfig(plan="none.json", threads=1))


def test_hosts_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"hosts \(--hosts\) is 3 and there are 4 ranks"):
        bench(BenchConfig(nproc=4, hosts=3))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"hosts \(--hosts\) is 3 and there are 8 ranks"):
        bench(BenchConfig(hosts=3))
    with pytest.raises(ConfigError, match=r"nproc \(--nproc\) is 4 and a launcher has already started 8 ranks"):
        bench(BenchConfig(nproc=4))


class TestReport:
    """What is shown: tables and JSON agree with the volumes."""

    def test_json(self) -> None:
        report = report_of(2, **SMALL, cut="row_wise")
        shown = report.to_json()
        assert shown["exact"] is True
        assert shown["config"]["batch_size"] == 12
        assert list(shown["bytes_per_step"]) == list(EXCHANGES)
        output = shown["bytes_per_step"]["output"]
        # Five tables of 16 columns, two of 8, a block of each on either rank.
        assert output["measured"]["pairs"] == [[0, 12 * 96 * 4], [12 * 96 * 4, 0]]
        assert output["formula"]["sent"] == output["uniform"]["sent"] == 2 * 12 * 96 * 4
        assert output["all_to_alls"] == 1
        payload = shown["bytes_per_step"]["payload"]
        # Seven slots, and on average half of the 5 · 2 ids of a sample, and 3/7 of its 2 (rank 1 has 3 of 7 rows).
        assert payload["uniform"]["pairs"][0][1] == pytest.approx(4 * 12 * (7 + 5 + 2 * 3 / 7))
        assert payload["measured"]["sent"] == payload["formula"]["sent"]


class TestWorkload:
    """Tables, batches and options."""

    @pytest.mark.parametrize("ids", ["uniform", "zipf"])
    def test_batches_are_those_of_their_seed_rank_and_step(self, ids: str) -> None:
        tables = parse_tables(["2x1000x8x2", "1x3x4"], max_rows=1)

        def draw(seed: int, rank: int, step: int) -> torch.Tensor:
            features = BatchMaker(tables, batch_size=50, ids=ids, seed=seed).draw(rank, step)
            assert features.keys() == ["f_t0", "f_t1", "f_t2"]
            assert features.lengths().tolist() == [2] * 100 + [1] * 50
            assert int(features.values().min()) >= 0
            assert int(features.values().max()) < 1000
            assert int(features["f_t2"].values().max()) < 3
            return features.values()

        first = draw(0, 1, 2)
        assert torch.equal(first, draw(0, 1, 2))
        for other in ((1, 1, 2), (0, 0, 2), (0, 1, 1)):
            assert not torch.equal(first, draw(*other))

    def test_ids_are_counted_by_row_block(self) -> None:
        (layout,) = cut_plan(parse_tables(["1x10x8"], max_rows=1), "row_wise", Topology(ranks_per_host=3)).tables
        ids = [[torch.tensor([0, 3, 3, 9]), torch.tensor([0])], [torch.tensor([]), torch.tensor([8, 4])]]
        traffic = counted_traffic(layout, ids, whole_rows=True)
        assert (traffic.ids, traffic.rows, traffic.lookups) == (((4, 0, 1), (0, 1, 1)), (2, 1, 2), 2)
        traffic = counted_traffic(layout, ids, distinct=True)
        assert (traffic.ids, traffic.rows, traffic.lookups) == (((2, 0, 1), (0, 1, 1)), (), 1)

    def test_faults(self) -> None:
        with pytest.raises(ConfigError, match=r"tables have 4, 8 columns: give tables \(--tables\) of one width"):
            BenchConfig(tables=("1x5x4", "1x5x8"), module="sequence")
        with pytest.raises(ConfigError, match=r"weights \(--weights\) is 'given' and module 'sequence' takes none"):
            BenchConfig(module="sequence", weights="given")
        with pytest.raises(ConfigError, match=r"hosts \(--hosts\) is given and plan"):
            BenchConfig(plan="plan.json", hosts=2)
        with pytest.raises(ConfigError, match=r"batch_size \(--batch-size\) is 0: it should be greater than"):
            BenchConfig(batch_size=0)
        config = BenchConfig(tables=("small",), steps=5)
        assert BenchConfig(**config.to_mapping()) == config
