"""The kernels of the input exchange give what torch's operators give, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given

from shardrec.exchange import check, launching
from shardrec.exchange.batch import NO_LIMIT
from shardrec.exchange.input import InputPacker
from tests.cuda_double import INTERPRETS_TRITON
from tests.plans import randoms

pytestmark = pytest.mark.skipif(
    not (INTERPRETS_TRITON or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
)

DEVICE = torch.device("cpu" if INTERPRETS_TRITON else "cuda", 0)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "has_kernels", lambda device: device == DEVICE)
        yield


@given(rng=randoms())
def test_ids_are_checked(rng: Random) -> None:
    keys, bags = rng.randint(1, 9), rng.choice([0, 1, 5, 70])
    limits = torch.tensor([rng.choice([1, 8, 2**31, NO_LIMIT]) for _ in range(keys)])
    lengths = torch.randint(0, rng.choice([1, 2, 40]), (keys, bags), dtype=rng.choice([torch.int32, torch.int64]))
    most = limits.clamp(max=8).repeat_interleave(lengths.sum(1))
    values = torch.tensor([rng.randrange(int(limit)) for limit in most], dtype=torch.int64)
    values = values.to(rng.choice([torch.int32, torch.int64]))
    fault = rng.choice(["", "", "id", "length", "sum", "overflow"])
    if fault == "id" and values.numel():
        values[rng.randrange(values.numel())] = rng.choice([-1, 8, 2**31 - 1])
    if fault == "length" and bags:
        lengths[rng.randrange(keys), rng.randrange(bags)] += rng.choice([-1, 1, -(2**31), 2**30])
    if fault == "sum":
        values = torch.cat([values, values.new_zeros(rng.randint(1, 3))])
    if fault == "overflow" and bags > 3 and lengths.dtype is torch.int64:
        lengths[rng.randrange(keys), :4] += 2**62
    expected = check.are_sound(lengths, values, limits, True, False)
    found = check._are_sound_on_device(lengths.to(DEVICE), values.to(DEVICE), limits.to(DEVICE))
    assert found.dtype is torch.bool and bool(found) == bool(expected)


@given(rng=randoms())
def test_headers_are_written(rng: Random) -> None:
    """Of two calls under one header."""
    world_size, groups, bags = rng.randint(1, 3), rng.randint(1, 3), rng.choice([0, 1, 7, 300])
    counts = [rng.randint(0, 4) for _ in range(world_size * groups)]
    edges = torch.tensor([0, *counts]).cumsum(0)
    columns = 2 + groups
    lengths = torch.randint(0, 50, (sum(counts), bags), dtype=torch.int32)
    headers = []
    valid = [rng.random() < 0.7 for _ in range(2)]
    for device in (torch.device("cpu"), DEVICE):
        header = torch.zeros((world_size, 2 + 2 * columns + 1), dtype=torch.int64, device=device)
        packer: Any = SimpleNamespace(
            _world_size=world_size,
            route=SimpleNamespace(groups=groups),
            group_edges=edges.to(device),
            columns=columns,
        )
        packer._counts = lambda given, packer=packer: InputPacker._counts(packer, given)
        for number, is_valid in enumerate(valid):
            prepared: Any = SimpleNamespace(
                lengths=lengths.to(device), valid=torch.tensor(is_valid, device=device), slot_sizes=None
            )
            InputPacker.write_header(packer, prepared, header, 2 + number * columns, 2**32 - 5)
        headers.append(header.cpu())
    assert torch.equal(*headers)
    assert headers[0][0, 0] == (not all(valid))
