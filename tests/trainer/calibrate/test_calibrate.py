"""Calibration: times made from a known profile give it back; files are checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from shardrec.errors import ConfigError
from shardrec.layout import Topology
from shardrec.layout.presets import preset
from shardrec.planner.cost import CostModel, Profile
from shardrec.planner.price import predicted_phases
from shardrec.trainer import calibrate
from shardrec.trainer.calibrate import Measured
from shardrec.trainer.calibrate.measure import time_step
from shardrec.trainer.calibrate.workload import step_plan, table_loads

BASE = Profile.of_machine(preset("cpu"))
TRUE = replace(
    BASE,
    name="true",
    lookup_id_ns=20.0,
    row_byte_ns=0.5,
    update_id_ns=80.0,
    cache_bytes=2.0**21,
    forward_us=300.0,
    backward_us=100.0,
    exchange_us=150.0,
    exchange_byte_ns=0.9,
    reduce_byte_ns=1.5,
)


def made(world: int, seed: int, count: int = 60) -> tuple[list[calibrate.Workload], Measured]:
    """Workloads and the times that the true profile predicts."""
    drawn = calibrate.workloads(count, world, seed)
    links = {
        "all_to_all": tuple((size, 0.15 + size * 0.9e-6) for size in (0.0, 1e5, 1e7)),
        # Of nothing, it sends nothing: its time says nothing of the others.
        "all_reduce": ((0.0, 1e-3), *((size, 0.15 + size * 1.5e-6) for size in (1e5, 1e6, 1e7))),
    }
    phases = []
    for each in drawn:
        model = CostModel(profile=TRUE, topology=Topology(ranks_per_host=world), batch_size=each.batch)
        phases.append(predicted_phases(model, table_loads(each), step_plan(each, world)))
    steps, forward = tuple(map(sum, phases)), tuple(first for first, _ in phases)
    return drawn, Measured(world=world, steps=steps, forward=forward, **(links if world > 1 else {}))


def test_a_known_profile_comes_back() -> None:
    found = calibrate.fit(BASE, [made(1, 0), made(2, 0)], name="found", source="made")
    assert found.errors["median_percent"] < 0.5
    assert found.exchange_us == pytest.approx(150.0, rel=0.05)
    assert found.forward_us == pytest.approx(300.0, rel=0.05)
    assert found.backward_us == pytest.approx(100.0, rel=0.05)
    assert found.row_byte_ns == pytest.approx(0.5, rel=0.1)
    assert found.update_id_ns == pytest.approx(80.0, rel=0.1)
    assert found.reduce_byte_ns == pytest.approx(1.5, rel=1e-3)
    others, measured = made(2, 7, count=12)
    assert max(map(abs, calibrate.relative_errors(found, others, measured))) < 0.05


@pytest.mark.slow
def test_disturbed_times_do_not_bend_the_rest() -> None:
    drawn, measured = made(2, 0)
    disturbed = replace(
        measured,
        steps=tuple(time * 4 if number % 10 == 0 else time for number, time in enumerate(measured.steps)),
        forward=tuple(time * 4 if number % 10 == 0 else time for number, time in enumerate(measured.forward)),
    )
    found = calibrate.fit(BASE, [made(1, 0), (drawn, disturbed)], name="found", source="made")
    others, quiet = made(2, 7, count=12)
    assert max(map(abs, calibrate.relative_errors(found, others, quiet))) < 0.1


@pytest.mark.slow
def test_small_and_large_steps_are_predicted_from_noisy_times() -> None:
    """Steps of 1 to 90 ms on a machine that is a profile, timed up to a quarter too long; and others of it."""
    rng = Random(0)
    runs = [(drawn, _noisy(measured, rng)) for drawn, measured in (made(1, 0), made(2, 0))]
    found = calibrate.fit(BASE, runs, name="found", source="made")
    others, quiet = made(2, 7, count=40)
    errors = np.abs(calibrate.relative_errors(found, others, quiet))
    small = np.argsort(quiet.steps)[:10]
    assert max(errors) < 0.25
    assert max(errors[small]) < 0.12


def _noisy(measured: Measured, rng: Random) -> Measured:
    noise = [1 + 0.25 * rng.random() ** 3 for _ in measured.steps]
    return replace(
        measured,
        steps=tuple(time * factor for time, factor in zip(measured.steps, noise, strict=True)),
        forward=tuple(time * factor for time, factor in zip(measured.forward, noise, strict=True)),
    )


def test_too_few_times() -> None:
    drawn, measured = made(1, 0, count=8)
    with pytest.raises(ConfigError, match="8 steps do not determine"):
        calibrate.fit(BASE, [(drawn, measured)], name="", source="")


def test_workloads_differ_and_repeat() -> None:
    drawn = calibrate.workloads(40, 2, 3)
    assert len(set(drawn)) == 40
    assert drawn == calibrate.workloads(40, 2, 3) != calibrate.workloads(40, 2, 4)
    assert {each.cut for each in drawn} == {"table_wise", "row_wise", "column_wise", "data_parallel"}


def test_profiles_are_saved_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    TRUE.save(path)
    assert Profile.load(path) == TRUE
    data = json.loads(path.read_text(encoding="utf-8"))
    for wrong, message in (
        ([], "format: None"),
        ({**data, "format": 2}, r"profile\.json: not a profile of format 3 \(format: 2\). Calibrate again"),
        ({**data, "speed": 1}, "unknown: speed"),
        ({**data, "bag_ns": "fast"}, "bag_ns is 'fast'"),
        ({**data, "bag_ns": -1.0}, "bag_ns is -1.0. Give a finite number"),
        ({name: value for name, value in data.items() if name != "bag_ns"}, "missing: bag_ns"),
    ):
        path.write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            Profile.load(path)
    path.write_text("not,json", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"profile\.json: not JSON .*. Give a file that shardrec calibrate wrote"):
        Profile.load(path)


@pytest.mark.parametrize(("least_ms", "timed"), [(0.0, 3), (1e6, 48)])
def test_small_steps_are_timed_more_often(monkeypatch: pytest.MonkeyPatch, least_ms: float, timed: int) -> None:
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    calls: list[str] = []

    def forward() -> Callable[[], None]:
        calls.append("forward")
        return lambda: calls.append("backward")

    forward_ms, step_ms = time_step(forward, 3, torch.device("cpu"), least_ms)
    assert 0 < forward_ms <= step_ms
    assert calls == ["forward", "backward"] * (2 + timed)


@pytest.mark.slow
def test_measures_this_machine(tmp_path: Path) -> None:
    drawn = calibrate.workloads(8, 2, 0)
    measured = calibrate.measure(drawn, 2, repeats=2)
    assert len(measured.steps) == 8
    assert min(measured.steps) > 0
    assert [size for size, _ in measured.all_to_all] == sorted(size for size, _ in measured.all_to_all)
