"""A run of the harness: rounds over the cases, the sides of each in turn, and a report that grows with every turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.timing.case import Case, Job
from benchmarks.harness.timing.config import TimingConfig
from benchmarks.harness.timing.environment import MALLOC, load_average, machine_record
from benchmarks.harness.timing.floor import floor_of, step_bytes
from benchmarks.harness.timing.matrix import cases_of
from benchmarks.harness.timing.record import BASE, CaseResult, turn_of
from benchmarks.harness.timing.report import TimingReport, machine_of, results_done, write_report
from shardrec.errors import ConfigError, ShardrecError
from shardrec.launch.run import launched_rank, on_new_ranks, run_on_ranks

if TYPE_CHECKING:
    from benchmarks.harness.timing.processes import Processes
    from shardrec.launch.ranks import RankInfo
    from shardrec.layout import ShardingPlan

__all__ = ["FILE", "PICTURE", "time_steps"]

FILE, PICTURE = "timings.json", "timings.png"

Tell = Callable[[str], None]
"""Takes a line about the progress."""


def time_steps(
    config: TimingConfig, *, resume: bool = False, debug: bool = False, tell: Tell = lambda line: None
) -> TimingReport | None:
    """Time the cases that ``config`` asks for, and write ``timings.json`` and ``timings.png``.

    On the CPU every turn runs in processes of its own. On CUDA, and under a launcher, the sides take turns in the same
    processes.

    Args:
        config: the cases.
        resume: go on from the report in ``config.out``. Rounds that it has are not measured again.
        debug: keep the ranks' tracebacks.
        tell: is called with a line for each turn.

    Returns:
        The report. None on a launcher's ranks other than the first.

    Raises:
        ShardrecError: what went wrong with the run. What is wrong with a case is in its result.
        KeyboardInterrupt: the run was stopped. What it had measured is in the report's file.
    """
    cases_of(config)  # a fault is told before anything is started
    launched = launched_rank()
    if config.device == "cpu" and launched is None:
        from benchmarks.harness.timing.processes import FreshProcesses
        from shardrec._versions import check_versions
        from shardrec.launch.quiet import quiet_libraries

        check_versions()
        fresh = FreshProcesses(threads=config.threads or 1, debug=debug)
        with quiet_libraries(quiet=not debug), fresh as processes:
            return _Run(config, processes, tell, resume=resume).all_rounds()
    nproc = config.nproc or (1 if launched is not None else 2)
    options = {**config.to_mapping(), "nproc": nproc if launched is None else launched[1], "resume": resume}
    report: TimingReport | None
    if launched is None:
        device, threads = config.device, config.threads or 1
        report = on_new_ranks(_on_kept_rank, options, nproc=nproc, device=device, threads=threads, debug=debug)
    else:
        report = run_on_ranks(_on_launched_rank, options, nproc=nproc, debug=debug)
    return report


def _on_launched_rank(options: dict[str, Any]) -> TimingReport | None:
    from shardrec.launch.ranks import joined_run

    with joined_run(options["device"], options["threads"] or 1, seed=options["seed"], alone=True) as rank_info:
        return _on_kept_rank(rank_info, options)


def _on_kept_rank(rank_info: RankInfo, options: dict[str, Any]) -> TimingReport | None:
    """In a process group, also of one rank, which TorchRec asks for."""
    from benchmarks.harness.timing.processes import KeptProcesses, serve

    resume = options.pop("resume")
    if not rank_info.is_lead:
        serve(rank_info)
        return None
    with KeptProcesses(rank_info) as processes:
        return _Run(TimingConfig(**options), processes, print, resume=resume).all_rounds()


@dataclass(kw_only=True)
class _Prepared:
    """A case that is ready to be measured.

    Args:
        plan: that all the sides follow.
        inputs: folder of its batches, "" for ranks that draw their own.
    """

    plan: ShardingPlan
    inputs: str


@dataclass
class _Run:
    """The state of a run.

    Args:
        config: the options.
        processes: where measurements run.
        tell: takes lines about the progress.
        resume: go on from the report that is there.
    """

    config: TimingConfig
    processes: Processes
    tell: Tell
    resume: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        self._path = Path(self.config.out) / FILE
        done, machine = results_done(self._path) if self.resume else ({}, {})
        self._machine: dict[str, list[dict[str, float]]] = machine
        on_cpu = self.config.device == "cpu"
        self._results = [
            CaseResult(case=case, shares_memory=on_cpu and case.transport == "auto", **done.get(case.key, {}))
            for case in cases_of(self.config)
        ]
        self._prepared: dict[str, _Prepared] = {}
        self._load = load_average()
        self._begin = time.monotonic()

    def all_rounds(self) -> TimingReport:
        """Measure until every case has its rounds, or the time is over."""
        with tempfile.TemporaryDirectory(prefix="shardrec-bench-") as folder:
            for number in range(self.config.rounds):
                for result in self._results:
                    if len(result.rounds) > number or result.error is not None or self._is_late():
                        continue
                    self._turns(result, number, Path(folder))
                    write_report(self.report(), self._path)
        report = self.report()
        write_report(report, self._path)
        # A machine that measures may have no matplotlib.
        if any(result.is_measured for result in report.results) and find_spec("matplotlib") is not None:
            from benchmarks.harness.timing.png import draw

            draw(report, self._path.with_name(PICTURE))
        return report

    def report(self) -> TimingReport:
        """What is measured so far."""
        for result in self._results:
            machine = self._machine.get(_machine_key(result.case))
            if machine and result.bytes:
                dense, rates = result.step("dense"), machine_of(machine)
                other = dense.median if dense else 0.0
                result.floor = floor_of(result.bytes, rates, other_ms=other)
                if "gather" in rates:  # not in what an earlier release measured
                    result.gather_floor = floor_of(result.bytes, rates, other_ms=other, gather=True)
        return TimingReport(
            options=self.config.to_mapping(),
            environment=self._environment(),
            results=self._results,
            machine=self._machine,
        )

    def _is_late(self) -> bool:
        minutes = self.config.minutes
        return minutes is not None and time.monotonic() - self._begin > 60 * minutes

    def _probe(self, case: Case, number: int) -> None:
        key = _machine_key(case)
        if len(self._machine.get(key, ())) <= number:
            task = "benchmarks.harness.timing.probe:probe"
            found = self.processes.run(task, {}, ranks=case.ranks, malloc=case.malloc)
            self._machine.setdefault(key, []).append(found)

    def _turns(self, result: CaseResult, number: int, folder: Path) -> None:
        """One round of a case. A side that fails, or computes something else, ends the case."""
        case = result.case
        try:
            self._probe(case, number)
            prepared = self._prepare(result, folder)
            measured = {}
            # Each round begins with another side, so that a machine that changes meanwhile favours none.
            first = number % len(case.turns)
            for side in (*case.turns[first:], *case.turns[:first]):
                measured[side] = self._measure(case, side, prepared)
                self.tell(f"round {number + 1}: {case.key} {side} {turn_of(measured[side])['ms']:.1f} ms")
            _check_outputs(measured, result)
            result.rounds.append({side: turn_of(measured[side]) for side in case.turns})
        except ShardrecError as error:
            result.error = str(error)
            self.tell(f"round {number + 1}: {case.key}: {error}")

    def _prepare(self, result: CaseResult, folder: Path) -> _Prepared:
        case = result.case
        if case.key not in self._prepared:
            from benchmarks.harness.timing.inputs import draw_inputs
            from benchmarks.harness.timing.plans import case_plan

            plan = case_plan(case)
            stripes = [layout for layout in plan.tables if len(layout.stripes()) > 1]
            result.other_rule = bool(stripes) and case.optimizer == "rowwise_adagrad" and case.trains
            result.bytes = step_bytes(case, plan)
            inputs = str(draw_inputs(case, folder, self.config.seed)) if self.processes.read_files else ""
            self._prepared[case.key] = _Prepared(plan=plan, inputs=inputs)
        return self._prepared[case.key]

    def _measure(self, case: Case, side: str, prepared: _Prepared) -> dict[str, Any]:
        config = self.config
        job = Job(
            case=case,
            side=side,
            plan=prepared.plan.to_json(),
            inputs=prepared.inputs,
            steps=config.steps,
            seconds=config.seconds,
            seed=config.seed,
            threads=config.threads or 1,
            device=config.device,
        )
        task = "benchmarks.harness.timing.rank:measure"
        found: dict[str, Any] = self.processes.run(task, job.to_json(), ranks=case.ranks, malloc=case.malloc)
        return found

    def _environment(self) -> dict[str, Any]:
        from shardrec.trainer.run.report import environment

        return {
            **environment(world_size=self.config.nproc or 2, threads=self.config.threads or 1),
            **machine_record(own_ranks=self.processes.read_files),
            "malloc": {name: dict(variables) for name, variables in MALLOC.items()},
            "processes": type(self.processes).__name__,
            "load_at_start": self._load,
            "load_at_end": load_average(),
        }


def _machine_key(case: Case) -> str:
    return f"{case.malloc}, {case.ranks} ranks"


def _check_outputs(measured: Mapping[str, Mapping[str, Any]], result: CaseResult) -> None:
    """Compare every side's outputs with shardrec's, on each rank.

    Raises:
        ConfigError: naming the features that differ.
    """
    from benchmarks.harness.timing.digest import differing

    mine: Sequence[Mapping[str, Any]] = measured[BASE]["digests"]
    for side in result.case.sides:
        found = measured[side]
        for rank, (ours, theirs) in enumerate(zip(mine, found["digests"], strict=True)):
            for moment in ours:
                if moment == "trained" and side == "torchrec" and result.other_rule:
                    continue
                keys = differing(ours[moment], theirs[moment])
                if keys:
                    when = "before a step" if moment == "first" else "after two steps"
                    raise ConfigError(
                        f"the outputs of {side} are not shardrec's {when}, on rank {rank}, for {', '.join(keys)}: they "
                        "do not compute the same, and their times say nothing"
                    )
