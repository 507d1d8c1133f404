"""Runs that begin with another run's weights: what is loaded, and specs that would make it mean something else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shardrec.errors import ConfigError, ShardrecError
from shardrec.trainer.data.encode import encode, row_numbers
from shardrec.trainer.data.spec import parse_spec
from shardrec.trainer.run import TrainConfig, initial
from shardrec.trainer.run.runs import RunFolder
from tests.ranks import ranks
from tests.trainer.run.broken_off import SMALL, broken_off

FEATURES = {
    "price": "kind: dense",
    "count": "kind: dense, transform: log",
    "user": "kind: id, rows: 40",
    "item": "kind: id, rows: 30, ids: number",
    "country": "kind: id, vocabulary: [de, fr, it]",
    "age": "kind: id, boundaries: [18, 30, 50]",
    "shop": "kind: id, rows: 20, dynamic_ids: {evict: lru}",
}


def config(folder: Path, name: str, features: dict[str, str], **options: Any) -> TrainConfig:
    """A run of six steps."""
    spec, data = folder / f"{name}.yaml", folder / "rows.csv"
    columns = {"product": "item", "city": "user"}
    lines = [f"  - {{name: {key}, column: {columns.get(key, key)}, {text}}}" for key, text in features.items()]
    spec.write_text("\n".join(["label: click", "features:", *lines]) + "\n", encoding="utf-8")
    rows = [f"{n % 2},{n},{n},u{n % 50},{n % 30},{('de', 'fr', 'it')[n % 3]},{n % 70},s{n % 30}" for n in range(400)]
    data.write_text("\n".join(["click,price,count,user,item,country,age,shop", *rows]) + "\n", encoding="utf-8")
    return SMALL.changed(
        **{"data": str(data), "features": str(spec), "out": str(folder / name), "samples": None, **options},
    )


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    broken_off(config(folder, "run", FEATURES))
    return folder / "run"


def tables(run: Path) -> dict[str, torch.Tensor]:
    state = RunFolder(run).model().state_dict()
    return {key.split(".t_")[1].removesuffix(".weight"): state[key] for key in state if ".t_" in key}


def test_a_run_begins_with_what_it_shares(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = {"price": FEATURES["price"], "count": FEATURES["count"], "user": FEATURES["user"]}
    features |= {"product": "kind: id, rows: 35, ids: number", "country": "kind: id, vocabulary: [de, fr, it, es]"}
    features |= {"city": "kind: id, rows: 10", "shop": FEATURES["shop"].replace("20", "30")}  # in the place of age
    run = config(tmp_path, "run", features, init_from=str(before), rename=["t_item=t_product"], lr=1e-12)
    run = run.changed(embedding_lr=1e-12, checkpoint_every="1", embedding_optimizer="sgd")
    broken_off(run, cut_after=2)
    shown = re.sub(r" +", " ", capsys.readouterr().out)
    prefix = "sparse_arch.embedding_bag_collection.embedding_bags.t_"
    assert f"from {before}:" in shown
    assert f"resized {prefix}product.weight (30, 4) -> (35, 4) from {prefix}item.weight" in shown
    assert f"loaded {prefix}user.weight" in shown
    assert f"new {prefix}city.weight" in shown
    assert f"left out {prefix}age.weight" in shown
    old, new = tables(before), tables(tmp_path / "run")
    for name, source, rows in (("user", "user", 40), ("product", "item", 30), ("country", "country", 4)):
        torch.testing.assert_close(new[name][:rows], old[source][:rows], atol=1e-6, rtol=0)
    # What it has learned since is not replaced when it goes on.
    broken_off(run, resume=True, cut_after=3)
    assert "left out" not in capsys.readouterr().out


def test_ranks_begin_together_with_a_given_checkpoint(before: Path, tmp_path: Path) -> None:
    (checkpoint,) = (before / "checkpoints").iterdir()
    run = config(tmp_path, "run", FEATURES, init_from=str(checkpoint), batch_size=32, lr=1e-12, embedding_lr=1e-12)
    ranks(2, broken_off, run.changed(embedding_optimizer="sgd"))
    torch.testing.assert_close(tables(tmp_path / "run")["user"], tables(before)["user"], atol=1e-6, rtol=0)


REFUSED = {
    "user": ("kind: id, rows: 41", "feature 'user' has rows: 41, and 'user' of that run 40"),
    "item": ("kind: id, rows: 30", "feature 'item' has ids: 'hash', and 'item' of that run 'number'"),
    "country": ("kind: id, vocabulary: [de, it, fr]", r"feature 'country' has vocabulary: \('de', 'it', 'fr'\)"),
    "age": ("kind: id, boundaries: [18, 35, 50]", r"feature 'age' has boundaries: \(18.0, 35.0, 50.0\)"),
    "shop": ("kind: id, rows: 20", "feature 'shop' has dynamic_ids: False|t_shop.weight has dynamic ids in the"),
    "count": ("kind: dense", "feature 'count' has transform: none, and 'count' of that run had log, .*. Give that"),
    "price": ("kind: dense, std: 2", "feature 'price' has std: 2.0, and 'price' of that run had 1.0"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_would_be_of_other_ids_are_refused(name: str, before: Path, tmp_path: Path) -> None:
    text, fault = REFUSED[name]
    run = config(tmp_path, "run", FEATURES | {name: text}, init_from=str(before))
    with pytest.raises(ConfigError, match=fault):
        broken_off(run)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_other_orders_and_names_are_refused(before: Path, tmp_path: Path) -> None:
    turned = dict(reversed(FEATURES.items()))
    moved = {name: text for name, text in FEATURES.items() if name != "user"} | {"city": "kind: id, rows: 40"}
    for features, options, fault in (
        (
            turned,
            {},
            "in another order, which dense layers depend on. Give it as user, item, country, age, shop; .*price",
        ),
        (moved, {}, "Give it as city, item, country, age, shop"),  # that would be one place before
        (FEATURES, {"init_from": str(tmp_path)}, "holds no run"),
        (FEATURES, {"rename": ["t_itm=t_item"]}, "the checkpoint has no 't_itm'"),
    ):
        with pytest.raises(ConfigError, match=fault):
            broken_off(config(tmp_path, "run", features, **{"init_from": str(before), **options}))
    broken_off(config(tmp_path, "unsaved", FEATURES, checkpoint="none"))
    with pytest.raises(ConfigError, match="a run without a checkpoint: train it first"):
        broken_off(config(tmp_path, "run", FEATURES, init_from=str(tmp_path / "unsaved")))
    with pytest.raises(ConfigError, match=r"rename \(--rename\) is \('a=b',\), without init_from \(--init-from\)"):
        TrainConfig(rename=("a=b",))
    with pytest.raises(ConfigError, match="give OLD=NEW, each OLD once"):
        TrainConfig(rename=("a=b", "a=c"), init_from="run")


BEFORE = """
labels: [{name: click}, {name: buy}]
features:
  - {name: history, kind: sequence, share: video, max_length: 5}
  - {name: price, kind: dense, mean: 3}
  - {name: video, kind: id, rows: 40}
  - {name: tags, kind: multi_hot, share: video}
  - {name: seen, kind: multi_hot, share: video}
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("mean: 3", "mean: 4", "feature 'price' has mean: 4.0, and 'price' of that run had 3.0"),
        ("tags, kind: multi_hot", "tags, kind: weighted, weights: w", "feature 'tags' has kind: weighted, and 'tags'"),
        ("{name: click}, {name: buy}", "{name: buy}", "label 'buy' is number 1 of the labels, and was number 2"),
        # Neither has a table of its own.
        ("name: tags, kind: multi_hot, share: video}\n  - {name: seen", "name: seen, kind: multi_hot, share: video}\n"
         "  - {name: tags", "in another order, .*. Give it as history, video, tags, seen$"),
        # What says where values are, or how many are kept.
        ("max_length: 5", "max_length: 9, separator: ;, column: h", ""),
        ("{name: click}, {name: buy}", "{name: click}, {name: sold}", ""),
    ],
)  # fmt: skip
def test_specs_that_layers_would_take_for_another(old: str, new: str, fault: str) -> None:
    before, after = (parse_spec(text, "x") for text in (BEFORE, BEFORE.replace(old, new)))
    assert before != after
    pairs = list(initial._pairs(before.sparse, after.sparse))
    faults = [*initial._other_places(pairs, before, after), *initial._other_values(pairs, before, after)]
    assert len(faults) == bool(fault)
    assert re.search(fault, "; ".join(faults))


def test_a_number_becomes_buckets(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = FEATURES | {"price": "kind: id, boundaries: [10, 100]"}
    broken_off(config(tmp_path, "run", features, init_from=str(before)), cut_after=1)
    assert re.search(r"new .*t_price\.weight", capsys.readouterr().out)


def test_rows_by_the_ids_of_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hashed, numbers, a vocabulary, dynamic ids; and what is said of the others."""
    ids = {
        "user": pa.array(["u1", "u2", None, "u3"]),
        "item": pa.array([3, 29, 30, -1]),
        "country": pa.array(["it", "es", "de", ""]).dictionary_encode(),
        "shop": pa.array(["s1", "s2", "s3", "s4"]),
    }
    rows = torch.arange(16).view(4, 4).float() + 100
    files = []
    for name, column in ids.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"id": column, "row": rows.tolist()}), path)
        files.append(f"{'t_' * (name == 'item')}{name}={path}")
    run = config(tmp_path, "run", FEATURES, init_rows=files, lr=1e-12, embedding_lr=1e-12)
    broken_off(run.changed(embedding_optimizer="sgd"), cut_after=1)
    shown = re.sub(r" +", " ", capsys.readouterr().out)
    assert f"from {', '.join(files)}:\n" in shown
    counts = {"user": "3 rows, 1 ids are not", "item": "2 rows, 2 ids are not", "country": "2 rows, 2 ids are not"}
    for name, words in (counts | {"shop": "4 rows"}).items():
        assert re.search(rf"loaded \S+t_{name}.weight \(4, 4\)( -> \S+ 4\))? from .+{name}.parquet: {words}", shown)


def test_rows_have_the_places_of_ids_in_data(tmp_path: Path) -> None:
    """The row of each id is the one that the same value in a file of rows looks up."""
    config(tmp_path, "run", FEATURES)
    spec = parse_spec((tmp_path / "run.yaml").read_text(encoding="utf-8"), "spec")
    columns = {
        "user": [f"u{n}" for n in range(30)],
        "item": list(range(30)),
        "country": ["de", "fr", "it"] * 10,
        "age": [18.0, 20, 60] * 10,
        "shop": [f"s{n}" for n in range(30)],
    }
    table = pa.table(columns | {"price": [0.0] * 30, "count": [0.0] * 30})
    looked_up = encode(table, spec, labelled=False).rows.ids.reshape(30, 5)
    for place, feature in enumerate(spec.sparse):
        numbers, bad = row_numbers(pa.array(columns[feature.name]), feature, spec)
        assert numbers.tolist() == looked_up[:, place].tolist()
        assert not bad.any()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["user=a.npy", "user=b.npy"], "give TABLE=FILE, each TABLE once"),
        (["user="], "give TABLE=FILE, each TABLE once"),
        (["usr=a.npy"], "init_rows .* is 'usr=a.npy', and 'usr' is the name of 0 tables: give one of .*t_user"),
        (["user=none.npy"], "none.npy .No such file"),
    ],
)
def test_rows_that_are_refused(given: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ShardrecError, match=words):
        broken_off(config(tmp_path, "run", FEATURES, init_rows=given))
