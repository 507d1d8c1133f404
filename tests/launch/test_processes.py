"""Ranks as processes: how they start, and how they end, whoever ends first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.template import RankTemplate
from shardrec.errors import ConfigError, DataError, InputError, PeerError
from shardrec.launch.processes import RankFailure, RankProcesses, Start, first_cause, spawn
from shardrec.launch.stop import RunStopped
from tests.launch.jobs import LONG_S, describe, dies_until, end_the_launcher, fail, large, meet_signal


def start(
    run: Any, options: dict[str, Any] | None = None, *, nproc: int = 2, timeout: float = LONG_S, **more: Any
) -> Any:
    return RankProcesses(run, options or {}, nproc=nproc, timeout=timeout, debug=False, **more).result()


@pytest.fixture(params=["spawned", "forked"])
def starting(request: pytest.FixtureRequest) -> Iterator[Start]:
    if request.param == "spawned":
        yield spawn
        return
    with RankTemplate(["tests.launch.jobs"]) as template:
        yield template.start


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = set(multiprocessing.active_children())  # the ranks of other tests
    yield
    assert set(multiprocessing.active_children()) == before


def test_ranks_know_who_they_are_and_meet_on_the_loopback_address(starting: Start) -> None:
    found = start(describe, {"given": 3}, start=starting)
    assert found == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "address": "127.0.0.1",
        "given": 3,
    }


def test_a_result_larger_than_a_pipe() -> None:
    assert len(start(large, {"size": 1 << 21}, nproc=1)) == 1 << 21


def test_an_error_is_raised_as_it_was_on_its_rank() -> None:
    with pytest.raises(DataError, match=r"^rows.tsv:3: field 'label'$"):
        start(fail)


def test_a_killed_rank_ends_the_others_at_once(starting: Start) -> None:
    with pytest.raises(PeerError, match=r"rank 1 was ended by SIGKILL\. The system"):
        start(meet_signal, {"signal": signal.SIGKILL}, start=starting)


def test_a_stopped_rank_ends_as_a_dead_one_after_the_time_limit() -> None:
    with pytest.raises(PeerError, match=r"rank 1 was stopped.*at most 0\.6 s.*--timeout"):
        start(meet_signal, {"signal": signal.SIGSTOP}, timeout=0.6)


def test_ranks_that_run_too_long_are_named_and_ended() -> None:
    with pytest.raises(PeerError, match=r"^ranks 0, 1 still ran after 0\.6 s, and were ended$"):
        start(meet_signal, {"signal": signal.SIGCONT}, limit=0.6)


def test_a_template_that_cannot_import_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    fault = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "starts_a_thread.py").write_text(fault)
    with (
        RankTemplate(["starts_a_thread"]) as threaded,
        pytest.raises(PeerError, match="ranks are forked from ended in its imports: its stderr says why"),
    ):
        start(describe, start=threaded.start)


@pytest.mark.some(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_told_to_end_lets_its_ranks_save(number: signal.Signals) -> None:
    handled = signal.getsignal(number)
    with pytest.raises(RunStopped) as stopped:
        start(end_the_launcher, {"signal": number})
    assert (stopped.value.step, stopped.value.folder) == (7, "here")
    assert signal.getsignal(number) is handled


LAUNCHER = """
import sys
from benchmarks.harness.template import RankTemplate
from shardrec.launch.processes import RankProcesses, spawn
from tests.launch.jobs import hold

if __name__ == "__main__":
    start = RankTemplate([]).start if sys.argv[2:] else spawn
    RankProcesses(hold, {"folder": sys.argv[1]}, nproc=2, timeout=1000.0, debug=False, start=start).result()
"""


@pytest.mark.parametrize("forked", [[], ["forked"]], ids=str)
def test_ranks_end_with_a_launcher_that_is_killed(forked: list[str], tmp_path: Path) -> None:
    """Also one that is stopped, and of spawned ones nothing is left in the folder for temporary files."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory() as temporary:  # a short name: the fork server's socket is in it
        environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": temporary}
        launcher = subprocess.Popen([sys.executable, str(script), str(tmp_path), *forked], env=environment, cwd=root)
        try:
            pids = [_pid(tmp_path / str(rank)) for rank in range(2)]
        finally:
            launcher.kill()
            launcher.wait()
        for pid in pids:
            _wait_for(lambda pid=pid: not _runs(pid))
        assert forked or os.listdir(temporary) == []


def _pid(path: Path) -> int:
    _wait_for(lambda: path.exists() and path.read_text(encoding="utf-8") != "")
    return int(path.read_text(encoding="utf-8"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def _wait_for(condition: Any) -> None:
    give_up = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < give_up, "it did not come"
        time.sleep(0.01)


# -------------------------------------------------------------------------------------------------- what went wrong


def note(rank: int, when: float, kind: str, message: str) -> RankFailure:
    return RankFailure(rank=rank, time=when, kind=kind, message=message, trace=f"trace of rank {rank}")


def test_the_first_error_that_is_not_about_another_rank() -> None:
    cause = first_cause(
        [
            note(0, 1.0, "PeerError", "rank 1 is gone"),
            note(2, 3.0, "DataError", "rows.tsv:9: field 'label'"),
            note(1, 2.0, "DataError", "rows.tsv:3: field 'label'"),
        ]
    )
    assert isinstance(cause, DataError)
    assert str(cause) == "rows.tsv:3: field 'label'"


def test_the_rank_with_the_bad_data_says_it_better_than_the_others() -> None:
    others, own = note(0, 1.0, "InputError", "rank 1: disk"), note(1, 2.0, "DataError", "disk")
    assert isinstance(first_cause([others, own]), DataError)
    assert isinstance(first_cause([others]), InputError)


def test_an_unexpected_error_names_its_rank_and_kind() -> None:
    notes = [note(1, 1.0, "ZeroDivisionError", "division by zero")]
    cause = first_cause(notes)
    assert isinstance(cause, PeerError)
    assert "rank 1 failed with ZeroDivisionError: division by zero" in str(cause)
    assert "trace of rank 1" not in str(cause)
    assert "trace of rank 1" in str(first_cause(notes, debug=True))


def test_a_killed_rank_is_named_though_others_complain() -> None:
    complaint = note(0, 1.0, "PeerError", "the header exchange failed")
    cause = first_cause([complaint, note(1, 2.0, "ended by a signal", "SIGKILL")])
    assert isinstance(cause, PeerError)
    assert str(cause).startswith("rank 1 was ended by SIGKILL. The system ends")
    assert str(first_cause([note(1, 2.0, "ended by a signal", "SIGSEGV")])) == "rank 1 was ended by SIGSEGV"


def test_an_option_that_cannot_be_honoured_says_more_than_a_death() -> None:
    killed = note(1, 1.0, "ended by a signal", "SIGKILL")
    assert isinstance(first_cause([killed, note(0, 2.0, "ConfigError", "lr is -1")]), ConfigError)


@pytest.mark.parametrize("kind", ["file", "piped"])
def test_a_program_that_ranks_cannot_import(kind: str, tmp_path: Path) -> None:
    guard = 'if __name__ == "__main__":\n    ' * (kind == "piped")
    program = f"{PROGRAM}{guard}on_new_ranks(work, nproc=2)\n"
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py") if kind == "file" else "-"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, input=program, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    if kind == "file":
        assert "ConfigError: each new rank imports the program again" in ended.stderr
        assert ended.stderr.endswith('\n\nif __name__ == "__main__":\n    main()\n')
        assert ended.stderr.count("Traceback") == 1, "the ranks add none"
    else:
        assert "Ranks cannot import a program that is typed, piped or a notebook" in ended.stderr


@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.slow), "piped"])
def test_a_program_that_ranks_need_not_import(kind: str, tmp_path: Path) -> None:
    """As that of train() with options alone: no guard, and no file either."""
    program = (
        "from shardrec.launch.processes import RankProcesses, spawn_alone\n"
        "options = {'b': 1, 'a': 2}\n"
        "print(RankProcesses(sorted, options, nproc=1, timeout=60, debug=True, start=spawn_alone).result())\n"
    )
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py") if kind == "file" else "-"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, input=program, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "['a', 'b']\n"), ended.stderr


PROGRAM = """from shardrec.launch.run import on_new_ranks

def work(place):
    return place.rank

"""


@pytest.mark.some(1)
@pytest.mark.parametrize(("restarts", "fails", "lives"), [(1, False, 2), (5, False, 3), (5, True, 3)])
def test_a_supervised_process_is_started_again_when_it_was_killed(
    restarts: int, fails: bool, lives: int, tmp_path: Path
) -> None:
    from shardrec.rpc.server_process import supervise

    match = "trainer0 did not come" if fails else "ended by SIGKILL"
    with pytest.raises(PeerError, match=match) if fails or restarts < 2 else nullcontext():
        supervise(dies_until, {"folder": str(tmp_path), "fails": fails}, restarts=restarts)
    assert len(list(tmp_path.iterdir())) == lives


def test_a_rank_without_a_word() -> None:
    assert "rank 1 ended with exit code 3" in str(first_cause([note(1, 1.0, "exit code", "3")]))
