"""What ``shardrec serve-embeddings`` is made of: models by name, stores by address, shards from checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardrec
from shardrec.errors import CheckpointError, ConfigError
from shardrec.rpc.server_process import load_server, named_function, open_store
from tests.rpc.jobs import make_model, make_plan, train


@pytest.mark.parametrize(
    "name", ["", "tests.rpc.jobs", "tests.rpc.jobs:nothing", "tests.rpc.jobs:ROWS", "tests.nothing:make", ":make"]
)
def test_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        named_function(name)
    assert named_function("tests.rpc.jobs:make_plan") is make_plan


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file://",
        "/tmp/store",
        "tcp://host",
        "tcp://host:no",
        "tcp://host:99999",
        "tcp://[::1",
        "http://host:80",
        "file://h/path",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="Give file:///path or tcp://host:port"):
        open_store(url)


def test_shards_come_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    model = shardrec.shard(make_model("adagrad"))
    checkpoints = shardrec.Checkpoints(tmp_path)
    for step in range(3):
        train(model, 0, range(step, step + 1))
        checkpoints.save(step, model)
    (tmp_path / "step-000000000002" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="skipped"):
        server = load_server(make_model("adagrad"), 1, plan=make_plan(), checkpoint=tmp_path)
    exact = load_server(make_model("adagrad"), 1, plan=make_plan(), checkpoint=tmp_path / "step-000000000001")
    for one, other in zip(server.model.parameters(), exact.model.parameters(), strict=True):
        assert torch.equal(one, other)
    (_, item), *_ = server.read("bags.item", "")
    assert not torch.equal(item, make_model("adagrad").bags.embedding_bags["item"].weight)
    whole = load_server(make_model("adagrad"), 0, plan=None, checkpoint=tmp_path / "step-000000000001")
    assert whole.model.plan == model.plan
    for one in (server, exact, whole):
        one.close()


def test_without_a_checkpoint_the_model_s_values_and_a_plan_are_needed(tmp_path: Path) -> None:
    server = load_server(make_model("sgd"), 0, plan=make_plan(), checkpoint=tmp_path)
    server.close()
    with pytest.raises(ConfigError, match="there is neither a plan nor"):
        load_server(make_model("sgd"), 0, plan=None, checkpoint=tmp_path)
    (tmp_path / "step-000000000000").mkdir()
    (tmp_path / "step-000000000000" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError):
        load_server(make_model("sgd"), 0, plan=make_plan(), checkpoint=tmp_path)
