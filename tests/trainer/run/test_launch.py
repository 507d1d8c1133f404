"""Where a run's ranks come from, and when they are started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardrec.errors import ConfigError, DataError, PeerError
from shardrec.launch.run import launched_rank, run_on_ranks
from shardrec.trainer.run import RunStopped, TrainConfig
from shardrec.trainer.run.launch import train

Launch = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[Any]]:
    """(The options of each attempt, what each attempt does: raises an error, or calls a function.)"""
    given: list[dict[str, Any]] = []
    happen: list[Any] = []

    def attempt(run: Any, options: dict[str, Any], **_: Any) -> None:
        given.append(options)
        what = happen.pop(0) if happen else None
        if isinstance(what, BaseException):
            raise what
        if what is not None:
            what()

    monkeypatch.setattr("shardrec.trainer.run.launch.run_on_ranks", attempt)
    return given, happen


def test_nproc_contradicts_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_rank() == (1, 4)
    with pytest.raises(ConfigError, match=r"nproc \(--nproc\) is 2 and a launcher has already started 4 ranks"):
        train(TrainConfig(nproc=2))


def test_a_run_has_a_folder_for_its_results(attempts: tuple[list[dict[str, Any]], list[Any]], tmp_path: Path) -> None:
    given, _ = attempts
    train(TrainConfig())
    train(TrainConfig(out=str(tmp_path)))
    assert given[0]["out"].startswith("runs/")
    assert given[1]["out"] == str(tmp_path)


def test_a_single_rank_runs_here_and_returns_its_result() -> None:
    assert run_on_ranks(sorted, {"b": 1, "a": 2}, nproc=1) == ["a", "b"]


def test_ranks_are_started_again_after_a_death_and_go_on(
    attempts: tuple[list[dict[str, Any]], list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, happen = attempts
    happen += [PeerError("rank 1 was ended by SIGKILL"), PeerError("rank 0 was ended by SIGKILL")]
    train(TrainConfig(nproc=2, checkpoint_every="5", out=str(tmp_path)))
    assert [options["resume"] for options in given] == [False, True, True]
    said = capsys.readouterr().err
    assert "shardrec: rank 1 was ended by SIGKILL\nshardrec: starting the ranks again, 1 of 3 times" in said


def test_restarts_without_a_new_checkpoint_come_to_an_end(
    attempts: tuple[list[dict[str, Any]], list[Any]], tmp_path: Path
) -> None:
    given, happen = attempts

    def save_and_die() -> None:
        (tmp_path / "checkpoints" / f"step-{len(given):012}").mkdir(parents=True)
        raise PeerError("later")

    happen += [PeerError("1"), PeerError("2"), save_and_die, PeerError("4"), PeerError("5"), PeerError("6")]
    with pytest.raises(PeerError, match=r"^5$"):
        train(TrainConfig(nproc=2, checkpoint_every="5", out=str(tmp_path), max_restarts=2))
    assert len(given) == 5


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (DataError("rows.tsv:3"), {}),
        (ConfigError("device"), {}),
        (RunStopped(3, "here"), {}),
        (PeerError("gone"), {"checkpoint_every": None}),
        (PeerError("gone"), {"max_restarts": 0}),
        (PeerError("gone"), {"nproc": 1}),
    ],
    ids=str,
)
def test_what_is_not_tried_again(
    error: BaseException,
    changes: dict[str, Any],
    attempts: tuple[list[dict[str, Any]], list[Any]],
    tmp_path: Path,
) -> None:
    given, happen = attempts
    happen.append(error)
    with pytest.raises(type(error)):
        train(TrainConfig(**{"nproc": 2, "checkpoint_every": "5", "out": str(tmp_path), **changes}))
    assert len(given) == 1


def test_ranks_of_torchrun_go_on_after_its_restart(
    attempts: tuple[list[dict[str, Any]], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, happen = attempts
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(TrainConfig(out=str(tmp_path)))
    assert given[0]["resume"]
    happen.append(PeerError("gone"))
    with pytest.raises(PeerError):  # to start again is torchrun's part
        train(TrainConfig(out=str(tmp_path), checkpoint_every="5"))


def test_checkpoints_of_another_run_are_neither_replaced_nor_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000000000005").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds the checkpoints of a run: continue it \(--resume\)"):
        train(TrainConfig(out=str(tmp_path)))


def test_resume_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"resume \(--resume\).*name it \(--out\)"):
        train(TrainConfig(), resume=True)


def test_an_interrupted_run_says_what_is_saved(
    attempts: tuple[list[dict[str, Any]], list[Any]], tmp_path: Path
) -> None:
    _, happen = attempts
    happen.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match=r"^nothing is saved: give --checkpoint-every"):
        train(TrainConfig(out=str(tmp_path)))
    for step, files in (("step-000000020", ["manifest.json"]), ("step-000000040", [])):
        folder = tmp_path / "checkpoints" / step
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).touch()
    happen.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match=r"^step-000000020 is saved\. Continue with --out .* --resume$"):
        train(TrainConfig(out=str(tmp_path)), resume=True)


def test_more_ranks_than_cores_are_warned_of(
    attempts: tuple[list[dict[str, Any]], list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for nproc in (2, 3):
        train(TrainConfig(out=str(tmp_path), nproc=nproc))
    assert capsys.readouterr().err == (
        "shardrec: warning: 3 ranks (--nproc) share 2 cores and slow each other down. Give --nproc 2 for speed\n"
    )
