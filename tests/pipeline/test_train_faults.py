"""A batch, a forward or a loader that fails on one rank fails on all, and the loop goes on if it can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.errors import AnomalyError, InputError
from shardrec.exchange.headers import quoted
from shardrec.modules.anomaly import detect_anomaly
from shardrec.pipeline.lookahead import Lookahead
from shardrec.trainer.data import ClickBatch
from tests.modules.clicks import batch, loss_fn
from tests.pipeline.loops import clicks, pipeline_of, plain, world
from tests.ranks import ranks


@pytest.mark.some(1)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_bad_batch_is_lost_alone_and_on_every_rank(depth: int) -> None:
    def run() -> None:
        rank, size = world()
        good = [step for step in range(8) if step not in (0, 3)]
        model = clicks()
        wanted = plain(model, [batch(step, rank) for step in good])
        steps = pipeline_of(
            clicks(), [batch(step, rank, bad=step in (0, 3) and rank == size - 1) for step in range(8)], depth
        )
        losses, errors = [], []
        while True:
            try:
                losses.append(float(next(steps)))
            except StopIteration:
                break
            except InputError as error:
                errors.append((len(losses), str(error)))
        assert losses == wanted
        assert [at for at, _ in errors] == [0, 2]
        assert all("rank 1: " in text or size == 1 for _, text in errors)

    ranks(1, run)
    ranks(2, run)


def test_a_part_that_cannot_be_copied_is_named_on_every_rank() -> None:
    def run() -> None:
        good, rank = batch(0, 0), dist.get_rank()
        bad = replace(good, sparse=good.sparse.to(torch.device("meta")))
        wanted = {0: InputError, 1: NotImplementedError}[rank]
        with pytest.raises(wanted) as caught:
            next(pipeline_of(clicks(), [bad if rank == 1 else good], 1))
        assert "batch.sparse could not be copied to cpu" in quoted(caught.value)

    ranks(2, run)


@pytest.mark.parametrize("name", ["batch['ids'][1]", "batch['pair'].dense"])
def test_the_name_of_a_part(name: str) -> None:
    class Pair(NamedTuple):
        dense: Tensor
        label: Tensor

    there, nowhere = torch.ones(2), torch.ones(2, device="meta")
    parts = {"ids": [there, nowhere if "ids" in name else there], "pair": Pair(nowhere, there), "day": "Monday"}
    steps = Lookahead([parts], None, depth=0, device=torch.device("cpu"), model=nn.Linear(1, 1))
    with pytest.raises(NotImplementedError) as caught:
        steps.step(lambda batch: batch)
    assert caught.value.__notes__ == [f"{name} could not be copied to cpu"]


class Breaks(nn.Module):
    """A loss that fails on one rank, in some steps, before or after the lookup."""

    def __init__(self, when: dict[int, str]) -> None:
        super().__init__()
        self.when = when
        self.calls = -1

    def __call__(self, model: nn.Module, batch: ClickBatch) -> Tensor:
        self.calls += 1
        how = self.when.get(self.calls) if dist.get_rank() == dist.get_world_size() - 1 else None
        if how == "before":
            raise RuntimeError("breaks before the lookup")
        loss = loss_fn(model, batch)
        if how == "after":
            raise RuntimeError("breaks after the lookup")
        return loss


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_forward_that_fails_on_one_rank_is_told_before_its_backward(n: int) -> None:
    def run() -> None:
        rank, size = world()
        when = {2: "before", 3: "after", 5: "before", 6: "after"}  # the last step, too
        model = clicks()
        plain_losses = plain(model, [batch(step, rank) for step in range(7) if step not in when])
        steps = pipeline_of(clicks(), [batch(step, rank) for step in range(7)], 2, Breaks(when))
        losses, errors = [], []
        kind = RuntimeError if rank == size - 1 else InputError
        while True:
            try:
                losses.append(float(next(steps)))
            except StopIteration:
                break
            except kind as error:
                errors.append(str(error))
        assert losses == plain_losses
        assert [how in error for how, error in zip(when.values(), errors, strict=True)] == [True] * 4
        if rank < size - 1:
            assert f"rank {size - 1}: the model's forward failed: RuntimeError: breaks before" in errors[0]

    ranks(n, run)


def test_a_plain_forward_that_fails_after_pipelined_steps_is_told() -> None:
    """Its header is yet to come, though the last pipelined forward made none."""

    def run() -> str:
        rank, _ = world()
        model = clicks(dense_first=True)
        assert len(list(pipeline_of(model, [batch(step, rank) for step in range(3)], 2))) == 3
        with pytest.raises(InputError if rank else RuntimeError) as caught:
            model(torch.ones(1, 2 + rank), batch(3, rank).sparse)
        assert torch.isfinite(loss_fn(model, batch(4, rank)))
        return str(caught.value)

    own, told = ranks(2, run, timeout=30.0)
    assert told == f"rank 0: the model's forward failed: RuntimeError: {own}"


@pytest.mark.some(1)
@pytest.mark.parametrize("depth", [0, 2])
def test_an_anomaly_is_raised_as_itself_on_every_rank(depth: int) -> None:
    def run() -> None:
        rank, _ = world()
        batches = [batch(step, rank) for step in range(6)]
        model = clicks()
        losses: list[float] = []
        steps = pipeline_of(model, batches, depth)
        with detect_anomaly(model):
            losses += [float(next(steps)) for _ in range(3)]
            spoiled = [one for one in model.parameters() if one.dim() == 2 and one.size(1) == 8][:1] if rank else []
            before = [one.detach().clone() for one in spoiled]
            for one in spoiled:
                one.data.fill_(torch.nan)
            with pytest.raises(AnomalyError, match=r"rank \d: what was looked up in table .* has nan"):
                next(steps)
            for one, value in zip(spoiled, before, strict=True):
                one.data.copy_(value)
            losses += [float(loss) for loss in steps]
        assert losses == plain(clicks(), [one for number, one in enumerate(batches) if number != 3])

    ranks(2, run)


@pytest.mark.some(4)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("good", [0, 1, 4])
def test_a_loader_that_fails_on_one_rank_fails_on_all(depth: int, good: int) -> None:
    def run() -> tuple[int, str]:
        rank, _ = world()

        def loader() -> Iterator[ClickBatch]:
            for step in range(good):
                yield batch(step, rank)
            if rank:
                raise OSError("no such disk")
            yield batch(good, rank)

        steps = pipeline_of(clicks(), loader(), depth)
        done = 0
        try:
            for _ in steps:
                done += 1
        except (OSError, InputError) as error:
            return done, f"{type(error).__name__}: {error}"
        raise AssertionError("the loader fails")

    (one, other), (two, own) = ranks(2, run)
    assert one == two == good
    assert other == "InputError: rank 1: OSError: no such disk"
    assert own == "OSError: no such disk"


def test_unequal_numbers_of_batches_are_an_error_and_no_hang() -> None:
    def run() -> tuple[int, str]:
        rank, _ = world()
        steps = pipeline_of(clicks(), [batch(step, rank) for step in range(4 + rank)], 2)
        done = 0
        try:
            for _ in steps:
                done += 1
        except InputError as error:
            return done, str(error)
        raise AssertionError("the ranks disagree")

    (one, message), (two, other) = ranks(2, run)
    assert one == two == 4
    assert message == other
    assert "rank 0: this rank has no further batch, and others have one: give every rank as many batches" in message
