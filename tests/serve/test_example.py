"""What an entry's tensors look like, and which calls fit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardrec.serve.example import TensorSpec

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
    words = "lengths has the shape [6]; the model takes [4*B], and 6 is not a multiple of 4"
    assert lengths.fault((6,), sizes) == words
    assert lengths.fault((8,), sizes) == ""
    assert dense.fault((2, 4), sizes) == "dense has the shape [2, 4]; the model takes [B, 3]"
    words = "dense has the shape [5, 3]; the model takes [B, 3], where B is 2 by the tensors before it"
    assert dense.fault((5, 3), sizes) == words
    assert dense.fault((2,), sizes) == "dense has the shape [2]; the model takes [B, 3]"


def test_a_note_is_the_spec() -> None:
    spec = TensorSpec(name="dense", dtype=torch.float16, shape=("B", 3))
    assert spec.note() == {"name": "dense", "dtype": "float16", "shape": ["B", 3]}
    assert TensorSpec.of_note(spec.note()) == spec
