"""The command line without a training run: help, versions, wrong flags, and the last words of a failed command."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import shardrec
from shardrec import _versions, launch, native, planner
from shardrec._versions import check_extra
from shardrec.errors import DataError, InputError, VersionError
from shardrec.trainer.cli import app, selftest
from shardrec.trainer.cli import doctor as doctor_lines
from shardrec.trainer.cli.ending import ended_by_error
from shardrec.trainer.run import TrainConfig, train
from shardrec.trainer.run.options import flag
from tests.trainer.cli.command import Run, shell

ROOT = Path(__file__).parents[3]


def test_help_names_every_option() -> None:
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for name in TrainConfig.options():
        assert f"{flag(name)} " in shown.output, name
    assert "(default: rowwise_adagrad)" in shown.output
    assert "(default: 128,64)" in shown.output


def test_help_imports_nothing_heavy() -> None:
    """Of the commands with the most options."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom shardrec.trainer.cli import app\n"
        "for name in ('train', 'bench'): assert CliRunner().invoke(app, [name, '--help']).exit_code == 0\n"
        "print(sorted({'torch', 'fbgemm_gpu', 'torchrec', 'numpy', 'matplotlib', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.output.strip() == f"shardrec {shardrec.__version__}"


def test_without_a_command_there_is_help() -> None:
    shown = CliRunner().invoke(app, [])
    assert "train" in shown.output
    assert "doctor" in shown.output


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where shardrec was installed without the planner's extra."""
    monkeypatch.setattr(planner, "plan", lambda *_, **__: pytest.fail("the planner's packages may not be there"))
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert "PROBLEM" not in shown.output
    assert re.findall(r"^ *([\w+ ]+?): ", shown.output, re.MULTILINE) == [
        "versions",
        "threads",
        "device",
        "gloo",
        "exchange",
        "C++",
        "fbgemm",
        "one rank",
        "training",
        "scripted",
    ]
    assert re.search(r"torchrec \d", shown.output)


def test_doctor_says_how_to_compile_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line of its own, for an install without them is silent otherwise until the first step."""
    monkeypatch.delenv("SHARDREC_NATIVE", raising=False)
    monkeypatch.setattr(native, "library_path", lambda: None)
    monkeypatch.setattr(launch, "has_operators", native.has_operators.__wrapped__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = doctor_lines._native()
    assert "without C++ operators for torch" in said
    assert "`pip install --no-build-isolation .`" in said


def test_doctor_fails_with_the_remedy_when_versions_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardrec import _versions

    def refuse() -> None:
        raise shardrec.errors.VersionError("found torch 1.0. Install torch==2.13.0")

    for module in (_versions, launch):
        monkeypatch.setattr(module, "check_versions", refuse)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 1
    assert "versions: PROBLEM: found torch 1.0. Install torch==2.13.0" in shown.output
    assert "gloo: two ranks" in shown.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_doctor_without_the_device_that_is_asked_for() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--device", "cuda"])
    assert shown.exit_code == 1
    assert "device: PROBLEM: --device is 'cuda' and torch sees no CUDA device" in shown.output
    assert "training" not in shown.output


def test_doctor_refuses_the_cpu_build_of_fbgemm_on_a_gpu() -> None:
    if torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::permute_2D_sparse_data", "CUDA"):
        pytest.skip("fbgemm-gpu is the build for CUDA here")
    with pytest.raises(shardrec.errors.VersionError, match="build for the CPU, which lacks CUDA kernels: uninstall"):
        selftest.fbgemm_build(torch.device("cuda"))


def test_doctor_tells_when_values_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    features = selftest._features
    monkeypatch.setattr(selftest, "_features", lambda step, device="": features(step + bool(device), device or "cpu"))
    with pytest.raises(shardrec.ConfigError, match=r"outputs on the device are not those on the CPU\. The largest"):
        selftest.training_lookup(torch.device("cpu"))


def test_a_wrong_option_is_one_line_and_exit_code_1() -> None:
    done = shell("train", "--batch-size", "0")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "shardrec: error: batch_size (--batch-size) is 0: it should be greater than or equal to 1\n"


def test_an_unknown_key_in_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("embeding_lr: 0.1\n", encoding="utf-8")
    code, _, errors = run("train", str(path))
    assert code == 1
    assert f"embeding_lr ({path}:1) is not an option: did you mean 'embedding_lr'?" in errors
    assert "The options are data, features" in errors
    assert "Traceback" not in errors


def test_debug_keeps_the_traceback() -> None:
    done = shell("train", "--epochs", "0", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_flag_of_the_wrong_type_is_a_usage_error(run: Run) -> None:
    assert run("train", "--batch-size", "many")[0] == 2


class TestEnding:
    """Who says what when several processes end with an error."""

    def test_an_unexpected_error_names_its_kind(self, capsys: pytest.CaptureFixture[str]) -> None:
        ended_by_error(ZeroDivisionError("division by zero"))
        assert "unexpected ZeroDivisionError: division by zero\nRun it again with --debug" in capsys.readouterr().err

    def test_all_that_an_extra_lacks_is_named_at_once(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lacking = ("highspy", "pyarrow", "werkzeug")
        monkeypatch.setattr(_versions.util, "find_spec", lambda name: None if name in lacking else name)
        check_extra.cache_clear()
        words = "without highspy, pyarrow, werkzeug, which its extra 'train' brings: pip install 'shardrec[train]'"
        for name in ("werkzeug", "pyarrow"):
            ended_by_error(ModuleNotFoundError(name=name))
            assert capsys.readouterr().err == f"shardrec: error: shardrec was installed {words}\n"
        with pytest.raises(VersionError, match=re.escape(words)):
            train(TrainConfig(out="nowhere"))
        ended_by_error(ModuleNotFoundError(name="highspy"))
        assert "without highspy, which its extra 'planner' brings" in capsys.readouterr().err
        ended_by_error(ModuleNotFoundError("No module named 'another'", name="another"))
        assert "unexpected ModuleNotFoundError: No module named 'another'" in capsys.readouterr().err

    def test_shared_errors_come_from_rank_0_only(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        ended_by_error(InputError("rank 0: bad batch"))
        assert capsys.readouterr().err == ""
        ended_by_error(DataError("rows.tsv:3: bad"))
        assert capsys.readouterr().err == "shardrec, rank 1: error: rows.tsv:3: bad\n"
        monkeypatch.setenv("RANK", "0")
        ended_by_error(InputError("rank 0: bad batch"))
        assert capsys.readouterr().err == "shardrec, rank 0: error: rank 0: bad batch\n"
