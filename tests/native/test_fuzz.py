"""Calls of the operators that do not fit end with an error, never with a crash or with a write out of bounds.

Each example makes a call that fits, then spoils some of its arguments. What the operators write to lies between guards,
so that a write past the end shows here, too; what is read past an end shows under ``make sanitize``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from torch import Tensor

from shardrec import native
from tests.plans import randoms

pytestmark = pytest.mark.skipif(
    not native.has_operators(),
    reason="the C++ operators were not compiled when shardrec was installed (no C++ compiler?)",
)

GUARD, BESIDE = -123.25, 40
NUMBERS = [-(2**63), -(2**40), -(2**31), -1, 0, 1, 2, 3, 64, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]
DTYPES = [
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
]


class Guarded:
    """Memory with guards on either side, for tensors that are written to."""

    def __init__(self) -> None:
        self.wholes: list[Tensor] = []

    def __call__(self, like: Tensor) -> Tensor:
        whole = torch.full((like.numel() + 2 * BESIDE,), GUARD)
        self.wholes.append(whole)
        return whole[BESIDE : BESIDE + like.numel()].view(like.shape).copy_(like)

    def are_whole(self) -> bool:
        return all(bool((whole[:BESIDE] == GUARD).all() & (whole[-BESIDE:] == GUARD).all()) for whole in self.wholes)


class Lookup:
    """Arguments of the lookups: a few tables, some of them looked up twice, and a batch."""

    def __init__(self, rng: Random, guarded: Guarded, *, pooled: bool, width: int | None = None) -> None:
        tables = rng.randint(1, 3)
        rows = [rng.choice([1, 3, 70, 9000]) for _ in range(tables)]
        same = width or rng.choice([4, 5, 16, 20, 64])
        widths = [same if width or not pooled else rng.choice([4, 5, 16, 20, 64]) for _ in range(tables)]
        self.slot_tables = sorted([*range(tables), *rng.choices(range(tables), k=rng.randrange(2))])
        samples = rng.choice([0, 1, 5, 70])
        self.lengths = torch.tensor([[rng.randrange(4) for _ in range(samples)] for _ in self.slot_tables])
        self.lengths = self.lengths.view(len(self.slot_tables), samples).int()
        counts = self.lengths.sum(dim=1).tolist()
        ids = [rng.randrange(rows[table]) for table, n in zip(self.slot_tables, counts, strict=True) for _ in range(n)]
        self.ids = torch.tensor(ids, dtype=rng.choice([torch.int32, torch.int64]))
        self.id_weights = torch.rand(len(ids)) if pooled and rng.random() < 0.5 else None
        self.rule = rng.randrange(3)
        sizes = [n * (w if self.rule == 1 else 1) for n, w in zip(rows, widths, strict=True)]
        base = [sum(n * w for n, w in zip(rows[:t], widths, strict=False)) for t in range(tables)]
        columns, described = 0, []
        for table in self.slot_tables:
            described.append([table, base[table], rows[table], widths[table], columns, sum(sizes[:table])])
            columns += widths[table] if pooled else 0
        self.slots, self.columns = torch.tensor(described), columns or same
        self.weights = guarded(torch.rand(sum(n * w for n, w in zip(rows, widths, strict=True))))
        self.states = guarded(torch.rand(sum(sizes))) if self.rule else None
        self.gradient = torch.rand(samples if pooled else len(ids), self.columns)
        self.rows, self.samples = rows, samples


def assemble(rng: Random, guarded: Guarded) -> list[object]:
    rows, cols, pieces = rng.randrange(4), 0, list[int]()
    blocks = [torch.rand(rows, rng.randint(4, 9)) for _ in range(rng.randint(1, 3))]
    for _ in range(rng.randrange(4)):
        sources = [(block, rng.randrange(2)) for block in rng.choices(range(len(blocks)), k=rng.randint(1, 2))]
        pieces += [3, len(sources), *chain(*sources)]
        cols += 3
    return [blocks, pieces, rows, cols]


def distribute(rng: Random, guarded: Guarded) -> list[object]:
    blocks, pieces, rows, cols = assemble(rng, guarded)
    assert isinstance(blocks, list)
    return [torch.rand(rows, cols), [guarded(one) for one in blocks], pieces, [rng.choice([1.0, 0.5]) for _ in blocks]]


def are_sound(rng: Random, guarded: Guarded) -> list[object]:
    features, batch = rng.randrange(4), rng.randrange(4)
    lengths = torch.randint(3, (features, batch), dtype=rng.choice([torch.int32, torch.int64]))
    ids = torch.randint(9, (int(lengths.sum()),), dtype=rng.choice([torch.int32, torch.int64]))
    return [lengths, ids, torch.tensor([rng.choice([5, 9, 2**63 - 1]) for _ in range(features)], dtype=torch.int64)]


def cut_ids(rng: Random, guarded: Guarded) -> list[object]:
    keys, batch = rng.randint(1, 3), rng.randrange(4)
    lengths = torch.randint(4, (keys, batch), dtype=torch.int32)
    ids = torch.randint(100, (int(lengths.sum()),), dtype=rng.choice([torch.int32, torch.int64]))
    units: list[int] = []
    slot = 0
    for _ in range(rng.randint(1, 3)):
        blocks = rng.choice([1, 2, 3, 20])
        units += [
            rng.randrange(keys),
            int(ids.dtype is torch.int64 and rng.random() < 0.3),
            blocks,
            0,
            *sorted(rng.randrange(101) for _ in range(blocks - 1)),
            100,
        ]
        for _ in range(blocks):
            mine = range(slot, slot + rng.randrange(3))
            units += [len(mine), *mine]
            slot += len(mine)
    weights = torch.rand(ids.numel()) if rng.random() < 0.5 else None
    return [ids, lengths, weights, units, slot, rng.random() < 0.5]


def look_up(rng: Random, guarded: Guarded) -> list[object]:
    pooled = rng.random() < 0.7
    made = Lookup(rng, guarded, pooled=pooled)
    return [made.weights, made.slots, made.ids, made.lengths, made.id_weights, made.columns, pooled]


def look_up_out(rng: Random, guarded: Guarded) -> list[object]:
    made = Lookup(rng, guarded, pooled=True)
    output = guarded(torch.zeros(made.samples, made.columns + 3))[:, 2 : 2 + made.columns]
    return [output, made.weights, made.slots, made.ids, made.lengths, made.id_weights]


def update(rng: Random, guarded: Guarded) -> list[object]:
    pooled = rng.random() < 0.7
    made = Lookup(rng, guarded, pooled=pooled)
    batch = [made.ids, made.lengths, made.id_weights, made.gradient]
    return [made.weights, made.states, made.slots, *batch, pooled, made.rule, 0.1, 1e-8]


def weight_gradient(rng: Random, guarded: Guarded) -> list[object]:
    made = Lookup(rng, guarded, pooled=True)
    return [made.weights, made.slots, made.ids, made.lengths, made.gradient]


def sum_gradient(rng: Random, guarded: Guarded) -> list[object]:
    pooled, width = rng.random() < 0.7, rng.choice([4, 5, 16, 64])
    made = Lookup(rng, guarded, pooled=pooled, width=width)
    bases = torch.tensor([sum(made.rows[:table]) for table in made.slot_tables])
    if rng.random() < 0.3:
        bases[rng.randrange(len(bases))] = -1
    columns, rows = made.slots[:, 4].contiguous(), sum(made.rows)
    return [*several(rng, made), bases, columns, width, pooled, rows]


def update_matrix(rng: Random, guarded: Guarded) -> list[object]:
    pooled, width = rng.random() < 0.7, rng.choice([4, 5, 16, 64])
    made = Lookup(rng, guarded, pooled=pooled, width=width)
    bases = torch.tensor([sum(made.rows[:table]) for table in made.slot_tables])
    weight, columns = made.weights.view(-1, width), made.slots[:, 4].contiguous()
    return [weight, made.states, *several(rng, made), bases, columns, pooled, made.rule, 0.1, 1e-8]


def several(rng: Random, made: Lookup) -> list[list[Tensor]]:
    """A batch and its gradient, up to three times."""
    times = rng.randint(1, 3)
    weights = [] if made.id_weights is None else [made.id_weights] * times
    return [[made.ids] * times, [made.lengths] * times, weights, [made.gradient] * times]


def update_rows(rng: Random, guarded: Guarded) -> list[object]:
    rows, width, count, rule = rng.choice([1, 50]), rng.choice([1, 4, 6, 64]), rng.choice([0, 1, 40]), rng.randrange(3)
    weight = guarded(torch.rand(rows, width))
    state = [None, guarded(torch.rand(rows, width)), guarded(torch.rand(rows))][rule]
    squares = torch.rand(count) if rule == 2 else None
    return [weight, state, torch.randint(rows, (count,)), torch.rand(count, width), squares, 0.5, rule, 0.1, 1e-8]


def map_ids(rng: Random, guarded: Guarded) -> list[object]:
    rows = rng.choice([1, 2, 40])
    records = torch.zeros((rows, 3), dtype=torch.int64)
    buckets = torch.zeros(128, dtype=torch.int32)
    for row in range(rng.randrange(rows + 1)):
        records[row] = torch.tensor([row * 2**57 - 5, rng.randint(1, 9), rng.randint(1, 5)])
    torch.ops.shardrec.index_ids(records, buckets)
    ids = torch.tensor([rng.randrange(rows + 3) * 2**57 - 5 for _ in range(rng.randrange(60))], dtype=torch.int64)
    waiting, of_waiting = torch.zeros((rows, 3), dtype=torch.int64), torch.zeros(128, dtype=torch.int32)
    out, state = torch.zeros(ids.numel(), dtype=torch.int32), torch.zeros(10, dtype=torch.int64)
    numbers = [rng.choice([0, 0, 1]), rng.randint(1, 2), rng.randrange(5), 2, 6, rng.randint(3, 6)]
    return [ids, out, records, buckets, waiting, of_waiting, state, *numbers, rng.random() < 0.8]


def admit_ids(rng: Random, guarded: Guarded) -> list[object]:
    _, _, records, *others = map_ids(rng, guarded)[:7]
    assert isinstance(records, Tensor)
    ids = torch.randperm(40)[: rng.randrange(12)] + 1
    used = (records[:, 1] > 0).nonzero().squeeze(1)
    evicted = rng.choice([None, used[: rng.randrange(len(used) + 1)]])
    numbers = [rng.choice([0, 0, 1]), rng.randint(1, 2), rng.randrange(5), 6]
    return [ids, records, *others, *numbers, evicted]


def index_ids(rng: Random, guarded: Guarded) -> list[object]:
    return map_ids(rng, guarded)[2:4]


def text_keys(rng: Random, guarded: Guarded) -> list[object]:
    data = torch.tensor([rng.choice(b"-0179afF x") for _ in range(rng.randrange(60))], dtype=torch.uint8)
    offsets = sorted(rng.randrange(data.numel() + 1) for _ in range(rng.randint(1, 9)))
    offset_dtype = rng.choice([torch.int32, torch.int64])
    return [data, torch.tensor(offsets, dtype=offset_dtype), rng.random() < 0.5, rng.random() < 0.5]


OPERATORS: list[Callable[[Random, Guarded], list[object]]] = [
    assemble, distribute, are_sound, cut_ids, look_up, look_up_out, update, weight_gradient, sum_gradient,
    update_matrix, update_rows, map_ids, admit_ids, index_ids, text_keys,
]  # fmt: skip


def spoiled_tensor(rng: Random, one: Tensor) -> Tensor:
    """Of another dtype, shape, stride or device, or with other values. What is written to keeps its guards."""
    match rng.randrange(9):
        case 0:
            return one.to(rng.choice(DTYPES))
        case 1:
            return one.flatten() if rng.random() < 0.5 else one.unsqueeze(rng.randrange(one.dim() + 1))
        case 2 if one.dim():
            dim = rng.randrange(one.dim())
            return one.narrow(dim, 0, rng.randrange(one.size(dim) + 1))
        case 3 if one.dim():
            return torch.cat([one, one], dim=rng.randrange(one.dim()))
        case 4 if one.dim() == 2:
            return one.t()
        case 5 if one.dim():
            return torch.stack([one, one], dim=-1)[..., 0]
        case 6:
            return one.to("meta")
        case 7 if one.dim():
            return one.new_zeros(()).expand(one.shape)
        case _ if one.numel() and one.dtype in (torch.int32, torch.int64):
            spoiled = one.clone(memory_format=torch.contiguous_format)
            for _ in range(rng.randint(1, 3)):
                number = rng.choice(NUMBERS)
                limit = torch.iinfo(one.dtype)
                spoiled.view(-1)[rng.randrange(one.numel())] = min(max(number, limit.min), limit.max)
            return spoiled
        case _:
            return one.new_empty(rng.choice([(0,), (0, 0), (0, 2**40), (3, 0), ()]))


def spoiled(rng: Random, one: object) -> object:
    if isinstance(one, Tensor):
        return spoiled_tensor(rng, one)
    if isinstance(one, bool):
        return not one
    if isinstance(one, int):
        return rng.choice(NUMBERS)
    if isinstance(one, float):
        return rng.choice([0.0, -1.0, float("inf"), float("nan")])
    if isinstance(one, list) and one:
        place = rng.randrange(len(one))
        return rng.choice(
            [one[:place], [*one[:place], spoiled(rng, one[place]), *one[place + 1 :]], [*one, one[place]]]
        )
    return rng.choice([[], None, torch.rand(3), torch.rand(0)])


@pytest.mark.parametrize("make", OPERATORS, ids=lambda make: make.__name__)
@given(rng=randoms())
def test_a_call_that_does_not_fit_is_refused(make: Callable[[Random, Guarded], list[object]], rng: Random) -> None:
    torch.manual_seed(rng.randrange(2**31))
    guarded = Guarded()
    arguments = make(rng, guarded)
    operator = getattr(torch.ops.shardrec, make.__name__)
    operator(*arguments)
    assert guarded.are_whole()
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(arguments))
        arguments[place] = spoiled(rng, arguments[place])
    try:
        operator(*arguments)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        assert str(error)
    assert guarded.are_whole()


def test_every_operator_is_tried() -> None:
    sources = sorted(Path(native.__file__).parent.glob("*.cpp"))
    found = {name for one in sources for name in re.findall(r'library\.def\(\s*"(\w+)\(', one.read_text())}
    assert {make.__name__ for make in OPERATORS} == found
