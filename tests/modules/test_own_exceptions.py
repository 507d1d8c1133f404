"""An exception of the model's own code stays as it is on its rank, and the errors of the other ranks quote it."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import CheckpointError, InputError
from shardrec.exchange.agree import on_all_ranks, on_first_rank, ranks_of
from shardrec.modules import shard
from shardrec.pipeline import TrainPipeline
from shardrec.replicas import Replicas
from tests.batches import random_bags
from tests.models import ClickModel, collection
from tests.modules.clicks import CONFIGS, ROWS, mixed_plan
from tests.ranks import ranks


class Own(Exception):
    """No error that torch or shardrec knows."""


class Stops(ClickModel):
    """Raises on some ranks, before or after its lookup."""

    error: BaseException | None = None
    when = "before"

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        if self.error is not None and self.when == "before":
            raise self.error
        logits = super().forward(dense.float(), features)
        if self.error is not None:
            raise self.error
        return logits


class Checkpointed(nn.Module):
    """Computes a model again in backward, up to its last saved tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor:
        logits: Tensor = checkpoint(self.model, *inputs, use_reentrant=False)
        return logits


def made(replicas: int) -> Any:
    size = dist.get_world_size() // replicas
    options: dict[str, Any] = {"replicas": Replicas(replicas)} if replicas > 1 else {}
    return shard(Stops(collection(CONFIGS, seed=1), pooled=32, dense_first=True), mixed_plan(size), **options)


def batch(step: int = 0) -> tuple[Tensor, KeyedJaggedTensor]:
    from random import Random

    rng = Random(10 * step + dist.get_rank())
    return torch.randn(2, 3, dtype=torch.float64), random_bags(rng, ROWS, 2).kjt()


def raised(forward: Any, *inputs: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:
        forward(*inputs)
    return caught.value


MODES = {"alone": (1, 1), "ranks": (2, 1), "replicas": (2, 2)}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_rank_raises_its_own_and_the_others_quote_it(mode: str, training: bool) -> None:
    world_size, replicas = MODES[mode]

    def rank_main() -> None:
        rank, model = dist.get_rank(), made(replicas)
        for when, kind in (("before", Own), ("after", Own), ("before", StopIteration), ("before", KeyError)):
            error = kind("of the user")
            model.module.when, model.module.error = when, error if rank == world_size - 1 else None
            # In evaluation nobody waits for a rank after its last lookup, or for another replica.
            hears = training or (when == "before" and replicas == 1)
            with torch.set_grad_enabled(training):
                if rank == world_size - 1:
                    found = raised(model, *batch())
                    assert found is error
                    assert "raise self.error" in "".join(traceback.format_exception(found))
                    assert not hasattr(found, "__notes__"), "the dtype of an input has nothing to do with it"
                elif hears and (training is False or replicas > 1 or when == "before"):
                    told = raised(model, *batch())
                    assert type(told) is InputError
                    assert f"rank 1: the model's forward failed: {kind.__name__}: {error}" in str(told)
                else:
                    model(*batch())
            model.module.error = None
            if training and when == "after" and replicas == 1:
                continue  # no backward: the others' report that this rank has failed is theirs to read
            with torch.set_grad_enabled(training):
                assert torch.isfinite(model(*batch())).all()

    ranks(world_size, rank_main)


def test_of_two_ranks_that_raise_each_has_its_own() -> None:
    def rank_main() -> None:
        model = made(2)
        model.module.error = own = Own(f"of {dist.get_rank()}")
        assert raised(model, *batch()) is own
        model.module.error = None
        model(*batch()).sum().backward()

    ranks(2, rank_main)


def test_an_interrupt_passes() -> None:
    """Each rank gets its own from the terminal, so nobody is told."""

    def rank_main() -> None:
        model = made(1)
        model.module.error = KeyboardInterrupt()
        told = model.context.headers.exchanged
        assert raised(model, *batch()) is model.module.error
        assert model.context.headers.exchanged == told
        model.module.error = None
        model(*batch()).sum().backward()

    ranks(2, rank_main)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_end_of_a_recomputation_passes(replicas: int) -> None:
    """torch stops a forward that it computes again by an exception, when it has the tensors that it needs."""

    def rank_main() -> None:
        model, plain = made(replicas), made(replicas)
        for step in range(2):
            torch.manual_seed(step)
            inputs = batch(step)
            Checkpointed(model)(*inputs).sum().backward()
            plain(*inputs).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)
        if replicas > 1:
            assert model.steps_since_sync == plain.steps_since_sync

    ranks(2, rank_main)


@pytest.mark.parametrize("where", ["model", "loss", "stage", "batch"])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_pipeline_raises_it_in_its_step(depth: int, where: str) -> None:
    def rank_main() -> None:
        rank, own = dist.get_rank(), Own("of the user")
        model = made(1)
        steps = 0

        class Breaks:
            def to(self, *_: Any, **__: Any) -> None:
                raise own

        def loss(model: Any, inputs: Any) -> Tensor:
            nonlocal steps
            steps += 1
            breaks = rank == 1 and steps == 3
            model.module.error = own if breaks and where == "model" else None
            if breaks and where == "loss":
                raise own
            value: Tensor = model(*inputs).sum()
            return value

        def stage(inputs: Any) -> Any:
            if rank == 1 and where == "stage" and inputs[0][0, 0] == 2:
                raise own
            return inputs

        batches: list[Any] = [(torch.full((2, 3), float(step)), batch(step)[1]) for step in range(5)]
        if rank == 1 and where == "batch":
            batches[2] = Breaks()
        pipeline = TrainPipeline(
            model, torch.optim.SGD(model.dense_parameters(), lr=0.1), batches, loss_fn=loss, depth=depth, stages=[stage]
        )
        for _ in range(2):
            next(pipeline)
        if depth or where != "loss":
            found = raised(next, pipeline)
            assert found is own if rank == 1 else "Own: of the user" in str(found)
            assert len(list(pipeline)) == 2

    ranks(2, rank_main)


def test_outside_of_a_step() -> None:
    """Of what reads and writes files, errors of the operating system become one with a remedy; a user's do not."""

    def rank_main() -> None:
        rank, own = dist.get_rank(), Own("of the user")
        group = ranks_of(dist.group.WORLD, torch.device("cpu"))

        def work() -> int:
            if rank == 1:
                raise own
            return 1

        found = raised(lambda: on_all_ranks(work, group, "save", remedy="give room"))
        assert found is own if rank == 1 else isinstance(found, CheckpointError)
        assert "rank 1: Own: of the user" in str(found) or rank == 1

        def first() -> int:
            raise own

        found = raised(lambda: on_first_rank(first, group, "plan"))
        assert found is own if rank == 0 else str(found) == "Own: of the user"

    ranks(2, rank_main)
