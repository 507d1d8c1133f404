"""The bytes of a step in docs/performance.md are those of the formula."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.harness import BenchConfig
from benchmarks.harness.formula import WorkloadFormula
from benchmarks.harness.layouts import cut_plan
from benchmarks.harness.volume import EXCHANGES, Volume
from shardrec.layout import Topology

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")


def number(cell: str) -> float:
    return float(re.sub(r"[^\d.]", "", cell) or 0)


def table_after(text: str) -> list[list[str]]:
    """The cells of the first table after ``text``, without its head."""
    lines = PAGE[PAGE.index(text) :].splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_worked_example() -> None:
    config = BenchConfig(tables=("4x1000x64",), batch_size=1024, pooling=10, cut="row_wise", nproc=4, hosts=2)
    flags = "--nproc 4 --hosts 2 --tables 4x1000x64 --batch-size 1024 --pooling 10 --cut row_wise"
    assert f"shardrec bench --bytes {flags}" in PAGE
    tables = config.workload_tables()
    formula = WorkloadFormula(config, tables, cut_plan(tables, config.cut, Topology(hosts=2, ranks_per_host=2)))
    uniform = formula.of_uniform_ids()
    steps = [formula.of_step(step) for step in range(config.steps)]

    def mean(exchange: str | None, *, abroad: bool = False) -> int:
        return round(sum(step.sent(exchange=exchange, abroad=abroad) for step in steps) / len(steps))

    rows = table_after("The command, all four ranks together")
    assert [row[0] for row in rows] == ["header", "payload", "partial sums", "output", "gradient", "all"]
    for name, _, measured, by_formula, difference, expected, abroad in rows:
        exchange = name if name in EXCHANGES else None
        assert [number(measured), number(by_formula)] == [mean(exchange)] * 2
        assert number(difference) == 0
        assert number(expected) == uniform.sent(exchange=exchange)
        assert number(abroad) == mean(exchange, abroad=True)
    for name, *_, by_rank in table_after("Each rank sends:"):
        assert number(by_rank) == uniform.sent(exchange=name, rank=0)


def test_beside_torchrec() -> None:
    rows = [row for row in table_after("### Comparison with TorchRec") if row[1] == "shardrec"]
    assert [row[0] for row in rows] == ["table-wise", "row-wise", "column-wise"]
    for cut, _, header, payload, output, gradient, row_norm in rows:
        config = BenchConfig(cut=cut.replace("-", "_"))
        tables = config.workload_tables()
        plan = cut_plan(tables, config.cut, Topology(ranks_per_host=2))
        found: Volume = WorkloadFormula(config, tables, plan).of_uniform_ids()
        for name, cell in [
            ("header", header),
            ("payload", payload),
            ("output", output),
            ("gradient", gradient),
            ("row norm", row_norm),
        ]:
            assert number(cell) == round(found.sent(exchange=name, rank=0)), name
