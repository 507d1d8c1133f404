"""Runs that publish, and servers that follow them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from werkzeug.test import Client

from shardrec.checkpoint.manifest import read_manifest
from shardrec.errors import ConfigError
from shardrec.serve import quantize
from shardrec.serve.lookup import served_memory
from shardrec.serve.published import version_name, versions_in
from shardrec.trainer.data import request_example
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.runs import RunFolder
from tests.ranks import ranks
from tests.trainer.run.broken_off import SMALL, broken_off


def steps_of(folder: Path) -> list[int]:
    names = [path.name for path in folder.iterdir()]
    manifests = [read_manifest(folder, version_name(version)) for version in versions_in(names)]
    return [manifest.extra["extra"]["step"] for manifest in manifests]


def rows_of(model: Any) -> list[torch.Tensor]:
    return [memory for child in model.sharded_collections for memory in served_memory(child).values()]


@pytest.mark.usefixtures("few_tables")
def test_a_server_follows_a_run(tmp_path: Path) -> None:
    out, published = tmp_path / "run", tmp_path / "published"
    config = SMALL.changed(
        out=str(out), publish=str(published), publish_every="7", publish_weights="int8", checkpoint_every="5", ema=0.9
    )
    broken_off(config, cut_after=16)
    assert steps_of(published) == [7, 14]
    endpoint = RunFolder(out).endpoint(str(published))
    client, model = Client(endpoint), endpoint._model
    follower: Any = model.follower
    follower.close()
    body = {"rows": [request_example(endpoint._spec)]}
    answer = client.post("/predict", json=body)
    assert (answer.status_code, answer.headers["Shardrec-Version"]) == (200, "2")
    assert 0 <= float(answer.headers["Shardrec-Age"]) < 1000
    broken_off(config, resume=True)
    assert steps_of(published)[2:] == [21, 24]  # from the checkpoint of step 15 on, and the last step
    assert follower.poll()
    again = client.post("/predict", json=body)
    assert client.get("/health").headers["Shardrec-Version"] == again.headers["Shardrec-Version"] == "4"
    assert again.get_json() != answer.get_json()
    trained = quantize(RunFolder(out).model(), "int8")  # the averages
    assert all(torch.equal(one, other) for one, other in zip(rows_of(model), rows_of(trained), strict=True))


def test_two_ranks_publish_by_the_clock_and_go_on_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig) -> None:
        from shardrec.trainer.run import saving

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "_AGREE_S", 0.0)  # at each step
            broken_off(config)

    published = tmp_path / "published"
    published.touch()
    config = SMALL.changed(samples=500, batch_size=32, publish=str(published), publish_every="0.00001m")
    config = config.changed(out=str(tmp_path / "run"))
    ranks(2, train, config)
    assert "warning: nothing was published" in capsys.readouterr().out
    published.unlink()
    ranks(2, train, config.changed(out=str(tmp_path / "again")))
    steps = steps_of(published)
    assert steps[-1] == 8
    assert len(steps) > 1


@pytest.mark.parametrize("every", ["0", "1s", "m"])
def test_intervals_that_are_none(every: str) -> None:
    with pytest.raises(ConfigError, match=r"publish_every \(--publish-every\) is"):
        TrainConfig(publish_every=every)
    assert TrainConfig(publish="x").output.publish_interval == (None, 60.0)
    assert TrainConfig(publish="x", publish_every="50").output.publish_interval == (50, None)
    assert TrainConfig().output.publish_interval == (None, None)


@pytest.mark.some(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("few_tables")
def test_a_run_goes_on_publishing_with_another_number_of_ranks(dynamic: bool, tmp_path: Path) -> None:
    """And a server follows it; of dynamic ids, whose row blocks are others then, one that is started again."""
    text = "\n".join(f"{n % 2},u{n % 70}" for n in range(800))
    (tmp_path / "rows.csv").write_text(f"click,user\n{text}\n", encoding="utf-8")
    ids = ", dynamic_ids: {evict: lru}" * dynamic
    spec = f"label: click\nfeatures:\n  - {{name: user, kind: id, rows: 40{ids}}}\n"
    (tmp_path / "spec.yaml").write_text(spec, encoding="utf-8")
    out, published = tmp_path / "run", tmp_path / "published"
    given = {"data": str(tmp_path / "rows.csv"), "features": str(tmp_path / "spec.yaml"), "out": str(out)}
    config = SMALL.changed(**given, samples=None, holdout_samples=None, global_batch_size=64, checkpoint_every="3")
    config = config.changed(publish=str(published), publish_every="2", publish_weights="int8")
    ranks(2, broken_off, config, cut_after=7)
    model: Any = RunFolder(out).following(str(published))
    model.follower.close()
    assert (model.follower.version, model.follower.extra) == (3, {"step": 6})
    broken_off(config, resume=True)
    if dynamic:
        with pytest.raises(ConfigError, match=r"are cut at .* Shard the model by the trainer's plan"):
            model.follower.poll()
        model = RunFolder(out).following(str(published))
        model.follower.close()
    else:
        assert model.follower.poll()
    trained = quantize(RunFolder(out).model(), "int8")
    assert all(torch.equal(one, other) for one, other in zip(rows_of(model), rows_of(trained), strict=True))
