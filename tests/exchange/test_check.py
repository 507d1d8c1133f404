"""What a batch must be, and the words for one that is not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.exchange.batch import NO_LIMIT, Batch, Expectation, read_batch, unreadable
from shardrec.exchange.check import describe_fault, ids_are_valid
from tests.batches import random_bags
from tests.plans import randoms

EXPECT = Expectation(
    tables=(("a", "movies", 5), ("b", "users", 7), ("a", "tags", 9)), weighted=False, device=torch.device("cpu")
)
WEIGHTED = Expectation(tables=EXPECT.tables, weighted=True, device=torch.device("cpu"))
AB = ["a", "b"]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def verdict(features: object, expect: Expectation = EXPECT) -> str:
    """The fault's words, or "" for a good batch."""
    try:
        batch = read_batch(features, expect)
    except Exception as error:
        batch = unreadable(error)
    if isinstance(batch, str):
        return batch
    limits = [expect.rows(key) for key in batch.keys]
    valid = ids_are_valid(batch, torch.tensor(limits), unlimited=NO_LIMIT in limits)
    assert valid.dtype == torch.bool
    assert valid.dim() == 0
    return "" if valid else describe_fault(batch, expect)


def test_rows_are_those_of_the_smallest_table() -> None:
    assert EXPECT.rows("a") == 5
    assert EXPECT.of_table("a") == " of table 'movies'"
    assert EXPECT.rows("z") == NO_LIMIT
    assert EXPECT.of_table("z") == ""


@pytest.mark.parametrize("length_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_good_batches(id_dtype: torch.dtype, length_dtype: torch.dtype) -> None:
    values = ints(0, 4, 6).to(id_dtype)
    assert verdict(KeyedJaggedTensor(keys=AB, values=values, lengths=ints(2, 0, 0, 1).to(length_dtype))) == ""
    assert verdict(KeyedJaggedTensor(keys=AB, values=values, offsets=ints(0, 1, 2, 2, 3).to(length_dtype))) == ""
    assert verdict(KeyedJaggedTensor(keys=AB, values=values[:0], lengths=ints(0, 0).to(length_dtype))) == ""
    none = KeyedJaggedTensor(keys=AB, values=values[:0], lengths=ints().to(length_dtype), stride=0)
    assert verdict(none) == ""
    read = read_batch(none, EXPECT)
    assert isinstance(read, Batch)
    assert read.size == 0


@pytest.mark.parametrize("one", [-(2**63), -1, 2**31, 2**63 - 1])
def test_ids_of_keys_that_no_table_uses_may_be_anything(one: int) -> None:
    features = KeyedJaggedTensor(keys=["x", "b", "a", "y"], values=ints(one, 6, 4, one), lengths=ints(1, 1, 1, 1))
    assert verdict(features) == ""


KEYS = [
    (
        lambda: KeyedJaggedTensor(keys=["a", "c"], values=ints(), lengths=ints(0, 0)),
        r"the input lacks feature\(s\) 'b' \(table 'users'\). Its keys are \['a', 'c'\]: rename the key, or give",
    ),
    (
        lambda: KeyedJaggedTensor(keys=[], values=ints(), lengths=ints()),
        r"lacks .*'a' \(table 'movies'\).*keys are \[\]",
    ),
    (
        lambda: KeyedJaggedTensor(keys=["a", "b", "b"], values=ints(), lengths=ints(0, 0, 0)),
        r"feature\(s\) 'b' come more than once among the keys \['a', 'b', 'b'\]",
    ),
    (
        lambda: KeyedJaggedTensor(keys=[f"k{n}" for n in range(40)], values=ints(), lengths=ints(*[0] * 40)),
        r"'k11' and 28 more\]",
    ),
]
LENGTHS = [
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 2, 3), lengths=ints(1, 0, 1, 0)),
        r"lengths of features \['a', 'b'\] add up to 2 and there are 3 ids. They must be equal: check how",
    ),
    (lambda: KeyedJaggedTensor(keys=AB, values=ints(1), lengths=ints(1, 0, 1, 0)), r"add up to 2 and there are 1 ids"),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1), lengths=ints(1, 1, -1, 0)),
        r"feature 'b' of table 'users': the length of sample 0 is -1; lengths must not be negative: check how",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 2), offsets=ints(0, 2, 1, 1, 2)),
        r"feature 'a' of table 'movies': the length of sample 1 is -1",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 2, 3), offsets=ints(1, 1, 2, 3, 3)),
        r"add up to 2 and .* 3 ids",
    ),
    (lambda: KeyedJaggedTensor(keys=AB, values=ints(1), lengths=ints(1, 0, 0)), r"there are 3 lengths for 2 features"),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1), lengths=ints(1, 0, 0, 0), stride=3),
        r"there are 4 lengths for 2 features of batch size 3. Give exactly one length for each",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1), lengths=ints(1, 0, 0, 0).to("meta")),
        r"the lengths are on meta and the tables of this module \('movies' of feature 'a' and on\) on cpu. Move",
    ),
    (
        lambda: KeyedJaggedTensor(
            keys=AB, values=ints(1, 2), lengths=ints(1, 1, 0), stride_per_key_per_rank=[[2], [1]]
        ),
        r"the features have a batch size each \(\[2, 1\]\).*pad the short features with empty bags",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1, 1), lengths=ints(2**62, 2**62, 2**62, 2**62 + 3)),
        r"feature 'a' of table 'movies': the length of sample 0 is 4611686018427387904; the batch has 3 ids in all",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1, 1), lengths=ints(0, 2**63 - 1, 2**63 - 1, 5)),
        r"feature 'a' of table 'movies': the length of sample 1 is 9223372036854775807; the batch has 3 ids in all",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1), offsets=ints(1, 2, 2, 3, 3)),
        r"the offsets of features \['a', 'b'\] do not begin at 0, or do not match the lengths",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1), lengths=ints(1, 0, 1, 0), offsets=ints(0, 0, 1, 1, 2)),
        r"the offsets of features .* do not match the lengths that the input also has. Give .* lengths alone",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1), lengths=ints(1, 0, 0, 0).to(torch.int16)),
        r"the lengths are int16. Lengths \(or offsets\) must be int32 or int64",
    ),
    (lambda: KeyedJaggedTensor(AB, ints(1), ints(1, 0)), r"neither lengths nor offsets.*weights: pass lengths="),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1), lengths=ints(1, 0), stride_per_key_per_rank=[[1]]),
        r"cannot be read \(\w+: .*lengths \(or offsets\)",
    ),
]
IDS = [
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(4, 3, 5, 6, 7), lengths=ints(2, 1, 1, 1)),
        r"feature 'a' of table 'movies': id 5 in sample 1 is outside \[0, 5\). Hash or clip the ids into the table, or "
        r"raise num_embeddings",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(4, 7, -1, 8), lengths=ints(1, 0, 1, 2)),
        r"feature 'b' of table 'users': id 7 in sample 0 \(and 2 more of this feature\) is outside \[0, 7\)",
    ),
    (lambda: KeyedJaggedTensor(keys=AB, values=ints(-1, 0), lengths=ints(1, 1)), r"'a' .*id -1 in sample 0"),
    (lambda: KeyedJaggedTensor(keys=AB, values=ints(0, 2**32), lengths=ints(1, 1)), r"id 4294967296 in sample 0"),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=torch.tensor([2.5, 1]), lengths=ints(1, 1)),
        r"the ids are float32 \(features from 'a' of table 'movies' on, the first is 2.5\). Ids must be int32 or "
        r"int64: convert them with \.long\(\)",
    ),
    (lambda: KeyedJaggedTensor(keys=AB, values=torch.zeros(0), lengths=ints(0, 0)), r"the ids are float32"),
    (lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1).to(torch.uint8), lengths=ints(1, 1)), r"the ids are uint8"),
    (lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1).bool(), lengths=ints(1, 1)), r"the ids are bool"),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=torch.zeros(2, device="meta"), lengths=ints(1, 1)),
        r"the ids are float32 .*'movies' on\). Ids must be",
    ),
    (lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1).view(2, 1), lengths=ints(1, 1)), r"shape \(2, 1\)"),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1).to("meta"), lengths=ints(1, 1).to("meta")),
        r"the ids are on meta and the tables of this module \('movies' of feature 'a' and on\) on cpu. Move the batch "
        r"with \.to\('cpu'\)",
    ),
]
WEIGHTS = [
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1), lengths=ints(1, 1)),
        WEIGHTED,
        r"lacks weights and the collection of feature 'a' \(table 'movies'\) has is_weighted=True. Give",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1), lengths=ints(1, 1), weights=ints(3, 1)),
        WEIGHTED,
        r"the weights are int64, the first is 3. They must be floating point: convert with \.float\(\)",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1), lengths=ints(1, 1), weights=torch.ones(3)),
        WEIGHTED,
        r"the weights have shape \(3,\) and the ids \(2,\). Give one weight for each id",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1), lengths=ints(1, 1), weights=torch.ones(2, 1)),
        WEIGHTED,
        r"the weights have shape \(2, 1\) and the ids \(2,\)",
    ),
    (
        lambda: KeyedJaggedTensor(keys=AB, values=ints(1, 1), lengths=ints(1, 1), weights=torch.ones(2, device="meta")),
        WEIGHTED,
        r"the weights are on meta",
    ),
]


@pytest.mark.parametrize(
    ("make", "expect", "words"),
    [(make, EXPECT, words) for make, words in [*KEYS, *LENGTHS, *IDS]] + WEIGHTS,
)
def test_bad_batches(make: Callable[[], KeyedJaggedTensor], expect: Expectation, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(verdict(make(), expect))


@pytest.mark.parametrize("thing", [None, 3, torch.zeros(2), {"a": torch.zeros(2)}])
def test_other_things(thing: object) -> None:
    assert verdict(thing) == (
        f"the input is a {type(thing).__name__}. A sharded collection takes a torchrec KeyedJaggedTensor"
    )


@given(rng=randoms())
def test_validity_is_that_of_each_id(rng: Random) -> None:
    rows = {"a": 5, "b": 7}
    bags = random_bags(
        rng, {key: rng.choice([limit, limit, limit + 1]) for key, limit in rows.items()}, 3, extra=("x",)
    )
    if rng.random() < 0.2:
        bags.ids[rng.choice("ab")][rng.randrange(3)][:] = [-1]  # type: ignore[index]  # a list, seen as a Sequence
    wrong = [
        (key, sample, one)
        for key in bags.keys
        if key in rows
        for sample, bag in enumerate(bags.ids[key])
        for one in bag
        if not 0 <= one < rows[key]
    ]
    words = verdict(bags.kjt(rng.choice([torch.int32, torch.int64])))
    if wrong:
        key, sample, one = wrong[0]
        assert words.startswith(f"feature {key!r} of table ")
        assert f"id {one} in sample {sample} " in words
    else:
        assert words == ""
