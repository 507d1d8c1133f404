"""Exported programs: eager mode's numbers on 1 and 2 ranks, any batch size, and faults on all ranks."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import ExportedProgram
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.layout import Topology
from shardrec.modules import ShardedModel, shard
from shardrec.serve import ExportError, WeightFormat, quantize
from tests.batches import random_bags
from tests.models import ClickModel, collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan
from tests.ranks import ranks, run_without_shardrec
from tests.scripting.scorers import Reader
from tests.serve.served import click_scorer, pooled_columns

FORMATS = [form.value for form in WeightFormat]


def plain(features: KeyedJaggedTensor) -> tuple[Tensor, ...]:
    """As a program takes them."""
    weights = features.weights_or_none()
    return (features.values(), features.lengths(), *([] if weights is None else [weights]))


def compare(seed: int, *, extra: bool = False) -> None:
    """A random model's program against the model, on batches of sizes that tracers take for special."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = Random(seed)
    weighted = rng.random() < 0.4
    model, configs, _ = click_scorer(rng, Topology(ranks_per_host=world_size), weighted=weighted)
    weights = rng.choice(FORMATS)
    served = quantize(model, weights)
    rows = feature_rows(configs)
    keys = ["unused"] if extra else []

    def batch(even: int, odd: int) -> KeyedJaggedTensor:
        """Of so many samples on ranks of even and odd number; all ranks draw those of all."""
        sizes = [odd if number % 2 else even for number in range(world_size)]
        bags = [random_bags(rng, rows, size, weighted=weighted, extra=keys, shuffled=False) for size in sizes]
        return bags[rank].kjt()

    program = shardrec.export(served, (batch(2, 2),)).module()
    where = f"seed {seed}, {weights}: {model.plan}"
    for sizes in [(3, 0), (0, 0), (1, 1), (0, 1), (2, 7)]:
        features = batch(*sizes)
        assert torch.equal(program(*plain(features)), served(features)), f"{sizes}, {where}"
    bad, faulty = batch(4, 4), world_size - 1
    values, lengths, *others = plain(bad)
    if rank == faulty:
        lengths = lengths.clone()
        lengths[0] += 1
    with pytest.raises(RuntimeError, match=f"bad input: rank {faulty}: .*lengths and ids do not fit"):
        program(values, lengths, *others)
    features = batch(2, 1)
    assert torch.equal(program(*plain(features)), served(features)), f"after a fault, {where}"


@pytest.mark.some(1, of="exact")
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_program_is_the_model_exactly(world_size: int) -> None:
    def rank_main() -> None:
        for seed in range(world_size - 1, 2):
            compare(seed, extra=seed == 1)

    ranks(world_size, rank_main, timeout=200)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_more_programs_are_their_models_exactly(world_size: int) -> None:
    def rank_main() -> None:
        for seed in [0, 2, *range(10, 10 + 12 // world_size)]:
            compare(seed, extra=seed % 3 == 0)

    ranks(world_size, rank_main, timeout=500)


TABLES = [
    EmbeddingConfig(name="t0", num_embeddings=13, embedding_dim=16, feature_names=["a"]),
    EmbeddingConfig(name="t1", num_embeddings=7, embedding_dim=16, feature_names=["b", "c"]),
]


def compare_sequences(seed: int, *, dedup: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = Random(seed)
    torch.manual_seed(0)
    sizes = {f"words.{one.name}": (one.num_embeddings, one.embedding_dim) for one in TABLES}
    plan = random_plan(rng, sizes, Topology(ranks_per_host=world_size))
    model = shard(Reader(EmbeddingCollection(tables=TABLES), 16), plan, dedup=dedup).eval()
    served = quantize(model, rng.choice(FORMATS))

    def batch(*counts: int) -> KeyedJaggedTensor:
        bags = [random_bags(rng, {"a": 13, "b": 7, "c": 7}, count, shuffled=False) for count in counts]
        return bags[rank].kjt()

    program = shardrec.export(served, (batch(2, 2),)).module()
    for counts in [(3, 0), (0, 0), (1, 1), (2, 7)]:
        features = batch(*counts)
        found, expected = program(*plain(features)), served(features)
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected), f"{counts}, seed {seed}: {plan}"


@pytest.mark.some(1, of="exact")
@pytest.mark.parametrize(
    ("world_size", "dedup"),
    [
        pytest.param(1, True, marks=pytest.mark.slow),
        (1, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_a_program_of_sequences_is_the_model_exactly(world_size: int, dedup: bool) -> None:
    ranks(world_size, compare_sequences, 0 if dedup else 1, dedup=dedup, timeout=200)


LOADED = """
import sys
import torch, fbgemm_gpu
program = torch.export.load(f"{folder}/program{rank}.pt2").module()
assert "shardrec" not in sys.modules and "torchrec" not in sys.modules
given = torch.load(f"{folder}/batch{rank}.pt")
try:
    program(given["bad"], *given["good"][1:])
    raise SystemExit("a bad batch gave no error")
except RuntimeError as error:
    assert "bad input: rank 1: an id is outside its table" in str(error), error
torch.save(program(*given["good"]), f"{folder}/output{rank}.pt")
"""


@pytest.mark.slow
def test_saved_programs_are_run_by_processes_that_know_torch_and_fbgemm_only(tmp_path: Path) -> None:
    def rank_main() -> None:
        rank = dist.get_rank()
        model, configs, _ = click_scorer(Random(5), Topology(ranks_per_host=2), cut="row_wise_uneven")
        rows = feature_rows(configs)
        features = random_bags(Random(rank), rows, 3 + rank, shuffled=False).kjt()
        # Not quantized: float32 tables of the inference kernel.
        program = shardrec.export(model, (features,))
        torch.export.save(program, tmp_path / f"program{rank}.pt2")
        assert names(program.graph) == {model.context.collectives.group_name}
        bad = features.values() + (10**6 if rank == 1 else 0)
        torch.save({"good": plain(features), "bad": bad}, tmp_path / f"batch{rank}.pt")
        torch.save(model(features).detach(), tmp_path / f"expected{rank}.pt")

    ranks(2, rank_main)
    run_without_shardrec(2, LOADED, folder=str(tmp_path))
    for rank in range(2):
        found, expected = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("output", "expected"))
        assert torch.allclose(found, expected, atol=1e-6, rtol=0)


def names(graph: torch.fx.Graph) -> set[str]:
    """The process groups that a program names."""
    calls = [node for node in graph.nodes if getattr(node.target, "namespace", "") == "_c10d_functional"]
    return {value for node in calls for value in node.args if isinstance(value, str)}


def click_model(weights: str = "") -> tuple[ShardedModel, dict[str, int]]:
    """With dense columns, on one rank."""
    rng = Random(1)
    configs = random_configs(rng)
    plan = random_plan(rng, table_sizes(configs, "sparse"), Topology(ranks_per_host=1))
    model = shard(ClickModel(collection(configs, optimizers="sgd"), pooled=pooled_columns(configs)), plan).eval()
    return quantize(model, weights) if weights else model, feature_rows(configs)


@pytest.fixture(scope="module")
def clicks() -> tuple[ShardedModel, dict[str, int], ExportedProgram]:
    model, rows = click_model("int4")
    features = random_bags(Random(0), rows, 1, shuffled=False).kjt()
    return model, rows, shardrec.export(model, (), {"dense": torch.randn(1, 3), "features": features})


def test_an_example_of_one_sample_stands_for_all_sizes(
    clicks: tuple[ShardedModel, dict[str, int], ExportedProgram],
) -> None:
    model, rows, program = clicks
    assert list(program.graph_signature.user_inputs) == ["values", "lengths", "dense"]
    for size in (0, 1, 2, 5, 64):
        features, dense = random_bags(Random(size), rows, size, shuffled=False).kjt(), torch.randn(size, 3)
        assert torch.equal(program.module()(*plain(features), dense), model(dense, features))


def test_what_does_not_fit_is_refused(clicks: tuple[ShardedModel, dict[str, int], ExportedProgram]) -> None:
    _, rows, exported = clicks
    program = exported.module()
    features, dense = random_bags(Random(3), rows, 4, shuffled=False).kjt(), torch.randn(4, 3)
    values, lengths = plain(features)
    program(values, lengths, dense)
    for bad in [
        (values[:-1], lengths, dense),
        (values, -lengths, dense),
        (values, lengths[:-1], dense),
        (values, lengths, dense[:3]),
        (values, lengths, dense[:, :2]),
        (values, lengths, dense.double()),
        (values.to(torch.int32), lengths, dense),
        (values.to(torch.float32), lengths, dense),
    ]:
        with pytest.raises((RuntimeError, AssertionError, ValueError)):
            program(*bad)


def test_fbgemms_operators_are_described_to_tracers_as_they_are(
    clicks: tuple[ShardedModel, dict[str, int], ExportedProgram],
) -> None:
    _, rows, program = clicks
    calls: list[tuple[Any, Any, Any]] = []

    class Note(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if str(target).startswith("fbgemm."):
                calls.append((target, args, kwargs))
            return super().call_function(target, args, kwargs)

    features, dense = random_bags(Random(3), rows, 4, shuffled=False).kjt(), torch.randn(4, 3)
    Note(program.module(check_guards=False)).run(*plain(features), dense)
    assert {str(target) for target, _, _ in calls} >= {
        "fbgemm.int_nbit_split_embedding_codegen_lookup_function.default"
    }
    builds = [one for one in metadata.distributions() if one.name.replace("_", "-").startswith("fbgemm-gpu")]
    of_16 = any(one.version.startswith("1.6.") for one in builds)
    for target, args, kwargs in calls:
        if of_16 and "block_bucketize" in str(target):
            continue  # its own description there promises a tensor, that our programs do not use, where it gives none
        torch.library.opcheck(target, args, kwargs, test_utils=("test_schema", "test_faketensor"))


class Branching(nn.Module):
    """Asks a value, which a tracer has not."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.sparse = bags

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.sparse(features).values()
        return pooled if pooled.sum() > 0 else -pooled


class AsksSizes(nn.Module):
    """Does something else for some sizes."""

    def __init__(self, bags: nn.Module, asks: str = "") -> None:
        super().__init__()
        self.sparse, self.asks = bags, asks

    def forward(self, features: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        scores = self.sparse(features).values().sum(dim=1) + dense.sum(dim=1)
        if self.asks == "no ids" and features.values().numel() == 0:
            return 100 * scores
        if self.asks == "one sample" and dense.size(0) == 1:
            return 100 * scores
        if self.asks == "many samples" and dense.size(0) > 1000:
            return 100 * scores
        return scores


class Scaled(nn.Module):
    """Takes a tensor of one size."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.sparse = bags

    def forward(self, features: KeyedJaggedTensor, scale: Tensor) -> Tensor:
        return self.sparse(features).values() * scale.sum()


def on_one_rank(cls: Any) -> tuple[ShardedModel, KeyedJaggedTensor]:
    configs = random_configs(Random(1))
    model = shard(cls(collection(configs)), random_plan(Random(1), table_sizes(configs, "sparse"), Topology()))
    return model.eval(), random_bags(Random(0), feature_rows(configs), 3, shuffled=False).kjt()


def test_what_cannot_be_exported_is_named() -> None:
    model, rows = click_model()
    features, dense = random_bags(Random(0), rows, 3, shuffled=False).kjt(), torch.randn(3, 3)
    with pytest.raises(ConfigError, match=r"not Linear: shard the model first"):
        shardrec.export(nn.Linear(1, 1), (dense,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is in training mode.*: call model\.eval\(\) first"):
        shardrec.export(model.train(), (dense, features))
    model.eval()
    with pytest.raises(ConfigError, match=r"the example does not fit ClickModel\.forward \(missing a required"):
        shardrec.export(model, (dense,))
    with pytest.raises(ConfigError, match="has 0 KeyedJaggedTensors, not one"):
        shardrec.export(model, (dense, dense))
    with pytest.raises(ConfigError, match=r"'dense' of the example is a int, and an exported model takes tensors"):
        shardrec.export(model, (3, features))
    with pytest.raises(ConfigError, match=r"the shape \(2, 3\) and the features have 3 samples: .* static=\['dense'\]"):
        shardrec.export(model, (dense[:2], features))
    with pytest.raises(ConfigError, match=r"static names 'other'\. The tensors besides the features are 'dense'"):
        shardrec.export(model, (dense, features), static=["other"])
    branching, features = on_one_rank(Branching)
    with pytest.raises(ExportError, match=r"Branching cannot be exported: .*data-dependent.*\. A branch or a size"):
        shardrec.export(branching, (features,))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("asks", "words"),
    [
        ("no ids", "AsksSizes cannot be exported: for a batch of 1 samples and no ids, its code does something else"),
        ("one sample", r"AsksSizes cannot be exported: Constraints violated \(B\)"),
        ("many samples", r"AsksSizes cannot be exported: Constraints violated \(B\)"),
    ],
)
def test_a_branch_on_a_size_is_refused_and_not_forgotten(asks: str, words: str) -> None:
    model, features = on_one_rank(AsksSizes)
    model.module.asks = asks
    with pytest.raises(ExportError, match=words):
        shardrec.export(model, (features, torch.randn(3, 2)))


def test_a_tensor_of_one_size() -> None:
    model, features = on_one_rank(Scaled)
    scale = torch.tensor([2.0, 3.0])
    program = shardrec.export(model, (features, scale), static=["scale"]).module()
    with torch.no_grad():
        assert torch.allclose(program(*plain(features), scale), model(features, scale), atol=1e-6, rtol=0)
    with pytest.raises((RuntimeError, AssertionError)):
        program(*plain(features), torch.ones(3))
