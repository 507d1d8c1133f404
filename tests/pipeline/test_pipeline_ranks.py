"""A pipeline of several ranks gives what the sequential gives, and fails on all of them together."""

from __future__ import annotations

import copy
import os
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError, InputError, PeerError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedEmbeddingBagCollection
from shardrec.pipeline import Pipeline, PipelineError
from shardrec.pipeline.skip.routes import skip_routes
from tests.pipeline.networks import BrokenBackward, Counts, Fails, failures_told, nested, network, two_skips
from tests.pipeline.skip.layers import popping, stashing
from tests.ranks import raises_on_all, ranks

BALANCES = {1: [8], 2: [5, 3], 3: [2, 3, 3], 4: [2, 2, 2, 2]}


def batch(samples: int = 10, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(samples, size, generator=generator).double() for size in (4, 2))  # type: ignore[return-value]


def piped(model: nn.Sequential, balance: list[int], **options: Any) -> Pipeline:
    return Pipeline(model, balance, group=dist.group.WORLD, **options)


def train_both(steps: int, schedule: Any, checkpoint: Any) -> None:
    """Some steps of plain and of pipelined training, with mini-batches of several sizes."""
    model = network()
    balance = BALANCES[dist.get_world_size()]
    pipeline = piped(copy.deepcopy(model), balance, chunks=4, schedule=schedule, checkpoint=checkpoint)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, pipeline)]
    for step in range(steps):
        x, y = batch(samples=2 + step % 7, seed=step)
        loss = mse_loss(model(x), y)
        loss.backward()
        # Only the first stage needs the input, and the last one the target.
        first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
        piped_loss = pipeline.step(x if first else None, y if last else None, loss_fn=mse_loss)
        torch.testing.assert_close(piped_loss, loss.detach(), rtol=1e-6, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = model.state_dict()
    own = pipeline.state_dict()
    torch.testing.assert_close(own, {name: wanted[name] for name in own}, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        output = pipeline(x)
    assert (output is not None) == last
    if last:
        torch.testing.assert_close(output, model(x).detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("n", "schedule", "checkpoint"),
    [(1, "1f1b", "always"), (2, "1f1b", "except_last"), (3, "gpipe", "always"), (3, "1f1b", "never")],
)
def test_training_equals_plain_training(n: int, schedule: str, checkpoint: str) -> None:
    ranks(n, train_both, 8, schedule, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 4])
def test_fifty_steps_of_each_schedule_and_checkpointing_mode(n: int) -> None:
    def every() -> None:
        for schedule, checkpoint in product(["gpipe", "1f1b"], ["always", "except_last", "never"]):
            train_both(50, schedule, checkpoint)

    ranks(n, every)


def test_a_pipeline_on_some_of_the_ranks() -> None:
    """Rank 0 does something else meanwhile, by other collectives."""

    def run() -> None:
        stages, beside = dist.new_group([1, 2]), dist.new_group([0, 1])
        model, (x, y) = network(), batch()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3), group=beside)
            return
        pipeline = Pipeline(copy.deepcopy(model), [5, 3], group=stages, chunks=2)
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(3), group=beside)
        mse_loss(model(x), y).backward()
        pipeline.step(x, y, loss_fn=mse_loss)
        expected = dict(model.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-6, atol=1e-9)

    ranks(3, run)


def test_namespaces_nests_and_none() -> None:
    def one(make: Any, balance: list[int]) -> None:
        model, (x, _) = make(), batch()
        pipeline = piped(copy.deepcopy(model), balance, chunks=3)

        def loss_fn(output: Tensor, _: Any) -> Tensor:
            return output.square().sum()

        loss = sum(loss_fn(model(part), None) for part in (x[:4], x[4:7], x[7:]))
        loss.backward()  # type: ignore[union-attr]
        torch.testing.assert_close(pipeline.step(x, loss_fn=loss_fn, reduction="sum"), loss.detach())  # type: ignore[union-attr]
        wanted = dict(model.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad)

    def both() -> None:
        one(two_skips, [3, 2, 3])
        one(nested, [2, 1, 3])

    ranks(3, both)


def test_between_stages_that_a_skip_jumps_over_no_bytes_are_added() -> None:
    def sent(width: int) -> dict[int, int]:
        before = [nn.Linear(4, width), stashing("a"), nn.Linear(width, 4)]
        after = [nn.Linear(4, width), popping("a")]
        pipeline = piped(nn.Sequential(*before, nn.Linear(4, 4), *after), [3, 1, 2], chunks=2)
        pipeline.step(torch.ones(6, 4), loss_fn=lambda output, _: output.sum())
        return pipeline.sent_bytes

    narrow, wide = ranks(3, sent, 8), ranks(3, sent, 32)
    bytes_of = lambda columns: 6 * columns * 4  # noqa: E731
    assert narrow == [
        {1: bytes_of(4), 2: bytes_of(8)},
        {2: bytes_of(4), 0: bytes_of(4)},
        {1: bytes_of(4), 0: bytes_of(8)},
    ]
    assert wide[1] == narrow[1]
    assert wide[0] == {1: bytes_of(4), 2: bytes_of(32)}


@pytest.mark.some(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_failing_stage_fails_on_every_rank_and_the_next_batch_works(schedule: Any) -> None:
    def run() -> list[str]:
        x, y = batch()
        layers: list[nn.Module] = [nn.Linear(4, 2)]
        for _ in range(3):
            layers += [Fails(), BrokenBackward(), nn.Tanh()]
        pipeline = piped(nn.Sequential(*layers).double(), [4, 3, 3], chunks=4, schedule=schedule)
        seen = []
        for at in range(3):
            own = list(pipeline)[-3:]
            fails, breaks = own[0], own[1]
            assert isinstance(fails, Fails)
            assert isinstance(breaks, BrokenBackward)
            here = dist.get_rank() == at
            for kind in ("forward", "backward"):
                fails.error = ValueError("forward fails on purpose") if here and kind == "forward" else None
                breaks.broken = here and kind == "backward"
                with pytest.raises(ValueError if here else PipelineError, match=f"{kind} fails on purpose") as caught:
                    pipeline.step(x, y, loss_fn=mse_loss)
                seen.append("" if here else str(caught.value))
                fails.error, breaks.broken = None, False
                assert pipeline.step(x, y, loss_fn=mse_loss).isfinite()
        return seen

    for texts in ranks(3, run):
        for number, text in enumerate(texts):
            assert not text or f"stage {number // 2} failed, on its rank:\nTraceback" in text
            assert not text or "networks.py" in text


def test_the_stage_before_a_failure_stops_once_it_is_told() -> None:
    def run() -> int:
        with failures_told() as told:
            first, fails = Counts(told), Fails()
            fails.error = ValueError("on purpose")
            pipeline = piped(nn.Sequential(nn.Linear(4, 2), first, fails), [2, 1], chunks=20)
            with pytest.raises((ValueError, PipelineError), match="on purpose"):
                pipeline.step(torch.randn(20, 4), loss_fn=lambda output, _: output.sum())
            return first.count

    assert ranks(2, run)[0] <= 2


def test_what_is_no_tensor_is_refused_on_every_rank_and_the_next_batch_works() -> None:
    class Number(nn.Module):
        returned: Any = 7

        def forward(self, input: Tensor) -> Any:
            return input if self.returned is None else self.returned

    def run() -> None:
        rank, (x, y) = dist.get_rank(), batch()
        number = Number()
        layers = [nn.Linear(4, 2), number, nn.Identity()]
        pipeline = piped(nn.Sequential(*layers).double(), [1, 1, 1], chunks=2)
        for returned in (7, [x, 7], {"a": "text"}):
            number.returned = returned
            words = f"the output of stage 1 holds a {'str' if isinstance(returned, dict) else 'int'}: between stages go"
            with pytest.raises(TypeError if rank == 1 else PipelineError, match=words):
                pipeline.step(x, y, loss_fn=mse_loss)
            with torch.no_grad(), pytest.raises(TypeError if rank == 1 else PipelineError, match=words):
                pipeline(x)
        number.returned = None
        assert pipeline.step(x, y, loss_fn=mse_loss).isfinite()

    ranks(3, run)


def test_a_bad_input_and_a_bad_target_fail_on_every_rank() -> None:
    def run() -> None:
        rank, (x, y) = dist.get_rank(), batch()
        pipeline = piped(network(), [4, 4], chunks=2)
        with pytest.raises(TypeError if rank == 0 else PipelineError, match="is a str: a pipeline takes"):
            pipeline.step("x", y, loss_fn=mse_loss)
        lengths = torch.ones(3, dtype=torch.int64)
        uneven = KeyedJaggedTensor(["a", "b"], torch.ones(3), lengths=lengths, stride_per_key_per_rank=[[2], [1]])
        with pytest.raises(ConfigError if rank == 0 else PipelineError, match=r"a batch size per key.*pad it"):
            pipeline.step(uneven, y, loss_fn=mse_loss)
        with pytest.raises(ConfigError if rank == 1 else PipelineError, match="target has 9 samples and the"):
            pipeline.step(x, y[1:], loss_fn=mse_loss)
        with pytest.raises(ConfigError, match=r"train with Pipeline\.step, and evaluate inside"):
            pipeline(x)
        assert pipeline.step(x, y, loss_fn=mse_loss).isfinite()

    ranks(2, run)


def test_too_few_ranks() -> None:
    raises_on_all(2, ConfigError, "3 stages and the group has 2 ranks", lambda: piped(network(), [3, 3, 2]))


def test_a_pipeline_of_ranks_is_not_copied() -> None:
    raises_on_all(1, ConfigError, "cannot be copied or pickled", lambda: copy.deepcopy(piped(network(), [8])))


def test_a_rank_that_dies_is_told() -> None:
    def run() -> None:
        pipeline = piped(network(), [4, 4], chunks=2)
        x, y = batch()
        pipeline.step(x, y, loss_fn=mse_loss)
        if dist.get_rank() == 1:
            os._exit(3)
        pipeline.step(x, y, loss_fn=mse_loss)

    survivor, _ = ranks(2, run, expect_death=[1])
    assert isinstance(survivor, PeerError)
    assert "another stage's rank stopped" in str(survivor)


def test_routes_are_numbered_alike_where_namespaces_are_not() -> None:
    def numbers() -> list[tuple[int, int, int]]:
        return [(one.number, one.source, one.target) for one in skip_routes(two_skips(), [2, 3, 3])]

    assert ranks(2, numbers) == [[(0, 0, 2), (1, 1, 2)]] * 2


def test_a_long_header_is_sent_in_two_parts() -> None:
    class Many(nn.Module):
        def forward(self, input: Tensor) -> Any:
            return {f"a rather long name of column {number}": input * number for number in range(100)}

    class Sum(nn.Module):
        def forward(self, input: Any) -> Tensor:
            total: Tensor = sum(input.values())
            return total

    def run() -> None:
        x = torch.ones(3, 1)
        loss = piped(nn.Sequential(nn.Linear(1, 1), Many(), Sum()), [2, 1]).step(x, loss_fn=lambda out, _: out.sum())
        assert loss.isfinite()

    ranks(2, run)


class Lookup(nn.Module):
    """The columns of a sharded collection."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["a"])
        plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=(cuts.row_wise("t", 8, 4, ranks=[0, 1]),))
        self.bags = ShardedEmbeddingBagCollection(EmbeddingBagCollection(tables=[config]), plan, group=dist.group.WORLD)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.bags(features).values()
        return pooled


def test_pipelines_that_share_tables_cut_their_batches_into_as_many_micro_batches() -> None:
    """Another rank's lookups would wait for those of the micro-batches that this one does not have."""

    def run() -> None:
        pipeline = Pipeline(nn.Sequential(Lookup(), nn.Linear(4, 1)), [1, 1], chunks=4)

        def loss_of(samples: int) -> Tensor:
            lengths = torch.ones(samples, dtype=torch.int64)
            features = KeyedJaggedTensor(keys=["a"], values=torch.arange(samples), lengths=lengths)
            return pipeline.step(features, torch.zeros(samples, 1), loss_fn=mse_loss)

        rank = dist.get_rank()
        words = r"rank 0: 4 micro-batches \(the least of chunks and samples\)\n  rank 1: 2 micro-batches"
        assert loss_of(8 - rank).isfinite()
        with pytest.raises(InputError, match=words):
            loss_of(2 if rank else 8)
        assert loss_of(2).isfinite()

    ranks(2, run, timeout=60)
