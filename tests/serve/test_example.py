"""What an entry's tensors look like, and which calls fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.serve.example import TensorSpec, example_of

SIZES = st.lists(st.one_of(st.integers(0, 9), st.sampled_from(["B", "N", "2*B", "26*B"])), max_size=3)


def size_of(size: int | str, samples: int, ids: int) -> int:
    if isinstance(size, int):
        return size
    factor = int(size.split("*")[0]) if "*" in size else 1
    return factor * (samples if size.endswith("B") else ids)


@given(shapes=st.lists(SIZES, max_size=4), samples=st.integers(0, 9), ids=st.integers(0, 9), data=st.data())
def test_shapes_fit_that_are_of_one_batch_and_no_others(
    shapes: list[list[int | str]], samples: int, ids: int, data: st.DataObject
) -> None:
    specs = [TensorSpec(name="t", dtype=torch.float32, shape=tuple(shape)) for shape in shapes]
    given_shapes = [[size_of(size, samples, ids) for size in shape] for shape in shapes]
    found: dict[str, int] = {}
    assert not any(spec.fault(tuple(shape), found) for spec, shape in zip(specs, given_shapes, strict=True))
    assert found.get("B", samples) == samples
    assert found.get("N", ids) == ids
    # One size changed: unless it is the only one that says what its symbol is, it is found.
    places = [(number, dim) for number, shape in enumerate(shapes) for dim in range(len(shape))]
    if not places:
        return
    number, dim = data.draw(st.sampled_from(places))
    changed = data.draw(st.integers(0, 300).filter(lambda size: size != given_shapes[number][dim]))
    given_shapes[number][dim] = changed
    size = shapes[number][dim]
    again: dict[str, int] = {}
    faults = [spec.fault(tuple(shape), again) for spec, shape in zip(specs, given_shapes, strict=True)]
    alone = (
        isinstance(size, str)
        and sum(isinstance(other, str) and other[-1] == size[-1] for shape in shapes for other in shape) == 1
    )
    divides = isinstance(size, str) and changed % size_of(size, 1, 1) == 0
    assert any(faults) == (not (alone and divides))


def test_the_words_say_what_was_wanted() -> None:
    lengths = TensorSpec(name="lengths", dtype=torch.int64, shape=("4*B",))
    dense = TensorSpec(name="dense", dtype=torch.float32, shape=("B", 3))
    sizes: dict[str, int] = {}
    words = "lengths has the shape [6]. The model takes [4*B], and 6 is not a multiple of 4"
    assert lengths.fault((6,), sizes) == words
    assert lengths.fault((8,), sizes) == ""
    assert dense.fault((2, 4), sizes) == "dense has the shape [2, 4]. The model takes [B, 3]"
    words = "dense has the shape [5, 3]. The model takes [B, 3], where B is 2 by the tensors before it"
    assert dense.fault((5, 3), sizes) == words
    assert dense.fault((2,), sizes) == "dense has the shape [2]. The model takes [B, 3]"


def test_a_note_is_the_spec() -> None:
    spec = TensorSpec(name="dense", dtype=torch.float16, shape=("B", 3))
    assert spec.note() == {"name": "dense", "dtype": "float16", "shape": ["B", 3]}
    assert TensorSpec.of_note(spec.note()) == spec


class _Weighted(nn.Module):
    """Of which the tensor ``weights`` is the samples'."""

    def __init__(self, *, ids_too: bool) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["a"])]
        self.bags = EmbeddingBagCollection(tables=configs, is_weighted=ids_too, device=torch.device("meta"))


class _OfSamples(_Weighted):
    def forward(self, sparse: KeyedJaggedTensor, weights: Tensor) -> Tensor:
        return self.bags(sparse).values().sum(1) * weights


class _OfIds(_Weighted):
    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        values: Tensor = self.bags(sparse).values()
        return values


def test_weights_of_samples_are_not_those_of_ids() -> None:
    model = shardrec.shard(_OfSamples(ids_too=False)).eval()
    features = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    specs = example_of(model, (features, torch.ones(2))).specs
    assert [(spec.name, spec.shape) for spec in specs] == [("values", ("N",)), ("lengths", ("B",)), ("weights", ("B",))]


def test_an_example_without_the_weights_that_a_collection_takes() -> None:
    model = shardrec.shard(_OfIds(ids_too=True)).eval()
    features = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="lack weights, and a weighted collection looks them up"):
        example_of(model, (features,))
