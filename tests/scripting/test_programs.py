"""Random models: scripted, they give what they give in eager mode, and issue and wait in the same order."""

from __future__ import annotations

import importlib.util
from collections import Counter
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings

from tests.scripting.lookups import assert_equal, batch, events_of, reload, script
from tests.scripting.programs import programs

_NUMBERS = count()


def load(folder: Path, text: str) -> ModuleType:
    # TorchScript reads the source again, from a file of this name.
    path = folder / f"program{next(_NUMBERS)}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def issued(events: list[str]) -> list[str]:
    """All but the waits."""
    return [event for event in events if not event.startswith("wait")]


def waited(events: list[str]) -> list[Counter[str]]:
    """The waits before each of the other events. TorchScript leaves out those whose value nobody looks at."""
    found, so_far = [], Counter[str]()
    for event in events:
        if event.startswith("wait"):
            so_far[event] += 1
        else:
            found.append(so_far.copy())
    return found


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(text=programs())
def test_random_forwards(folder: Path, text: str) -> None:
    model, x = load(folder, text).Model(), batch()
    scripted = script(model)
    runs = [scripted, reload(scripted)]
    for flag in (True, False):
        for times in range(3):
            expected, order = events_of(model, x, flag, times)
            for run in runs:
                got, its_order = events_of(run, x, flag, times)
                assert_equal(got, expected)
                assert issued(its_order) == issued(order)
                for mine, eager in zip(waited(its_order), waited(order), strict=True):
                    assert mine <= eager, f"{its_order} waits earlier than {order}"
