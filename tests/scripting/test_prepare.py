"""torch.jit.script, torch.jit.trace and torch.fx on sharded models: what users type first."""

from __future__ import annotations

import gc
import inspect
import linecache
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel
from shardrec.modules.optim import NoFusedOptimizer
from shardrec.scripting import ScriptError
from tests.collective_counts import CountCollectives
from tests.models import collection
from tests.ranks import ranks


class Scorer(nn.Module):
    """One table and a layer over it."""

    def __init__(self, *, optimizers: str = "none") -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])]
        self.ebc = collection(configs, optimizers=optimizers, seed=1)
        self.over = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        result: Tensor = self.over(self.ebc(features)["f"])
        return result


class Two(nn.Module):
    """Two collections, each used right where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Scorer(optimizers="sgd").ebc, Scorer(optimizers="sgd").ebc

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        left = self.left(features)
        right = self.right(features)
        return left["f"] * right["f"]


class OfTensors(nn.Module):
    """What torch.jit.trace takes: tensors in, tensors out."""

    def __init__(self, scorer: nn.Module) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = self.scorer(KeyedJaggedTensor(keys=["f"], values=values, lengths=lengths))
        return result


VALUES, LENGTHS = torch.tensor([1, 2, 3]), torch.tensor([1, 2])


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=VALUES, lengths=LENGTHS)


def sharded(**options: str) -> ShardedModel:
    return shardrec.shard(Scorer(**options))


def test_torch_jit_script_of_a_sharded_model() -> None:
    model, reference = sharded(optimizers="adagrad"), sharded(optimizers="adagrad")
    reference.load_state_dict(model.state_dict())
    scripted = torch.jit.script(model)
    for _ in range(2):
        loss, expected = scripted(features()).sum(), reference(features()).sum()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))
    assert list(scripted.state_dict()) == list(model.state_dict())


@pytest.mark.some(1)
@pytest.mark.parametrize("script", [torch.jit.script, shardrec.script])
def test_a_portable_program_only_infers(script: Any) -> None:
    model = sharded(optimizers="adagrad").eval()
    program, expected = script(model), model(features())
    assert torch.equal(program(features()), expected)
    assert list(program.state_dict()) == list(model.state_dict())
    with pytest.raises(RuntimeError, match="does not require grad"):
        program(features()).sum().backward()
    with torch.no_grad():
        model.over.weight.add_(1.0)  # type: ignore[operator, union-attr]
    assert torch.equal(program(features()), model(features())), "the memory is the model's"
    assert all(parameter.requires_grad for parameter in model.over.parameters())  # type: ignore[union-attr]
    with pytest.raises(torch.jit.Error, match=r"portable programs only infer: call eval\(\) on it; to train, call"):
        program.train()(features())
    program = shardrec.script(model.train(), portable=True)
    assert not program.training and model.training
    assert torch.equal(program(features()), model(features()))


class AroundScripted(nn.Module):
    """A module that is scripted already, before one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.jit.script(nn.Dropout(0.9))
        self.scorer = Scorer()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        result: Tensor = self.drop(self.scorer(features))
        return result


def test_scripted_modules_in_a_portable_program_have_to_be_in_eval_mode() -> None:
    model = shardrec.shard(AroundScripted())
    with pytest.raises(
        ScriptError, match=r"^portable programs only infer, and drop, which is scripted already, is in "
    ):
        shardrec.script(model.train(), portable=True)
    program = shardrec.script(model.eval(), portable=True)
    scores = program(features())
    assert torch.equal(scores, model(features())) and not scores.requires_grad


BAD = [
    ([1], torch.empty(0, dtype=torch.int64), "there are ids and no samples"),
    ([1], torch.tensor([0]), "lengths and ids do not fit"),
    ([1, 2], torch.tensor([1]), "lengths and ids do not fit"),
    ([1], torch.tensor([1, 0]), "there is not exactly one length"),
    ([1], torch.tensor([1], dtype=torch.int16), "the lengths .or offsets. are not int32"),
    ([10], torch.tensor([1]), "an id is outside its table"),
]


@pytest.mark.parametrize(("ids", "lengths", "words"), BAD, ids=[words for *_, words in BAD])
def test_what_a_portable_program_says_of_bad_input(ids: list[int], lengths: Tensor, words: str) -> None:
    program = shardrec.script(sharded().eval())
    bad = KeyedJaggedTensor(keys=["f"], values=torch.tensor(ids), lengths=lengths, stride=len(lengths) % 2)
    with pytest.raises(torch.jit.Error, match=f"bad input: rank 0: .*{words}"):
        program(bad)
    assert torch.isfinite(program(features())).all()


@pytest.mark.parametrize(
    ("keys", "weights", "words"),
    [
        (["f", "f"], torch.ones(2), "a feature that a table looks up comes more than once among the keys"),
        (["f", "x"], torch.ones(2, 1), "lacks a floating-point weight for each id"),
        (["f", "x"], torch.ones(1, 2), "lacks a floating-point weight for each id"),
    ],
)
def test_a_portable_program_refuses_what_the_eager_model_refuses(keys: list[str], weights: Tensor, words: str) -> None:
    """It took the first of two features of one name, and the weights of other shapes as they lay."""
    config = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    model = shardrec.shard(collection([config], weighted=True)).eval()
    bad = KeyedJaggedTensor(keys=keys, values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]), weights=weights)
    with pytest.raises(shardrec.InputError):
        model(bad)
    with pytest.raises(torch.jit.Error, match=f"bad input: rank 0: .*{words}"):
        shardrec.script(model)(bad)


def test_two_collections_share_their_exchanges_in_torch_jit_script() -> None:
    """One all-to-all of headers and ids, of output and of gradient, for both."""

    def rank_main() -> None:
        tables = tuple(cuts.row_wise(f"{path}.t", 10, 4, ranks=[0, 1]) for path in ("left", "right"))
        plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=tables)
        eager, model = (shardrec.shard(Two(), plan) for _ in range(2))
        scripted = torch.jit.script(model)
        for run in (eager, scripted):
            with CountCollectives() as counts:
                run(features()).sum().backward()
            assert counts["all_to_all"] == 3
        torch.testing.assert_close(list(model.parameters()), list(eager.parameters()))

    ranks(2, rank_main)


def test_the_generated_sources_go_with_the_copy() -> None:
    def generated() -> list[str]:
        gc.collect()
        return [name for name in linecache.cache if name.startswith("<shardrec.script")]

    before = generated()
    scripted = torch.jit.script(sharded())
    del scripted
    assert generated() == before


def test_inside_of_another_module_it_is_refused_and_the_model_stays_as_it_is() -> None:
    model = sharded()
    outer = OfTensors(model)
    with pytest.raises(ScriptError, match=r"a ShardedModel inside of another module.*shardrec.script\(model\)"):
        torch.jit.script(outer)
    assert outer.scorer is model
    assert shardrec.script(outer)(VALUES, LENGTHS).shape == (2, 1)


def test_a_collection_by_itself_is_refused() -> None:
    with pytest.raises(ScriptError, match="a ShardedEmbeddingBagCollection inside of another module, or by"):
        torch.jit.script(sharded().ebc)


def test_torch_jit_trace_is_refused() -> None:
    model = OfTensors(sharded())
    with pytest.raises(
        ConfigError, match=r"torch.jit.trace records .*: script the model with shardrec.script\(model\)"
    ):
        torch.jit.trace(model, (VALUES, LENGTHS))
    assert model(VALUES, LENGTHS).shape == (2, 1)


def test_a_graph_module_keeps_its_forward() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 1), nn.ReLU()))
    inputs = torch.randn(3, 4)
    assert torch.equal(shardrec.script(traced)(inputs), traced(inputs))


def test_a_model_without_fused_optimizers_can_be_inspected() -> None:
    model = sharded()
    assert not hasattr(model, "fused_optimizer")
    assert "module" in dict(inspect.getmembers(model))
    with pytest.raises(NoFusedOptimizer, match="Give the tables one with apply_optimizer_in_backward"):
        _ = model.fused_optimizer
    assert issubclass(NoFusedOptimizer, ConfigError)


class Outer(nn.Module):
    """A model around a sharded one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        result: Tensor = self.inner(features).sigmoid()
        return result


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torchrec.fx.symbolic_trace])
def test_sharded_modules_are_nodes_of_fx_graphs(trace: Any) -> None:
    model = sharded()
    expected = model(features())
    around, inside = trace(Outer(model)), trace(model.module)
    assert [node.target for node in around.graph.nodes if node.op == "call_module"] == ["inner"]
    assert [node.target for node in inside.graph.nodes if node.op == "call_module"] == ["ebc", "over"]
    assert torch.equal(around(features()), expected.sigmoid())
    assert torch.equal(inside(features()), expected)
    with pytest.raises(ConfigError, match="cannot be traced by itself: trace the module that holds it"):
        trace(model.ebc)
