"""A timing report as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from benchmarks.harness.timing.record import BASE, CaseResult, Spread, groups_of
from benchmarks.harness.timing.report import TimingReport

__all__ = ["report_tables"]


def report_tables(report: TimingReport) -> Iterator[Table]:
    """The cases, then the geometric means, then what went wrong."""
    yield _cases(report)
    means = _means(report)
    if means.row_count:
        yield means
    if report.failed:
        yield _failures(report)


def _cases(report: TimingReport) -> Table:
    sides = list(dict.fromkeys(side for result in report.results for side in result.case.sides))
    rounds = max((len(result.rounds) for result in report.results), default=0)
    table = Table(
        title=f"Milliseconds of a step: median of {rounds} rounds (least–most)",
        caption=_caption(report),
        caption_justify="left",
    )
    for heading in ("case", "ranks", "batch"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for side in sides:
        table.add_column(side, justify="right")
    for side in sides:
        if side != BASE:
            table.add_column(f"{side} / {BASE}", justify="right")
    on_cuda = report.options.get("device") == "cuda"
    for heading in ["share of copy bandwidth", "peak GiB"] if on_cuda else []:
        table.add_column(heading, justify="right")
    table.add_column("floor", justify="right")
    table.add_column("step / floor", justify="right")
    table.add_column("step / gather floor", justify="right")
    section = ""
    for result in report.results:
        if not result.rounds or result.error is not None:
            continue
        case = result.case
        if section and section != _section(result):
            table.add_section()
        section = _section(result)
        over, over_gather, floor = result.over_floor(), result.over_gather_floor(), result.least_ms
        table.add_row(
            _name(result),
            str(case.ranks),
            str(case.batch_size),
            *(_spread(result.step(side), ".1f") for side in sides),
            *(_spread(result.ratio(side), ".2f") for side in sides if side != BASE),
            *([_bandwidth(result), _peak(result)] if on_cuda else []),
            f"{floor:.1f}" if floor else "",
            f"{over:.1f}{' ?' * (over < 1)}" if over is not None else "",
            f"{over_gather:.1f}" if over_gather is not None else "",
        )
    return table


def _bandwidth(result: CaseResult) -> str:
    """Of the bare kernels, where they had a turn."""
    over = result.over_floor("kernels")
    return f"{1 / over:.0%}" if over else ""


def _peak(result: CaseResult) -> str:
    """Of each side, allocated on a device at most."""
    most = {side: max(turns[side]["peak_bytes"] for turns in result.rounds) for side in result.case.sides}
    return ", ".join(f"{side} {size / 2**30:.2f}" for side, size in most.items())


def _section(result: CaseResult) -> str:
    case = result.case
    return " ".join([case.mode, *case.surroundings, case.group])


def _name(result: CaseResult) -> str:
    case = result.case
    parts = [case.mode, case.workload, case.layout]
    parts += [case.ids] * (case.ids != "uniform") + [case.optimizer] * (case.optimizer != "rowwise_adagrad")
    return " ".join([*parts, *case.surroundings]) + " *" * result.other_rule


def _caption(report: TimingReport) -> str:
    environment = report.environment
    words = [
        f"{environment['cpu']}, {environment['cores']} cores, {environment['threads_per_rank']} thread a rank, "
        f"{environment['libc']}. Load {environment['load_at_start'][0]} at the start, "
        f"{environment['load_at_end'][0]} at the end"
    ]
    for name, rounds in report.machine.items():
        one = rounds[-1]
        words.append(
            f"malloc {name}: copies {one['memory'] / 1e9:.1f} GB/s, {_random(one)}"
            f"all-to-all {one['link'] / 1e9:.2f} GB/s, {one['latency'] * 1e3:.2f} ms without bytes"
        )
    if any((result.over_floor() or 1) < 1 for result in report.results if result.rounds):
        words.append(
            "? a step below the floor: bandwidths were lower when they were measured than during the steps, as on a "
            "busy machine; measure again on an idle one"
        )
    if any(result.other_rule for result in report.results):
        words.append("* tables cut by columns: shardrec keeps the unsharded optimizer's rule, TorchRec has another one")
    return "\n".join(words)


def _random(one: Mapping[str, float]) -> str:
    """Rates of random rows, where they were measured."""
    if "gather" not in one:
        return ""
    return f"random rows {one['gather'] / 1e9:.1f} read, {one['scatter'] / 1e9:.1f} changed, "


def _means(report: TimingReport) -> Table:
    table = Table(title="Geometric means over cases")
    table.add_column("cases of")
    for heading in ("cases", "ratio", "least"):
        table.add_column(heading, justify="right")
    table.add_column("where")
    for group in groups_of(report.results):
        name = f"{group.name}: {group.side} / {BASE}"
        table.add_row(name, str(group.cases), f"{group.mean:.2f}", f"{group.least:.2f}", group.where)
    return table


def _failures(report: TimingReport) -> Table:
    table = Table(title="Cases without figures")
    table.add_column("case")
    table.add_column("why")
    for result in report.failed:
        table.add_row(result.case.key, str(result.error))
    return table


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    if spread.low == spread.high:
        return f"{spread.median:{form}}"
    return f"{spread.median:{form}} ({spread.low:{form}}–{spread.high:{form}})"
