"""Bad input ends the step on every rank with the same words, and leaves the model as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from tests.batches import Bags, joined, random_bags
from tests.models import ClickModel, click_model, collection, feature_rows, table_sizes
from tests.modules.parity import assert_weights_equal
from tests.plans import random_plan
from tests.ranks import ranks

CONFIGS = [
    EmbeddingBagConfig(name="movies", num_embeddings=12, embedding_dim=8, feature_names=["watched", "liked"]),
    EmbeddingBagConfig(name="tags", num_embeddings=6, embedding_dim=4, feature_names=["tag"]),
    EmbeddingBagConfig(name="days", num_embeddings=7, embedding_dim=4, feature_names=["day"]),
    EmbeddingBagConfig(name="users", num_embeddings=9, embedding_dim=8, feature_names=["user"]),
]
ROWS = feature_rows(CONFIGS)
TABLES = {feature: config.name for config in CONFIGS for feature in config.feature_names}


def plan_of(world_size: int, path: str) -> ShardingPlan:
    """Row-wise, table-wise, data-parallel and column-wise: a way of its own for every table."""
    ranks_ = list(range(world_size))
    return ShardingPlan(
        topology=Topology(ranks_per_host=world_size),
        tables=(
            cuts.row_wise(f"{path}movies", 12, 8, ranks=ranks_),
            cuts.table_wise(f"{path}tags", 6, 4, rank=world_size - 1),
            cuts.data_parallel(f"{path}days", 7, 4),
            cuts.column_wise(f"{path}users", 9, 8, ranks=ranks_[:2]),
        ),
    )


Change = Callable[[KeyedJaggedTensor], Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A way to spoil a batch.

    Args:
        name: for messages.
        change: makes the bad input of a good one.
        words: regular expression that the message must match.
    """

    name: str
    change: Change
    words: str


def rebuilt(features: KeyedJaggedTensor, **changes: Any) -> KeyedJaggedTensor:
    """A copy with other parts."""
    parts = {
        "keys": features.keys(),
        "values": features.values().clone(),
        "lengths": features.lengths().clone(),
        "weights": features.weights_or_none(),
    }
    return KeyedJaggedTensor(**{**parts, **changes})


def with_id(feature: str, one: int, position: int) -> Change:
    """Put an id into the first bag of a feature, as its first or last."""

    def change(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys = features.keys()
        size = features.stride()
        bags = {
            key: [list(part) for part in features[key].values().split(features[key].lengths().tolist())] for key in keys
        }
        bags[feature][0].insert(position if position >= 0 else len(bags[feature][0]), torch.tensor(one))
        flat = [int(value) for key in keys for bag in bags[key] for value in bag]
        lengths = [len(bag) for key in keys for bag in bags[key]]
        return KeyedJaggedTensor(keys=keys, values=torch.tensor(flat), lengths=torch.tensor(lengths), stride=size)

    return change


def id_faults() -> list[Fault]:
    """The first and the last id of each feature's first bag, below and above its table."""
    found = []
    for feature, rows in ROWS.items():
        for one in (-1, rows, 2**40):
            for position in (0, -1):
                found.append(
                    Fault(
                        name=f"{feature} {one} at {position}",
                        change=with_id(feature, one, position),
                        words=rf"feature '{feature}' of table '\w*\.?{TABLES[feature]}': id {one} in sample 0 is "
                        rf"outside \[0, {rows}\); hash or clip the ids into the table, or raise num_embeddings",
                    )
                )
    return found


def first_length(features: KeyedJaggedTensor, change: int) -> KeyedJaggedTensor:
    lengths = features.lengths().clone()
    lengths[0] += change
    return rebuilt(features, lengths=lengths)


def renamed(features: KeyedJaggedTensor, old: str, new: str) -> KeyedJaggedTensor:
    keys = features.keys()
    return rebuilt(features, keys=[new if key == old else key for key in keys])


def without(features: KeyedJaggedTensor, key: str) -> KeyedJaggedTensor:
    keys = features.keys()
    return KeyedJaggedTensor.from_jt_dict({other: features[other] for other in keys if other != key})


STRUCTURE_FAULTS = [
    Fault(name="longer", change=lambda x: first_length(x, 3), words=r"lengths of features \[.*add up to \d+ and there"),
    Fault(name="shorter", change=lambda x: first_length(x, 0 - int(x.lengths()[0]) or 1), words=r"add up to \d+ and"),
    Fault(
        name="negative",
        change=lambda x: first_length(x, -9),
        words=r"feature '\w+' of table '\S*': the length of sample 0 is -\d; lengths must not be negative",
    ),
    Fault(
        name="one length less",
        change=lambda x: rebuilt(x, lengths=x.lengths()[1:]),
        words=r"there are \d+ lengths for 5 features of batch size \d; give exactly one length",
    ),
    Fault(
        name="missing key",
        change=lambda x: without(x, "tag"),
        words=r"the input lacks feature\(s\) 'tag' \(table '\S*tags'\); its keys are \[.*\]: rename the key, or give",
    ),
    Fault(
        name="renamed key",
        change=lambda x: renamed(x, "day", "Day"),
        words=r"the input lacks feature\(s\) 'day' \(table '\S*days'\); its keys are \[.*'Day'.*\]: rename the key",
    ),
    Fault(
        name="key twice",
        change=lambda x: renamed(x, "day", "tag"),
        words=r"feature\(s\) 'tag' come more than once among the keys",
    ),
    Fault(
        name="float ids",
        change=lambda x: rebuilt(x, values=x.values().double()),
        words=r"the ids are float64 \(features from 'watched' of table '\S*movies' on.*\); ids must be int32 or int64: "
        r"convert them with \.long\(\)",
    ),
    Fault(
        name="weights",
        change=lambda x: rebuilt(x, weights=torch.full((x.values().numel(),), 0.5)),
        words=r"the input has \d+ weights, the first is 0\.5 and .* is_weighted=False; drop the weights, or",
    ),
    Fault(
        name="meta",
        change=lambda x: rebuilt(x, values=x.values().to("meta"), lengths=x.lengths().to("meta")),
        words=r"the ids are on meta and the tables of this module .* on cpu; move the batch with \.to\('cpu'\)",
    ),
    Fault(
        name="lengths on meta",
        change=lambda x: rebuilt(x, lengths=x.lengths().to("meta")),
        words=r"the lengths are on meta and the tables of this module",
    ),
    Fault(
        name="batch size per feature",
        change=lambda x: KeyedJaggedTensor(
            keys=x.keys(),
            values=torch.zeros(5, dtype=torch.int64),
            lengths=torch.tensor([1, 1, 1, 1, 1, 0]),
            stride_per_key_per_rank=[[2], [1], [1], [1], [1]],
        ),
        words=r"the features have a batch size each \(\[2, 1, 1, 1, 1\]\).*pad the short ones with empty bags",
    ),
    Fault(
        name="no lengths",
        change=lambda x: KeyedJaggedTensor(keys=x.keys(), values=x.values()),
        words=r"cannot be read .*check how its values and lengths",
    ),
    Fault(name="None", change=lambda x: None, words=r"the input is a NoneType; .* takes a torchrec KeyedJaggedTensor"),
    Fault(name="tensor", change=lambda x: x.values(), words=r"the input is a Tensor; .* takes a torchrec KeyedJagged"),
    Fault(
        name="dict", change=lambda x: x.to_dict(), words=r"the input is a dict; .* takes a torchrec KeyedJaggedTensor"
    ),
]


def tensors_of(features: object) -> list[Tensor]:
    if not isinstance(features, KeyedJaggedTensor):
        return []
    parts = [features.values(), features._lengths, features.weights_or_none()]
    return [part for part in parts if part is not None and not part.is_meta]


class Trial:
    """A model in training whose steps are alternately good and bad, beside an unsharded one that sees the good ones."""

    def __init__(self, model: ShardedModel, reference: nn.Module, seed: int, weighted: bool = False) -> None:
        self.model = model
        self.reference = reference
        self.rng = Random(seed)
        self.weighted = weighted
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def bags(self) -> list[Bags]:
        return [random_bags(self.rng, ROWS, 2, weighted=self.weighted, shuffled=False) for _ in range(self.world_size)]

    def good_step(self, where: str) -> None:
        bags = self.bags()
        values = self.model(bags[self.rank].kjt()).values()
        expected = self.reference(joined(bags).kjt()).values()
        assert torch.allclose(values, expected[2 * self.rank : 2 * self.rank + 2], atol=1e-5), f"output after {where}"
        (values * values).mean().backward()
        (expected * expected).mean().backward()
        assert_weights_equal(self.model.module, self.reference, f"weights after {where}")

    def bad_step(self, fault: Fault, guilty: Sequence[int]) -> None:
        """A step in which the ranks of ``guilty`` have bad input."""
        where = f"{fault.name} on {guilty}"
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        good = self.bags()[self.rank].kjt()
        features = fault.change(good) if self.rank in guilty else good
        tensors = tensors_of(features)
        copies = [(tensor.clone(), tensor._version) for tensor in tensors]
        with pytest.raises(InputError) as caught:
            self.model(features)
        message = str(caught.value)
        assert re.search(fault.words, message), f"{where}: {message}"
        for rank in range(self.world_size):
            assert (f"rank {rank}: " in message) == (rank in guilty), f"{where}: {message}"
        for tensor, (copy, version) in zip(tensors, copies, strict=True):
            assert torch.equal(tensor, copy) and tensor._version == version, f"{where}: the input was changed"
        for parameter, copy in zip(self.model.parameters(), before, strict=True):
            assert torch.equal(parameter, copy), f"{where}: a weight was changed"
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, message)
        assert len(set(gathered)) == 1, f"{where}: the ranks have different messages: {gathered}"


def guilty_ranks(world_size: int, number: int) -> list[int]:
    """Each rank in turn, then all of them."""
    turn = number % (world_size + 1)
    return [turn] if turn < world_size else list(range(world_size))


def run_faults(faults: Sequence[Fault], plan: ShardingPlan, weighted: bool = False) -> None:
    model = shard(collection(CONFIGS, weighted=weighted, optimizers="sgd", seed=1), plan)
    reference = collection(CONFIGS, weighted=weighted, optimizers="sgd", seed=1)
    trial = Trial(model, reference, seed=5, weighted=weighted)
    trial.good_step("the start")
    for number, fault in enumerate(faults):
        guilty = guilty_ranks(trial.world_size, number)
        trial.bad_step(fault, guilty)
        if number % 3 == 0:
            trial.good_step(f"{fault.name} on {guilty}")
    trial.good_step("everything")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ids_outside_their_table(world_size: int) -> None:
    """Row-wise, table-wise, column-wise and replicated tables alike."""

    def rank_main() -> None:
        run_faults(id_faults(), plan_of(world_size, ""))

    ranks(world_size, rank_main)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_broken_batches(world_size: int) -> None:
    def rank_main() -> None:
        run_faults(STRUCTURE_FAULTS, plan_of(world_size, ""))
        run_faults(list(reversed(STRUCTURE_FAULTS)), plan_of(world_size, ""))

    ranks(world_size, rank_main)


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_fault_under_any_plan(world_size: int) -> None:
    def rank_main() -> None:
        for seed in range(6):
            rng = Random(seed)
            plan = random_plan(rng, table_sizes(CONFIGS), Topology(ranks_per_host=world_size))
            run_faults(rng.sample([*id_faults(), *STRUCTURE_FAULTS], 6), plan)

    ranks(world_size, rank_main)


WEIGHT_FAULTS = [
    Fault(
        name="no weights",
        change=lambda x: rebuilt(x, weights=None),
        words=r"the input has no weights and .* feature 'watched' \(table 'movies'\) has is_weighted=True; give the",
    ),
    Fault(
        name="one weight more",
        change=lambda x: rebuilt(x, weights=torch.ones(x.values().numel() + 1)),
        words=r"the weights have shape \(\d+,\) and the ids \(\d+,\); give one weight for each id",
    ),
    Fault(
        name="whole weights",
        change=lambda x: rebuilt(x, weights=torch.full((x.values().numel(),), 3)),
        words=r"the weights are int64, the first is 3; they must be floating point",
    ),
    Fault(
        name="learned weights",
        change=lambda x: rebuilt(x, weights=torch.ones(x.values().numel(), requires_grad=True)),
        words=r"the weights require a gradient.*pass weights\.detach\(\)",
    ),
]


def test_weights() -> None:
    def rank_main() -> None:
        run_faults(WEIGHT_FAULTS, plan_of(2, ""), weighted=True)

    ranks(2, rank_main)


def test_double_weights_are_as_good_as_float() -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, weighted=True, seed=1), plan_of(2, ""))
        features = random_bags(Random(0), ROWS, 2, weighted=True).kjt()
        doubled = rebuilt(features, weights=features.weights().double())
        assert torch.equal(model(doubled).values(), model(features).values())

    ranks(2, rank_main)


# ------------------------------------------------------------------------------------------------------ disagreements


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_int32_ids_on_one_rank_and_int64_on_the_others(odd: int) -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, seed=1), plan_of(4, ""))
        bags = random_bags(Random(0), ROWS, 2)
        dtype = torch.int32 if dist.get_rank() == odd else torch.int64
        with pytest.raises(InputError) as caught:
            model(bags.kjt(dtype))
        message = str(caught.value)
        assert message.startswith("the ranks disagree about their input; give every rank the same dtypes and modes")
        for rank in range(4):
            assert f"rank {rank}: ids int{32 if rank == odd else 64}" in message
        expected = collection(CONFIGS, seed=1)(bags.kjt()).values()
        for dtype in (torch.int32, torch.int64):
            assert torch.allclose(model(bags.kjt(dtype)).values(), expected)

    ranks(4, rank_main)


def test_gradients_on_one_rank_only() -> None:
    def rank_main() -> None:
        model = shard(collection(CONFIGS, seed=1), plan_of(2, ""))
        bags = random_bags(Random(0), ROWS, 2)
        with torch.set_grad_enabled(dist.get_rank() == 0), pytest.raises(InputError) as caught:
            model(bags.kjt())
        assert "rank 0: ids int64, gradients on" in str(caught.value)
        assert "rank 1: ids int64, gradients off" in str(caught.value)
        model(bags.kjt()).values().sum().backward()

    ranks(2, rank_main)


# --------------------------------------------------------------------------------------------------- the dense inputs


def dense_trial(
    dense_first: bool, guilty: Sequence[int], spoil: Callable[[Tensor], Tensor], words: str, world_size: int
) -> None:
    """A step in which some ranks' dense columns are bad, between good ones."""
    rank = dist.get_rank()
    model = shard(click_model(CONFIGS, dense_first=dense_first), plan_of(world_size, "sparse."))
    reference = click_model(CONFIGS)
    rng, generator = Random(0), torch.Generator().manual_seed(2)

    def good(where: str) -> None:
        bags = [random_bags(rng, ROWS, 2, shuffled=False) for _ in range(world_size)]
        dense = torch.randn(2 * world_size, 3, generator=generator)
        mine = slice(2 * rank, 2 * rank + 2)
        logits, expected = model(dense[mine], bags[rank].kjt()), reference(dense, joined(bags).kjt())
        assert torch.allclose(logits, expected[mine], atol=1e-5), where
        logits.square().mean().backward()
        expected.square().mean().backward()
        assert_weights_equal(model.sparse, reference.sparse, where)

    good("before")
    dense, features = torch.randn(2, 3), random_bags(rng, ROWS, 2).kjt()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(InputError) as caught:
        model(spoil(dense) if rank in guilty else dense, features)
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))
    good("after")
    good("after, again")


@pytest.mark.parametrize("dense_first", [True, False], ids=["dense first", "sparse first"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_wrong_dense_dtype_everywhere(world_size: int, dense_first: bool) -> None:
    words = (
        r"rank 0: the model's forward failed: RuntimeError.*among the other inputs are float64 tensors and the model's "
    )
    words += r"parameters are float32: convert the inputs with \.to\(torch\.float32\)"
    if not dense_first:
        words = words.replace("rank 0", r"rank \d")

    def rank_main() -> None:
        dense_trial(dense_first, range(world_size), Tensor.double, words, world_size)

    ranks(world_size, rank_main)


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("dense_first", [True, False], ids=["dense first", "sparse first"])
def test_wrong_dense_dtype_on_one_rank(dense_first: bool, guilty: int) -> None:
    if dense_first:
        words = rf"rank {guilty}: the model's forward failed: RuntimeError.*float64.*convert the inputs with"
    else:
        words = rf"the ranks disagree.*rank {guilty}: ids int64, gradients on, other inputs float64"

    def rank_main() -> None:
        dense_trial(dense_first, [guilty], Tensor.double, words, 2)

    ranks(2, rank_main)


@pytest.mark.parametrize("guilty", [0, 3])
def test_wrong_dense_shape_before_the_lookup(guilty: int) -> None:
    words = rf"^rank {guilty}: the model's forward failed: RuntimeError: mat1 and mat2 shapes"

    def rank_main() -> None:
        dense_trial(True, [guilty], lambda dense: dense[:, :2], words, 4)

    ranks(4, rank_main)


def test_a_missing_argument_on_one_rank() -> None:
    def rank_main() -> None:
        model = shard(click_model(CONFIGS), plan_of(2, "sparse."))
        features, dense = random_bags(Random(0), ROWS, 2).kjt(), torch.randn(2, 3)
        arguments = (dense, features) if dist.get_rank() else (dense,)
        with pytest.raises(InputError, match=r"rank 0: the model's forward failed: TypeError.*'features'"):
            model(*arguments)
        assert model(dense, features).shape == (2,)

    ranks(2, rank_main)


class TwoLookups(nn.Module):
    """Two collections with inputs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = collection(CONFIGS, optimizers="sgd", seed=1)
        self.right = collection(CONFIGS, optimizers="sgd", seed=2)

    def forward(self, left: Any, right: Any) -> Tensor:
        values: Tensor = self.left(left).values() + self.right(right).values()
        return values


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_fault_of_the_second_lookup(world_size: int) -> None:
    """The first one's exchange is over by then, and its output is dropped."""

    def rank_main() -> None:
        rank = dist.get_rank()
        left, right = plan_of(world_size, "left."), plan_of(world_size, "right.")
        plan = ShardingPlan(topology=left.topology, tables=left.tables + right.tables)
        model, reference = shard(TwoLookups(), plan), TwoLookups()
        rng = Random(0)
        for number, fault in enumerate([*id_faults()[:5], *STRUCTURE_FAULTS]):
            good = random_bags(rng, ROWS, 2, shuffled=False).kjt()
            guilty = guilty_ranks(world_size, number)
            bad = fault.change(good) if rank in guilty else good
            pair = (good, bad) if number % 4 else (bad, good)
            # A tensor in place of the batch is a dense input, too, of which the first header tells.
            words = fault.words if fault.name != "tensor" else rf"{fault.words}|the ranks disagree.*other inputs int64"
            with pytest.raises(InputError, match=re.compile(words, re.DOTALL)):
                model(*pair)
            values, expected = model(good, good), reference(good, good)
            assert torch.allclose(values, expected, atol=1e-5), fault.name
            values.mean().backward()
            expected.mean().backward()
        assert_weights_equal(model.left, reference.left, "left")
        assert_weights_equal(model.right, reference.right, "right")

    ranks(world_size, rank_main)


class Picky(ClickModel):
    """Refuses some dense input by itself, between its two lookups."""

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        first = self.sparse(features).values()
        if bool((dense > 99).any()):
            raise ValueError("dense values above 99")
        second = self.sparse(features).values()
        total: Tensor = first + second
        return total


def test_an_error_of_the_models_own_between_two_lookups() -> None:
    def rank_main() -> None:
        model = shard(Picky(collection(CONFIGS, seed=1), pooled=32), plan_of(2, "sparse."))
        features, dense = random_bags(Random(0), ROWS, 2).kjt(), torch.zeros(2, 3)
        expected = 2 * collection(CONFIGS, seed=1)(features).values()
        with torch.no_grad():
            assert torch.allclose(model(dense, features), expected)
            for guilty in (0, 1):
                with pytest.raises(InputError, match=rf"^rank {guilty}: .*ValueError: dense values above 99"):
                    model(dense + 100 * (dist.get_rank() == guilty), features)
                assert torch.allclose(model(dense, features), expected)

    ranks(2, rank_main)
