"""``TimingReport``: all the cases of a run, as JSON that a later run can go on from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.timing.case import Case
from benchmarks.harness.timing.floor import RankBytes
from benchmarks.harness.timing.record import CaseResult, groups_of
from shardrec.errors import ConfigError

__all__ = ["TimingReport", "machine_of", "results_done", "write_report"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TimingReport:
    """A run of the harness.

    Args:
        options: in effect.
        environment: versions, machine, malloc's settings, load at the start and at the end.
        results: of each case, in the order of the run.
        machine: per ``"<malloc>, <ranks> ranks"``, what :func:`~benchmarks.harness.timing.probe.probe` found in each
            round.
    """

    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    results: Sequence[CaseResult]
    machine: Mapping[str, Sequence[Mapping[str, float]]]

    @property
    def failed(self) -> list[CaseResult]:
        """The cases without figures because something went wrong."""
        return [result for result in self.results if result.error is not None]

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "format": _FORMAT,
            "options": dict(self.options),
            "environment": dict(self.environment),
            "machine": {name: list(rounds) for name, rounds in self.machine.items()},
            "geometric_means": [asdict(group) for group in groups_of(self.results)],
            "cases": [result.to_json() for result in self.results],
        }


def machine_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def write_report(report: TimingReport, path: Path) -> None:
    """Write the report as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def results_done(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, list[Any]]]:
    """What a run that was stopped had measured.

    Args:
        path: of its report. There need be none.

    Returns:
        By case key, fields of its :class:`~benchmarks.harness.timing.record.CaseResult`, without the cases that went
        wrong; and the probes of the machine.

    Raises:
        ConfigError: if the file is none of this version's.
    """
    if not path.exists():
        return {}, {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"its format is {data['format']}")
        # Keys are made anew, so that they mean what they mean now.
        done = {Case.from_json(one["case"]).key: _fields(one) for one in data["cases"] if one["error"] is None}
        return done, dict(data["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a report to go on from ({error}): leave --resume out, or give another --out"
        ) from error


def _fields(one: Mapping[str, Any]) -> dict[str, Any]:
    ranks = [RankBytes(**rank) for rank in one["bytes_per_rank"]]
    return {"rounds": one["rounds"], "other_rule": one["other_rule"], "bytes": ranks}
