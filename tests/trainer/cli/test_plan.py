"""``shardrec plan``: files of tables in, a plan out, and one message for each thing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan
from shardrec.trainer.cli import app
from shardrec.trainer.cli.plan import read_tables
from tests.trainer.cli.command import shell

CSV = "name,count,num_embeddings,embedding_dim,pooling\nuser,1,1000000,64,1;10\nday,2,7,8,\n"
YAML = """
tables:
  - {name: user, num_embeddings: 1000000, embedding_dim: 64, pooling: [1, 10]}
  - {name: day, count: 2, num_embeddings: 7, embedding_dim: 8}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_and_yaml_say_the_same(tmp_path: Path) -> None:
    loads = read_tables(write(tmp_path, "t.csv", CSV))
    assert loads == read_tables(write(tmp_path, "t.yaml", YAML))
    assert list(loads) == ["user", "day_0", "day_1"]
    assert loads["user"].poolings == (1.0, 10.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (YAML.replace("name: day", "nam: day"), r"t\.yaml:4: a table lacks 'nam'"),
        (YAML.replace("embedding_dim: 8", "embedding_dim: lots"), r"t\.yaml:4: embedding_dim is 'lots'"),
        (YAML + "tables\n", r"t\.yaml:6 cannot be read as YAML \(could not find expected ':'\)"),
    ],
)
def test_yaml_faults_are_named_by_their_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_tables(write(tmp_path, "t.yaml", text))


def test_files_that_are_not_there_or_folders(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "t.csv", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"{path}: {reason}.*. Give a CSV or YAML file of tables"):
            read_tables(path)


def test_a_calibration_with_too_few_workloads_does_not_begin() -> None:
    """In a process that imports torch and TorchRec for the first time, whose warnings are not ours to show."""
    done = shell("calibrate", "--workloads", "6")
    assert (done.returncode, done.stdout) == (1, "")
    words = "--workloads is 6: give at least 7, which determine the coefficients"
    assert done.stderr == f"shardrec: error: {words}\n"


def test_json_and_files(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", CSV)
    arguments = ["plan", str(path), "--ranks", "4", "--hosts", "2", "--json", "--constraint", "user=row_wise"]
    for kind in ("save", "html", "png"):
        arguments += [f"--{kind}", str(tmp_path / kind)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["cost_ms"] >= found["bound_ms"] > 0
    assert found["gap"] == pytest.approx(found["cost_ms"] / found["bound_ms"] - 1, abs=1e-9)
    plan = ShardingPlan.load(tmp_path / "save")
    assert plan.topology.hosts == 2
    assert plan.by_name["user"].cut == "row_wise"
    assert found["shards"]["user"] == [
        [s.row_start, s.row_end, s.col_start, s.col_end, s.rank] for s in plan.by_name["user"].shards
    ]
    assert "data:image/png" in (tmp_path / "html").read_text(encoding="utf-8")
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")


def test_the_table_for_people(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", CSV)
    shown = CliRunner().invoke(app, ["plan", str(path), "--ranks", "2", "--machine", "h100"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "why it lost" in shown.output
    assert "day_1" in shown.output


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--seconds", "0.001"], "the time limit ended the search"),
        (["--effort", "1"], "the search used up its effort (--effort)"),
        (["--gap", "10"], ""),
    ],
)
def test_the_report_says_why_a_search_ended_before_its_gap(tmp_path: Path, options: list[str], reason: str) -> None:
    tables = "".join(f"{rows},{dim},{rows % 7 + 1}\n" for rows in range(900, 20_000, 700) for dim in (16, 64))
    path = write(tmp_path, "t.csv", f"num_embeddings,embedding_dim,pooling\n{tables}")
    arguments = ["plan", str(path), "--ranks", "7", "--memory", "1", "--gap", "0", *options]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert reason in shown.output
    assert ("may find a better plan" in shown.output) == (reason != "")


@pytest.mark.some(1)
@pytest.mark.parametrize("width", [60, 80, 140])
def test_what_is_shown_fits_the_terminal(tmp_path: Path, width: int) -> None:
    name = "user.embeddings.history_of_everything_that_was_ever_bought"
    path = write(tmp_path, "t.csv", f"name,num_embeddings,embedding_dim\n{name},40000000,128\nday,7,8\n")
    arguments = ["plan", str(path), "--ranks", "8", "--hosts", "2", "--machine", "h100"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)})
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= width
    assert "…" not in shown.output, "nothing is cut off"
    text = " ".join(shown.output.split())
    assert "Step estimate: " in text
    assert "GiB per rank: " in text
    assert " data-parallel " in shown.output, "a cut's name is whole"
    assert "40,000,000" in text
    assert ("why other cuts lost:" in text) == (width < 100)


def test_outputs_are_checked_before_the_search(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", CSV)
    arguments = ["plan", str(path), "--save", str(tmp_path / "no" / "plan.json"), "--html", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrec.planner.plan_tables", lambda *_, **__: pytest.fail("there was a search"))
        shown = CliRunner().invoke(app, arguments)
    assert isinstance(shown.exception, ConfigError), shown.output
    assert "does not exist. Make it first" in str(shown.exception)
    assert "--html" in str(shown.exception)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows,dim\n1,2\n", "lacks column 'num_embeddings'"),
        ("num_embeddings,embedding_dim\n", "holds no table"),
        ("num_embeddings,embedding_dim\n10,x\n", r":2: embedding_dim is 'x'. Give a whole number"),
        ("num_embeddings,embedding_dim,pooling\n10,4,many\n", r":2: pooling is 'many'"),
        ("num_embeddings,embedding_dim,colour\n10,4,red\n", r":2: a table lacks 'colour'"),
        ("name,num_embeddings,embedding_dim\na,1,4\na,1,4\n", r":3: there are two tables 'a'"),
        (
            "instance,num_embeddings,embedding_dim\na,1,4\nb,1,4\n",
            "holds 2 instances. Give --instance with one of a, b",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tables(write(tmp_path, "t.csv", text))


def test_instances(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", "instance,num_embeddings,embedding_dim\na,1,4\nb,2,4\n")
    assert [load.num_embeddings for load in read_tables(path, instance="b").values()] == [2]
    with pytest.raises(ConfigError, match=r"lacks instance 'c'\. It has a, b"):
        read_tables(path, instance="c")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "3", "--hosts", "2"], "3 ranks cannot be spread evenly over 2 hosts"),
        (["--machine", "abacus"], "there is no preset 'abacus'"),
        (["--constraint", "user"], "constraint (--constraint) is 'user': give TABLE=CUT"),
        (["--constraint", "user=diagonal"], "there is no cut 'diagonal'"),
        (["--memory", "0.01", "--ranks", "2"], "the tables do not fit"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: list[str], message: str) -> None:
    shown = CliRunner().invoke(app, ["plan", str(write(tmp_path, "t.csv", CSV)), *flags])
    assert shown.exit_code == 1
    assert message in str(shown.exception)


def test_an_optimizer_that_there_is_not(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["plan", str(write(tmp_path, "t.csv", CSV)), "--optimizer", "lion"])
    assert shown.exit_code == 2
    assert "'lion' is not one of" in shown.output
