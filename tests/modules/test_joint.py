"""Several sharded collections in one model: one exchange for those that are ready together, and the same values."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError, ShardrecError
from shardrec.layout import ShardingPlan
from shardrec.modules import ShardedModel, shard
from tests.batches import joined, random_bags
from tests.collective_counts import CountCollectives
from tests.executors import executed
from tests.models import apply_optimizer_in_backward, collection
from tests.modules.tables import local_part
from tests.plans import cut_plan, random_plan, sums_inside_hosts, topologies_of
from tests.ranks import ranks

ROWS = {"a": 13, "b": 7, "c": 29}
BAGS = [
    EmbeddingBagConfig(name="t0", num_embeddings=13, embedding_dim=8, feature_names=["a"]),
    EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=12, feature_names=["b"]),
]
OTHER_BAGS = [EmbeddingBagConfig(name="t0", num_embeddings=29, embedding_dim=16, feature_names=["c"])]
SEQUENCES = [
    EmbeddingConfig(name="s0", num_embeddings=13, embedding_dim=8, feature_names=["a"]),
    EmbeddingConfig(name="s1", num_embeddings=29, embedding_dim=8, feature_names=["c"]),
]
SHAPES = {
    **{f"left.{one.name}": (one.num_embeddings, one.embedding_dim) for one in BAGS},
    **{f"right.0.{one.name}": (one.num_embeddings, one.embedding_dim) for one in OTHER_BAGS},
    **{f"words.{one.name}": (one.num_embeddings, one.embedding_dim) for one in SEQUENCES},
}


class Three(nn.Module):
    """Two bag collections, one of them in a list, and a sequence collection.

    Args:
        order: in which their values are first used, after all of them are called: letters l, r, w; ``|`` at the start
            uses each value before the next call.
    """

    def __init__(self, order: str = "lrw", optimizer: str = "sgd") -> None:
        super().__init__()
        self.order = order
        self.left = collection(BAGS, optimizers=optimizer, seed=1)
        self.right = nn.ModuleList([collection(OTHER_BAGS, optimizers=optimizer, seed=2)])
        torch.manual_seed(3)
        self.words = EmbeddingCollection(tables=SEQUENCES)
        if optimizer != "none":
            cls = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adagrad
            apply_optimizer_in_backward(cls, self.words.parameters(), {"lr": 0.5})
        self.dense = nn.Linear(2, 1, bias=False)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        calls = {"l": self.left, "r": self.right[0], "w": self.words}
        total = torch.zeros(())
        if self.order.startswith("|"):
            for name in self.order[1:]:
                total = total + self.use(name, calls[name](features))
            return total
        pending = {name: module(features) for name, module in calls.items()}
        for name in self.order:
            total = total + self.use(name, pending[name])
        return total

    def use(self, name: str, value: Any) -> Tensor:
        """A sum of squares, in which each value matters."""
        if name != "w":
            values: Tensor = value.values()
            return values.square().sum() + self.dense.weight.sum() * values.sum()
        return sum((one.values().square().sum() for one in value.values()), torch.zeros(()))


def plan_for(rng: Random, world_size: int, optimizer: str = "sgd") -> ShardingPlan:
    return random_plan(rng, SHAPES, rng.choice(topologies_of(world_size)))


def assert_same_weights(model: ShardedModel, reference: Three) -> None:
    for name, whole in reference.named_parameters():
        if name.startswith("dense"):
            continue
        path, table, _ = name.rsplit(".", 2)
        module: Any = model.module.get_submodule(path.rsplit(".", 1)[0] if "." in path else path)
        for place, part in module.tables()[table].locals.items():
            expected = whole
            if place is not None:
                expected = whole[place.row_start : place.row_end, place.col_start : place.col_end]
            assert torch.allclose(part, expected, atol=1e-4), f"{name} {place}"


def train_both(model: ShardedModel, reference: Three, rng: Random, steps: int = 3) -> list[dict[str, int]]:
    """Train both; the reference on the global batch. Returns this rank's collectives of each step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for _ in range(steps):
        batches = [random_bags(rng, ROWS, rng.choice([0, 1, 3])) for _ in range(world_size)]
        reference.zero_grad()
        model.zero_grad()
        with CountCollectives() as counts:
            loss = model(batches[rank].kjt())
        forward = counts["all_to_all"]
        with CountCollectives() as counts:
            loss.backward()
        found.append({"forward": forward, "backward": counts["all_to_all"]})
        expected = reference(joined(batches).kjt()) if sum(one.size for one in batches) else None
        total = loss.detach().clone()
        dist.all_reduce(total)
        if expected is not None:
            assert torch.allclose(total, expected, rtol=1e-4, atol=1e-4)
            (expected / world_size).backward()
    return found


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_three_collections_share_one_exchange(world_size: int) -> None:
    def rank_main() -> None:
        for number, order in enumerate(["lrw", "wrl", "rwl"]):
            # Two ranks take every pair, the others each order and each optimizer.
            for optimizer in ("sgd", "adagrad") if world_size == 2 else [("sgd", "adagrad")[number % 2]]:
                rng = Random(number)
                plan = plan_for(rng, world_size)
                model, reference = shard(Three(order, optimizer), plan), Three(order, optimizer)
                counts = train_both(model, reference, rng)
                assert_same_weights(model, reference)
                bags = [layout for layout in plan.tables if not layout.name.startswith("words")]
                inside = sums_inside_hosts(ShardingPlan(topology=plan.topology, tables=tuple(bags)))
                if world_size > 1:
                    assert counts == [{"forward": 2 + inside, "backward": 1 + inside}] * 3, order

    ranks(world_size, rank_main)


def test_values_used_before_the_next_call_are_exchanged_by_themselves() -> None:
    def rank_main() -> None:
        rng = Random(1)
        model, reference = shard(Three("|lrw"), plan_for(rng, 2)), Three("|lrw")
        assert train_both(model, reference, rng) == [{"forward": 6, "backward": 3}] * 3
        assert_same_weights(model, reference)

    ranks(2, rank_main)


def test_a_value_that_is_not_used_still_comes_back_with_zero_gradient() -> None:
    def rank_main() -> None:
        # A replicated table without a gradient is one that DistributedDataParallel waits for.
        rng = Random(2)
        plans = (plan_for(rng, 2) for _ in range(99))
        plan = next(plan for plan in plans if not any(layout.replicated for layout in plan.tables))
        model, reference = shard(Three("rl"), plan), Three("rl")
        assert train_both(model, reference, rng) == [{"forward": 2, "backward": 1}] * 3
        assert_same_weights(model, reference)

    ranks(2, rank_main)


class Twice(nn.Module):
    """One collection for queries and for candidates.

    Args:
        apart: use the first value before the second call.
        optimizer: of the tables.
        reference: that a sharded model is compared with.
    """

    def __init__(self, *, apart: bool, optimizer: str = "sgd", reference: bool = False) -> None:
        super().__init__()
        self.apart = apart
        self.left = collection(BAGS, optimizers=optimizer, seed=1, reference=reference)

    def forward(self, query: KeyedJaggedTensor, candidate: KeyedJaggedTensor) -> Tensor:
        if self.apart:
            first = self.left(query).values().sin()
            return first + self.left(candidate).values().square()
        query_values, candidate_values = self.left(query), self.left(candidate)
        return query_values.values().sin() + candidate_values.values().square()


@pytest.mark.parametrize("apart", [False, True])
def test_one_collection_called_twice(apart: bool) -> None:
    """In the first forward nobody knows that a second call will come; from the second on they share."""

    def rank_main() -> None:
        rank = dist.get_rank()
        rng = Random(3)
        shapes = {name: shape for name, shape in SHAPES.items() if name.startswith("left")}
        model = shard(Twice(apart=apart), random_plan(rng, shapes, topologies_of(2)[0]))
        reference = Twice(apart=apart)
        for step in range(3):
            queries, candidates = ([random_bags(rng, ROWS, 2, shuffled=False) for _ in range(2)] for _ in range(2))
            with CountCollectives() as counts:
                values = model(queries[rank].kjt(), candidates[rank].kjt())
            assert counts["all_to_all"] == (2 if step and not apart else 4)
            with CountCollectives() as counts:
                values.sum().backward()
            assert counts["all_to_all"] == (1 if step and not apart else 2)
            expected = reference(joined(queries).kjt(), joined(candidates).kjt())
            assert torch.allclose(values, expected[2 * rank : 2 * rank + 2], atol=1e-5)
            (expected.sum() / 2).backward()
        for name, table in model.module.left.tables().items():  # type: ignore[union-attr]
            whole = reference.left.embedding_bags[name].weight  # type: ignore[union-attr]
            for place, part in table.locals.items():
                if place is not None:
                    whole = whole[place.row_start : place.row_end, place.col_start : place.col_end]
                assert torch.allclose(part, whole, atol=1e-4)
                whole = reference.left.embedding_bags[name].weight  # type: ignore[union-attr]

    ranks(2, rank_main)


def called_twice(optimizer: str, update: str, executor: str, apart: bool, kernels: str) -> None:
    """Beside the unsharded model, under cuts of every kind at once."""
    os.environ["SHARDREC_KERNELS"] = kernels
    rank, world_size, rng = dist.get_rank(), dist.get_world_size(), Random(f"{optimizer} {update}")
    shapes = {name: shape for name, shape in SHAPES.items() if name.startswith("left")}
    for cut in ("row_wise", "column_wise", "data_parallel"):
        plan = cut_plan(cut, rng, shapes, topologies_of(world_size)[0])
        model = shard(Twice(apart=apart, optimizer=optimizer), plan, update=update)
        program = executed(model, executor)
        reference = Twice(apart=apart, optimizer=optimizer, reference=True)
        for _ in range(2):
            batches = [[random_bags(rng, ROWS, 2, shuffled=False) for _ in range(2)] for _ in range(world_size)]
            program(*(one.kjt() for one in batches[rank])).sum().backward()
            if update == "step":
                model.fused_optimizer.step()
                model.fused_optimizer.zero_grad()
            expected = reference(*(joined(list(of_ranks)).kjt() for of_ranks in zip(*batches, strict=True)))
            (expected.sum() / world_size).backward()
        for name, table in model.module.left.tables().items():  # type: ignore[union-attr]
            whole = reference.left.embedding_bags[name].weight.detach()  # type: ignore[union-attr]
            for place, part in table.locals.items():
                torch.testing.assert_close(part.detach(), local_part(whole, place), atol=1e-4, rtol=1e-4)


@pytest.mark.some(2)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("executor", ["eager", pytest.param("traced", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", ["", "fbgemm"])
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam"])
def test_a_collection_that_is_called_twice_is_updated_once(
    optimizer: str, update: str, kernels: str, executor: str, apart: bool
) -> None:
    """With the sum of both gradients, whether or not the calls share an exchange."""
    ranks(2, called_twice, optimizer, update, executor, apart, kernels)


class Choosy(nn.Module):
    """Calls and uses its collections in a way that changes with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.left = collection(BAGS, optimizers="sgd", seed=1)
        self.right = nn.ModuleList([collection(OTHER_BAGS, optimizers="sgd", seed=2)])
        self.plan = ""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        modules = {"l": self.left, "r": self.right[0]}
        pending: list[Any] = []
        total = torch.zeros(())
        for what in self.plan:
            if what == "!":
                total = total + sum((one.values().square().sum() for one in pending), torch.zeros(()))
                pending = []
            else:
                pending.append(modules[what](features))
        return total


def test_a_model_that_changes_its_habits_gets_the_right_values() -> None:
    def rank_main() -> None:
        rank = dist.get_rank()
        rng = Random(4)
        shapes = {name: shape for name, shape in SHAPES.items() if not name.startswith("words")}
        model, reference = shard(Choosy(), random_plan(rng, shapes, topologies_of(2)[0])), Choosy()
        for plan in ["lr!", "l!r!", "r!", "lrlrl!", "lrlrlrlrlrlr!", "llllllllll!r!", "", "rl!l!", "lr"]:
            model.module.plan = reference.plan = plan  # type: ignore[assignment]
            for grad in (True, False):
                batches = [random_bags(rng, ROWS, 2, shuffled=False) for _ in range(2)]
                with torch.set_grad_enabled(grad):
                    value = model(batches[rank].kjt())
                    assert torch.allclose(value, reference(batches[rank].kjt()), rtol=1e-4, atol=1e-4), plan
                if value.requires_grad:
                    value.backward()
                    (sum(reference(batch.kjt()) for batch in batches) / 2).backward()

    ranks(2, rank_main)


class Left(nn.Module):
    """Returns pending values."""

    def __init__(self) -> None:
        super().__init__()
        self.left = collection(BAGS, optimizers="sgd", seed=1)
        self.right = nn.ModuleList([collection(OTHER_BAGS, optimizers="sgd", seed=2)])

    def forward(self, features: KeyedJaggedTensor, fail: bool = False) -> Any:
        first = self.left(features)
        if fail:
            self.kept = first
            raise ValueError("no luck")
        return first, self.right[0](features)


def test_pending_values_leave_the_forward_and_are_used_in_any_mode() -> None:
    def rank_main() -> None:
        shapes = {name: shape for name, shape in SHAPES.items() if not name.startswith("words")}
        plan = random_plan(Random(7), shapes, topologies_of(2)[0])
        model = shard(Left(), plan)
        features = random_bags(Random(8 + dist.get_rank()), ROWS, 2).kjt()
        expected = [one.values() for one in Left()(features)]
        first, second = model(features)
        with torch.no_grad():
            assert torch.allclose(second.values(), expected[1], atol=1e-5)
        assert second.values().requires_grad
        with torch.inference_mode():
            assert torch.allclose(first.values(), expected[0], atol=1e-5)
        (first.values().sum() + second.values().sum()).backward()

        with torch.inference_mode():
            first, second = model(features)
        assert not (first.values().requires_grad or second.values().requires_grad)

        # An error of the model's own between the calls is every rank's, at the same step; the pending value says so.
        with pytest.raises((InputError, ValueError), match="no luck"):
            model(features, fail=dist.get_rank() == 1)
        if dist.get_rank() == 1:
            with pytest.raises(ShardrecError, match="failed before this lookup was exchanged: no luck"):
                model.module.kept.values()
        first, second = model(features)
        (first.values().sum() + second.values().sum()).backward()

    ranks(2, rank_main)


def test_bad_input_of_any_collection_is_named() -> None:
    def rank_main() -> None:
        model = shard(Three(), plan_for(Random(11), 2))
        good = random_bags(Random(0), ROWS, 2, shuffled=False).kjt()
        bad = KeyedJaggedTensor(keys=["a", "b", "c"], values=torch.tensor([0, 0, 99]), lengths=torch.tensor([1, 1, 1]))
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        for _ in range(2):
            with pytest.raises(InputError) as caught:
                model(bad if dist.get_rank() == 1 else good)
            assert "rank 1: feature 'c' of table 'right.0.t0': id 99 in sample 0 is outside" in str(caught.value)
            assert "of table 'words.s1'" in str(caught.value)
        for name, one in model.named_parameters():
            assert torch.equal(one, before[name])
        model(good).backward()

    ranks(2, rank_main)
