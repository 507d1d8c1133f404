"""benchmarks/scaling/README.md: its arithmetic, and the assumptions that it states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.harness.scaling import DLRM_DCN_V2, Assumptions
from benchmarks.harness.workload import parse_tables

PAGE = (Path(__file__).parents[2] / "benchmarks" / "scaling" / "README.md").read_text(encoding="utf-8")
ROWS = [
    [float(re.sub(r"[%,\s]", "", cell)) for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| [\d,]+ \| \d+ \| ", line)
]


def test_the_parts_add_up() -> None:
    assert [row[0] for row in ROWS] == [8, 16, 32, 64, 128, 256, 512, 1024] * 2
    for row in ROWS:
        ranks, copies, work, links, dense, reduce, sync, latency, step, overlapped, samples, each, _ = row
        assert step == pytest.approx(work + links + dense + reduce + sync + latency, abs=0.035)
        assert overlapped == pytest.approx(max(work + dense, links + reduce) + sync + latency, abs=0.03)
        assert samples == pytest.approx(ranks * 8192 / step / 1e3, rel=0.01)
        assert each == pytest.approx(100 * ROWS[0][8] / step, abs=0.6)
        assert dense == pytest.approx(1e3 * DLRM_DCN_V2.flops * 8192 / Assumptions().dense_flops, abs=0.006)
        peers = ranks / copies - 1
        assert latency == pytest.approx(1e-3 * (4 * (20 + Assumptions().peer_us * peers) + 20), abs=0.006)


def test_what_it_says_of_the_workload() -> None:
    tables = parse_tables(["multi_hot"], max_rows=10**9)
    rows = sum(table.rows for table in tables)
    assert f"{rows / 1e6:.0f} million rows of 128 columns, {rows * 512 / 1e9:.0f} GB" in PAGE
    assert f"{DLRM_DCN_V2.flops / 1e6:.1f} MFLOP" in PAGE
    assert f"{DLRM_DCN_V2.flops / 6e6:.1f} million weights" in PAGE


def test_what_it_assumes() -> None:
    assumed = Assumptions()
    assert f"**The dense part reaches {assumed.dense_flops / 1e12:.0f} TFLOP/s**" in PAGE
    assert f"**An all-to-all costs {assumed.peer_us:.0f} µs for each peer**" in PAGE
    assert f"averaged every {assumed.sync_every} steps" in PAGE
    assert f"data-sheet peaks times 0.5 (random rows) and {assumed.links} (links)" in PAGE
