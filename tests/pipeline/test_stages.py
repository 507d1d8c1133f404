"""A user's own stages, and ``progress()`` with an iterator, as programs of TorchRec's pipelines have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.streamable import Pipelineable

from shardrec.errors import ConfigError, InputError
from shardrec.modules import ShardedModel, shard
from shardrec.pipeline import TrainPipeline
from shardrec.trainer.data import ClickBatch
from tests.models import click_model
from tests.modules.clicks import CONFIGS, batch, dense_parameters, loss_fn, mixed_plan
from tests.ranks import ranks


@dataclass
class Rows(Pipelineable):
    """A batch with TorchRec's methods: none has a default."""

    x: Tensor
    y: Tensor

    def to(self, device: torch.device, non_blocking: bool) -> Rows:
        return Rows(self.x.to(device, non_blocking=non_blocking), self.y.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        raise AssertionError("there is no stream on the CPU")


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(3, 1)

    def forward(self, rows: Rows) -> tuple[Tensor, Tensor]:
        scores = self.top(rows.x)
        return (scores - rows.y).square().mean(), scores


def rows(count: int) -> list[Rows]:
    generator = torch.Generator().manual_seed(1)
    return [Rows(torch.rand(4, 3, generator=generator), torch.rand(4, 1, generator=generator)) for _ in range(count)]


def progressed(pipeline: Any, iterators: list[Iterator[Any]]) -> list[list[Tensor]]:
    """What each iterator gives, until it is at its end."""
    outputs: list[list[Tensor]] = []
    for iterator in iterators:
        outputs.append([])
        while True:
            try:
                outputs[-1].append(pipeline.progress(iterator))
            except StopIteration:
                break
    return outputs


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_progress_is_torchrecs(depth: int) -> None:
    """Its arguments, its outputs and its end; with one iterator after the other, too, which its base class refuses."""
    model, peer, data = Scores(), Scores(), rows(7)
    pipeline = TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"), depth=depth)
    ours = progressed(pipeline, [iter(data[:3]), iter(data[3:4]), iter(data[4:])])
    assert [len(outputs) for outputs in ours] == [3, 1, 3]
    theirs = TrainPipelineBase(peer, torch.optim.SGD(peer.parameters(), lr=0.1), torch.device("cpu"))
    (wanted,) = progressed(theirs, [iter(data)])
    torch.testing.assert_close(list(chain.from_iterable(ours)), wanted, rtol=0, atol=0)


def test_another_iterator_comes_after_the_batches_in_progress() -> None:
    model = Scores()
    pipeline = TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.device("cpu"))
    data = rows(8)
    wanted = [model(one)[1] for one in data]
    first, second = iter(data[:6]), iter(data[6:])
    outputs = [pipeline.progress(first)]
    outputs += progressed(pipeline, [second])[0]
    # The first iterator has given three batches by the first step; what it has left comes when it is given again.
    torch.testing.assert_close(outputs, [*wanted[:3], *wanted[6:]], rtol=0, atol=0)
    torch.testing.assert_close(progressed(pipeline, [first])[0], wanted[3:6], rtol=0, atol=0)


def test_progress_goes_on_after_close() -> None:
    """As after TorchRec's ``reset()``: the batches in progress are lost, and no more."""
    model, data = Scores(), rows(8)
    pipeline = TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.device("cpu"))
    wanted = [model(one)[1] for one in data]
    iterator = iter(data)
    torch.testing.assert_close(pipeline.progress(iterator), wanted[0], rtol=0, atol=0)
    pipeline.close()
    torch.testing.assert_close(progressed(pipeline, [iterator])[0], wanted[3:], rtol=0, atol=0)


def test_what_a_loop_and_a_device_need() -> None:
    model = Scores()
    pipeline = TrainPipeline(model, [], torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"lacks a dataloader to loop over: give it one, or call progress\(iterator\)"
    ):
        iter(pipeline)
    with pytest.raises(ConfigError, match=r"device is given twice, as cpu and cuda\. Leave one out"):
        TrainPipeline(model, [], torch.device("cpu"), device="cuda")


def clicks() -> ShardedModel:
    return shard(click_model(CONFIGS), mixed_plan(dist.get_world_size()))


def pipelined(batches: Any, **options: Any) -> TrainPipeline:
    model = clicks()
    return TrainPipeline(model, torch.optim.Adam(dense_parameters(model)), batches, loss_fn=loss_fn, **options)


def scaled(batch: ClickBatch) -> ClickBatch:
    assert not torch.is_grad_enabled()
    batch.dense.mul_(0.5)
    return batch


def shifted(batch: ClickBatch) -> ClickBatch:
    batch.dense.add_(0.25)
    return batch


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_batches_pass_the_stages_in_their_order(depth: int) -> None:
    def run() -> None:
        steps, rank = range(6), dist.get_rank()
        by_hand = [shifted(scaled_by_hand(batch(step, rank))) for step in steps]
        wanted = [float(loss) for loss in pipelined(by_hand, depth=0)]
        pipeline = pipelined([batch(step, rank) for step in steps], depth=depth, stages=[scaled, shifted])
        assert [float(loss) for loss in pipeline] == wanted
        scores = pipeline.predict([batch(0, rank)], lambda model, one: one.dense.clone())
        assert torch.equal(next(scores), by_hand[0].dense)

    def scaled_by_hand(one: ClickBatch) -> ClickBatch:
        one.dense.mul_(0.5)
        return one

    ranks(2, run)


@pytest.mark.parametrize(("depth", "by_first_forward"), [(0, [3, 0, 0, 0, 0, 0]), (2, [3, 3, 2, 1, 0, 0])])
def test_a_batch_passes_a_stage_in_each_step_before_its_own(depth: int, by_first_forward: list[int]) -> None:
    passed = [0, 0, 0, 0, 0, 0]

    def stage(one: list[int]) -> list[int]:
        passed[one[0]] += 1
        return one

    model, seen = nn.Linear(1, 1), []

    def loss(model: nn.Module, one: list[int]) -> Tensor:
        seen.append(list(passed))
        return model(torch.ones(1, 1)).sum()  # type: ignore[no-any-return]

    data = [[number] for number in range(6)]
    pipeline = TrainPipeline(model, [], data, loss_fn=loss, depth=depth, stages=[stage] * 3)
    assert len(list(pipeline)) == 6
    assert seen[0] == by_first_forward
    assert passed == [3] * 6


@pytest.mark.parametrize("depth", [0, 2])
def test_a_stage_that_fails_fails_in_its_own_step_on_all_ranks(depth: int) -> None:
    def run() -> tuple[list[int], str]:
        rank = dist.get_rank()

        def stage(one: ClickBatch) -> ClickBatch:
            if one.dense[0, 0] == 77:
                raise ValueError("77 is refused")
            return one

        batches = [batch(step, rank) for step in range(6)]
        batches[3].dense[0, 0] = 77 if rank else 0
        pipeline = pipelined(batches, depth=depth, stages=[stage])
        done, text = [], ""
        for step in range(6):
            try:
                next(pipeline)
                done.append(step)
            except (InputError, ValueError) as error:
                text = str(error)
        return done, text

    (done, told), (others, own) = ranks(2, run)
    assert done == others == [0, 1, 2, 4, 5]
    assert (told, own) == ("rank 1: ValueError: 77 is refused", "77 is refused")
