"""The double finds what waits, and what races."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_double import HiddenWait, Race, cuda_double, cuda_is_there


def test_the_double_finds_what_waits() -> None:
    with cuda_is_there(), cuda_double() as double:
        numbers = torch.tensor([1, 2], pin_memory=True).to("cuda", non_blocking=True)
        for waits in (
            lambda: int(numbers[0]),
            lambda: numbers.tolist(),
            lambda: numbers.nonzero(),
            lambda: numbers.unique(),
            lambda: numbers[numbers > 1],
            lambda: numbers.repeat_interleave(numbers),
            lambda: numbers.cpu(),
            lambda: torch.tensor([1], device="cuda"),
            lambda: torch.ones(2).to("cuda", non_blocking=True),
            lambda: numbers.copy_(torch.ones(2)),
        ):
            with pytest.raises(HiddenWait):
                waits()
        assert not double.waits
        with double.may_wait():
            assert numbers.tolist() == [1, 2]
        assert len(double.waits) == 1
        with pytest.raises(AssertionError, match="a CPU tensor of shape"):
            numbers + torch.ones(2)


def test_the_double_finds_races() -> None:
    with cuda_is_there(), cuda_double():
        numbers = torch.ones(3, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), pytest.raises(Race, match="reads a tensor of another stream"):
            numbers + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            more = numbers + 1
            done = side.record_event()
            late = more + 1
        torch.cuda.current_stream().wait_event(done)
        assert more.add_(1).is_cuda
        with pytest.raises(Race):
            late + 1
        with torch.cuda.stream(side), pytest.raises(Race):
            more + 1
        with pytest.raises(HiddenWait):
            done.synchronize()
