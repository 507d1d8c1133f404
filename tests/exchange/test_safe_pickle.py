"""What ranks tell each other comes back as it was, and no pickle runs code."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.checkpoint.data_files import SavedFile
from shardrec.checkpoint.manifest import Manifest
from shardrec.errors import CheckpointError, PeerError
from shardrec.exchange.safe_pickle import _FIRST_BYTES, dump, gather, load
from shardrec.pipeline.message import Failure
from tests.ranks import ranks

Pair = namedtuple("Pair", "first second")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(value=VALUES)
def test_plain_values_come_back(value: Any) -> None:
    assert load(dump(value)) == value


def test_what_stages_and_checkpoints_tell_comes_back() -> None:
    jagged = KeyedJaggedTensor(keys=["a"], values=torch.ones(2), lengths=torch.tensor([2]))
    nest = {"a": [1, (2, Pair(3, jagged))], "b": OrderedDict(c=4), "d": defaultdict(list, e=[5])}
    for value in (
        tree_flatten(nest)[1],
        [torch.float32, torch.int64],
        {3: Path("a/b")},
        Failure(stage=1, text="no"),
        Manifest(data="data", numbers={"a": 1.0}, step_counts={}, param_groups=None, extra={}),
    ):
        assert load(dump(value)) == value
    error = load(dump(CheckpointError("damaged")))
    assert type(error) is CheckpointError
    assert str(error) == "damaged"


class Runs:
    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "value",
    [
        Runs(os.system, "true"),
        Runs(eval, "1"),
        Runs(getattr, "a", "upper"),
        Runs(__import__, "antigravity"),
        Runs(torch.load, "x"),
        Runs(pickle.loads, b""),
        [Path("a"), {"b": (SavedFile, Runs(Path.unlink, Path("a")))}],
    ],
)
def test_what_would_run_is_refused(value: Any) -> None:
    with pytest.raises(PeerError, match="which is not plain data"):
        load(pickle.dumps(value))


def test_a_module_that_is_not_loaded_is_not_imported() -> None:
    with pytest.raises(PeerError, match=r"antigravity\.geohash"):
        load(b"cantigravity\ngeohash\n.")


def test_values_of_different_sizes_are_gathered() -> None:
    """Around the size up to which a value takes one collective."""
    fitting = _FIRST_BYTES - len(dump("x" * _FIRST_BYTES)) + _FIRST_BYTES
    sizes = [(0, 100), (fitting, 0), (fitting, fitting + 1), (5 * _FIRST_BYTES, 3)]

    def run() -> list[Any]:
        import torch.distributed as dist

        return [gather("x" * of_ranks[dist.get_rank()]) for of_ranks in sizes]

    assert len(dump("x" * fitting)) == _FIRST_BYTES
    assert ranks(2, run) == [[["x" * size for size in of_ranks] for of_ranks in sizes]] * 2
