"""Pieces of the training loop: when it evaluates, its loss, and how a rank's data error reaches the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError, DataError, InputError
from shardrec.trainer.run.loop import Schedule, failing_together
from shardrec.trainer.run.losses import click_loss
from shardrec.trainer.run.progress import Progress, RecentMean
from shardrec.trainer.run.report import CurvePoint
from tests.ranks import ranks


@given(total=st.integers(1, 3000), evaluations=st.integers(1, 20))
def test_known_length_is_divided_evenly_and_ends_with_a_point(total: int, evaluations: int) -> None:
    schedule = Schedule(total_steps=total, evaluations=evaluations)
    due = [step for step in range(1, total + 1) if schedule.is_due(step)]
    assert len(due) == min(evaluations, total)
    assert due[-1] == total
    gaps = {after - before for before, after in zip([0, *due[:-1]], due, strict=True)}
    assert max(gaps) - min(gaps) <= 1


@given(
    total=st.integers(1, 500),
    warmup=st.integers(0, 30),
    shape=st.sampled_from(["linear", "cosine"]),
    decay=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_rates_rise_stay_and_fall_to_nothing(total: int, warmup: int, shape: str, decay: float) -> None:
    schedule = Schedule(total_steps=total, evaluations=1, warmup=warmup, shape=shape, decay=decay)
    fall = Schedule(total_steps=total, evaluations=1, shape=shape, decay=decay)
    for step in range(total):
        rising = min(1.0, (step + 1) / warmup) if warmup else 1.0
        assert schedule.rate(step) == rising * fall.rate(step)
        assert 0 < fall.rate(step) <= 1
        assert fall.rate(step + 1) <= fall.rate(step)
        assert (fall.rate(step) == 1) == (step <= (1 - decay) * total + 1e-9) or shape == "cosine"
    assert fall.rate(total) == fall.rate(total + 1) == 0
    half = Schedule(total_steps=2 * total, evaluations=1, shape=shape, decay=1.0)
    assert half.rate(total) == pytest.approx(0.5)


def test_without_steps_or_a_shape_rates_only_rise() -> None:
    for total, shape in ((0, "linear"), (0, "cosine"), (9, "constant")):
        schedule = Schedule(total_steps=total, evaluations=1, warmup=4, shape=shape, decay=0.5)
        assert [schedule.rate(step) for step in range(9)] == [0.25, 0.5, 0.75] + [1.0] * 6


def test_loss_is_the_mean_cross_entropy() -> None:
    logits, labels = torch.tensor([[0.0], [2.0], [-1.0]]), torch.tensor([1.0, 0.0, 0.0])
    probabilities = torch.sigmoid(logits.view(-1))
    expected = -(labels * probabilities.log() + (1 - labels) * (1 - probabilities).log()).mean()
    torch.testing.assert_close(click_loss(logits, labels), expected)


def test_loss_of_an_empty_batch_is_zero_with_zero_gradients() -> None:
    layer = torch.nn.Linear(3, 1)
    loss = click_loss(layer(torch.zeros(0, 3)), torch.zeros(0))
    loss.backward()
    assert loss.item() == 0
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().sum() == 0


def _lookup_until_the_data_breaks(where: tuple[int, ...]) -> Any:
    """Three steps of a sharded lookup, the data of the ranks in ``where`` broken at the second."""
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    import shardrec

    config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    model = shardrec.shard(EmbeddingBagCollection(tables=[config]))
    rank = dist.get_rank()

    def batches() -> Iterator[KeyedJaggedTensor]:
        for step in range(3):
            if step == 1 and rank in where:
                raise DataError(f"rows.tsv:{rank + 7}: field 'label'")
            yield KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]), lengths=torch.tensor([2]))

    made = 0
    try:
        for batch in failing_together(batches(), model):
            model(batch).values()
            made += 1
    except (DataError, InputError) as error:
        return made, type(error).__name__, str(error)
    return made, "", ""


def test_one_ranks_data_error_ends_all_at_the_same_step() -> None:
    (made_0, kind_0, text_0), (made_1, kind_1, text_1) = ranks(2, _lookup_until_the_data_breaks, (1,))
    assert (made_0, made_1) == (1, 1)
    assert (kind_0, kind_1) == ("InputError", "DataError")
    assert text_0 == f"rank 1: {text_1}" == "rank 1: rows.tsv:8: field 'label'"


def test_each_rank_keeps_its_own_data_error() -> None:
    assert ranks(2, _lookup_until_the_data_breaks, (0, 1)) == [
        (1, "DataError", "rows.tsv:7: field 'label'"),
        (1, "DataError", "rows.tsv:8: field 'label'"),
    ]


def test_alone_there_is_nobody_to_tell() -> None:
    assert ranks(1, _lookup_until_the_data_breaks, (0,)) == [(1, "DataError", "rows.tsv:7: field 'label'")]


def test_without_an_error_all_batches_come() -> None:
    assert ranks(2, _lookup_until_the_data_breaks, ()) == [(3, "", "")] * 2


@pytest.mark.parametrize("watched", ["auc", "normalized_entropy", "gauc"])
def test_points_without_the_watched_metric_are_not_compared(watched: str) -> None:
    """Neither as the best nor as the worst of them."""
    progress = Progress(world_size=1, loss=RecentMean(torch.device("cpu")), watched=watched)
    assert progress.improved()
    assert not progress.stalled(1)
    point = CurvePoint(samples=64, seconds=0.1, train_loss=0.5, rows=300, logloss=0.4)
    progress.curve = [point]
    assert not progress.stalled(None)
    for compare in (progress.improved, lambda: progress.stalled(3)):
        with pytest.raises(ConfigError, match=rf"compare points by '{watched}' .*the 300 held-out rows lack it"):
            compare()
    progress.watched = "logloss"
    progress.curve = [point, dataclasses.replace(point, logloss=0.5)]
    assert not progress.improved()
    assert (progress.stalled(1), progress.stalled(2)) == (True, False)


def test_time_is_that_on_the_clock() -> None:
    progress = Progress(world_size=1, loss=RecentMean(torch.device("cpu")))
    with progress.off_the_clock():
        assert progress.seconds == 0
    with progress.on_the_clock(), progress.off_the_clock(), progress.off_the_clock():
        pass
    seconds = progress.seconds
    with progress.off_the_clock():  # as of a save while a run waits for rows
        pass
    assert progress.seconds == seconds > 0
