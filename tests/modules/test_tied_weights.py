"""What a sharded table cannot follow is refused: ties, parametrizations, and other tensors in its parameters' place."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import shardrec
from shardrec import ConfigError, InputError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.pipeline import TrainPipeline
from tests.batches import random_bags
from tests.models import apply_optimizer_in_backward, collection
from tests.ranks import ranks

CONFIGS = [
    EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=8, feature_names=[f"f_{name}"]) for name in "tu"
]
ROWS = {"f_t": 10, "f_u": 10}


class Tied(nn.Module):
    """Two collections, and a head with the shape of a table."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=CONFIGS, device=torch.device(device))
        tables = [EmbeddingConfig(name="s", num_embeddings=10, embedding_dim=8, feature_names=["f_s"])]
        self.rows = EmbeddingCollection(tables=tables, device=torch.device(device))
        self.head = nn.Linear(8, 10, bias=False)


def tie_head(model: Tied) -> None:
    model.head.weight = model.bags.embedding_bags["t"].weight


def tie_memory(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.bags.embedding_bags["t"].weight.detach())


def tie_collections(model: Tied) -> None:
    model.rows.embeddings["s"].weight = model.bags.embedding_bags["t"].weight


def tie_tables(model: Tied) -> None:
    model.bags.embedding_bags["u"].weight = model.bags.embedding_bags["t"].weight


def use_a_table_alone(model: Tied) -> None:
    model.alone = model.bags.embedding_bags["t"]


TIES = {
    tie_head: "'bags.embedding_bags.t.weight', 'head.weight' are tied",
    tie_memory: "'bags.embedding_bags.t.weight', 'head.weight' are tied",
    tie_collections: "'bags.embedding_bags.t.weight', 'rows.embeddings.s.weight' are tied",
    tie_tables: "'bags.embedding_bags.t.weight', 'bags.embedding_bags.u.weight' are tied",
    use_a_table_alone: "'bags.embedding_bags.t.weight', 'alone.weight' are tied",
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tie", TIES)
def test_ties_are_refused_by_name(tie: Callable[[Tied], None], device: str) -> None:
    if device == "meta" and tie is tie_memory:
        return  # there is no memory to share
    model = Tied(device)
    tie(model)
    with pytest.raises(ConfigError, match=f"{re.escape(TIES[tie])}.*a parameter of its own"):
        shard(model)


def test_a_collection_in_two_places_stays_one() -> None:
    model = Tied()
    model.again = model.bags
    sharded = shard(model).module
    assert sharded.again is sharded.bags
    assert isinstance(sharded.bags, shardrec.modules.ShardedEmbeddingBagCollection)


def test_a_parametrized_table_is_refused_by_name() -> None:
    model = Tied()
    parametrize.register_parametrization(model.rows.embeddings["s"], "weight", nn.Tanh())
    with pytest.raises(ConfigError, match=r"'s' of collection 'rows' is computed.*remove the parametrization"):
        shard(model)


class OwnForward(EmbeddingBagCollection):
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = super().forward(features)
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values() * 2)


class OwnTraining(EmbeddingCollection):
    def train(self, mode: bool = True) -> EmbeddingCollection:
        return super().train(False)


class OwnConstructor(EmbeddingBagCollection):
    """Sharding loses nothing of it."""

    def __init__(self, names: str, device: str = "cpu") -> None:
        super().__init__(tables=[config for config in CONFIGS if config.name in names], device=torch.device(device))
        self.names = names

    def extra_repr(self) -> str:
        return self.names

    def describe(self) -> str:
        return f"tables {self.names}"


class OwnValues(OwnConstructor):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def patch_forward(model: Tied) -> None:
    model.bags.forward = lambda features: None


def patch_table(model: Tied) -> None:
    model.rows.embeddings["s"].forward = lambda ids: ids


OVERRIDES: dict[str, Callable[[Tied], object]] = {
    r"'bags' has forward\(\) of its own, in a OwnForward": lambda model: setattr(
        model, "bags", OwnForward(tables=CONFIGS)
    ),
    r"'rows' has train\(\) of its own, in a OwnTraining": lambda model: setattr(
        model, "rows", OwnTraining(tables=model.rows.embedding_configs())
    ),
    r"'bags' has reset_parameters\(\) of its own, in a OwnValues": lambda model: setattr(
        model, "bags", OwnValues("tu", "meta")
    ),
    r"'bags' has forward\(\) of its own, in a EmbeddingBagCollection": patch_forward,
    r"'rows' has forward\(\) of its own, in a Embedding,": patch_table,
    "'bags' has _forward_hooks of its own": lambda model: model.bags.register_forward_hook(print),
    "'rows' has _forward_pre_hooks of its own": lambda model: model.rows.register_forward_pre_hook(print),
    "'bags' has _state_dict_pre_hooks of its own": lambda model: model.bags.register_state_dict_pre_hook(print),
    "'bags' has _backward_hooks of its own": lambda model: model.bags.embedding_bags["t"].weight.register_hook(print),
    "'rows' has _post_accumulate_grad_hooks": lambda model: model.rows.embeddings[
        "s"
    ].weight.register_post_accumulate_grad_hook(print),
}


@pytest.mark.parametrize("message", OVERRIDES)
def test_what_was_added_to_a_collection_is_refused_by_name(message: str) -> None:
    model = Tied()
    OVERRIDES[message](model)
    before = list(model.modules())
    with pytest.raises(ConfigError, match=f"module {message}.*put them into a module around it"):
        shard(model)
    assert list(model.modules()) == before


def test_a_subclass_that_sharding_loses_nothing_of() -> None:
    model = Tied()
    for kind in (OwnConstructor, OwnValues):
        model.bags = kind("tu")
        apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
        weight = model.bags.embedding_bags["t"].weight.detach().clone()
        sharded = shard(copy.deepcopy(model))
        assert torch.equal(sharded.state_dict()["bags.embedding_bags.t.weight"], weight)


# ------------------------------------------------------------------------------------------------- after it was sharded


def sharded_model(cut: str = "table_wise", optimizers: str = "adagrad") -> ShardedModel:
    """On 2 ranks ``t`` is on rank 0 alone with "table_wise", and on both with the others."""
    make: dict[str, Any] = {
        "table_wise": lambda name: cuts.table_wise(name, 10, 8, rank="tu".index(name)),
        "row_wise": lambda name: cuts.row_wise(name, 10, 8, ranks=[0, 1]),
        "data_parallel": lambda name: cuts.data_parallel(name, 10, 8),
    }
    plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=tuple(make[cut](one.name) for one in CONFIGS))
    return shard(collection(CONFIGS, optimizers=optimizers), plan)


def features() -> Any:
    return random_bags(Random(dist.get_rank()), ROWS, 4).kjt()


def freeze(model: ShardedModel) -> None:
    model.requires_grad_(False)


def new_data(model: ShardedModel) -> None:
    for parameter in model.parameters():
        parameter.data = torch.ones_like(parameter)


def new_parameter(model: ShardedModel) -> None:
    for table in model.module.tables().values():  # type: ignore[operator,union-attr]
        for name, parameter in list(table.named_parameters()):
            setattr(table, name, nn.Parameter(torch.ones_like(parameter)))


CHANGES = {
    freeze: "was frozen .* after .*shard",
    new_data: "is another tensor than .*copy values into the parameter",
    new_parameter: "is another tensor than .*copy values into the parameter",
}


@pytest.mark.some(4)
@pytest.mark.parametrize("cut", ["table_wise", "row_wise", "data_parallel"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_one_rank_is_an_error_on_all_at_the_next_forward(
    change: Callable[[ShardedModel], None], cut: str
) -> None:
    def rank_main() -> None:
        for steps in (0, 2):
            model = sharded_model(cut)
            for _ in range(steps):
                model(features()).values().sum().backward()
            if dist.get_rank() == 0:
                change(model)
            before = [one.detach().clone() for one in model.parameters()]
            with pytest.raises(InputError, match=f"rank 0: weight of table 't' {CHANGES[change]}"):
                model(features())
            for one, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(one, old)

    ranks(2, rank_main)


@pytest.mark.some(1)
@pytest.mark.parametrize("executor", ["live", "traced"])
def test_a_change_is_an_error_in_every_executor(executor: str) -> None:
    def rank_main() -> None:
        model = sharded_model()
        run: Any = (
            shardrec.script(model, portable=False) if executor == "live" else torch.compile(model, backend="eager")
        )
        run(features()).values().sum().backward()
        if dist.get_rank() == 0:
            freeze(model)
        with pytest.raises(Exception, match="rank 0: weight of table 't' was frozen"):
            run(features()).values()

    ranks(2, rank_main)


def test_a_change_between_the_steps_of_a_pipeline_is_an_error_at_the_next() -> None:
    def rank_main() -> None:
        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tables = collection(CONFIGS, optimizers="adagrad")

            def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
                loss = self.tables(batch).values().sum()
                return loss, loss

        plan = ShardingPlan(
            topology=Topology(ranks_per_host=2),
            tables=tuple(cuts.row_wise(f"tables.{name}", 10, 8, ranks=[0, 1]) for name in "tu"),
        )
        model = shard(Loss(), plan)
        nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        steps = iter(TrainPipeline(model, nothing, [features() for _ in range(6)]))
        for _ in range(3):
            next(steps)
        model.requires_grad_(False)
        with pytest.raises((ConfigError, InputError), match=r"table 'tables\.t' was frozen"):
            next(steps)

    ranks(2, rank_main)


def test_a_frozen_copy_looks_up_without_gradients() -> None:
    def rank_main() -> None:
        model = sharded_model()
        teacher = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            assert torch.equal(teacher(features()).values(), model(features()).values())
        with pytest.raises(InputError, match=r"torch\.no_grad\(\)"):
            teacher(features())

    ranks(2, rank_main)


@pytest.mark.parametrize("optimizers", ["adagrad", "none"])
def test_a_table_that_was_frozen_when_it_was_sharded_cannot_be_unfrozen(optimizers: str) -> None:
    def rank_main() -> None:
        module = collection(CONFIGS, optimizers=optimizers).requires_grad_(False)
        tables = tuple(cuts.row_wise(one.name, 10, 8, ranks=[0, 1]) for one in CONFIGS)
        model = shard(module, ShardingPlan(topology=Topology(ranks_per_host=2), tables=tables))
        model(features())
        model.requires_grad_(True)
        with pytest.raises(InputError, match="was unfrozen"):
            model(features())

    ranks(2, rank_main)


def test_tables_without_an_optimizer_in_backward_may_be_frozen_and_unfrozen() -> None:
    def rank_main() -> None:
        model = sharded_model(optimizers="none")
        for learns in (False, True):
            if dist.get_rank() == 0:
                model.requires_grad_(learns)
            model(features()).values().sum().backward()
            (weight,) = model.parameters()
            assert (weight.grad is not None) == (learns or dist.get_rank() == 1)

    ranks(2, rank_main)


@contextmanager
def expects(error: bool) -> Iterator[None]:
    if error:
        with pytest.raises(InputError, match=r"is another tensor.*functional_call"):
            yield
    else:
        yield


def test_a_functional_call_with_other_weights_is_an_error() -> None:
    def rank_main() -> None:
        for cut in ("table_wise", "data_parallel"):
            model = sharded_model(cut)
            own = dict(model.module.named_parameters())
            for replaced in (False, True, False):
                given = {name: one.detach() * 2 if replaced else one for name, one in own.items()}
                with expects(replaced):
                    torch.func.functional_call(model.module, given, (features(),)).values()

    ranks(2, rank_main)
