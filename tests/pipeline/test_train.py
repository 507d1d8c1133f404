"""A loop that works ahead makes the plain loop's steps, and survives what the plain loop survives."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import DynamicIds
from shardrec.errors import ConfigError, InputError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.pipeline import TrainPipeline
from shardrec.trainer.data import ClickBatch
from tests.batches import random_bags
from tests.collective_counts import CollectiveOperators
from tests.models import apply_optimizer_in_backward, click_model, collection, table_sizes
from tests.modules.clicks import CONFIGS, ROWS, SIZES, batch, loss_fn, mixed_plan
from tests.pipeline.loops import clicks, pipeline_of, plain, weights, world
from tests.plans import random_plan
from tests.ranks import ranks


@pytest.mark.some(2)
@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_losses_and_weights_are_the_plain_loop_s_to_the_bit(n: int, optimizer: str) -> None:
    def run() -> None:
        rank, _ = world()
        batches = [batch(step, rank) for step in range(12)]
        model = clicks(optimizer=optimizer)
        wanted, last = plain(model, batches), weights(model)
        for depth in (0, 1, 2):
            model = clicks(optimizer=optimizer)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="TrainPipeline")
                losses = [float(loss) for loss in pipeline_of(model, batches, depth)]
            assert losses == wanted, f"depth {depth}"
            for one, other in zip(weights(model), last, strict=True):
                assert torch.equal(one, other), f"depth {depth}"

    ranks(n, run)


class TwoKinds(nn.Module):
    """Bags looked up twice and used in between, and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(CONFIGS, optimizers="sgd")
        configs = [EmbeddingConfig(name="s", num_embeddings=11, embedding_dim=8, feature_names=["z"])]
        self.rows = EmbeddingCollection(tables=configs)
        self.top = nn.Linear(1, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        first = self.bags(batch["pair"][0])
        rows = self.rows(batch["rows"])
        total = first.values().sum() + rows["z"].values().square().sum()
        second = self.bags(batch["pair"][1])
        output: Tensor = self.top((total * second.values().sum()).view(1, 1)).sum()
        return output


def test_several_modules_and_exchanges_in_a_forward() -> None:
    def run() -> None:
        rank, size = world()

        def batches() -> Iterator[dict[str, Any]]:
            for step in range(6):
                rng = Random(10 * step + rank)
                pair = (random_bags(rng, ROWS, 3).kjt(), random_bags(rng, ROWS, 2).kjt())
                yield {"pair": pair, "rows": random_bags(rng, {"z": 11}, 3).kjt()}

        def model() -> ShardedModel:
            tables = {**table_sizes(CONFIGS, "bags"), "rows.s": (11, 8)}
            return shard(TwoKinds(), random_plan(Random(1), tables, Topology(ranks_per_host=size)))

        torch.manual_seed(0)
        wanted = plain(one := model(), batches(), nn.Module.__call__)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="TrainPipeline")
            other = model()
            losses = [float(loss) for loss in pipeline_of(other, batches(), 2, None)]
        assert losses == wanted
        for mine, theirs in zip(weights(other), weights(one), strict=True):
            assert torch.equal(mine, theirs)

    ranks(2, run)


class KeptBranch(nn.Module):
    """Looks up bags and rows of one branch in a mode that may differ from step to step, and trains the other.

    Args:
        is_first: the calls of the kept branch are the first ones, whose rows a pipeline looks up early.
    """

    def __init__(self, optimizer: str, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.kept, self.trained = (collection(CONFIGS, optimizers=optimizer) for _ in range(2))
        configs = [EmbeddingConfig(name="s", num_embeddings=11, embedding_dim=8, feature_names=["tag"])]
        self.rows = EmbeddingCollection(tables=configs)
        apply_optimizer_in_backward(torch.optim.SGD, self.rows.parameters(), {"lr": 0.1})
        self.top = nn.Linear(1, 1)

    def forward(self, sparse: KeyedJaggedTensor, mode: Any) -> Tensor:
        total = torch.zeros(()) if self.is_first else self.trained(sparse).values().sum()
        with mode():
            kept, rows = self.kept(sparse), self.rows(sparse)
            fixed = kept.values().sum() + rows["tag"].values().square().sum()
        if self.is_first:
            total = self.trained(sparse).values().sum()
        output: Tensor = self.top((fixed.clone() + total).view(1, 1)).sum()
        return output


def kept_branch(optimizer: str, is_first: bool) -> ShardedModel:
    torch.manual_seed(0)
    size = dist.get_world_size()
    plans = [mixed_plan(size, path).tables for path in ("kept", "trained")]
    rows = cuts.row_wise("rows.s", 11, 8, ranks=range(size))
    plan = ShardingPlan(topology=Topology(ranks_per_host=size), tables=(*plans[0], *plans[1], rows))
    return shard(KeptBranch(optimizer, is_first), plan, dynamic_ids={"rows.s": DynamicIds(fallback_rows=1)})


def assert_kept_branch_equals_plain(optimizer: str, is_first: bool, loss: Any, steps: int) -> None:
    results = []
    for depth in (None, 2):
        model = kept_branch(optimizer, is_first)
        batches = [(step, batch(step, dist.get_rank()).sparse) for step in range(steps)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TrainPipeline")  # of modes that change
            if depth is None:
                losses = plain(model, batches, loss)
            else:
                losses = [float(one) for one in pipeline_of(model, batches, depth, loss)]
        results.append((losses, model.id_stats(), [weight.tolist() for weight in weights(model)]))
    assert results[0] == results[1]


@pytest.mark.parametrize(("mode", "is_first"), [(torch.no_grad, True), (torch.inference_mode, False)])
def test_a_lookup_without_gradients_is_not_trained(mode: Any, is_first: bool) -> None:
    def loss(model: nn.Module, part: Any) -> Tensor:
        output: Tensor = model(part[1], mode)
        return output

    ranks(2, assert_kept_branch_equals_plain, "adam", is_first, loss, 4)


MODES = {1: torch.no_grad, 3: torch.inference_mode}


def changing_modes(model: Any, part: tuple[int, KeyedJaggedTensor]) -> Tensor:
    step, sparse = part
    model.rows.train(step not in (2, 5))  # dynamic ids are learned in training mode
    output: Tensor = model(sparse, MODES.get(step % 4, torch.enable_grad))
    return output


@pytest.mark.some(1)
@pytest.mark.parametrize("n", [1, 2])
def test_the_forward_s_modes_decide_what_a_lookup_trains(n: int) -> None:
    """Modes change between steps, after ids were sent ahead in those of a step before."""
    ranks(n, assert_kept_branch_equals_plain, "adam", False, changing_modes, 7)


def test_rows_that_were_looked_up_early_in_another_mode_are_refused() -> None:
    def run() -> None:
        model = kept_branch("adam", True)
        batches = [(step, batch(step, dist.get_rank()).sparse) for step in (0, 4, 4, 1)]
        steps = pipeline_of(model, batches, 2, changing_modes)
        for _ in range(3):
            next(steps)
        before = weights(model)
        words = r"tables '.*' is called in another mode \(torch.no_grad, .*\) than in the steps before"
        with pytest.raises(ConfigError, match=words):
            next(steps)
        assert all(map(torch.equal, weights(model), before))

    ranks(2, run)


def test_no_collective_is_added() -> None:
    def run() -> list[int]:
        rank, _ = world()
        counts = []
        for depth in (0, 2):
            steps = pipeline_of(clicks(), (batch(step, rank) for step in range(9)), depth)
            for _ in range(3):
                next(steps)
            with CollectiveOperators() as counted:
                next(steps)
            counts.append(sum(counted.values()))
        return counts

    for before, after in ranks(2, run):
        assert before == after > 0


def test_ids_travel_while_the_batch_before_goes_back() -> None:
    def run() -> None:
        rank, _ = world()
        orders = {}
        for depth in (0, 1):
            model, order = clicks(), []
            send, exchange = model.context.collectives.send, model.context.collectives.header_with_ids

            def noted_header(*arguments: Any, exchange=exchange, order=order) -> Any:
                order.append("header")
                return exchange(*arguments)

            def noted(parts: Any, receive: Any, what: str, streams: Any = None, *, send=send, order=order) -> Any:
                order.append(what)
                pending = send(parts, receive, what, streams)
                wait = lambda: (order.append(f"{what} is there"), pending.wait())[1]  # noqa: E731
                return SimpleNamespace(wait=wait, way_back=getattr(pending, "way_back", None))

            def loss(model: nn.Module, one: ClickBatch, *, order=order) -> Tensor:
                value = loss_fn(model, one)
                value.register_hook(lambda _: order.append("backward"))
                return value

            model.context.collectives.send, model.context.collectives.header_with_ids = noted, noted_header
            steps = pipeline_of(model, [batch(step, rank) for step in range(5)], depth, loss)
            next(steps)
            next(steps)
            order.clear()
            next(steps)
            orders[depth] = order[: order.index("backward") + 1]
        assert orders[0] == ["header", "output", "output is there", "backward"]
        assert orders[1] == ["output", "output is there", "header", "backward"]

    ranks(2, run)


def test_rows_travel_while_the_dense_features_are_computed() -> None:
    """Of a model that computes them before it calls its tables, as DLRM does."""

    def run() -> None:
        rank, _ = world()
        batches = [batch(step, rank) for step in range(6)]
        wanted = plain(clicks(dense_first=True), batches)
        for depth in (1, 2):
            model, order = clicks(dense_first=True), []
            model.bottom.register_forward_pre_hook(lambda *_, order=order: order.append("bottom"))
            send = model.context.collectives.send

            def noted(parts: Any, receive: Any, what: str, streams: Any = None, *, send=send, order=order) -> Any:
                order.append(what)
                return send(parts, receive, what, streams)

            model.context.collectives.send = noted
            steps = pipeline_of(model, batches, depth)
            losses = [float(next(steps)) for _ in range(3)]
            order.clear()
            losses += [float(loss) for loss in steps]
            assert losses == wanted
            assert order[:2] == ["output", "bottom"]

    ranks(2, run)


@pytest.mark.parametrize("depth", [0, 2])
def test_each_loop_is_a_pass_over_the_dataloader(depth: int) -> None:
    def run() -> None:
        rank, _ = world()
        batches = [batch(step, rank) for step in range(3)]
        wanted = plain(clicks(), [*batches, *batches, *batches])
        steps = pipeline_of(clicks(), batches, depth)
        losses = [float(loss) for _ in range(2) for loss in steps]
        losses += [float(next(iter(steps))) for _ in range(2)]  # a loop that was left goes on
        steps.close()
        assert losses == wanted[:8]
        assert len(list(steps)) == 3
        assert next(steps, None) is None, "only a loop begins a pass"

    ranks(2, run)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_without_a_further_pass_is_refused_on_every_rank(depth: int) -> None:
    def run() -> str:
        rank, _ = world()
        batches: Iterable[Any] = [batch(step, rank) for step in range(2)]
        steps = pipeline_of(clicks(), (one for one in batches) if rank else batches, depth)
        assert len(list(steps)) == 2
        with pytest.raises((ConfigError, InputError)) as raised:
            next(iter(steps))
        return f"{raised.type.__name__}: {raised.value}"

    other, own = ranks(2, run)
    assert own.startswith(
        "ConfigError: the dataloader of this TrainPipeline, a generator, has no batch for another loop"
    )
    assert other == own.replace("ConfigError:", "InputError: rank 1:")


def test_evaluation_and_prediction_between_steps() -> None:
    def run() -> None:
        rank, _ = world()
        held_out = [batch(50 + step, rank) for step in range(3)]
        batches = [batch(step, rank) for step in range(5)]
        model = clicks()
        wanted = plain(model, batches)
        with torch.no_grad():
            scores = [model(one.dense, one.sparse) for one in held_out]
            expected = [float(loss_fn(model, one)) for one in held_out]
        model = clicks()
        steps = pipeline_of(model, batches, 2)
        losses = []
        for loss in steps:
            losses.append(float(loss))
            # While the next training batch is under way.
            evaluated = [float(one) for one in steps.evaluate(held_out)]
            predicted = list(steps.predict(held_out, lambda model, one: model(one.dense, one.sparse)))
            assert model.training
            assert not any(one.requires_grad for one in predicted)
            model(batches[0].dense, batches[0].sparse)
        assert losses == wanted
        assert evaluated == expected
        for one, other in zip(predicted, scores, strict=True):
            assert torch.equal(one, other)

    ranks(2, run)


def test_frozen_modules_stay_in_evaluation_mode_after_an_evaluation() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1).eval(), nn.Linear(1, 1))
    steps = TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), [])
    for _ in steps.predict([torch.ones(2, 1)]):
        assert [module.training for module in model.modules()] == [True, False, True]
        model.eval()  # which stays, too
    assert not any(module.training for module in model.modules())


def test_a_loop_that_ends_early_lets_go_of_what_is_under_way() -> None:
    def run() -> None:
        rank, _ = world()
        model = clicks()
        steps = pipeline_of(model, (batch(step, rank) for step in range(9)), 2)
        losses = [float(next(steps)) for _ in range(4)]
        assert model.context.headers.exchanged == 5, "the ids of the fifth batch are under way"
        steps.close()
        assert next(steps, None) is None
        losses += [float(loss) for loss in pipeline_of(model, [batch(step, rank) for step in range(4, 6)], 2)]
        assert len(losses) == 6

    ranks(2, run)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_bad_ids_are_counted_once_where_they_are_used(depth: int) -> None:
    """Not where they were exchanged ahead, for a plan that has changed since, or for a step that is not made."""

    def run() -> None:
        model = shard(click_model(CONFIGS), mixed_plan(2), on_bad_id="zero")
        batches = [batch(step, world()[0]) for step in range(6)]
        for each in batches:
            each.sparse.values()[:2] = 10**6
        bad = [int((each.sparse.values() == 10**6).sum()) for each in batches]
        steps, other = pipeline_of(model, batches, depth), random_plan(Random(2), SIZES, model.plan.topology)
        for number, _ in enumerate(steps, 1):
            if number == 2:
                model.reshard(other)
        assert sum(model.bad_ids().values()) == sum(bad)
        for number, _ in enumerate(steps, 1):
            if number == 4:
                break
        steps.close()
        assert sum(model.bad_ids().values()) == sum(bad) + sum(bad[:4])

    ranks(2, run)


class Breaking(torch.autograd.Function):
    """Of whose backward the parameters above it have their gradients, and the others none."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise ArithmeticError
        return gradient, None


def test_a_backward_that_raises_leaves_nothing_to_the_next_update() -> None:
    """It is made of the batches after it, as if those before it in its update had not come."""

    def trained(broken: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        batches = [(number == broken, torch.ones(2, 4) * number) for number in range(7)]
        kept = batches if broken < 7 else batches[broken - 7 :]
        pipeline = TrainPipeline(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            kept,
            loss_fn=lambda model, batch: model[1](Breaking.apply(model[0](batch[1]), batch[0])).sum(),
            accumulate=3,
        )
        steps = iter(pipeline)
        for breaks, _ in kept:
            with pytest.raises(ArithmeticError) if breaks else nullcontext():
                next(steps)
        return weights(model)

    for after_it, expected in zip(trained(broken=1), trained(broken=9), strict=True):
        assert torch.equal(after_it, expected)


def test_gradients_of_the_last_step_stay() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = TrainPipeline(model, optimizer, [torch.ones(3, 2)] * 2, loss_fn=lambda model, x: model(x).sum(), depth=1)
    assert len(list(steps)) == 2
    assert model.bias.grad is not None


def test_it_says_once_that_nothing_is_exchanged_ahead() -> None:
    def run() -> None:
        rank, _ = world()

        def makes(model: nn.Module, one: ClickBatch) -> Tensor:
            made = KeyedJaggedTensor(keys=one.sparse.keys(), values=one.sparse.values(), lengths=one.sparse.lengths())
            return binary_cross_entropy_with_logits(model(one.dense, made), one.labels)

        batches = [batch(step, rank) for step in range(4)]
        wanted = plain(clicks(), batches, makes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = [float(loss) for loss in pipeline_of(clicks(), batches, 2, makes)]
        texts = [str(one.message) for one in caught if "TrainPipeline" in str(one.message)]
        assert losses == wanted
        assert len(texts) == 1
        assert "exchanges no ids of ShardedEmbeddingBagCollection ahead, because the forward makes" in texts[0]

    ranks(2, run)


def test_a_model_that_changes_its_calls_is_followed() -> None:
    def run() -> None:
        rank, _ = world()

        def sometimes_twice(model: nn.Module, one: ClickBatch) -> Tensor:
            state["step"] += 1
            loss = loss_fn(model, one)
            return loss + loss_fn(model, one) if state["step"] in (3, 4) else loss

        batches = [batch(step, rank) for step in range(8)]
        state = {"step": 0}
        wanted = plain(clicks(), batches, sometimes_twice)
        state = {"step": 0}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = [float(loss) for loss in pipeline_of(clicks(), batches, 2, sometimes_twice)]
        assert losses == wanted
        assert len([one for one in caught if "otherwise than in the step before" in str(one.message)]) == 1

    ranks(2, run)


def test_a_model_without_tables() -> None:
    model = nn.Linear(2, 1)
    steps = TrainPipeline(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [torch.ones(3, 2)] * 3,
        loss_fn=lambda model, x: (model(x).sum(), x),
    )
    assert len([loss for loss, _ in steps]) == 3
    assert next(steps, None) is None


def test_depths() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"depth is 3: give 0 \(the plain loop\), 1 or 2"):
        TrainPipeline(model, [], [], depth=3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_losses_are_the_plain_loop_s() -> None:
    def losses(depth: int) -> list[float]:
        model = shard(click_model(CONFIGS), mixed_plan(1), device="cuda")
        return [float(loss) for loss in pipeline_of(model, [batch(step, 0) for step in range(8)], depth)]

    first = losses(0)
    assert losses(1) == first
    assert losses(2) == first
