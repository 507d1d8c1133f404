"""The comparison with TorchRec: ``shardrec bench`` by its presets, and their tables in README.md.

The figures are written between the two marks in README.md, a section for each preset, so that those of a section are
always of one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.harness.timing import TimingConfig, time_steps
from benchmarks.harness.timing.record import BASE, CaseResult, Spread, groups_of
from benchmarks.harness.timing.report import TimingReport
from benchmarks.harness.timing.tables import report_tables

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
MINUTES = {"core": 9.5, "full": 45.0, "growth": 18.0}
SECONDS = {"core": 1.0, "full": 2.0, "growth": 2.0}
"""Of a turn's steps."""


def markdown(reports: dict[str, TimingReport]) -> str:
    """The tables of the runs."""
    return "\n".join(line for preset, report in reports.items() for line in _section(preset, report))


def written(page: str, figures: str) -> str:
    """The page with the figures between its marks. Sections of other presets stay."""
    before, _, rest = page.partition(BEGIN)
    kept, _, after = rest.partition(END)
    sections = _sections(kept) | _sections(figures)
    text = "".join(sections[name] for name in sorted(sections, key=list(MINUTES).index))
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _sections(figures: str) -> dict[str, str]:
    """By preset."""
    found = {}
    for part in figures.split("\n### ")[1:]:
        name, _, _ = part.partition("\n")
        found[name.strip()] = f"\n### {part.rstrip()}\n"
    return found


def _section(preset: str, report: TimingReport) -> Iterator[str]:
    environment = report.environment
    packages = environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in packages if name != "numpy")
    yield f"\n### {preset}\n"
    yield (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['libc']}, Python {environment['python']}, "
        f"{versions}. Ranks of {environment['threads_per_rank']} thread. Load average "
        f"{environment['load_at_start'][0]} at the start, {environment['load_at_end'][0]} at the end."
    )
    for name, rounds in report.machine.items():
        memory, gather, scatter, link, latency = (
            _range([factor * one[key] for one in rounds], digits)
            for key, factor, digits in (
                ("memory", 1e-9, 1),
                ("gather", 1e-9, 1),
                ("scatter", 1e-9, 1),
                ("link", 1e-9, 2),
                ("latency", 1e3, 2),
            )
        )
        yield (
            f"- malloc {name}: copies {memory} GB/s, random rows of 256 bytes {gather} GB/s read and {scatter} GB/s "
            f"changed, all-to-all {link} GB/s, {latency} ms without bytes"
        )
    yield from _means(report)
    yield from _cases(report)
    for result in report.failed:
        yield f"\nNot timed: {result.case.key}: {result.error}"


def _range(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _means(report: TimingReport) -> Iterator[str]:
    yield "\n| cases of | cases | ratio, geometric mean | least | of |\n|---|---:|---:|---:|---|"
    for group in groups_of(report.results):
        name = f"{group.name}: {group.side} / {BASE}"
        yield f"| {name} | {group.cases} | {group.mean:.2f} | {group.least:.2f} | {group.where} |"


def _cases(report: TimingReport) -> Iterator[str]:
    sides = list(dict.fromkeys(side for result in report.results for side in result.case.sides))
    others = [side for side in sides if side != BASE]
    heads = ["case", "ranks", "batch", *sides, *(f"{side} / {BASE}" for side in others)]
    heads += ["floor", "gather floor", "step / floor", "step / gather floor"]
    yield f"\n| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}"
    for result in report.results:
        if result.is_measured:
            yield f"| {' | '.join(_cells(result, sides, others))} |"


def _cells(result: CaseResult, sides: list[str], others: list[str]) -> Iterator[str]:
    case = result.case
    parts = [case.mode, case.workload, case.layout, *[case.ids] * (case.ids != "uniform")]
    parts += [case.optimizer] * (case.optimizer != "rowwise_adagrad")
    yield " ".join([*parts, *case.surroundings, *["\\*"] * result.other_rule])
    yield str(case.ranks)
    yield f"{case.batch_size:,}"
    yield from (_text(result.step(side), 1) for side in sides)
    yield from (_text(result.ratio(side), 2) for side in others)
    yield from (f"{least:.1f}" for least in (result.least_ms, result.gather_ms))
    yield from ("" if one is None else f"{one:.1f}" for one in (result.over_floor(), result.over_gather_floor()))


def _text(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def main() -> None:
    """Run the presets, show their tables, and write them into README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", nargs="+", choices=list(MINUTES), default=["core"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="go on from runs/train")
    parser.add_argument("--dry", action="store_true", help="leave README.md as it is")
    options = parser.parse_args()
    console = Console(width=200)
    reports = {}
    for preset in options.preset:
        config = TimingConfig(
            preset=preset,
            rounds=options.rounds,
            seconds=SECONDS[preset],
            minutes=MINUTES[preset],
            out=f"runs/train/{preset}",
        )
        report = time_steps(config, resume=options.resume, tell=console.print)
        if report is None:  # another rank's, under a launcher
            return
        reports[preset] = report
        for table in report_tables(report):
            console.print(table)
    if not options.dry:
        README.write_text(written(README.read_text(encoding="utf-8"), markdown(reports)), encoding="utf-8")


if __name__ == "__main__":
    main()
