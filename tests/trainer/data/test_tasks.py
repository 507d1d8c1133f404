"""Several labels in a spec: what is refused, and how the columns of a file become labels, weights and faults."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardrec.errors import ConfigError, DataError
from shardrec.trainer.data import FileClickData
from shardrec.trainer.data.encode import encode
from shardrec.trainer.data.spec import FeatureSpec, parse_spec

SPEC = """
labels:
  - {name: click}
  - {name: long, column: minutes, above: 2.5, optional: true}
  - {name: minutes, kind: regression, loss: poisson, optional: true}
  - {name: shelf, kind: multiclass, classes: 3}
weight: importance
features:
  - {name: user, kind: id, rows: 10}
"""
GOOD = {"click": 1, "minutes": 3.5, "shelf": 2, "importance": 0.5, "user": "u"}


def spec(text: str = SPEC) -> FeatureSpec:
    return parse_spec(text, "features.yaml")


def test_columns_become_labels_and_weights() -> None:
    rows = [GOOD, {**GOOD, "click": 0, "minutes": None, "shelf": 0, "importance": 0}, {**GOOD, "minutes": 2}]
    encoded = encode(pa.Table.from_pylist(rows), spec())
    assert encoded.faults == {}
    nan = np.nan
    np.testing.assert_array_equal(encoded.rows.labels, np.float32([[1, 1, 3.5, 2], [0, nan, nan, 0], [1, 0, 2, 2]]))
    taken = encoded.rows.take(np.array([2, 0])).to_batch(spec().schema_)
    assert taken.row_weights is not None
    assert taken.row_weights.tolist() == [0.5, 0.5]
    assert taken.labels[0].tolist() == [1, 0, 2, 2]
    assert spec().schema_.outputs == (1, 1, 1, 3)
    assert spec().sources == ("click", "minutes", "shelf", "importance", "user")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("click", 0.5, "'click': value 0.5 is not 0 or 1"),
        ("click", 3.0, "'click': value 3.0 is not 0 or 1"),
        ("click", float("nan"), "'click': value nan is not 0 or 1"),
        ("click", None, "'click': value None is missing: give the label, or optional: true in labels"),
        ("minutes", float("nan"), "'minutes': value nan is not a number"),
        ("minutes", -1.0, "'minutes': value -1.0 is no count"),
        ("minutes", 1e39, "'minutes': value 1e[+]39 is not a number"),
        ("shelf", 3, "'shelf': value 3 is no class, a whole number from 0 to 2"),
        ("importance", -1.0, "'importance': value -1.0 is no weight"),
        ("importance", None, "'importance': value None is no weight"),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_label_outside_its_task_is_named_with_file_and_row(
    field: str, value: float | None, words: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / f"rows.{kind}"
    if value is not None and math.isnan(value) and kind == "csv":
        pytest.skip("nan means missing in a text")
    bad = {**GOOD, field: value}
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([GOOD, bad, GOOD]), path)
    else:
        lines = [",".join("" if cell is None else str(cell) for cell in row.values()) for row in (GOOD, bad)]
        path.write_text("\n".join([",".join(GOOD), *lines]) + "\n", encoding="utf-8")
    data = FileClickData([path], spec(), holdout=0)
    with pytest.raises(DataError, match=rf"rows.{kind}:{2 if kind == 'parquet' else 3}: field {words}"):
        list(data.train_batches(0, 1, 4))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("labels:", "label: click\nlabels:", "label and labels are given: leave one out"),
        ("name: shelf, kind: multiclass, classes: 3", "name: click", "labels has the name 'click' twice"),
        ("classes: 3", "classes: 1", "label 'shelf', classes: Input should be greater than or equal to 2"),
        (", classes: 3", "", "label 'shelf': kind: multiclass needs classes"),
        ("name: click", "name: click, loss: mse", "label 'click': loss is for kind: regression"),
        (
            "name: click",
            "name: click, clases: 3",
            "label 'click', clases: there is no such key, did you mean 'classes'",
        ),
        ("name: click", "name: click, weight: 0", "label 'click', weight: Input should be greater than 0"),
        (SPEC[: SPEC.index("weight")], "", "weight is for labels"),
    ],
)
def test_specs_that_do_not_fit(old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec(SPEC.replace(old, new))
