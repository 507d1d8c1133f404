"""Bad input of a compiled model: the eager model's error, on every rank at the same step, and no table touched."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import InputError
from tests.compile.changed import _changed, too_large
from tests.compile.compiled import batch, fresh, graphs, make
from tests.ranks import ranks


def negative_length(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths = features.lengths().clone()
    lengths[1] = -1
    return _changed(features, lengths=lengths)


def too_few_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return _changed(features, values=features.values()[:-1])


def too_many_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return _changed(features, values=torch.cat([features.values(), features.values()[:2]]))


def missing_length(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return _changed(features, lengths=features.lengths()[:-1])


def missing_key(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return _changed(features, keys=["a", "b", "other"])


FAULTS: dict[str, tuple[Callable[[KeyedJaggedTensor], KeyedJaggedTensor], str]] = {
    "too_large": (too_large, r"id 1000000 in sample \d is outside \[0, 13\)"),
    "negative_length": (negative_length, "lengths must not be negative"),
    "too_few_ids": (too_few_ids, "add up to"),
    "too_many_ids": (too_many_ids, "add up to"),
    "missing_length": (missing_length, "Give exactly one length for each feature and sample"),
    "missing_key": (missing_key, "lacks"),
}


def weights(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def fails_together(mode: str, name: str, guilty: int, *faults: str, backend: str = "aot_eager") -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    with fresh():
        model = make(name, mode, torch.optim.SGD)
        compiled = torch.compile(model, backend=backend, dynamic=True)
        for spoil, words in (FAULTS[fault] for fault in faults or FAULTS):
            for step in range(2):
                compiled(*batch(Random(step + rank), 5 + step)).sum().backward()
            before = weights(model)
            dense, features = batch(Random(7 + rank), 7)
            with pytest.raises(InputError, match=rf"(?s)rank {guilty}: .*{words}"):
                compiled(dense, spoil(features) if rank == guilty else features).sum().backward()
            assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        compiled(*batch(Random(rank), 4)).sum().backward()


@pytest.mark.parametrize("mode", ["boundary", pytest.param("traced", marks=pytest.mark.slow)])
def test_one_rank(mode: str) -> None:
    fails_together(mode, "least", 0)


def test_sequences_traced() -> None:
    # The forward finds the fault: no graph of a backward is needed, which takes as long again to compile.
    fails_together("traced", "sequences", 0, "missing_length", "too_large", backend="eager")


@pytest.mark.slow
def test_two_ranks_traced() -> None:
    ranks(2, fails_together, "traced", "least", 1, "too_large", "missing_key", timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "name"), [("boundary", "dlrm"), ("traced", "dlrm"), ("traced", "sequences"), ("boundary", "sequences")]
)
def test_two_ranks(mode: str, name: str) -> None:
    ranks(2, fails_together, mode, name, 0, timeout=200)


def disagreement(mode: str) -> None:
    with fresh():
        # Each dtype is compiled anew, and the graph is the same for every backend.
        compiled = torch.compile(make("least", mode), backend="eager", dynamic=True)
        dense, features = batch(Random(0), 5)
        compiled(dense, features)
        if dist.get_rank():
            features = _changed(features, values=features.values().to(torch.int32))
        with pytest.raises(InputError, match=r"(?s)disagree about their input.*ids int64.*ids int32"):
            compiled(dense, features)
        with pytest.raises(RuntimeError if dist.get_rank() else InputError) as caught:
            compiled(dense.double() if dist.get_rank() else dense, features)
        assert "float64" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_ranks_that_disagree_are_told() -> None:
    ranks(2, disagreement, "traced", timeout=120)


def compiled_here_and_not_there() -> None:
    with fresh():
        model, eager = make("least", "traced"), make("least", None)
        run = torch.compile(model, backend="eager", dynamic=True) if dist.get_rank() else model
        for step in range(2):
            for one in (run, eager):
                one(*batch(Random(step), 4)).sum().backward()
        for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine, its)


def test_a_rank_that_is_not_compiled_goes_with_one_that_is() -> None:
    ranks(2, compiled_here_and_not_there, timeout=120)


def forms_of_faults() -> None:
    with fresh(), torch._dynamo.config.patch(recompile_limit=3):
        model = make("least", "traced", torch.optim.SGD)
        compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
        rank = dist.get_rank() if dist.is_initialized() else 0
        compiled(*batch(Random(rank), 5)).sum().backward()
        before = graphs()
        for form in range(6):
            dense, features = batch(Random(rank), 5)
            if not rank:
                features = _changed(features, keys=["a", "b", f"other {form}"])
            with pytest.raises(InputError, match="rank 0: the input lacks feature"):
                compiled(dense, features)
        if not rank:
            assert graphs() == before
        compiled(*batch(Random(7 + rank), 6)).sum().backward()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_forms_of_faults_use_up_no_recompilations(world_size: int) -> None:
    ranks(world_size, forms_of_faults, timeout=120)


def beyond_the_limit() -> None:
    with fresh(), torch._dynamo.config.patch(recompile_limit=1):
        models = [make("least", mode, torch.optim.SGD) for mode in ("traced", None)]
        runs = [torch.compile(models[0], backend="eager", dynamic=True), models[1]]
        for step in range(3):
            # Each rank has an order of its own, and only the first step's is compiled.
            dense, features = batch(Random(step), 5)
            order = [[0, 1, 2], [2, 0, 1], [1, 2, 0]][(step * (1 + dist.get_rank())) % 3]
            outputs = [run(dense, features.permute(order)) for run in runs]
            torch.testing.assert_close(*outputs)
            for one in outputs:
                one.sum().backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_beyond_the_limit_of_recompilations_ranks_still_agree() -> None:
    ranks(2, beyond_the_limit, timeout=120)
