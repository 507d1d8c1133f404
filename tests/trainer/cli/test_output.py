"""Where what is printed goes: streams of few characters, full disks, readers that have gone."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from shardrec.errors import CheckpointError
from shardrec.files import naming, os_fault
from shardrec.trainer.cli import main
from tests.checkpoint.models import make

TRAIN = ("train", "--samples", "2000", "--holdout-samples", "200", "--batch-size", "1000", "--max-embeddings", "20")


def full() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8")


def without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def read_only() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, few_tables: None) -> None:
    monkeypatch.setattr("shardrec.trainer.run.session.write_curve", lambda report, path: path.touch())
    monkeypatch.setattr("shardrec.trainer.data.synthetic._EXPECTATION_ROWS", 1_000)
    monkeypatch.chdir(tmp_path)


def command(monkeypatch: pytest.MonkeyPatch, stream: TextIO, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.argv", ["shardrec", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    monkeypatch.setattr("sys.stdout", sys.__stdout__)
    stream.close()  # as the interpreter does, which must not fail
    return int(ended.value.code or 0)


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [full, without_reader, read_only])
def test_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stream: type[TextIO]
) -> None:
    assert command(monkeypatch, stream(), *TRAIN, "--out", "run") == 0
    assert json.loads(Path("run/metrics.json").read_text())["training"]["steps"] == 2
    errors = capfd.readouterr().err
    assert errors.count("shardrec: warning: standard output cannot be written to: ") == errors.count("\n") == 1


@pytest.mark.parametrize("stream", [full, without_reader, read_only])
@pytest.mark.parametrize("arguments", [("plan", "t.csv"), ("plan", "t.csv", "--json"), ("doctor",)])
def test_other_commands_say_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stream: type[TextIO], arguments: tuple[str, ...]
) -> None:
    Path("t.csv").write_text("num_embeddings,embedding_dim\n10,4\n", encoding="utf-8")
    assert command(monkeypatch, stream(), *arguments) == 1
    errors = capfd.readouterr().err
    assert errors.startswith("shardrec: error: standard output cannot be written to: ")
    assert errors.count("\n") == 1


def test_a_stdout_that_was_closed() -> None:
    """No file that is opened later gets its number."""
    command = [sys.executable, "-m", "shardrec.trainer.cli", "--version"]
    ended = subprocess.run(["sh", "-c", '"$0" "$@" >&-', *command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        "shardrec: error: standard output cannot be written to: Bad file descriptor; send it elsewhere\n",
    )


def test_a_stream_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    held = io.BytesIO()
    stream = io.TextIOWrapper(held, encoding="ascii", errors="strict", write_through=True)
    monkeypatch.setattr(stream, "close", lambda: None)
    assert command(monkeypatch, stream, *TRAIN, "--out", "ran-±") == 0
    assert "results in ran-?" in held.getvalue().decode("ascii")


def test_a_full_disk_is_told_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shardrec import save_checkpoint

    def fail(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    words = r"\.safetensors: No space left on device \([\d,.]+ MiB are free in /.+\);"
    with pytest.raises(CheckpointError, match=words):
        save_checkpoint(tmp_path / "saved", make("table_wise", "sgd"))


def test_metrics_on_a_full_disk(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(report: object, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shardrec.trainer.run.session.write_metrics", fail)
    assert command(monkeypatch, io.StringIO(), *TRAIN, "--out", "run") == 1
    assert "run/metrics.partial.json: No space left on device (" in capfd.readouterr().err


def test_an_error_keeps_the_name_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught, naming("other"):
        (tmp_path / "none").read_bytes()
    assert os_fault(caught.value) == f"{tmp_path / 'none'}: No such file or directory"
