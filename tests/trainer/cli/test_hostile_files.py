"""Files of strangers: the command line says in a line what is wrong, and neither hangs nor takes all memory."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.documents import LAUGHS
from tests.trainer.cli.command import Run


def archive(path: Path, **members: str | bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": ' + "9" * 5000 + "}", "{}", "null", '"\\ud800"', "[[1]]"])
def test_a_plan(run: Run, text: str) -> None:
    Path("p.json").write_text(text, encoding="utf-8")
    code, _, errors = run("inspect", "p.json")
    assert (code, "unexpected" in errors, "p.json" in errors) == (1, False, True), errors


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("m/extra/{}", "{}", "KeyError: 'formats'"),
        ("m/extra/{}", "[" * 100_000, "nested too deeply"),
        ("m/extra/{}", '{"formats": ' + "9" * 5000 + "}", "4300 digits"),
        ("m/extra/{}", bytes(64 << 20), "would take 67,108,864 bytes"),
        ("m/extra/{}", '{"formats": [], "features": 3}', "AttributeError"),
        ("m/x_metadata.json", bytes(64 << 20), "would take 67,108,864 bytes"),
        ("m/x_metadata.json", "[1]", "was not written by shardrec"),
        ("m/x_metadata.json", "7", "TypeError"),
    ],
)
def test_a_model_to_serve(run: Run, name: str, data: str | bytes, words: str) -> None:
    from shardrec.serve import NOTES

    archive(Path("m.pt"), **{name.format(NOTES): data})
    code, _, errors = run("inspect", "m.pt")
    assert (code, "unexpected" in errors) == (1, False), errors
    assert "m.pt" in errors
    assert words in errors


@pytest.mark.parametrize("text", ["[" * 100_000, "7", '{"training": {}}', '{"training": 1, "final": 2}', "\ud800"])
def test_the_metrics_of_a_run(run: Run, text: str) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("seed: 1\n", encoding="utf-8")
    Path("run/metrics.json").write_bytes(text.encode(errors="surrogatepass"))
    code, _, errors = run("inspect", "run")
    assert (code, "unexpected" in errors) == (1, False), errors
    assert "run/metrics.json is not what shardrec train writes" in errors


@pytest.mark.parametrize("arguments", [("train", "f.yaml"), ("train", "--features", "f.yaml"), ("plan", "f.yaml")])
@pytest.mark.parametrize(
    ("text", "words"), [(LAUGHS, "its aliases make"), ("seed: 1\nseed: 2\n", "f.yaml:2"), ("[" * 99_999, "f.yaml:1")]
)
def test_yaml(run: Run, arguments: tuple[str, ...], text: str, words: str) -> None:
    Path("f.yaml").write_text(text, encoding="utf-8")
    Path("rows.csv").write_text("label,x\n", encoding="utf-8")
    given = ("--data", "rows.csv") if "--features" in arguments else ()
    code, _, errors = run(*arguments, *given)
    assert (code, "unexpected" in errors, words in errors) == (1, False, True), errors


def test_options_that_are_spelled_in_two_ways(run: Run) -> None:
    Path("f.yaml").write_text("batch_size: 1\nbatch-size: 2\n", encoding="utf-8")
    code, _, errors = run("train", "f.yaml")
    assert (code, "f.yaml:2: 'batch-size' is there twice, first in line 1: keep one" in errors) == (1, True), errors


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"format": 2}', "null"])
def test_a_profile(run: Run, text: str) -> None:
    Path("p.json").write_text(text, encoding="utf-8")
    Path("t.csv").write_text("num_embeddings,embedding_dim\n10,4\n", encoding="utf-8")
    code, _, errors = run("plan", "t.csv", "--profile", "p.json")
    assert (code, "unexpected" in errors, "p.json" in errors) == (1, False, True), errors
