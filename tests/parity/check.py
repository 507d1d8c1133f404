"""Train the collection of a case sharded, beside the unsharded one, and say which of its cells differ in what.

Tolerances. float32: both add the same numbers in another order, 1e-5. 16 bits: where a sum is next to the middle
between two 16-bit numbers, both may round apart, by one unit of the number itself and rarely; ``MOST_APART`` numbers of
a cell may. Such tables take the reference's weights after each step, so that steps are compared one by one. What
travels in another format than float32 may differ by that format's bounds, see :mod:`tests.parity.wire`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import native
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.layout import Shard
from shardrec.modules import ShardedModel, shard
from shardrec.modules.collection import ShardedCollection
from tests.batches import random_bags, random_sizes_bags
from tests.executors import executed
from tests.models import OPTIMIZERS
from tests.modules.tables import local_part
from tests.parity.cases import Case, Cell
from tests.parity.policies import like, spoiled
from tests.parity.reference import Reference, dense_optimizers, dtype_of, lookups, outputs, tables_of, unsharded
from tests.parity.wire import WireBounds

__all__ = ["check_all"]

ATOL = 1e-5
UNIT = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""The distance of neighbouring numbers near 1."""
MOST_APART = 2
MOST_NAMED = 30
LEAST_MOVED = 2e-5
"""FP16 moves numbers of about 1 by up to 5e-4; adding up in another order does so by less than 1e-6."""


def check_all(cases: Sequence[Case], steps: int = 2, micro_batches: int = 0, device: str = "cpu") -> int:
    """Check cases one after the other, on every rank of the process group.

    Args:
        cases: alike on every rank.
        steps: of training.
        micro_batches: backward calls of each step, with ``update="step"``; 0: one, with ``update="backward"``.
        device: of the sharded collection.

    Returns:
        The number of cells.

    Raises:
        AssertionError: naming the cells that differ, and in what.
    """
    faults: list[str] = []
    for case in cases:
        try:
            with with_native(not case.in_torch):
                faults += Comparison(case, micro_batches, device).run(steps)
        except Exception as error:
            names = " ".join(cell.name for cell in case.cells)
            raise AssertionError(f"{case}: {type(error).__name__}: {error}, with cells {names}") from error
    more = f"\n  and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
    assert not faults, f"{len(faults)} differ:\n  " + "\n  ".join(faults[:MOST_NAMED]) + more
    return sum(len(case.cells) for case in cases)


@contextmanager
def with_native(there: bool) -> Iterator[None]:
    """With the C++ operators, or as where they were not compiled."""
    before = native.has_operators
    native.has_operators = before if there else lambda: False  # type: ignore[assignment]
    try:
        yield
    finally:
        native.has_operators = before


class Comparison:
    """A sharded collection and its reference.

    Args:
        case: describes both.
        micro_batches: as :func:`check_all` takes them.
        device: of the sharded collection.
    """

    def __init__(self, case: Case, micro_batches: int = 0, device: str = "cpu") -> None:
        self.case, self.device = case, device
        self._micro_batches = micro_batches
        self.faults: list[str] = []
        self._apart = dict.fromkeys((cell.name for cell in case.cells), 0)
        source = unsharded(case)
        first = [tables_of(source)[cell.name].weight.detach().clone() for cell in case.cells]  # type: ignore[operator,union-attr]
        self.reference = Reference(case, first)
        comms = QuantizedComms(output=case.comms, gradient=case.comms)
        if case.meta:
            source = unsharded(case, device="meta")
        torch.manual_seed(case.seed)
        self.model: ShardedModel = shard(
            source,
            case.plan(),
            dedup=case.dedup,
            comms=comms,
            transport=case.transport,
            on_bad_id=case.policies() or "error",
            update="step" if micro_batches else "backward",
            device=device,
        )
        self.run_model = executed(self.model, "eager" if case.executor == "portable" else case.executor)
        self.portable = executed(self.model, "portable") if case.executor == "portable" else None
        collection = self.model.module
        assert isinstance(collection, ShardedCollection)
        self.tables = [collection.tables()[cell.name] for cell in case.cells]
        self._fused = self.model.fused_optimizer if micro_batches and self.model.has_fused_tables else None
        self._dense = dense_optimizers(case, [list(table.locals.values()) for table in self.tables])
        self._wire = None if case.comms == "fp32" else WireBounds(case)
        self._wire_errors: dict[str, Tensor] = {}
        self._moved: dict[str, float] = {}

    def run(self, steps: int) -> list[str]:
        """Train both; returns what differs."""
        self._compare_weights("first values")
        for step in range(steps):
            self._step(step)
            self._compare_weights(f"weights after step {step}")
        for cell, apart in self._apart.items():
            if apart > MOST_APART:
                self._fault(cell, f"{apart} 16-bit weights were rounded apart")
        if self._wire is None:
            self._compare_states(steps)
        elif self.case.topology.world_size > 1:
            for what, moved in self._moved.items():
                if moved < LEAST_MOVED:
                    self._fault("all cells", f"{what} are as exact as if they had not travelled as {self.case.comms}")
        if self.portable is None:
            assert self.model.bad_ids() == self.reference.bad, (self.model.bad_ids(), self.reference.bad)
        assert self.model.state_dict().keys() == self.reference.module.state_dict().keys()
        return self.faults

    def _fault(self, name: str, text: str) -> None:
        self.faults.append(f"{self.case} {name}: {text}")

    def _step(self, step: int) -> None:
        count = max(1, self._micro_batches)
        for micro in range(count):
            self._backward(step * count + micro)
        self.reference.average()
        self._compare_gradients(step)
        self.reference.step()
        if self._fused is not None:
            self._fused.step()
            self._fused.zero_grad()
        for optimizer in self._dense:
            optimizer.step()
            optimizer.zero_grad()

    def _backward(self, step: int) -> None:
        """A forward and a backward of both."""
        case, rank = self.case, dist.get_rank()
        features, samples = self._batch(step)
        given, weights = self._with_weights(features.to(self.model.context.device))
        same, same_weights = self._with_weights(features)
        if self.portable is not None:
            with torch.no_grad():
                inferred = outputs(case, self.portable, given)
        output = outputs(case, self.run_model, given).on_the_cpu()
        found = output.values
        if any(value.dtype is not torch.float32 for value in found):
            self._fault("all cells", f"step {step}: outputs are {[value.dtype for value in found]}")
        if self.portable is not None:
            for (cell, feature), one, other in zip(lookups(case), inferred.values, found, strict=True):
                if not _close(one, other, torch.zeros(())):
                    self._fault(cell.name, f"step {step}: {feature} of the portable program is off")
            assert (inferred.keys, len(inferred.integers)) == (output.keys, len(output.integers))
            assert all(torch.equal(*pair) for pair in zip(inferred.integers, output.integers, strict=True))
        generator = torch.Generator().manual_seed(1000 * case.seed + 10 * step + rank)
        flat = torch.cat([one.reshape(-1) for one in found])
        gradient = torch.randn(flat.shape, generator=generator)
        # Ranks without a sample take part in backward, too.
        (flat * gradient).sum().backward()
        expected = self.reference.forward(same) if samples else output
        if self._wire is not None:
            parts = gradient.split([one.numel() for one in found])
            parts = [part.view_as(one) for part, one in zip(parts, found, strict=True)]
            allowed, self._wire_errors = self._wire(self.reference.weights, same, parts, samples)
        else:
            allowed = [torch.zeros(()) for _ in found]
        if samples:
            (torch.cat([one.reshape(-1) for one in expected.values]) * gradient).sum().backward()
            if output.keys != expected.keys:
                self._fault("all cells", f"step {step}: keys {output.keys} instead of {expected.keys}")
            for one, other in zip(output.integers, expected.integers, strict=True):
                if not torch.equal(one, other):
                    self._fault("all cells", f"step {step}: lengths or ids {one.tolist()} instead of {other.tolist()}")
            for (cell, feature), one, other, error in zip(lookups(case), found, expected.values, allowed, strict=True):
                self._note_moved("outputs", one, other)
                if one.shape != other.shape or not _close(one, other, error):
                    self._fault(cell.name, f"step {step}: {feature} is off by {_distance(one, other)}")
        else:
            assert flat.numel() == 0, f"an empty batch has an output of {flat.numel()} numbers"
        if weights is not None and same_weights is not None:
            found_gradient = None if weights.grad is None else weights.grad.cpu()
            self._compare_weight_gradients(step, features, found_gradient, same_weights.grad)

    def _batch(self, step: int) -> tuple[KeyedJaggedTensor, int]:
        """This rank's input of a step, and its samples."""
        case, rng = self.case, self.case.rng("batch", step, dist.get_rank())
        weighted = case.weights != "none"
        rows = case.feature_rows()
        if case.sizes == "each":
            # Sequences come also without inverse indices; the bounds on what the wire rounds do not know of them.
            inverse = case.pooled or (case.comms == "fp32" and rng.random() < 0.7)
            bags = random_sizes_bags(rng, rows, weighted=weighted, even=rng.random() < 0.3, inverse=inverse)
            return spoiled(bags.features, rows, case.policies(), rng), bags.samples
        # The ranks have ids of one dtype, but lengths, keys and their order may differ between them.
        size = rng.choice([0, 1, 3, 4])
        ids = case.rng("dtype", step).choice([torch.int32, torch.int64])
        lengths = rng.choice([torch.int32, torch.int64])
        features = random_bags(rng, rows, size, weighted=weighted, extra=("extra",)).kjt(ids, lengths)
        return spoiled(features, rows, case.policies(), rng), size

    def _with_weights(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor | None]:
        """The batch; where its weights are learned, with a copy of them that takes a gradient."""
        if self.case.weights != "learned":
            return features, None
        leaf = features.weights().clone().requires_grad_()
        return like(features, weights=leaf), leaf

    def _compare_weight_gradients(
        self, step: int, features: KeyedJaggedTensor, found: Tensor | None, expected: Tensor | None
    ) -> None:
        if found is None:
            self._fault("all cells", f"step {step}: the ids' weights have no gradient")
        elif expected is not None and not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
            wrong = ((found - expected).abs() > 1e-4 + 1e-4 * expected.abs()).nonzero()
            keys = [
                key for key, count in zip(features.keys(), features.length_per_key(), strict=True) for _ in range(count)
            ]
            names = sorted({keys[int(index)] for index in wrong})
            cells = [cell.name for cell, feature in lookups(self.case) if feature in names]
            self._fault(" or ".join(cells), f"step {step}: weights' gradient is off by {_distance(found, expected)}")

    def _compare_gradients(self, step: int) -> None:
        """Of the tables without an optimizer in backward."""
        for cell, table in zip(self.case.cells, self.tables, strict=True):
            if cell.optimizer != "none":
                continue
            whole = self.reference.weights[cell.name].grad
            assert whole is not None, "it was averaged"
            for place, parameter in table.locals.items():
                if parameter.grad is None:
                    self._fault(cell.name, f"step {step}: {place or 'the replica'} has no gradient")
                    continue
                error = self._wire_error(cell, place)
                found = parameter.grad.cpu()
                if found.dtype is torch.float32:
                    self._note_moved("gradients", found, local_part(whole, place))
                self._compare(cell, found, local_part(whole, place), error, f"step {step}: gradient of {place}")

    def _compare_weights(self, what: str) -> None:
        for cell, table in zip(self.case.cells, self.tables, strict=True):
            whole = self.reference.weights[cell.name].detach()
            for place, parameter in table.locals.items():
                part = local_part(whole, place)
                if parameter.dtype is not dtype_of(cell):
                    self._fault(cell.name, f"{what}: dtype {parameter.dtype}")
                if self._wire is None or cell.optimizer != "none":
                    # On the wire the step is one of SGD; elsewhere there is no error, and the rate does not matter.
                    error = self._wire_error(cell, place) * float(OPTIMIZERS["sgd"].settings["lr"])
                    if cell.optimizer == "adam" and cell.name in self.reference.unsure:
                        error = error + 2 * float(OPTIMIZERS["adam"].settings["lr"]) * self.reference.unsure[cell.name]
                    self._compare(cell, parameter.detach().cpu(), part, error, f"{what}, {place}")
                if parameter.dtype is not torch.float32 or self._wire is not None:
                    with torch.no_grad():
                        parameter.copy_(part)

    def _compare(self, cell: Cell, found: Tensor, expected: Tensor, error: Tensor, what: str) -> None:
        if found.dtype is torch.float32:
            if not _close(found, expected, error):
                self._fault(cell.name, f"{what} is off by {_distance(found, expected)}")
            return
        difference = (found.float() - expected).abs()
        slack = self.reference.slack[cell.name]
        bound = UNIT[found.dtype] * (expected.abs() + slack) + ATOL + error
        if bool((difference > bound).any()):
            self._fault(cell.name, f"{what} is off by {float(difference.max())}")
        elif not slack and self._wire is None:
            self._apart[cell.name] += int((difference > 0).sum())

    def _note_moved(self, what: str, found: Tensor, expected: Tensor) -> None:
        """Keep the largest error that the wire made in numbers that are not all zero."""
        if self._wire is not None and bool(expected.any()):
            self._moved[what] = max(self._moved.get(what, 0.0), float((found - expected).detach().abs().max()))

    def _wire_error(self, cell: Cell, place: Shard | None) -> Tensor:
        """What the format on the wire may change in the gradient of this rank's part of a table."""
        error = self._wire_errors.get(cell.name)
        return torch.zeros(()) if error is None else local_part(error, place)

    def _states_of(
        self, cell: Cell, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> list[tuple[str, Tensor]]:
        """The states of a table by the names of the torch class, which TorchRec's names stand for."""
        first = "sum" if "sum" in expected else "exp_avg"
        short = {name.rpartition(".")[2]: tensor for name, tensor in state.items()}
        found = [(first if name == "momentum1" else name, tensor) for name, tensor in short.items()]
        if dict(found).keys() != expected.keys():
            self._fault(cell.name, f"states {sorted(dict(found))} instead of {sorted(expected)}")
            return []
        return found

    def _compare_states(self, steps: int) -> None:
        """Of the fused optimizers, through the view that a user has of them."""
        if all(OPTIMIZERS[cell.optimizer].optimizer is None for cell in self.case.cells):
            return
        view = self.model.fused_optimizer
        view.state_dict()  # counts Adam's steps anew
        for cell, table in zip(self.case.cells, self.tables, strict=True):
            if OPTIMIZERS[cell.optimizer].optimizer is None:
                continue
            expected = self.reference.state(cell.name)
            # Gradients of a replica are rounded once per feature, rank and sum; a square errs by twice the number.
            slack = self.reference.slack[cell.name]
            rounding = UNIT[dtype_of(cell)] * 3 * steps * max(slack, slack**2) if slack else 0.0
            first = next(iter(table.locals.values()), None)
            for name, state in [] if first is None else self._states_of(cell, view.state[first], expected):
                for offsets, part in parts_of(state):
                    whole = expected[name].to(part.dtype) if part.dim() == 0 else _cut(expected[name], offsets, part)
                    if not torch.allclose(part.cpu(), whole, rtol=1e-4, atol=ATOL + rounding):
                        self._fault(cell.name, f"{offsets}: state {name!r} is off by {_distance(part, whole)}")
            if cell.optimizer == "adam" and int(expected["step"]) != steps:
                self._fault(cell.name, "the reference made another number of steps")


def parts_of(state: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """The local parts of a state, and where they begin in it."""
    if isinstance(state, ShardedTensor):
        return [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in state.local_shards()]
    return [((0,) * state.dim(), state)]


def _cut(whole: Tensor, offsets: tuple[int, ...], like: Tensor) -> Tensor:
    """A part of an unsharded state: of each weight, or of each row."""
    whole = whole if like.dim() == 2 else whole.reshape(-1)
    for dim, (start, size) in enumerate(zip(offsets, like.shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def _close(found: Tensor, expected: Tensor, error: Tensor) -> bool:
    return bool(((found - expected).abs() <= ATOL + 1e-5 * expected.abs() + error).all())


def _distance(found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"its shape, {tuple(found.shape)} instead of {tuple(expected.shape)}"
    return str(float((found.detach().float() - expected.detach()).abs().max()))
