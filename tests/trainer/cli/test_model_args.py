"""A model's arguments: given, checked, recorded and used again; its source; and what export will ask of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardrec.errors import ConfigError
from shardrec.trainer.data import criteo_schema
from shardrec.trainer.run import RunFolder, TrainConfig, load_config
from shardrec.trainer.run.config import FILE
from shardrec.trainer.run.model import build_model, export_fault, source_digest
from shardrec.trainer.run.runs import differing
from tests.trainer.cli.command import Run
from tests.trainer.run.broken_off import FEW_TABLES

SIZES = TrainConfig(
    samples=1_500, holdout_samples=500, max_embeddings=40, batch_size=128, evaluations=1, threads=1, model="dnn"
)

OWN = """
from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Sums(nn.Module):
    def __init__(self, schema, width: int = 4, *, names=()):
        super().__init__()
        features = list(schema.sparse_names[:2])
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=width, feature_names=[name])
                for name in features
            ]
        )
        self.top = nn.Linear(2 * width, 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        return self.top(self.bags(sparse).values())


class Unannotated(Sums):
    def forward(self, dense, sparse):
        return self.top(self.bags(sparse).values())


class Unscriptable(Sums):
    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        return self.top(self.bags(sparse).values()) * (lambda: 1)()


if TYPE_CHECKING:
    from nowhere import Width


class Hidden(Sums):
    def __init__(self, schema, width: Width = 4):
        super().__init__(schema, width)


def nothing():
    return None


half = partial(Sums, width=2)


class Open(Sums):
    def __init__(self, schema, **settings):
        super().__init__(schema)
        self.settings = settings
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a module of models, whose name no other test has imported."""
    name = f"models_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / f"{name}.py"


def trained(config: TrainConfig, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    from shardrec.trainer.data import schema, synthetic
    from shardrec.trainer.run import session

    monkeypatch.setattr(session, "write_curve", lambda report, path: path.touch())
    monkeypatch.setattr(synthetic, "_EXPECTATION_ROWS", 1_000)
    monkeypatch.setattr(schema, "CRITEO_CARDINALITIES", FEW_TABLES)
    session.run_rank(config.changed(out=str(out)), **options)


def test_arguments_of_flags_go_over_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: dnn\nmodel_args: {dim: 8, hidden: [32, 16]}\n", encoding="utf-8")
    flags = {"model_args": ["dropout=0.1", "hidden=[64]", "dims={cat_0: 4}"]}
    config = load_config(tmp_path / "run.yaml", flags)
    assert config.model.args == {"dim": 8, "hidden": [64], "dropout": 0.1, "dims": {"cat_0": 4}}
    assert TrainConfig(**yaml.safe_load(config.to_yaml())) == config
    with pytest.raises(
        ConfigError, match=r"model_args \(--model-arg\) is .*'dim'.*: give NAME=VALUE, such as dropout=0.1"
    ):
        TrainConfig(model_args=["dim"])


def test_options_of_a_model_give_arguments() -> None:
    schema = criteo_schema(max_embeddings=40)
    config = SIZES.changed(embedding_dim=8, over_layers=(12,))
    assert build_model(config, schema).get_parameter("over.0.weight").shape == (12, 26 * 8 + 13)
    with pytest.raises(
        ConfigError, match=r"dense_layers \(--dense-layers\) is \(8,\) and model 'dnn' has no dense_layers"
    ):
        build_model(SIZES.changed(dense_layers=(8,)), schema)
    with pytest.raises(ConfigError, match=r"embedding_dim \(--embedding-dim\) is 8 and model_args also gives dim"):
        build_model(config.changed(model_args={"dim": 4}), schema)


def test_arguments_of_an_own_model(own: Path) -> None:
    schema = criteo_schema(max_embeddings=40)
    config = SIZES.changed(model=f"{own.stem}:Sums", model_args={"width": 6, "names": ["a"]})
    assert build_model(config, schema).get_parameter("top.weight").shape == (1, 12)
    with pytest.raises(ConfigError, match=r"'with'.*: did you mean 'width'\? It takes width, names"):
        build_model(config.changed(model_args={"with": 6}), schema)
    with pytest.raises(ConfigError, match="width is 'wide': Input should be a valid integer"):
        build_model(config.changed(model_args={"width": "wide"}), schema)
    assert build_model(config.changed(model=f"{own.stem}:Open", model_args={"any": 1}), schema).settings == {"any": 1}
    for name in ("Hidden", "half"):
        other = config.changed(model=f"{own.stem}:{name}", model_args={"width": 6})
        assert build_model(other, schema).get_parameter("top.weight").shape == (1, 12)
    assert source_digest(f"{own.stem}:Hidden") == source_digest(f"{own.stem}:half") != ""
    with pytest.raises(ConfigError, match=r"nothing\(schema\) fails"):
        build_model(config.changed(model=f"{own.stem}:nothing", model_args={}), schema)


def test_a_run_keeps_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    config = SIZES.changed(model_args={"dim": 4, "dropout": 0.1, "batch_norm": True})
    trained(config, tmp_path / "run", monkeypatch)
    folder = RunFolder(tmp_path / "run")
    assert folder.config.model.args == config.model.args
    assert folder.evaluate()[0].to_mapping() == pytest.approx(folder.metrics["final"], abs=1e-6)
    assert folder.summary()["model"] == "dnn dim=4 dropout=0.1 batch_norm=True"
    assert folder.export("script", tmp_path / "dnn.pt").stat().st_size > 0
    assert "model_args" in differing(folder.config, config.changed(model_args={"dim": 4}))
    with pytest.raises(ConfigError, match=r"model_args \(--model-arg\) is \{'dim': 8\} and the run"):
        trained(config.changed(model_args={"dim": 8}), tmp_path / "run", monkeypatch, resume=True)
    # A run from before there were arguments.
    text = (tmp_path / "run" / FILE).read_text(encoding="utf-8")
    old = {name: value for name, value in yaml.safe_load(text).items() if name != "model_args"}
    load_config(tmp_path / "run" / FILE).changed(model_args={}).check_resumes(old)
    code, _, errors = run("train", "--model", "dnn", "--model-arg", "dropot=0.1", "--samples", "100", "--out", "runs/x")
    assert code == 1
    for given in ("dim", "hidden=[1"):
        assert "error: model_args (--model-arg) is " in run("train", "--model-arg", given, "--out", "runs/x")[2]
    assert "did you mean 'dropout'? It takes dim, hidden, dropout, batch_norm" in errors


def test_a_changed_source_is_said(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = SIZES.changed(model=f"{own.stem}:Sums")
    trained(config, tmp_path / "run", monkeypatch)
    RunFolder(tmp_path / "run").model()
    trained(config, tmp_path / "run", monkeypatch, resume=True)
    assert "has changed" not in "".join(capfd.readouterr())
    own.write_text(OWN + "\n# another line\n", encoding="utf-8")
    RunFolder(tmp_path / "run").model()
    assert f"the source of model '{own.stem}:Sums' has changed since the checkpoint" in capfd.readouterr().err
    trained(config, tmp_path / "run", monkeypatch, resume=True)
    assert "has changed since the checkpoint" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Sums", ""),
        (
            "Unannotated",
            "Unannotated.forward cannot be given plain tensors .*: it takes no parameter annotated KeyedJagged",
        ),
        ("Unscriptable", r"cannot be scripted at .*models_of_.*\.py:\d+"),
    ],
)
def test_what_export_will_refuse_is_said_before_training(
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    model: str,
    message: str,
) -> None:
    import re

    config = SIZES.changed(model=f"{own.stem}:{model}")
    schema = criteo_schema(max_embeddings=40)
    fault = export_fault(config, build_model(config, schema), schema)
    assert bool(fault) == bool(message)
    assert re.search(message, fault)
    if model == "Unannotated":
        trained(config.changed(checkpoint="none"), tmp_path / "run", monkeypatch)
        assert f"warning: {fault}" in capfd.readouterr().err
