"""Each kind of optimizer, ordinary, fused and in backward, under GradScaler, clipping and accumulation: the unsharded
model's values on every rank, or an error before anything changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel
from shardrec.pipeline import TrainPipeline
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks


class OneTable(nn.Module):
    """The same values everywhere; a hook on ``rows`` sees the gradients of the table alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])
        self.tables, self.top = EmbeddingBagCollection(tables=[config]), nn.Linear(4, 1)
        self.overflows = False

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.tables(features).values() * 1
        if self.overflows:
            rows.register_hook(lambda gradient: gradient * torch.inf)
        loss: Tensor = self.top(rows).sum()
        return loss


def one_bag(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor(ids), lengths=torch.tensor([len(ids)]))


def one_table(model: OneTable, *, ranks_of_plan: int = 1, **options: Any) -> ShardedModel:
    """Sharded by a plan that has the table on the last rank."""
    layout = cuts.table_wise("tables.t", 6, 4, rank=ranks_of_plan - 1)
    return shardrec.shard(
        model, ShardingPlan(topology=Topology(ranks_per_host=ranks_of_plan), tables=(layout,)), **options
    )


def scale_three_steps(model: nn.Module, inner: Any, overflows: bool) -> list[float]:
    """The scale, and the dense part; in the second step the gradients of the rows overflow."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        inner.overflows = overflows and step == 1
        optimizer.zero_grad()
        scaler.scale(model(one_bag(1, 2))).backward()
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), *inner.top.weight.flatten().tolist()]


def scale_tables_with_an_ordinary_optimizer() -> None:
    """Of a plan that leaves a rank without rows, and of replicas: the rank that overflows is rank 0."""
    reference = OneTable()
    expected = scale_three_steps(reference, reference, True)
    for options in ({"ranks_of_plan": 2}, {"replicas": shardrec.Replicas(2)}):
        model = one_table(OneTable(), **options)
        torch.testing.assert_close(scale_three_steps(model, model.module, dist.get_rank() == 0), expected)


def test_a_grad_scaler_skips_the_steps_of_ordinary_optimizers_on_every_rank() -> None:
    ranks(2, scale_tables_with_an_ordinary_optimizer)


def refuse_scaler(model: ShardedModel, optimizer: Any, words: str, factor: float = 1.0) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(one_bag(1, 2)).sum() * factor).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ConfigError, match=f"a GradScaler is given an optimizer of this model, but .*{words}"):
            call(optimizer)


def in_backward(part: nn.Module) -> None:
    apply_optimizer_in_backward(torch.optim.SGD, part.parameters(), {"lr": 0.1})


@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_a_grad_scaler_is_refused_where_tables_are_updated_in_backward(factor: float) -> None:
    """Also in a step that it would skip, after which it would skip all."""
    for of_tables in (False, True):
        in_backward((unsharded := OneTable()).tables)
        model = one_table(unsharded)
        optimizer = model.fused_optimizer if of_tables else torch.optim.SGD(model.dense_parameters(), lr=0.1)
        refuse_scaler(model, optimizer, "update='step'", factor)
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    other = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    scaler.step(torch.optim.SGD(other.parameters(), lr=0.1))


def refuse_scaler_under_fsdp() -> None:
    in_backward((unsharded := OneTable()).tables)
    model = one_table(unsharded, ranks_of_plan=2, dense="fsdp")
    for optimizer in (torch.optim.SGD(model.dense_parameters(), lr=0.1), model.fused_optimizer):
        refuse_scaler(model, optimizer, "update='step'")
    in_backward((unsharded := OneTable()).top)
    with pytest.raises(ConfigError, match=r"has given optimizers to top\.weight, top\.bias, which dense='fsdp'"):
        one_table(unsharded, ranks_of_plan=2, dense="fsdp")


def test_a_grad_scaler_is_refused_under_fsdp_too() -> None:
    ranks(2, refuse_scaler_under_fsdp)


def test_optimizers_in_backward_of_the_dense_part_are_refused_where_gradients_are_changed() -> None:
    in_backward(unsharded := OneTable())
    model = one_table(unsharded, update="step")
    words = r"the optimizers of top\.weight, top\.bias step in each backward"
    refuse_scaler(model, model.fused_optimizer, words)
    for clip in (shardrec.clip_grad_norm_, shardrec.clip_grad_value_):
        with pytest.raises(ConfigError, match=words):
            clip(model, 1.0)
    with pytest.raises(ConfigError, match=f"accumulate is 2.* {words}"):
        TrainPipeline(model, model.fused_optimizer, [], accumulate=2)
    with pytest.raises(ConfigError, match=rf"TrainPipeline\(clip_norm=\) finds no gradients to clip.* {words}"):
        TrainPipeline(model, model.fused_optimizer, [], clip_norm=1.0)


def clip_with_torch(how: str) -> None:
    """Of a plan with rows on rank 1, and of replicas of all rows."""
    for options in ({"ranks_of_plan": 2}, {"replicas": shardrec.Replicas(2)}):
        model = one_table(OneTable(), **options)
        keyed = KeyedOptimizerWrapper(dict(model.named_parameters()), partial(torch.optim.SGD, lr=0.1))
        clips = GradientClippingOptimizer(keyed, GradientClipping.NORM, 0.05, enable_global_grad_clip=True)
        for _ in range(2):  # the second one accumulates
            model(one_bag(1, 2)).backward()
        state = [(parameter.detach().clone(), parameter.grad) for parameter in model.parameters()]
        gradients = [None if gradient is None else gradient.clone() for _, gradient in state]
        if dist.get_rank() == 0 and "ranks_of_plan" in options:
            continue  # which has no rows, and whose gradients are those of every rank
        with pytest.raises(ConfigError, match=r"call shardrec\.clip_grad_norm_\(model, max_norm\)"):
            if how == "torchrec":
                clips.step()
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=how == "foreach" or None)
        for parameter, (value, gradient), before in zip(model.parameters(), state, gradients, strict=True):
            assert torch.equal(parameter, value)
            assert gradient is parameter.grad
            assert gradient is not None and before is not None and torch.equal(gradient, before)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)


@pytest.mark.parametrize("how", ["torch", "foreach", "torchrec"])
def test_clipping_by_each_rank_s_own_norm_is_refused(how: str) -> None:
    ranks(2, clip_with_torch, how)


def test_the_state_of_an_ordinary_optimizer_is_made_of_plain_tensors() -> None:
    def rank_main() -> None:
        model = one_table(OneTable(), ranks_of_plan=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(one_bag(1, 2)).backward()
        optimizer.step()
        assert {type(state["momentum_buffer"]) for state in optimizer.state.values()} == {Tensor}

    ranks(2, rank_main)
