"""The C++ operators give what torch's operators give."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from torch import Tensor

from shardrec import native
from shardrec.exchange.assemble import Columns
from shardrec.exchange.batch import NO_LIMIT
from shardrec.exchange.check import are_sound
from shardrec.exchange.route import Piece, Source
from shardrec.lookup.backward import LookupGradient
from shardrec.lookup.group_shards import RowGradient, TableBank
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.lookup.row_optimizers import RowOptimizer
from tests.plans import randoms

pytestmark = pytest.mark.skipif(
    not native.has_operators(),
    reason="the C++ operators were not compiled when shardrec was installed (no C++ compiler?)",
)


class InTorch:
    """Leaves the C++ operators alone inside a ``with`` block."""

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(native, "has_operators", lambda: False)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def whole(rng: Random, *shape: int) -> Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(-8, 9, shape, generator=generator).float()


@given(rng=randoms())
def test_columns(rng: Random) -> None:
    rows, widths = rng.randrange(70), [rng.randint(1, 12) for _ in range(rng.randint(1, 4))]
    blocks = [whole(rng, rows, width + 3)[:, : width + 2] for width in widths]
    pieces = []
    for _ in range(rng.randint(1, 9)):
        width = rng.randint(1, min(widths))
        sources = [
            Source(block=block, start=rng.randint(0, widths[block] - width))
            for block in rng.choices(range(len(widths)), k=rng.randint(1, 3))
        ]
        pieces.append(Piece(width=width, sources=tuple(sources)))
    scales = [rng.choice([1.0, 0.5, 0.25]) for _ in widths]
    columns = Columns(pieces, scales)
    gradient = whole(rng, rows, columns.width)
    targets = [[block.clone() for block in blocks] for _ in range(2)]
    made = columns.assemble(blocks)
    columns.distribute(gradient, targets[0])
    with InTorch():
        assert torch.equal(columns.assemble(blocks), made)
        columns.distribute(gradient, targets[1])
    for ours, theirs in zip(*targets, strict=True):
        assert torch.equal(ours, theirs)


def test_pieces_that_do_not_fit_are_refused() -> None:
    block = torch.zeros(2, 4)
    for pieces, words in [
        ([4, 1, 0, 1], "outside of its block"),
        ([4, 1, 1, 0], "outside of its block"),
        ([3, 1, 0, 0], "cover 3 of 4"),
        ([4, 2, 0, 0], "malformed"),
        ([4, 1, 0, 0, 1], "end inside"),
        ([1, 1, 0, 0, 2**63 - 1, 1, 0, 0], "malformed"),
        ([4, 1, 0, 2**63 - 1], "outside of its block"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            torch.ops.shardrec.assemble([block], pieces, 2, 4)


@given(rng=randoms())
def test_a_batch_is_sound_or_not(rng: Random) -> None:
    features, batch = rng.randint(1, 4), rng.randrange(5)
    limits = [rng.choice([1, 5, 100, NO_LIMIT]) for _ in range(features)]
    lengths = [[rng.randrange(4) for _ in range(batch)] for _ in range(features)]
    ids = [
        rng.randrange(min(limit, 10**9)) for limit, row in zip(limits, lengths, strict=True) for _ in range(sum(row))
    ]
    match rng.randrange(5):
        case 0 if ids:
            ids[rng.randrange(len(ids))] = rng.choice([-1, 100, 5])
        case 1 if batch:
            lengths[rng.randrange(features)][rng.randrange(batch)] += rng.choice([-4, 1, -1])
        case 2:
            ids = [*ids, 0]
        case _:
            pass
    length_dtype, id_dtype = rng.choices([torch.int32, torch.int64], k=2)
    arguments = (
        torch.tensor(lengths, dtype=length_dtype).view(features, batch),
        torch.tensor(ids, dtype=id_dtype),
        torch.tensor(limits),
    )
    expected = bool(are_sound(*arguments, NO_LIMIT in limits, True))
    assert bool(torch.ops.shardrec.are_sound(*arguments)) == expected


@pytest.mark.parametrize(
    "lengths",
    [
        [2**62] * 4 + [3],
        [2**63 - 1, 2**63 - 1, 2, 3, 0],
        [2**63 - 1, -(2**63), 1, 3, 0],
        [4, -1, 0, 0, 0],
        [4, 0, 0, 0, 0],
        [0, 0, 0, 0, 2**31],
    ],
)
def test_lengths_whose_sum_overflows_are_not_sound(lengths: list[int]) -> None:
    """However they are spread over features; the first three add up to 3 modulo 2^64."""
    limits = torch.full((5,), NO_LIMIT)
    for shape in [(1, 5), (5, 1)]:
        for dtype in (torch.int32, torch.int64):
            given = torch.tensor(lengths).view(shape), torch.zeros(3, dtype=dtype), limits[: shape[0]]
            assert not torch.ops.shardrec.are_sound(*given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edges_that_are_no_ids_are_refused(dtype: torch.dtype) -> None:
    ids, lengths = torch.tensor([0, 5], dtype=dtype), torch.tensor([[1, 1]], dtype=torch.int32)
    most = torch.iinfo(dtype).max
    for last, words in [(most, None), (2**31, "ids up to" if dtype is torch.int32 else None), (-(2**63), "ascend")]:
        for edges in ([0, last], [0, min(3, last), last]):
            blocks = len(edges) - 1
            units = [0, 0, blocks, *edges, *(number for slot in range(blocks) for number in (1, slot))]
            if words is None:
                torch.ops.shardrec.cut_ids(ids, lengths, None, units, blocks, False)
                continue
            with pytest.raises(RuntimeError, match=words):
                torch.ops.shardrec.cut_ids(ids, lengths, None, units, blocks, False)


@given(rng=randoms())
def test_the_gradient_of_each_row(rng: Random) -> None:
    pooled, weighted = rng.random() < 0.7, rng.random() < 0.5
    widths = [rng.choice([4, 8]) if pooled else 4 for _ in range(rng.randint(1, 3))]
    shapes = [(rng.randint(1, 3000), width) for width in widths]
    tables = sorted([*range(len(shapes)), *rng.choices(range(len(shapes)), k=rng.randrange(3))])
    bank = TableBank(shapes, tables, None, torch.device("cpu"), pooled=pooled)
    batch = rng.randrange(6)
    lengths = torch.tensor([[rng.randrange(4) for _ in range(batch)] for _ in tables], dtype=torch.int32)
    lengths = lengths.view(len(tables), batch)
    rows = [
        rng.randrange(shapes[table][0])
        for table, row in zip(tables, lengths.tolist(), strict=True)
        for _ in range(sum(row))
    ]
    ids = torch.tensor(rows, dtype=rng.choice([torch.int32, torch.int64]))
    columns = sum(shapes[table][1] for table in tables)
    gradient = whole(rng, batch, columns) if pooled else whole(rng, ids.numel(), 4)
    weights = whole(rng, ids.numel()) if weighted else None
    lookup = LookupGradient(ids=ids, lengths=lengths, id_weights=weights, gradient=gradient)
    ours = bank.row_gradients([lookup])
    with InTorch():
        theirs = bank.row_gradients([lookup])
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine.rows, its.rows)
        assert torch.equal(mine.values, its.values)
        assert torch.equal(mine.square_sums(), its.square_sums())


def test_an_update_by_rows() -> None:
    optimizer = FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.1)
    results = []
    for in_torch in (False, True):
        torch.manual_seed(0)
        bank = TableBank([(50, 8)], [0], None, torch.device("cpu"))
        bank.weights[0].copy_(torch.randn(50, 8))
        fused = RowOptimizer(bank.classes, 1, optimizer)
        for _ in range(3):
            rows = torch.randperm(50)[:20].sort().values
            gradient = RowGradient(rows=rows, values=torch.randn(20, 8))
            if in_torch:
                with InTorch():
                    fused.step([gradient])
            else:
                fused.step([gradient])
        results.append((bank.weights[0].clone(), fused.states()[0]["sum"].clone()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lengths", [[2**62] * 4 + [3], [2**63 - 1, 2**63 - 1, 2, 3], [-(2**63), -(2**63), 3], [4, -1]])
def test_lengths_whose_sum_wraps_are_not_sound(lengths: list[int]) -> None:
    arguments = torch.tensor([lengths]), torch.zeros(3, dtype=torch.int64), torch.tensor([5])
    assert not bool(torch.ops.shardrec.are_sound(*arguments))
    assert not bool(are_sound(*arguments, False, True))
