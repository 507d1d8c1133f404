"""``shardrec serve-embeddings``: what its options come to; tests/rpc/test_serve.py has what they are given to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardrec.trainer.cli import app

COMMAND = ["serve-embeddings", "a.b:make", "--store", "file:///s", "--servers", "one,two"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The options of each server that was started, and those of what starts it again."""
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = []
    monkeypatch.setattr("shardrec.trainer.cli.serve_embeddings._serve", lambda options: calls.append((options, {})))
    monkeypatch.setattr("shardrec.rpc.supervise", lambda _, options, **kwargs: calls.append((options, kwargs)))
    return calls


def test_options(served: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    options = ["--rank", "1", "--window-ms", "2.5", "--trainers", "3", "--timeout", "60", "--checkpoint", "c"]
    assert CliRunner().invoke(app, [*COMMAND, *options]).exit_code == 0
    assert CliRunner().invoke(app, [*COMMAND, *options, "--name", "late", "--restarts", "4"]).exit_code == 0
    (first, started), (named, again) = served
    server = {"checkpoint": Path("c"), "read_only": False, "capacity": 256, "window_s": 0.0025, "max_requests": 64}
    world = {"trainers": 3, "servers": ["one", "two"], "interface": "lo", "timeout_s": 60.0}
    common = {"model": "a.b:make", "rank": 1, "plan": None, "store": "file:///s"}
    assert first == {
        **common,
        "server": {**server, "servers": ["one", "two"]},
        "world": {**world, "name": "two"},
    }
    assert named == {**common, "server": {**server, "servers": None}, "world": {**world, "name": "late"}}
    assert (started, again) == ({}, {"restarts": 4, "debug": False})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "2"], "--rank is 2 and --servers names 2. Name each server, or give --name"),
        (["--restarts", "1"], "--restarts continues from the last checkpoint: give --checkpoint"),
    ],
)
def test_options_that_do_not_fit(
    served: list[tuple[dict[str, Any], dict[str, Any]]], options: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, [*COMMAND, *options])
    assert result.exit_code != 0 and message in f"{result.output} {result.exception}"
    assert not served
