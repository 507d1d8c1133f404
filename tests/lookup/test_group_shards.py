"""A bank of tables against ``torch.nn.functional.embedding_bag``, table by table."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from shardrec import native
from shardrec.layout import COLUMN_UNIT
from shardrec.lookup import fbgemm_kernel as kernels
from shardrec.lookup import group_shards as bank_module
from shardrec.lookup.backward import LookupGradient
from shardrec.lookup.fbgemm_kernel import has_fused_kernel
from shardrec.lookup.group_shards import TableBank
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.lookup.replicated import dense_lookup
from shardrec.lookup.row_optimizers import RowOptimizer
from tests.large_tensors import LargeTensors
from tests.lookup.differentiable import looked_up
from tests.plans import randoms

CPU = torch.device("cpu")
SGD = FusedOptimizer(kind=OptimizerKind.SGD, lr=1.0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Drawn:
    """Random tables, slots and bags."""

    def __init__(
        self, rng: Random, optimizer: FusedOptimizer | None, dtype: torch.dtype = torch.float32, *, pooled: bool = True
    ) -> None:
        count = rng.randint(1, 4)
        widths = [COLUMN_UNIT * rng.randint(1, 3) for _ in range(count)]
        self.shapes = [(rng.randint(1, 9), width if pooled else widths[0]) for width in widths]
        self.slots = sorted([*range(count), *(rng.randrange(count) for _ in range(rng.randint(0, 3)))])
        order = list(range(count))
        if pooled:
            # The lookups of a table are neighbours, but the tables may come in any order; not so without pooling, where
            # fbgemm takes the distance of the tables of two slots for the size of the first.
            rng.shuffle(order)
        self.slots.sort(key=order.index)
        self.bank = TableBank(self.shapes, self.slots, optimizer, CPU, dtype=dtype, pooled=pooled)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        for weight in self.bank.weights:
            weight.copy_(torch.randn(weight.shape, generator=generator))
        self.size = rng.randrange(4)
        bags = [[rng.randrange(4) for _ in range(self.size)] for _ in self.slots]
        self.lengths = torch.tensor(bags, dtype=torch.int32).view(len(self.slots), self.size)
        ids = [
            rng.randrange(self.shapes[table][0])
            for table, row in zip(self.slots, bags, strict=True)
            for length in row
            for _ in range(length)
        ]
        self.ids = torch.tensor(ids, dtype=rng.choice([torch.int32, torch.int64]))
        self.weights = torch.rand(len(ids), generator=generator) + 0.1 if rng.random() < 0.5 else None
        self.gradient = torch.randn(self.size, sum(self.shapes[t][1] for t in self.slots), generator=generator)

    def reference(self, tables: list[Tensor]) -> Tensor:
        """(B, D) by one embedding_bag per slot."""
        columns, start = [], 0
        tables = [table.float() for table in tables]
        for table, row in zip(self.slots, self.lengths, strict=True):
            count = int(row.sum())
            part = slice(start, start + count)
            start += count
            columns.append(
                nn.functional.embedding_bag(
                    self.ids[part].long(),
                    tables[table],
                    torch.cat([row.new_zeros(1), row.cumsum(0)]).long(),
                    mode="sum",
                    per_sample_weights=None if self.weights is None else self.weights[part],
                    include_last_offset=True,
                )
            )
        return torch.cat(columns, dim=1)


@given(rng=randoms())
def test_looks_up_sums_of_rows(rng: Random) -> None:
    drawn = Drawn(rng, None, rng.choice(DTYPES)) if rng.random() < 0.6 else Drawn(rng, SGD)
    pooled = drawn.bank.look_up(drawn.ids, drawn.lengths, drawn.weights)
    assert pooled.dtype is torch.float32
    assert torch.allclose(pooled, drawn.reference(drawn.bank.weights), atol=1e-5)


@given(rng=randoms())
def test_looks_up_rows(rng: Random) -> None:
    drawn = Drawn(rng, None, rng.choice(DTYPES), pooled=False)
    rows = drawn.bank.look_up(drawn.ids, drawn.lengths, None)
    counts = drawn.lengths.sum(dim=1).tolist()
    expected = [
        drawn.bank.weights[table][ids.long()].float()
        for table, ids in zip(drawn.slots, drawn.ids.split(counts), strict=True)
    ]
    assert rows.dtype is torch.float32
    assert torch.equal(rows, torch.cat(expected))


@given(rng=randoms())
def test_row_gradients_are_those_of_autograd(rng: Random) -> None:
    drawn = Drawn(rng, None, rng.choice(DTYPES))
    leaves = [weight.float().requires_grad_() for weight in drawn.bank.weights]
    drawn.reference(leaves).backward(drawn.gradient)
    given = {"ids": drawn.ids, "lengths": drawn.lengths, "id_weights": drawn.weights, "gradient": drawn.gradient}
    found = drawn.bank.row_gradients([LookupGradient(**given)])
    assert len(found) == len(drawn.bank.classes)
    seen = []
    for cls, gradient in zip(drawn.bank.classes, found, strict=True):
        assert torch.equal(gradient.rows, gradient.rows.unique(sorted=True)), "rows are distinct and ascending"
        whole = torch.zeros(cls.weight.shape).index_copy_(0, gradient.rows, gradient.values)
        for position, table in enumerate(cls.tables):
            seen.append(table)
            expected = leaves[table].grad
            assert expected is not None
            part = whole[cls.bases[position] : cls.bases[position + 1]]
            assert torch.allclose(part, expected, atol=1e-5)
    assert sorted(seen) == list(range(len(drawn.shapes)))


@pytest.mark.parametrize("dtype", DTYPES)
@given(rng=randoms())
def test_dense_lookup_gives_dense_gradients(dtype: torch.dtype, rng: Random) -> None:
    """Summed in float32, rounded once; those of the ids' weights, too, with and without the kernels in C++."""
    drawn = Drawn(rng, None, dtype)
    parameters = [nn.Parameter(weight) for weight in drawn.bank.weights]
    leaves = [weight.float().requires_grad_() for weight in drawn.bank.weights]
    drawn.weights = (torch.rand(len(drawn.ids)) + 0.1).requires_grad_()
    weights = drawn.weights.detach().requires_grad_()
    drawn.reference(leaves).backward(drawn.gradient)
    for kernel in (drawn.bank._native, None):
        drawn.bank._native, weights.grad = kernel, None
        dense_lookup(drawn.bank, drawn.ids, drawn.lengths, weights, parameters).backward(drawn.gradient)
        if drawn.ids.numel():
            assert weights.grad is not None and drawn.weights.grad is not None
            assert torch.allclose(weights.grad, drawn.weights.grad, atol=1e-4)
        for parameter, leaf in zip(parameters, leaves, strict=True):
            assert parameter.grad is not None and leaf.grad is not None
            assert parameter.grad.dtype is dtype
            assert torch.allclose(parameter.grad.float(), leaf.grad, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)
            parameter.grad = None


@given(rng=randoms())
def test_a_fused_bank_learns_in_backward(rng: Random) -> None:
    drawn = Drawn(rng, SGD)
    leaves = [weight.clone().requires_grad_() for weight in drawn.bank.weights]
    drawn.reference(leaves).backward(drawn.gradient)
    looked_up(drawn.bank, drawn.ids, drawn.lengths, drawn.weights).backward(drawn.gradient)
    for weight, leaf in zip(drawn.bank.weights, leaves, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(weight, leaf.detach() - leaf.grad, atol=1e-5)


@given(rng=randoms())
def test_a_fused_bank_of_float16_rows_learns_in_float32_and_rounds(rng: Random) -> None:
    spec = FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.5, eps=1e-3)
    drawn = Drawn(rng, spec, torch.float16)
    leaves = [weight.float().requires_grad_() for weight in drawn.bank.weights]
    drawn.reference(leaves).backward(drawn.gradient)
    looked_up(drawn.bank, drawn.ids, drawn.lengths, drawn.weights).backward(drawn.gradient)
    for weight, state, leaf in zip(drawn.bank.weights, drawn.bank.states(), leaves, strict=True):
        assert leaf.grad is not None
        squares = leaf.grad.square().mean(dim=1)
        assert state["sum"].dtype is torch.float32
        assert torch.allclose(state["sum"], squares, atol=1e-5)
        exact = leaf.detach() - 0.5 * leaf.grad / (squares.sqrt() + 1e-3).unsqueeze(1)
        # Half a unit, or a whole one where float32 came out on the other side of the middle: measured 6 in 10,000.
        assert torch.allclose(weight.float(), exact, rtol=0.51 * torch.finfo(torch.float16).eps, atol=1e-5)


@given(rng=randoms())
def test_width_classes_are_the_banks_own_memory(rng: Random) -> None:
    drawn = Drawn(rng, None, rng.choice(DTYPES))
    for cls in drawn.bank.classes:
        cls.weight.fill_(cls.width)
    for weight, (rows, cols) in zip(drawn.bank.weights, drawn.shapes, strict=True):
        assert weight.shape == (rows, cols)
        assert bool((weight == cols).all())


@pytest.mark.parametrize("takes_memory", sorted({False, kernels._TAKES_MEMORY}))
@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_first_states(kind: OptimizerKind, takes_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with fbgemm's own memory, which is all that 1.6 takes."""
    monkeypatch.setattr(kernels, "_TAKES_MEMORY", takes_memory)
    if not has_fused_kernel(FusedOptimizer(kind=kind, lr=1.0), CPU, torch.float32, [4, 8]):
        assert kind not in (OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)
        return
    first = 0.0 if kind is OptimizerKind.SGD else 0.5
    bank = TableBank([(3, 4), (2, 8)], [0, 1], FusedOptimizer(kind=kind, lr=1.0, initial_accumulator_value=first), CPU)
    for (rows, cols), states in zip(bank.shapes, bank.states(), strict=True):
        assert set(states) == ({"sum"} if kind is not OptimizerKind.SGD else set())
        for state in states.values():
            assert state.shape == ((rows,) if kind is OptimizerKind.ROWWISE_ADAGRAD else (rows, cols))
            assert bool((state == first).all())


def test_learning_rate() -> None:
    bank = TableBank([(3, 4)], [0], SGD, CPU)
    bank.weights[0].zero_()
    ids, lengths = torch.tensor([1]), torch.tensor([[1]], dtype=torch.int32)
    bank.set_learning_rate(0.25)
    looked_up(bank, ids, lengths, None).sum().backward()
    assert bank.weights[0].tolist() == [[0.0] * 4, [-0.25] * 4, [0.0] * 4]


def test_inference_mode() -> None:
    bank = TableBank([(3, 4)], [0], SGD, CPU)
    bank.weights[0].copy_(torch.arange(12).view(3, 4))
    with torch.inference_mode():
        pooled = bank.look_up(torch.tensor([1, 2]), torch.tensor([[2]], dtype=torch.int32), None)
    assert pooled.tolist() == [[12.0, 14.0, 16.0, 18.0]]
    looked_up(bank, torch.tensor([1]), torch.tensor([[1]], dtype=torch.int32), None).sum().backward()
    assert bank.weights[0][1].tolist() == [3.0, 4.0, 5.0, 6.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_a_fused_bank_on_cuda_learns_as_rows_do_on_the_cpu(kind: OptimizerKind, dtype: torch.dtype) -> None:
    """To one unit of the number: the sums of a row's gradients may be added up in another order."""
    spec = FusedOptimizer(kind=kind, lr=0.1, eps=1e-8, betas=(0.9, 0.999))
    if spec.is_decay_decoupled:
        spec = replace(spec, weight_decay=0.5)
    if not has_fused_kernel(spec, torch.device("cuda"), dtype, [8]):
        pytest.skip(f"fbgemm has no {kind.value}")
    cuda, cpu = (TableBank([(9, 8)], [0], *where, dtype=dtype) for where in ((spec, torch.device("cuda")), (None, CPU)))
    rows = RowOptimizer(cpu.classes, 1, spec)
    generator = torch.Generator().manual_seed(2)
    first = torch.randn(9, 8, generator=generator)
    cuda.weights[0].copy_(first)
    cpu.weights[0].copy_(first)
    for _ in range(3):
        ids, lengths = torch.randint(9, (12,), generator=generator), torch.full((1, 4), 3, dtype=torch.int32)
        gradient = torch.randn(4, 8, generator=generator)
        pooled = looked_up(cuda, ids.cuda(), lengths.cuda(), None)
        assert torch.allclose(pooled.cpu(), cpu.look_up(ids, lengths, None), atol=1e-4)
        pooled.backward(gradient.cuda())
        rows.step(cpu.row_gradients([LookupGradient(ids=ids, lengths=lengths, id_weights=None, gradient=gradient)]))
        found, expected = cuda.weights[0].cpu().float(), cpu.weights[0].float()
        assert torch.allclose(found, expected, rtol=1.01 * max(torch.finfo(dtype).eps, 1e-5), atol=1e-5)
        cuda.weights[0].copy_(cpu.weights[0])


@pytest.mark.parametrize("mode", ["rows", "dense", "id weights", "in torch"])
def test_no_tensor_has_a_row_of_floats_for_each_id_of_bags(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operators, as on CUDA: 64 bags of 50 ids."""
    monkeypatch.setattr(native, "has_operators", lambda: False)
    monkeypatch.setattr(native, "has_kernels", lambda: False)
    monkeypatch.setattr(bank_module, "_FLOATS_AT_ONCE", 50 * 8)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (64 * 50,), generator=generator)
    lengths, id_weights = torch.full((1, 64), 50), torch.rand(len(ids), generator=generator)
    gradient = torch.rand(64, 8, generator=generator)
    bank = TableBank([(20, 8)], [0], None, CPU, dtype=torch.bfloat16)
    bank.weights[0].copy_(torch.rand(20, 8, generator=generator))
    rows = bank.weights[0].float()
    of_ids = gradient.repeat_interleave(50, dim=0)
    sums = torch.zeros(20, 8).index_add_(0, ids, of_ids * id_weights.unsqueeze(1))
    of_bags = torch.zeros(64, 20).scatter_add_(1, ids.view(64, 50), id_weights.view(64, 50)) @ rows
    of_weights = (of_ids * rows[ids]).sum(dim=1)
    expected = {"in torch": of_bags, "id weights": of_weights}.get(mode, sums)
    with LargeTensors(4 * 8 * len(ids) // 2) as large:
        match mode:
            case "in torch":
                found = bank.look_up(ids, lengths, id_weights)
            case "id weights":
                found = bank.id_weight_gradient(ids, lengths, gradient)
            case "dense":
                (found,) = bank.dense_gradients(ids, lengths, id_weights, gradient)
            case _:
                lookup = LookupGradient(ids=ids, lengths=lengths, id_weights=id_weights, gradient=gradient)
                (whole,) = bank.row_gradients([lookup])
                found = torch.zeros(20, 8).index_copy_(0, whole.rows, whole.values)
    assert not +large.made
    torch.testing.assert_close(found, expected)
