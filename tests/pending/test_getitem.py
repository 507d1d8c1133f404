"""Items that wait for their collection, and not before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from shardrec.pending import LazyAwaitable, LazyGetItemMixin, LazyNoWait
from tests.pending.counted import Counted


class Features(LazyGetItemMixin[str, Tensor], Counted[Any]):
    """A keyed collection on its way."""


def keyed() -> KeyedTensor:
    return KeyedTensor(keys=["f1", "f2"], length_per_key=[1, 2], values=torch.arange(6.0).view(2, 3))


def test_item_is_lazy() -> None:
    features = Features(keyed())
    first, second = features["f1"], features["f2"]
    assert isinstance(first, LazyAwaitable)
    assert features.waits == 0
    assert not first.done()
    assert torch.equal(torch.cat([second, first], dim=1), torch.tensor([[1.0, 2.0, 0.0], [4.0, 5.0, 3.0]]))
    assert features.waits == 1


def test_items_of_items() -> None:
    class Nested(LazyGetItemMixin[str, Any], Counted[Any]): ...

    nested = Nested({"a": [1, 2, 3]})
    assert nested["a"][1] == 2
    assert nested.waits == 1


def test_item_is_done_when_its_collection_is() -> None:
    features = Features(keyed())
    item = features["f1"]
    features.wait()
    assert item.done()
    assert item.tolist() == [[0.0], [3.0]]
    assert item.done()


def test_missing_key_shows_at_the_first_use() -> None:
    features = Features(keyed())
    item = features["f3"]
    assert features.waits == 0
    for _ in range(2):
        with pytest.raises(KeyError, match=r"KeyedTensor of Features has no item 'f3'. It has 'f1', 'f2'"):
            item.wait()


def test_missing_key_lists_only_some_of_many() -> None:
    features = Features({f"f{number}": torch.ones(1) for number in range(20)})
    with pytest.raises(KeyError, match=r"'f0', .*'f7' and 12 more"):
        features["x"].wait()


def test_index_out_of_range() -> None:
    class Rows(LazyGetItemMixin[int, Tensor], Counted[Any]): ...

    with pytest.raises(IndexError, match=r"list of Rows has no item 5. Its length is 2"):
        Rows([1, 2])[5].wait()


def test_error_of_the_collection_is_the_items() -> None:
    error = ValueError("broken pipe")

    def fail() -> Any:
        raise error

    features = Features(None, fail)
    items = [features["f1"], features["f2"]]
    for item in items:
        with pytest.raises(ValueError, match="broken pipe") as caught:
            item.wait()
        assert caught.value is error
    assert features.waits == 1


def test_writing_and_asking_go_to_the_collection() -> None:
    features = Features({"f1": 1})
    features["f2"] = 2
    assert "f2" in features
    assert len(features) == 2
    del features["f1"]
    assert features.wait() == {"f2": 2}


def test_mixin_with_no_wait() -> None:
    class Ready(LazyGetItemMixin[str, int], LazyNoWait[dict[str, int]]): ...

    item = Ready({"a": 1})["a"]
    assert item.done()
    assert item + 1 == 2
