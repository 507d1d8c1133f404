"""``shardrec train`` on files, good and bad, through the same door as the shell; and on new ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.trainer.data import write_criteo_tsv
from tests.trainer.cli.command import Run, shell

SMALL = ("--max-embeddings", "100", "--embedding-dim", "8", "--batch-size", "64", "--evaluations", "1")


@pytest.fixture
def rows(tmp_path: Path, few_tables: None) -> Path:
    """600 generated rows in Criteo's format, but for its number of categories."""
    path = tmp_path / "rows.tsv"
    write_criteo_tsv(path, 600, seed=1)
    return path


def break_rows(path: Path, field: int, value: str, lines: tuple[int, ...]) -> None:
    """Puts ``value`` in one field (0 is the label) of some lines, counted from 1."""
    text = path.read_text(encoding="utf-8").splitlines()
    for line in lines:
        fields = text[line - 1].split("\t")
        fields[field] = value
        text[line - 1] = "\t".join(fields)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def test_a_file(run: Run, rows: Path, tmp_path: Path) -> None:
    code, shown, errors = run("train", "--data", str(rows), *SMALL, "--out", str(tmp_path / "out"))
    assert (code, errors) == (0, "")
    assert "best possible" not in shown
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["optimum"] is None
    assert metrics["training"]["samples"] + metrics["final"]["rows"] == 600
    assert len(metrics["curve"]) == 1


def test_advice_names_flags_and_no_arguments_of_python(run: Run, rows: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    tables = (cuts.table_wise("t", 10, 4, rank=3),)
    ShardingPlan(topology=Topology(ranks_per_host=4), tables=tables).save(plan)
    csv = tmp_path / "tables.csv"
    csv.write_text("name,num_embeddings,embedding_dim\nuser,10,4\n", encoding="utf-8")
    break_rows(rows, 3, "abc", (17,))
    train = ("train", "--data", str(rows), *SMALL, "--out", str(tmp_path / "out"))
    for arguments, words in (
        ((*train, "--on-bad-row", "skip", "--plan", str(plan)), f"plan (--plan) is '{plan}', which is for 4 ranks"),
        ((*train, "--on-bad-row", "skip", "--plan", str(plan)), "start 4 (--nproc 4)"),
        (train, "--on-bad-row skip"),
        (
            (*train, "--constraint", "t_cat_1=data_parallel@0"),
            "constraint (--constraint) is 't_cat_1=data_parallel@0'",
        ),
        ((*train, "--loss", "softmax"), "loss (--loss) is 'softmax'"),
        (("plan", str(csv), "--constraint", "user=data_parallel@0"), "constraint (--constraint) is "),
        (("plan", str(csv), "--seconds", "0"), "'--seconds'"),
        (("plan", str(csv), "--save", str(tmp_path / "no" / "plan.json")), "--save "),
    ):
        code, _, errors = run(*arguments)
        assert code in (1, 2)
        assert words in errors
        for given in arguments:
            errors = errors.replace(given, "") if "=" in given else errors
        assert not re.search(r"\b[a-z_]+=\S", errors), "an argument of a function"


def test_samples_cut_a_file_short(run: Run, rows: Path, tmp_path: Path) -> None:
    flags = ("--samples", "128", "--epochs", "3", "--out", str(tmp_path))
    code, _, _ = run("train", "--data", str(rows), *SMALL, *flags)
    assert code == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert (metrics["training"]["samples"], metrics["training"]["steps"]) == (3 * 128, 6)


@pytest.mark.slow
def test_batches_of_a_step_and_clipped_gradients(run: Run, rows: Path, tmp_path: Path) -> None:
    sgd = ("--optimizer", "sgd", "--embedding-optimizer", "sgd", "--accumulate", "3", "--epochs", "2")
    sgd += ("--evaluations", "2")
    train = ("train", "--data", str(rows), *SMALL, *sgd)
    losses = {}
    for clip in ("1e-7", "10"):
        code, shown, errors = run(*train, "--clip", clip, "--out", str(tmp_path / clip))
        assert (code, errors) == (0, "")
        assert "training dlrm on 1 rank with" in shown
        assert "3 batches of 64 rows a step on each rank" in shown
        metrics = json.loads((tmp_path / clip / "metrics.json").read_text(encoding="utf-8"))
        assert metrics["training"]["steps"] == 6  # of 9 batches an epoch, the last one smaller
        assert all(0 < point["grad_norms"][part] < 10 for point in metrics["curve"] for part in ("dense", "tables"))
        tags = EventAccumulator(str(tmp_path / clip / "tensorboard")).Reload().Tags()["scalars"]
        assert {"gradient_norm/dense", "gradient_norm/tables"} <= set(tags)
        losses[clip] = [point["logloss"] for point in metrics["curve"]]
    assert losses["1e-7"][0] == pytest.approx(losses["1e-7"][-1], abs=1e-6)
    assert losses["10"][0] != pytest.approx(losses["10"][-1], abs=1e-6)
    for flag, value in (("--accumulate", "0"), ("--clip", "0"), ("--clip", "-1")):
        code, _, errors = run(*train, flag, value, "--out", str(tmp_path / "bad"))
        assert code == 1
        assert f"({flag}) is {float(value) if flag == '--clip' else value}: it should be greater than" in errors


@pytest.mark.parametrize(("given", "meant"), [("--acumulate", "--accumulate"), ("--embeding-lr", "--embedding-lr")])
def test_an_unknown_flag_is_answered_with_the_nearest(run: Run, given: str, meant: str) -> None:
    code, _, errors = run("train", given, "3")
    assert code == 2
    said = " ".join(errors.replace("│", " ").split())
    assert f"No such option: {given}" in said
    assert set(re.findall(r"--[a-z-]+", said)) - {"--help"} == {given, meant}


def test_a_bad_row_is_one_line_that_says_where(run: Run, rows: Path, tmp_path: Path) -> None:
    break_rows(rows, 3, "abc", (17, 400))
    code, _, errors = run("train", "--data", str(rows), *SMALL, "--out", str(tmp_path / "out"))
    assert code == 1
    assert errors.startswith(f"shardrec: error: {rows}:17: field 'int_3': value 'abc'")
    assert errors.count("\n") == 1
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_bad_rows_are_counted_when_skipped(run: Run, rows: Path, tmp_path: Path) -> None:
    break_rows(rows, 3, "abc", (17, 400))
    break_rows(rows, 0, "2", (500,))
    flags = ("--on-bad-row", "skip", "--epochs", "2", "--out", str(tmp_path))
    code, shown, _ = run("train", "--data", str(rows), *SMALL, *flags)
    assert code == 0
    assert "left out 2 rows: bad number" in shown
    assert "left out 1 row: bad label" in shown
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["skipped_rows"] == {"bad number": 2, "bad label": 1}
    assert metrics["training"]["samples"] == 2 * (597 - metrics["final"]["rows"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.tsv", None, "none.tsv"),
        ("empty.tsv", b"", "empty.tsv"),
        ("text.tsv", b"hello\nworld\n", "text.tsv:1: "),
        ("lie.tsv.gz", b"0\t1\n", "lie.tsv.gz"),
    ],
)
def test_files_that_are_not_data(run: Run, tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    code, _, errors = run("train", "--data", str(path), *SMALL, "--out", str(tmp_path / "out"))
    assert code == 1
    assert errors.startswith("shardrec: error: ")
    assert f"{tmp_path}/{message}" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("saved", ["", "nothing is saved: give --checkpoint-every to save during a run"])
def test_ctrl_c(run: Run, monkeypatch: pytest.MonkeyPatch, saved: str) -> None:
    import shardrec.trainer.cli.train as command

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt(saved)

    monkeypatch.setattr(command, "train", interrupted)
    assert run("train") == (130, "", "\nshardrec: stopped" + f"; {saved}" * bool(saved) + "\n")


def test_files_without_a_spec_are_answered_with_the_command_that_proposes_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "own rows.parquet"
    pq.write_table(pa.table({"clicked": [1, 0], "user": ["a", "b"]}), path)
    code, _, errors = run("train", "--data", str(path), *SMALL, "--out", str(tmp_path / "out"))
    assert code == 1
    assert "columns 'label', 'int_1', 'int_2' and 37 more are missing" in errors
    assert f"shardrec inspect '{path}' --suggest --out proposed" in errors


def test_a_header_without_a_spec_is_answered_with_the_command_that_proposes_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "own rows.csv"
    path.write_text("clicked,user\n1,a\n0,b\n")
    code, _, errors = run("train", "--data", str(path), *SMALL, "--out", str(tmp_path / "out"))
    assert code == 1
    assert "own rows.csv:1: the line has 1 of 40 columns: 'clicked,user'; if this is a header" in errors
    assert f"shardrec inspect '{path}' --suggest --out proposed" in errors


@pytest.mark.slow
def test_two_new_ranks(tmp_path: Path) -> None:
    flags = ("--samples", "50000", "--holdout-samples", "10000", "--batch-size", "512", "--max-embeddings", "500")
    done = shell("train", "--nproc", "2", *flags, "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "training dlrm on 2 ranks" in done.stdout
    assert "\x1b" not in done.stdout
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["environment"]["ranks"] == 2
    assert metrics["training"]["samples"] == 50_000
    assert metrics["final"]["rows"] == 10_000
    assert metrics["final"]["auc"] > 0.7


@pytest.mark.slow
def test_two_new_ranks_say_a_bad_row_once(tmp_path: Path) -> None:
    rows = tmp_path / "rows.tsv"
    write_criteo_tsv(rows, 600, seed=1)
    break_rows(rows, 0, "maybe", (590,))
    done = shell("train", "--nproc", "2", "--data", str(rows), *SMALL, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"shardrec: error: {rows}:590: field 'label': value 'maybe'")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kaggle_head", "x4_valid_sample", "x4_test_sample"])
def test_real_rows(run: Run, data_dir: Path, tmp_path: Path, name: str) -> None:
    path = data_dir / "criteo_raw_sample" / f"{name}.tsv.xz"
    code, shown, errors = run("train", "--data", str(path), *SMALL, "--epochs", "3", "--out", str(tmp_path))
    assert (code, errors) == (0, "")
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["skipped_rows"] == {}
    assert metrics["final"]["auc"] > 0.55
    assert f"AUC {metrics['final']['auc']:.4f}" in shown.splitlines()[-1]
