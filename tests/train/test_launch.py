"""Which of several ranks' errors a failed run ends with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardrec.errors import ConfigError, DataError, InputError, PeerError
from shardrec.train import TrainConfig
from shardrec.train.launch import first_cause, launched_rank, run_on_ranks, train


def note(folder: Path, rank: int, time: float, kind: str, message: str) -> None:
    content = {"rank": rank, "time": time, "kind": kind, "message": message, "trace": f"trace of rank {rank}"}
    (folder / f"{rank}.json").write_text(json.dumps(content), encoding="utf-8")


def failed(**exitcodes: int) -> Any:
    """What the agent says of ``rank0=…`` and so on; the later argument failed later."""
    failures = {
        int(rank.removeprefix("rank")): SimpleNamespace(exitcode=code, timestamp=when)
        for when, (rank, code) in enumerate(exitcodes.items())
    }
    return SimpleNamespace(failures=failures)


def test_the_first_error_that_is_not_about_another_rank(tmp_path: Path) -> None:
    note(tmp_path, 0, 1.0, "PeerError", "rank 1 is gone")
    note(tmp_path, 1, 2.0, "DataError", "rows.tsv:3: field 'label'")
    note(tmp_path, 2, 3.0, "DataError", "rows.tsv:9: field 'label'")
    cause = first_cause(tmp_path, failed(rank0=1, rank1=1))
    assert isinstance(cause, DataError)
    assert str(cause) == "rows.tsv:3: field 'label'"


def test_the_rank_with_the_bad_data_says_it_better_than_the_others(tmp_path: Path) -> None:
    note(tmp_path, 0, 1.0, "InputError", "rank 1: disk")
    note(tmp_path, 1, 2.0, "DataError", "disk")
    assert isinstance(first_cause(tmp_path, failed(rank0=1)), DataError)
    (tmp_path / "1.json").unlink()
    assert isinstance(first_cause(tmp_path, failed(rank0=1)), InputError)


def test_an_unexpected_error_names_its_rank_and_kind(tmp_path: Path) -> None:
    note(tmp_path, 1, 1.0, "ZeroDivisionError", "division by zero")
    cause = first_cause(tmp_path, failed(rank1=1))
    assert isinstance(cause, PeerError)
    assert "rank 1 failed with ZeroDivisionError: division by zero" in str(cause)
    assert "trace of rank 1" not in str(cause)
    assert "trace of rank 1" in str(first_cause(tmp_path, failed(rank1=1), debug=True))


def test_a_killed_rank_is_named_though_others_complain(tmp_path: Path) -> None:
    note(tmp_path, 0, 1.0, "PeerError", "the header exchange failed")
    cause = first_cause(tmp_path, failed(rank1=-9))
    assert isinstance(cause, PeerError)
    assert str(cause).startswith("rank 1 was ended by SIGKILL; the system ends")
    assert str(first_cause(tmp_path, failed(rank1=-11))) == "rank 1 was ended by SIGSEGV"


def test_a_rank_without_a_word(tmp_path: Path) -> None:
    assert "rank 1 ended with exit code 3" in str(first_cause(tmp_path, failed(rank1=3)))


def test_nproc_contradicts_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_rank() == (1, 4)
    with pytest.raises(ConfigError, match=r"nproc \(--nproc\) is 2 and a launcher has already started 4 ranks"):
        train(TrainConfig(nproc=2))


def test_a_launchers_ranks_have_a_folder_for_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    given: list[Any] = []
    monkeypatch.setattr("shardrec.train.launch.run_on_ranks", lambda run, options, **_: given.append(options["out"]))
    train(TrainConfig())
    train(TrainConfig(out="here"))
    assert given[0].startswith("runs/")
    assert given[1] == "here"


def test_a_single_rank_runs_here_and_returns_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run_on_ranks(sorted, {"b": 1, "a": 2}, nproc=1) == ["a", "b"]
