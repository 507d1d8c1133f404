"""Features that a model makes of the batch: post-processors run ahead, and other features do not keep any from it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from shardrec.pipeline import TrainPipeline
from shardrec.pipeline.feature_sources import ForwardRecord, PostProcessed
from tests.batches import random_bags
from tests.models import collection, feature_rows, table_sizes
from tests.modules.clicks import CONFIGS
from tests.plans import random_plan
from tests.ranks import ranks

ROWS = feature_rows(CONFIGS)
NAMES = ("a", "b", "c")


def shifted(features: KeyedJaggedTensor, by: int) -> KeyedJaggedTensor:
    """The same bags with other ids."""
    modulus = min(ROWS.values())
    return KeyedJaggedTensor(features.keys(), (features.values() + by) % modulus, lengths=features.lengths())


@dataclass
class Made:
    features: KeyedJaggedTensor
    offsets: Tensor


class Shift(nn.Module):
    """A post-processor that counts its runs, and returns features inside an object, or themselves."""

    def __init__(self, by: int, *, inside: bool = False) -> None:
        super().__init__()
        self.by, self.inside, self.runs = by, inside, 0

    def forward(self, features: KeyedJaggedTensor, *, more: Sequence[Any] = ()) -> Any:
        self.runs += 1
        made = shifted(features, self.by + sum(int(part["n"]) for part in more))
        return Made(made, features.lengths().cumsum(0)) if self.inside else made


class Program(nn.Module):
    """Calls three collections in the order, with the features and with the uses between that a test asks for.

    Args:
        calls: of each call, the collection, where its features come from, and whether its value is used at once.
    """

    def __init__(self, calls: Sequence[tuple[str, str, bool]]) -> None:
        super().__init__()
        self.calls = calls
        self.bags = nn.ModuleDict({name: collection(CONFIGS, optimizers="sgd", seed=1) for name in NAMES})
        self.first, self.second = Shift(1, inside=True), Shift(2)
        self.top = nn.Linear(1, 1)
        self.fails_at = -1

    def features(self, kind: str, batch: dict[str, Any]) -> KeyedJaggedTensor:
        given: KeyedJaggedTensor = batch["features"]
        if kind == "made":
            made = self.first(given)
            return self.second(made.features, more=[{"n": batch["n"]}])  # type: ignore[no-any-return]
        return shifted(given, 3) if kind == "inline" else given

    def forward(self, batch: dict[str, Any]) -> Tensor:
        total, pending = torch.zeros(()), []
        for place, (name, kind, is_used) in enumerate(self.calls):
            if place == self.fails_at:
                raise RuntimeError("breaks")
            pending.append(self.bags[name](self.features(kind, batch)))
            if is_used:
                total = total + sum(value.values().tanh().sum() for value in pending)
                pending = []
        if self.fails_at == len(self.calls):
            raise RuntimeError("breaks")
        total = total + sum(value.values().tanh().sum() for value in pending)
        output: Tensor = self.top(total.view(1, 1)).sum()
        return output


def sharded(calls: Sequence[tuple[str, str, bool]]) -> ShardedModel:
    torch.manual_seed(0)
    tables = {table: size for name in NAMES for table, size in table_sizes(CONFIGS, f"bags.{name}").items()}
    return shard(Program(calls), random_plan(Random(3), tables, Topology(ranks_per_host=dist.get_world_size())))


def batches(count: int) -> list[dict[str, Any]]:
    made = []
    for step in range(count):
        rng = Random(10 * step + dist.get_rank())
        made.append({"features": random_bags(rng, ROWS, 3).kjt(), "n": torch.tensor(step)})
    return made


def plain(model: ShardedModel, data: Iterable[Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.01)
    losses = []
    for one in data:
        optimizer.zero_grad()
        loss = model(one)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


CALLS = st.permutations(NAMES).flatmap(
    lambda names: st.tuples(
        *(st.tuples(st.just(name), st.sampled_from(["batch", "made", "inline"]), st.booleans()) for name in names)
    )
)
FAULTS = st.none() | st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 3))


@settings(max_examples=5)
@given(calls=CALLS, fault=FAULTS, depth=st.sampled_from([1, 2]))
def test_any_order_of_calls_makes_the_plain_steps(calls: Any, fault: Any, depth: int) -> None:
    """To the bit; and whichever rank's forward fails anywhere, in any step, all lose that batch alone."""

    def run() -> None:
        data = batches(6)
        kept = [one for step, one in enumerate(data) if fault is None or step != fault[0]]
        wanted = plain(sharded(calls), kept)
        model = sharded(calls)
        steps = TrainPipeline(model, torch.optim.SGD(model.dense_parameters(), lr=0.01), data, depth=depth)
        losses, errors = [], 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TrainPipeline exchanges no ids")
            for step in range(6):
                fails = fault is not None and (step, dist.get_rank()) == fault[:2]
                model.module.fails_at = fault[2] if fails else -1
                try:
                    losses.append(float(next(steps)))
                except (InputError, RuntimeError):
                    errors += 1
        assert losses == wanted
        assert errors == (fault is not None)

    ranks(2, run, timeout=60.0)


def test_post_processors_run_once_and_ahead() -> None:
    calls = (("a", "made", False), ("b", "batch", True), ("c", "made", False))

    def run() -> None:
        model = sharded(calls)
        runs = []

        def loss(model: nn.Module, batch: Any) -> Any:
            before = model.first.runs, model.second.runs
            result = model(batch)
            runs.append((model.first.runs - before[0], model.second.runs - before[1]))
            return result

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="TrainPipeline")
            steps = TrainPipeline(model, torch.optim.SGD(model.dense_parameters(), lr=0.01), batches(5), loss_fn=loss)
            losses = [float(loss) for loss in steps]
        assert losses == plain(sharded(calls), batches(5))
        assert runs == [(2, 2), (0, 0), (0, 0), (0, 0), (0, 0)]  # two calls of each, which the first step learns
        made = [model.module.first, model.module.second]
        assert steps.modules_ahead == [*made, *(model.module.bags[name] for name in NAMES)]

    ranks(2, run)


def test_features_of_trained_processors_travel_in_their_own_step() -> None:
    """Their weights are those after the last update; the other collections do not wait for them."""

    class Processed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = collection(CONFIGS, optimizers="sgd", seed=1)
            weighted = collection(CONFIGS, optimizers="sgd", seed=2, weighted=True)
            processors = PositionWeightedModuleCollection(dict.fromkeys(ROWS, 20))
            self.processed = FeatureProcessedEmbeddingBagCollection(weighted, processors)

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            plain, processed = self.plain(features), self.processed(features)
            output: Tensor = plain.values().tanh().sum() + processed.values().tanh().sum()
            return output

    def run() -> None:
        data = [one["features"] for one in batches(5)]
        losses = plain(shard(Processed()), data)
        model = shard(Processed())
        steps = TrainPipeline(model, torch.optim.SGD(model.dense_parameters(), lr=0.01), data)
        with pytest.warns(UserWarning, match="exchanges no ids of ShardedEmbeddingBagCollection ahead, because"):
            assert [float(loss) for loss in steps] == losses
        assert steps.modules_ahead == [model.module.plain]

    ranks(2, run)


def test_a_post_processor_that_fails_fails_in_its_own_step_on_all_ranks() -> None:
    class Refusing(Shift):
        def forward(self, features: KeyedJaggedTensor, **given: Any) -> Any:
            if given["more"][0]["n"] == 3 and dist.get_rank():
                raise ValueError("three is refused")
            return super().forward(features, **given)

    def run() -> tuple[list[int], str]:
        torch.manual_seed(0)
        model = Program((("a", "made", False), ("b", "batch", True), ("c", "batch", False)))
        model.second = Refusing(2)
        model = shard(model)
        steps = TrainPipeline(model, torch.optim.SGD(model.dense_parameters(), lr=0.01), batches(6))
        done, text = [], ""
        for step in range(6):
            try:
                next(steps)
                done.append(step)
            except (InputError, ValueError) as error:
                text = str(error)
        return done, text

    (done, told), (others, own) = ranks(2, run)
    assert done == others == [0, 1, 2, 4, 5]
    assert own == "three is refused"
    assert told == "rank 1: ValueError: three is refused"


def test_an_evaluation_between_steps_runs_its_own() -> None:
    calls = (("a", "made", False), ("b", "batch", True), ("c", "made", False))

    def run() -> None:
        model, reference = sharded(calls), sharded(calls)
        steps = TrainPipeline(model, torch.optim.SGD(model.dense_parameters(), lr=0.01), batches(4))
        losses, scores = [], []
        for loss in steps:
            losses.append(float(loss))
            scores.append([float(score) for score in steps.predict(batches(4))])
        wanted, expected = [], []
        optimizer = torch.optim.SGD(reference.dense_parameters(), lr=0.01)
        for one in batches(4):
            optimizer.zero_grad()
            loss = reference(one)
            loss.backward()
            optimizer.step()
            wanted.append(float(loss))
            with torch.no_grad():
                expected.append([float(reference(each)) for each in batches(4)])
        assert losses == wanted
        assert scores == expected

    ranks(2, run)


def found(batch: object, wanted: object) -> object:
    source = ForwardRecord(batch).source(wanted)
    return None if source is None else PostProcessed(batch).value(source)


def test_features_are_found_wherever_the_batch_holds_them() -> None:
    class Slotted:
        __slots__ = ("inside",)

    features = random_bags(Random(0), ROWS, 2).kjt()
    slotted = Slotted()
    slotted.inside = {"deep": [1, (features,)]}
    for value in (features, [features], {"a": (1, features)}, slotted):
        assert found(value, features) is features
    assert found([[[[[features]]]]], features) is None
    assert found(random_bags(Random(0), ROWS, 2).kjt(), features) is None


def test_features_that_a_batch_makes_when_it_is_asked() -> None:
    class Lazy:
        @cached_property
        def features(self) -> KeyedJaggedTensor:
            return random_bags(Random(0), ROWS, 2).kjt()

    batch, other = Lazy(), Lazy()
    record = ForwardRecord(batch)
    source = record.source(batch.features)
    assert source is not None
    assert PostProcessed(other).value(source) is other.features


def test_which_modules_may_run_ahead() -> None:
    """Not those that training changes, that use another precision in the forward, or whose output takes a gradient."""
    features = random_bags(Random(0), ROWS, 2).kjt()

    class Weighted(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.hidden = [weight]

        def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor(features.keys(), features.values(), self.hidden[0].expand(len(features.values())))

    weight = torch.ones(1, requires_grad=True)
    frozen = PositionWeightedModuleCollection(dict.fromkeys(ROWS, 20)).requires_grad_(False)
    kinds = {
        "frozen": frozen,
        "trained": PositionWeightedModuleCollection(dict.fromkeys(ROWS, 20)),
        "hidden": Weighted(weight),
        "none": Weighted(weight.detach()),
        "scripted": torch.jit.script(nn.Identity()),
    }
    model = nn.ModuleDict(kinds)
    record = ForwardRecord(features)
    with record.calls_of(model, torch.device("cpu")):
        for name in ("frozen", "trained", "hidden", "none"):
            model[name](features)
        model["scripted"](features.values())
        with torch.autocast("cpu"):
            model["none"](features)
    assert [call.module for call in record.calls] == [frozen, model["none"]]
    model["none"](features)
    assert len(record.calls) == 2


def test_features_that_the_forward_replaces_in_the_batch() -> None:
    """They are not taken from the batch. Those that it held before the forward are."""

    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.other = (collection(CONFIGS, optimizers="sgd", seed=seed) for seed in (1, 2))
            self.top = nn.Linear(1, 1)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            plain = self.plain(batch["features"])
            batch["features"] = shifted(batch["features"], 1)
            total = plain.values().tanh().sum() + self.other(batch["features"]).values().tanh().sum()
            output: Tensor = self.top(total.view(1, 1)).sum()
            return output

    def model() -> ShardedModel:
        torch.manual_seed(0)
        return shard(Replacing())

    def run() -> None:
        losses = plain(model(), batches(5))
        pipelined = model()
        steps = TrainPipeline(pipelined, torch.optim.SGD(pipelined.dense_parameters(), lr=0.01), batches(5))
        with pytest.warns(UserWarning, match="exchanges no ids of ShardedEmbeddingBagCollection ahead, because"):
            assert [float(loss) for loss in steps] == losses
        assert steps.modules_ahead == [pipelined.module.plain]

    ranks(2, run)


def test_a_step_in_another_mode_does_not_lose_the_post_processors() -> None:
    calls = (("a", "made", False), ("b", "batch", True), ("c", "made", False))

    def run() -> None:
        def loss(model: nn.Module, batch: Any) -> Any:
            is_third = int(batch["n"]) == 2
            with torch.set_grad_enabled(not is_third):
                result = model(batch)
            return result.detach().requires_grad_() if is_third else result

        model = sharded(calls)
        steps = TrainPipeline(model, torch.optim.SGD(model.dense_parameters(), lr=0.01), batches(7), loss_fn=loss)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TrainPipeline exchanges no ids ahead of this step")
            count = len([next(steps) for _ in range(6)])
        assert count == 6
        assert len(steps.modules_ahead) == 5

    ranks(1, run)


def test_another_argument_runs_the_module_again() -> None:
    features, shift = random_bags(Random(0), ROWS, 2).kjt(), Shift(1)
    model = nn.Sequential(shift)
    record = ForwardRecord([features])
    with record.calls_of(model, torch.device("cpu")):
        made = shift(features, more=[{"n": 2}])
    source = record.source(made)
    assert source is not None
    ahead = PostProcessed([features])
    output = ahead.value(source)
    with ahead.in_place():
        assert shift(features, more=[{"n": 3}]) is not output
        assert shift(features, more=[{"n": 2}]) is output
        assert shift(features, more=[{"n": 2}]) is not output, "it is returned once"
    assert "forward" not in vars(shift)
