"""The kernels of the input exchange give what torch's operators give, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from shardrec.exchange import check, launching
from shardrec.exchange.batch import NO_LIMIT, Batch
from shardrec.exchange.fault_flags import FaultFlag
from shardrec.step.id_exchange import write_header
from tests.compiled_kernels import compile_kernels
from tests.cuda_double import INTERPRETS_TRITON
from tests.plans import randoms

pytestmark = pytest.mark.skipif(
    not (INTERPRETS_TRITON or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
)

DEVICE = torch.device("cpu" if INTERPRETS_TRITON else "cuda")


@settings(max_examples=15)  # a second each in the interpreter
@given(rng=randoms())
def test_ids_are_checked(rng: Random) -> None:
    """A sound batch, and some of its faults."""
    torch.manual_seed(rng.randrange(2**31))
    id_dtype = rng.choice([torch.int32, torch.int64])
    keys, bags = rng.choice([(1, 5000), (3, 0), (1, 1), (2, 5), (9, 70), (3, 2100)])
    limits = torch.tensor([rng.choice([1, 8, 2**31, NO_LIMIT]) for _ in range(keys)])
    most = rng.choice([1, 2, 40 if bags < 100 else 3])
    lengths = torch.randint(0, most, (keys, bags), dtype=rng.choice([torch.int32, torch.int64]))
    limit_of = limits.repeat_interleave(lengths.sum(1))
    values = (torch.rand(limit_of.numel()) * limit_of.clamp(max=8)).to(rng.choice([torch.int32, torch.int64]))
    faulty = [(lengths, values), (lengths, torch.cat([values, values.new_zeros(1)]))]
    for place in {0, rng.randrange(values.numel()), values.numel() - 1} if values.numel() else ():
        for fault in (-1, int(limit_of[place])):
            if fault <= torch.iinfo(values.dtype).max:
                faulty.append((lengths, values.index_fill(0, torch.tensor(place), fault)))
    if bags > 3:
        key, bag = rng.randrange(keys), rng.randrange(bags - 1)
        for more in (1, 2**30, -1 - int(lengths[key, bag])):
            changed = lengths.clone()
            changed[key, bag] += more  # the sum with the next is as before
            changed[key, bag + 1] -= more
            faulty.append((changed, values))
        overflowing = lengths.to(torch.int64, copy=True)
        overflowing[key, :4] += 2**62
        faulty.append((overflowing, values))
    if keys > 1 and bags > 1:
        # A negative length, and so many more ids in another key that they add up if the first key has -1.
        moved = lengths.to(torch.int64, copy=True)
        moved[0, 0], moved[1, 0] = -1, moved[1, 0] + lengths[0].sum() + 1
        faulty.append((moved, values))
    for lengths, values in [faulty[0], *rng.sample(faulty[1:], min(2, len(faulty) - 1))]:
        is_sound = bool(check.are_sound(lengths, values, limits, True, False))
        for has_kernels in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launching, "has_kernels", lambda _, answer=has_kernels: answer)
                batch = Batch(keys=(), lengths=lengths.to(DEVICE), values=values.to(DEVICE), weights=None)
                flag = FaultFlag(7, torch.tensor(3, device=DEVICE), torch.tensor(0))
                safe = check.checked_on_device(batch, limits.to(DEVICE), id_dtype, flag)
            assert int(flag.value) == (3 if is_sound else 7)
            ids, offsets, safe_lengths = (tensor.cpu() for tensor in safe)
            assert (ids.dtype, offsets.dtype, safe_lengths.dtype) == (id_dtype, id_dtype, torch.int32)
            assert torch.equal(offsets.diff(), safe_lengths.flatten())
            if is_sound:
                assert torch.equal(ids, values.to(id_dtype))
                assert torch.equal(safe_lengths, lengths)
            assert offsets[0] == 0
            assert (safe_lengths >= 0).all()
            assert offsets[-1] <= values.numel()
            of_bags = ids[: offsets[-1]].to(torch.int64)
            limit_of_id = limits.repeat_interleave(safe_lengths.sum(dim=1))
            assert ((limit_of_id == NO_LIMIT) | ((of_bags >= 0) & (of_bags < limit_of_id))).all()


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
    for device, has_kernels in ((torch.device("cpu"), False), (DEVICE, True)):
        header = torch.zeros((world_size, 2 + 2 * columns + 1), dtype=torch.int64, device=device)
        input: Any = SimpleNamespace(
            world_size=world_size,
            route=SimpleNamespace(groups=groups),
            group_edges=edges.to(device),
            columns=columns,
        )
        for number, is_valid in enumerate(valid):
            call: Any = SimpleNamespace(
                input=input,
                lengths=lengths.to(device),
                size=bags,
                flag=FaultFlag(5, torch.tensor(3 if is_valid else 5, device=device), torch.tensor(0)),
                slot_sizes=None,
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launching, "has_kernels", lambda _, answer=has_kernels: answer)
                write_header(call, header, 2 + number * columns, 2**32 - 5)
        headers.append(header.cpu())
    assert torch.equal(*headers)
    assert headers[0][0, 0] == (not all(valid))


@pytest.mark.skipif(not INTERPRETS_TRITON, reason="where there is a device, it runs the kernels")
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    pointers = {"values_N": "*i64", "limits_F": "*i64", "flag": "*i64", "edges": "*i64", "header_WC": "*i64"}
    types = pointers | dict.fromkeys(["offsets", "ids_N", "safe_offsets", "lengths_FB", "lengths_SB"], "*i32")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("check_ids", {"SHARES": 32, "STARTS": 1024, "BLOCK": 1024}),
        ("write_header", {"SIZES": 2, "SHARES": 32, "BLOCK": 1024}),
    ]
    compile_kernels("shardrec.exchange.input_kernels", types, calls, tmp_path)
