from __future__ import annotations

import pytest

from shardrec.errors import ConfigError
from shardrec.trainer.data import CRITEO_CARDINALITIES, ClickSchema, criteo_schema


def test_criteo_has_13_integers_and_26_categories() -> None:
    schema = criteo_schema(max_embeddings=20_000)
    assert (len(schema.dense_names), len(schema.sparse_names)) == (13, 26)
    assert (schema.dense_names[0], schema.sparse_names[-1]) == ("int_1", "cat_26")
    assert max(schema.num_embeddings) == 20_000
    assert min(schema.num_embeddings) == min(CRITEO_CARDINALITIES) + 1


def test_lists_become_tuples() -> None:
    schema = ClickSchema(dense_names=["x"], sparse_names=["a"], num_embeddings=[5])  # type: ignore[arg-type]
    assert schema == ClickSchema(dense_names=("x",), sparse_names=("a",), num_embeddings=(5,))
    assert hash(schema)


def test_all_faults_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        ClickSchema(dense_names=("x",), sparse_names=("x", "b"), num_embeddings=(1,))
    text = str(caught.value)
    assert "names used more than once: 'x'" in text
    assert "num_embeddings has 1 sizes for 2 sparse_names" in text
    assert "num_embeddings of 'x' is 1: a table needs 2" in text


def test_a_sparse_feature_is_needed() -> None:
    with pytest.raises(ConfigError, match="sparse_names is empty"):
        ClickSchema(dense_names=("x",), sparse_names=(), num_embeddings=())


def test_features_that_share_a_table_are_alike() -> None:
    names = {"dense_names": ("x",), "sparse_names": ("a", "b"), "tables": ("t", "t")}
    assert ClickSchema(**names, num_embeddings=(5, 5)).dims == (None, None)
    with pytest.raises(ConfigError, match=r"share table 't' have \(5, 8\) and \(5, 4\) as rows and columns"):
        ClickSchema(**names, num_embeddings=(5, 5), dims=(4, 8))
    with pytest.raises(ConfigError, match="dims has 1 sizes for 2 sparse_names: give one size per name"):
        ClickSchema(**names, num_embeddings=(5, 5), dims=(4,))
