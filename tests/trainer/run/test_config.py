"""Options: where they come from, what they may be, and what is said when they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError
from shardrec.planner import Constraint
from shardrec.trainer.run import TrainConfig, load_config
from shardrec.trainer.run.option_groups import parse_constraint


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_go_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "batch_size: 64\nlr: 0.5\n")
    config = load_config(path, {"lr": 0.25, "seed": None})
    assert (config.learning.batch_size, config.learning.lr) == (64, 0.25)
    assert config.learning.seed == TrainConfig().learning.seed


def test_empty_file_and_no_file_are_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == load_config() == TrainConfig()


def test_yaml_spellings(tmp_path: Path) -> None:
    text = "embedding-lr: 1e-3\nlr: 1\ndense_layers: [8, 4]\nconstraint: {'t_*': [row_wise, grid], t_a: table_wise@0}\n"
    config = load_config(write(tmp_path, text))
    assert (config.learning.embedding_lr, config.learning.lr, config.model.dense_layers) == (1e-3, 1.0, (8, 4))
    assert isinstance(config.learning.lr, float)
    assert config.ranks.constraint == ("t_*=row_wise,grid", "t_a=table_wise@0")


NESTED = """
data: {data: 'day_*.parquet', epochs: 3}
model: {model: dcn}
learning: {batch-size: 64, initial: {init_from: run, rename: {a: b}}}
ranks: {replicas: {replicas: 2, elastic: 'host:1'}, nproc: 2}
output: {out: here}
seed: 5
"""


def test_groups_and_flat_options_are_the_same(tmp_path: Path) -> None:
    flat = dict(data="day_*.parquet", epochs=3, model="dcn", batch_size=64, init_from="run", rename="a=b", seed=5)
    config = TrainConfig(**flat, replicas=2, elastic="host:1", nproc=2, out="here")
    assert load_config(write(tmp_path, NESTED)) == config == TrainConfig(**config.to_mapping())
    assert load_config(write(tmp_path, NESTED), {"epochs": 4}) == config.changed(epochs=4)
    assert (config.epochs, config.replica_count, config.feed) == (3, 2, None)
    assert (
        load_config(write(tmp_path, "sync_every: 4\nelastic: null\n")).ranks.replicas is None
    )  # as runs have recorded it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  epochs: 0\n", r"^epochs \(.*run\.yaml:2\) is 0: it should be"),
        ("seed: 1\nlearning:\n  seed: 2\n", r"run\.yaml:3: 'seed' is there twice, first in line 1"),
        ("data:\n  data: feed:x\n  valid: y\n", r"^valid \(.*run\.yaml:3\) is 'y', and data .* is a feed"),
        ("model:\n  seed: 2\n", r"run\.yaml:2: 'seed' is not an option of the group 'model'"),
        ("ranks: {replicas: {elastic: h, x: 1}}\n", r"x \(.*run\.yaml:1\) is not an option"),
        (
            "batchsize: 3\n",
            r"batchsize \(.*run\.yaml:1\) is not an option: did you mean 'batch_size'\?\nThe options are data",
        ),
        ("zzz: 3\nyyy: 4\n", r"2 faults:\n  1\. zzz .*run\.yaml:1.*\n  2\. yyy .*run\.yaml:2"),
        ("- 3\n", "holds a list: give options"),
        ("embedding_lr: true\n", r"embedding_lr \(.*run\.yaml:1\) is True: give a number, or a text in quotes"),
        ("lr: 1" + "0" * 400 + "\n", r"lr \(.*run\.yaml:1\) is 10+: it should be a (finite|valid) number"),
        ("a: [\n", r"run\.yaml:2 cannot be read as YAML"),
        (
            "seed: 1\nlr: 1\n  model: dcn\n",
            r"run\.yaml:3 cannot be read as YAML \(mapping values are not allowed",
        ),
        ("seed: 1\nbatch-size: lots\n", r"^batch_size \(.*run\.yaml:2\) is 'lots': it should be a valid integer"),
        ("batch_size: true\n", "batch_size .* is True: give a number"),
        ("batch_size: 1.5\n", "batch_size .* is 1.5: it should be a valid integer"),
        ("lr: .nan\n", "is nan: it should be a finite number"),
    ],
)
def test_faulty_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot be read.*A pattern of data files needs quotes"):
        load_config(tmp_path / "bytes.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, r"epochs \(--epochs\) is 0: it should be greater than or equal to 1"),
        ({"holdout": 1.0}, r"holdout .* is 1\.0: it should be less than 1"),
        ({"model": "resnet"}, "model .* is 'resnet': give one of dlrm, dcn"),
        ({"on_bad_row": "ignore"}, "give one of error, skip"),
        ({"dense_layers": "8,x"}, r"dense_layers .* is '8,x': each should be a valid integer"),
        ({"over_layers": (0,)}, "each should be greater than 0"),
        ({"checkpoint": True}, r"checkpoint .* is True: .* YAML reads on, off"),
        ({"data": ""}, "data .* is '': give some text"),
        ({"constraint": "t_a=diagonal"}, "there is no cut 'diagonal'. The cuts are table_wise"),
        ({"constraint": "t_a"}, r"constraint .* is 't_a': give TABLE=CUT"),
        ({"constraint": "t_a=row_wise@x"}, "give TABLE=CUT"),
        (
            {"constraint": "t_a=data_parallel@1"},
            r"\(--constraint\) is .*@1': a data_parallel table .* [Nn]ame no ranks",
        ),
        ({"constraint": "t_a=row_wise", "plan": "p.json"}, "leave one out"),
        ({"model": "dcn", "over_layers": ()}, "needs one layer at least"),
        ({"accumulate": 0}, r"accumulate \(--accumulate\) is 0: it should be greater than or equal to 1"),
        ({"weight_decay": -0.1}, r"weight_decay \(--weight-decay\) is -0\.1: it should be greater than or equal to 0"),
        ({"embedding_weight_decay": "much"}, r"embedding_weight_decay .* is 'much': it should be a valid number"),
        ({"precision": "fp16"}, r"precision \(--precision\) is 'fp16': give one of fp32, bf16"),
        ({"monitor": "f1"}, r"monitor \(--monitor\) is 'f1': give one of auc, logloss, ne, gauc, ndcg"),
        ({"checkpoint": "all"}, r"checkpoint \(--checkpoint\) is 'all': give one of last, best, none"),
        ({"ema": 1.0}, r"ema \(--ema\) is 1\.0: it should be less than 1"),
        ({"ema": 0}, r"ema \(--ema\) is 0: it should be greater than 0"),
        ({"warmup": -1}, r"warmup \(--warmup\) is -1: it should be greater than or equal to 0"),
        ({"schedule": "step"}, r"schedule \(--schedule\) is 'step': give one of constant, linear, cosine"),
        ({"decay": 1.5}, r"decay \(--decay\) is 1\.5: it should be less than or equal to 1"),
    ],
)
def test_faulty_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**options)


def test_all_faults_are_told_together() -> None:
    with pytest.raises(ConfigError, match=r"3 faults:\n  1\. epochs.*\n  2\. batch_size.*\n  3\. lr"):
        TrainConfig(epochs=0, batch_size=-1, lr="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("t_*=row_wise", ("t_*", ("row_wise",), ())),
        ("a.b.t=row-wise, grid@1,0", ("a.b.t", ("row_wise", "grid"), (1, 0))),
        ("t=@2", ("t", (), (2,))),
    ],
)
def test_constraints(text: str, parsed: tuple[str, tuple[str, ...], tuple[int, ...]]) -> None:
    pattern, cuts, ranks = parsed
    assert parse_constraint(text) == (pattern, Constraint(cuts=cuts, ranks=ranks))


@given(
    batch_size=st.integers(1, 10**6),
    lr=st.floats(1e-6, 10),
    samples=st.none() | st.integers(1, 10**9),
    layers=st.lists(st.integers(1, 4096), min_size=1, max_size=4),
    out=st.none() | st.sampled_from(["here", "no", "1.5", "a: b", "ünder"]),
)
def test_effective_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    batch_size: int,
    lr: float,
    samples: int | None,
    layers: list[int],
    out: str | None,
) -> None:
    config = TrainConfig(
        batch_size=batch_size, lr=lr, samples=samples, dense_layers=tuple(layers), out=out, constraint=("t_*=grid",)
    )
    path = write(tmp_path_factory.mktemp("config"), config.to_yaml())
    assert load_config(path) == config == TrainConfig(**config.to_mapping())


def test_results_do_not_go_to_a_url() -> None:
    """Of which pathlib would make a folder ``s3:`` here."""
    with pytest.raises(ConfigError, match=r"out \(--out\) is 's3://box/run': results and checkpoints go to a folder"):
        TrainConfig(out="s3://box/run")


def test_every_option_has_a_help_line() -> None:
    for name, option in TrainConfig.options().items():
        assert option.help[0].isupper(), name


@pytest.mark.parametrize(
    ("given", "steps", "seconds"), [("500", 500, None), (500, 500, None), ("10m", None, 600.0), ("0.5m", None, 30.0)]
)
def test_checkpoints_by_steps_or_minutes(given: Any, steps: int | None, seconds: float | None) -> None:
    config = TrainConfig(checkpoint_every=given)
    assert config.output.checkpoint_interval == (steps, seconds)
    assert config.allowed_restarts == 3


@pytest.mark.parametrize("given", ["0", "0m", "-5", "5s", "m", "1.5", "ten"])
def test_intervals_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_every \(--checkpoint-every\) is .*500, minutes, such as 10m"):
        TrainConfig(checkpoint_every=given)


def test_checkpoints_meanwhile_but_not_at_the_end() -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        TrainConfig(checkpoint_every="5", checkpoint="none")


def test_what_may_change_when_a_run_goes_on() -> None:
    started = TrainConfig(out="run").to_mapping()
    TrainConfig(out="run", nproc=4, threads=2, evaluations=3, checkpoint_every="7", timeout=9.0).check_resumes(started)
    TrainConfig(out="run").check_resumes({name: value for name, value in started.items() if name != "accumulate"})
    with pytest.raises(ConfigError, match=r"seed \(--seed\) is 1 and the run in run was started with 0"):
        TrainConfig(out="run", seed=1).check_resumes(started)
