"""Feature specs: what is wrong with one is told by the names in it."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardrec.trainer.data
from shardrec.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("features: [{name: a, kind: id, ids: number, vocabulary: [b]}]", r"feature 'a': ids: number needs rows"),
        ("features: [{name: a, kind: id}]", r"feature 'a': give one of rows, vocabulary and boundaries"),
        ("features: [{name: a, kind: ids, rows: 3}]", r"feature 'a', kind: Input should be 'id'"),
        ("features: [{name: a, kind: id, rows: 1}]", r"feature 'a', rows: Input should be greater than or equal to 2"),
        (
            "features: [{name: a, kind: dense, row: 3}]",
            r"feature 'a', row: there is no such key, did you mean 'rows'\? \(the keys are name, kind, column, rows",
        ),
        (
            "features: [{name: a, kind: id, rows: 9, dynamic_ids: {evit: lru}}]",
            r"feature 'a', dynamic_ids, evit: there is no such key, did you mean 'evict'\? \(the keys are capacity, ",
        ),
        ("label: {zzz: x}", r"label, zzz: there is no such key \(the keys are column, above\)"),
        ("lable: x", r"lable: there is no such key, did you mean 'label'\? \(the keys are label, labels, weight, "),
        ("features: [{name: a, kind: dense, rows: 3}]", r"feature 'a': a dense feature has no rows"),
        ("features: [{name: a, kind: dense}]", r"no feature has a table"),
        ("features: [{name: a, kind: id, rows: 3}, {name: a, kind: dense}]", r"names used more than once: 'a'"),
        ("features: [{name: a, kind: id, boundaries: [2, 1]}]", r"feature 'a': boundaries must ascend"),
        ("features: [{name: a, kind: weighted, rows: 3}]", r"feature 'a': weights names the column"),
        ("features: !!set {a, b}", r"feature 0: "),
        (
            "features: [{name: a, kind: id, vocabulary: [de, no]}]",
            r"feature 'a', vocabulary: False is what YAML makes of words such as no, on and null: put them in quotes",
        ),
        ("features: [{name: a, kind: id, vocabulary: [null]}]", r"feature 'a', vocabulary: None is what YAML makes"),
        ("features: [{name: a, kind: dense, mean: .nan}]", r"feature 'a', mean: Input should be a finite number"),
        (
            "features: [{name: a, kind: id, boundaries: [.nan]}]",
            r"feature 'a', boundaries, 0: Input should be a finite",
        ),
        ("label: {column: a, above: .nan}", r"label, above: Input should be a finite number"),
        ("label: clicked\nfeatures: []", r"spec\.yaml: no feature has a table"),
        (
            "label: a: b",
            r"spec\.yaml:1 cannot be read as YAML \(mapping values are not allowed",
        ),
    ],
)
def test_faults_of_a_spec_name_the_feature(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        shardrec.trainer.data.load_spec(path)


def test_a_spec_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "label: clicked\nfeatures:\n  - {name: a, kind: id, vocabulary: [1, 'no', mon]}\n  - {name: x, kind: dense}\n",
        encoding="utf-8",
    )
    spec = shardrec.trainer.data.load_spec(path)
    assert spec.label.column == "clicked"
    assert spec.schema_.num_embeddings == (4,)
    assert spec.features[0].vocabulary == ("1", "no", "mon")
    with pytest.raises(ConfigError, match="cannot be read"):
        shardrec.trainer.data.load_spec(tmp_path / "nowhere.yaml")
