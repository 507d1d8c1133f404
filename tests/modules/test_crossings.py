"""Pairs of features that a reading has found to go wrong together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

ROWS, DIM = 6, 4
HAS_FSDP_RESET = hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state")


class Net(nn.Module):
    """One table, and a layer above it."""

    def __init__(self, *, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["a"])
        self.bags = EmbeddingBagCollection(tables=[config], is_weighted=weighted)
        self.top = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.top(self.bags(features).values())
        return logits


def features(step: int = 0, weights: Tensor | None = None) -> KeyedJaggedTensor:
    ids = torch.tensor([step % ROWS, dist.get_rank(), 3])
    return KeyedJaggedTensor(keys=["a"], values=ids, lengths=torch.tensor([2, 1]), weights=weights)


def given(net: Net, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **settings: Any) -> Net:
    apply_optimizer_in_backward(optimizer, net.bags.parameters(), {"lr": 0.1, **settings})
    return net


def plan(make: Callable[..., Any] = cuts.table_wise, **where: Any) -> ShardingPlan:
    where = where or {"rank": 0}
    return ShardingPlan(
        topology=Topology(ranks_per_host=dist.get_world_size()), tables=(make("bags.t", ROWS, DIM, **where),)
    )


def replicated_plan() -> ShardingPlan:
    topology = Topology(ranks_per_host=dist.get_world_size())
    return ShardingPlan(topology=topology, tables=(cuts.data_parallel("bags.t", ROWS, DIM),))


def table(model: nn.Module) -> Tensor:
    weight = model.state_dict()["bags.embedding_bags.t.weight"]
    if not isinstance(weight, ShardedTensor):
        return weight.clone()
    whole = torch.zeros(ROWS, DIM) if dist.get_rank() == 0 else None
    weight.gather(0, whole)
    shared = [whole]
    dist.broadcast_object_list(shared)
    assert shared[0] is not None
    return shared[0]


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_id_weights_alone_update_no_table(size: int) -> None:
    def run() -> None:
        model = shardrec.shard(given(Net(weighted=True)), plan())
        before = table(model)
        weights = torch.ones(3, requires_grad=True)
        (of_weights,) = torch.autograd.grad(model(features(weights=weights)).sum(), weights)
        model(features(weights=weights)).sum().backward(inputs=[weights])
        assert torch.equal(table(model), before)
        assert weights.grad is not None
        assert torch.equal(of_weights, weights.grad)
        model(features(weights=weights)).sum().backward()
        assert not torch.equal(table(model), before)

    ranks(size, run)


def test_a_rate_that_was_changed_before_shard_is_used_and_states_are_not_dropped() -> None:
    def run() -> None:
        net = given(Net())
        net.bags.embedding_bags["t"].weight._in_backward_optimizers[0].param_groups[0]["lr"] = 0.5  # type: ignore[union-attr, index]
        model = shardrec.shard(net, plan())
        assert model.fused_optimizer.param_groups[0]["lr"] == 0.5

        net = given(Net(), torch.optim.Adagrad)
        net(features()).sum().backward()
        with pytest.raises(ConfigError, match="was trained by its Adagrad in backward before it was sharded"):
            shardrec.shard(net, plan())

    ranks(1, run)


@pytest.mark.parametrize(("name", "value"), [("weight_decay", 0.1), ("eps", 1e-3)])
def test_a_setting_that_kernels_cannot_change_is_refused(name: str, value: float) -> None:
    def run() -> None:
        model = shardrec.shard(given(Net(), torch.optim.Adagrad), plan())
        optimizer = model.fused_optimizer
        before = table(model)
        saved = optimizer.state_dict()
        saved["param_groups"] = [{**group, name: value} for group in saved["param_groups"]]
        with pytest.raises(ConfigError, match=f"{name} of the fused optimizer of bags.t is"):
            optimizer.load_state_dict(saved)
        optimizer.param_groups[0][name] = value
        with pytest.raises(ConfigError, match=r"Only lr can change after shardrec\.shard"):
            model(features())
        assert torch.equal(table(model), before)

    ranks(1, run)


def test_the_scaler_of_fsdp_is_refused_where_backward_has_used_scaled_gradients() -> None:
    def run() -> None:
        model = shardrec.shard(given(Net()), plan())
        optimizer = torch.optim.SGD([*model.dense_parameters()], lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=16.0)
        scaler.scale(model(features()).sum()).backward()
        with pytest.raises(ConfigError, match="a GradScaler is given an optimizer of this model"):
            scaler.step(optimizer)

    ranks(2, run)


def test_a_scaler_takes_the_gradients_of_both_kinds_of_tables() -> None:
    """In whichever order an optimizer has them."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ordinary, self.fused = Net(), given(Net())

        def forward(self, given_features: KeyedJaggedTensor) -> Tensor:
            logits: Tensor = self.ordinary(given_features) + self.fused(given_features)
            return logits

    def run() -> None:
        layouts = [
            cuts.row_wise(f"{path}.bags.t", ROWS, DIM, ranks=range(dist.get_world_size()))
            for path in ("ordinary", "fused")
        ]
        both = ShardingPlan(topology=Topology(ranks_per_host=dist.get_world_size()), tables=tuple(layouts))
        tables = []
        for scale in (1.0, 16.0):
            model = shardrec.shard(Both(), both, update="step")
            parameters = [*model.dense_parameters()]
            optimizer = torch.optim.SGD([{"params": parameters}, *model.fused_optimizer.param_groups], lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scaler.scale(model(features()).sum()).backward()
            scaler.unscale_(optimizer)
            model.fused_optimizer.step()
            tables.append([part.detach().clone() for name, part in model.named_parameters() if "fused.bags" in name])
        for plain, scaled in zip(*tables, strict=True):
            torch.testing.assert_close(scaled, plain)

    ranks(2, run)


def test_models_are_sharded_and_copied_in_inference_mode() -> None:
    def run() -> None:
        from copy import deepcopy

        net = given(Net())
        with torch.inference_mode():
            model = shardrec.shard(net, plan())
            copied = deepcopy(model)
        before = table(model)
        for each in (model, copied):
            each(features()).sum().backward()
            assert not torch.equal(table(each), before)

    ranks(1, run)


def test_a_dense_layer_of_two_models_makes_one_step() -> None:
    def run() -> None:
        nets = [given(Net()), given(Net())]
        nets[1].top = nets[0].top
        apply_optimizer_in_backward(torch.optim.SGD, nets[0].top.parameters(), {"lr": 0.1})
        models = [shardrec.shard(net, plan()) for net in nets]
        before = nets[0].top.bias.detach().clone()
        sum(model(features()).sum() for model in models).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(nets[0].top.bias.detach(), before - 0.1 * 4)  # two samples of two models

    ranks(2, run)


@pytest.mark.parametrize("replicated", ["table", "model"])
def test_an_evaluation_between_a_forward_and_its_recomputation_changes_nothing(replicated: str) -> None:
    def run() -> None:
        def trained(*, evaluates: bool) -> list[Tensor]:
            torch.manual_seed(0)
            if replicated == "model":
                cut = ShardingPlan(
                    topology=Topology(ranks_per_host=1), tables=(cuts.table_wise("bags.t", ROWS, DIM, rank=0),)
                )
                model = shardrec.shard(given(Net()), cut, replicas=shardrec.Replicas(2, sync_every=3))
            else:
                model = shardrec.shard(given(Net()), replicated_plan())
            dense = torch.optim.SGD(model.dense_parameters(), 0.1)
            for step in range(6):
                with model.no_sync() if replicated == "table" and step % 2 == 0 else nullcontext():
                    logits = checkpoint(model, features(step), use_reentrant=False)
                if evaluates:
                    with torch.no_grad():
                        model(features(step + 1))
                logits.square().sum().backward()
                if step % 2:
                    dense.step()
                    dense.zero_grad()
            return [table(model), *(each.detach().clone() for each in model.dense_parameters())]

        for with_it, without in zip(trained(evaluates=True), trained(evaluates=False), strict=True):
            assert torch.equal(with_it, without)

    ranks(2, run)


def test_a_first_forward_and_its_recomputation_make_the_same_exchanges() -> None:
    class Twice(Net):
        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            first = self.bags(features)
            scale = torch.sigmoid(self.top.weight)  # which is saved between the calls
            second = self.bags(features)
            logits: Tensor = self.top(first.values() * scale + second.values())
            return logits

    def run() -> None:
        def trained(*, again: bool) -> list[Tensor]:
            model = shardrec.shard(given(Twice()), plan())
            for step in range(3):
                batch = features(step)
                logits = checkpoint(model, batch, use_reentrant=False) if again else model(batch)
                logits.square().sum().backward()
            return [table(model), *(each.grad for each in model.top.parameters())]

        for with_it, without in zip(trained(again=True), trained(again=False), strict=True):
            assert torch.equal(with_it, without)

    ranks(2, run)


def test_a_checkpoint_of_an_optimizer_in_backward_of_a_cut_table_is_loaded(tmp_path: Any) -> None:
    def run() -> None:
        def made() -> shardrec.ShardedModel:
            model = shardrec.shard(Net(), plan())
            apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.1})
            return model

        model = made()
        for step in range(2):
            model(features(step)).sum().backward()
        shardrec.save_checkpoint(tmp_path / "saved", model)
        other = made()
        shardrec.load_checkpoint(tmp_path / "saved", other)
        for each in (model, other):
            each(features(2)).sum().backward()
        assert torch.equal(table(model), table(other))

    ranks(2, run)


@pytest.mark.parametrize("differs", ["dense", "update", "optimizer"])
def test_options_that_differ_between_ranks_are_refused_on_all(differs: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        net = given(Net(), lr=0.1 * (1 + rank * (differs == "optimizer")))
        options: dict[str, Any] = {}
        if differs == "dense":
            options["dense"] = {"bucket_cap_mb": 1 + rank}
        elif differs == "update":
            options["update"] = "step" if rank else "backward"
        name = {"optimizer": "the optimizer in backward of bags"}.get(differs, differs)
        with pytest.raises(ConfigError, match=f"the ranks give different values of {name}"):
            shardrec.shard(net, plan(), **options)

    ranks(2, run)


@pytest.mark.parametrize("every", [1, 2])
def test_a_table_that_was_frozen_after_its_last_step_is_averaged_once_more(every: int) -> None:
    def run() -> None:
        rank = dist.get_rank()
        where = ShardingPlan(
            topology=Topology(ranks_per_host=1), tables=(cuts.table_wise("bags.t", ROWS, DIM, rank=0),)
        )
        model = shardrec.shard(Net(), where, replicas=shardrec.Replicas(2, sync_every=every))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = next(parameter for name, parameter in model.named_parameters() if "bags" in name)
        for step in range(every):
            optimizer.zero_grad()
            model(features(step + rank)).sum().backward()
            optimizer.step()
        weight.requires_grad_(False)
        model.sync_replicas()
        copies = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(copies, weight.detach().clone())
        assert torch.equal(copies[0], copies[1])

    ranks(2, run)


@pytest.mark.skipif(not HAS_FSDP_RESET, reason="this torch has no FSDPModule.reset_iter_state")
def test_fsdp_trains_on_after_a_backward_that_raised() -> None:
    def run() -> None:
        losses = []
        for fails in (False, True):
            model = shardrec.shard(given(Net()), plan(), dense="fsdp")
            optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.1)
            of_model = []
            for step in (0, None, 1, 2) if fails else (0, 1, 2):
                optimizer.zero_grad()
                output = model(features(step or 0))
                if step is None:

                    def fail(gradient: Tensor) -> None:
                        raise ValueError("of the user")

                    output.register_hook(fail)
                    with pytest.raises(ValueError, match="of the user"):
                        output.sum().backward()
                    continue
                loss = output.square().sum()
                loss.backward()
                optimizer.step()
                of_model.append(loss.item())
            losses.append(of_model)
        assert losses[0] == losses[1]

    ranks(2, run)


@pytest.mark.parametrize("size", [1, 2])
def test_optimizers_in_backward_of_the_dense_part_accumulate_in_no_sync_where_there_is_something_to_average(
    size: int,
) -> None:
    def run() -> None:
        net = given(Net())
        apply_optimizer_in_backward(torch.optim.SGD, net.top.parameters(), {"lr": 0.1})
        model, moved = shardrec.shard(net, plan()), []
        for step in range(4):
            before = model.top.bias.detach().clone()
            with model.no_sync() if step % 2 == 0 else nullcontext():
                model(features(step)).sum().backward()
            moved.append(float((before - model.top.bias.detach()) / 0.1))
        assert moved == pytest.approx([2, 2, 2, 2] if size == 1 else [0, 4, 0, 4], rel=1e-4)

    ranks(size, run)


@pytest.mark.parametrize(("reentrant", "updates"), [(False, 1), (True, 2)])
def test_a_lookup_in_a_reentrant_checkpoint_makes_an_update_of_its_own(reentrant: bool, updates: int) -> None:
    """Whose backward is another one inside of the loss's: it ends before it is known what that one will reach."""

    def run() -> None:
        model = shardrec.shard(given(Net(), torch.optim.Adam), plan())

        def second(scale: Tensor) -> Tensor:
            value: Tensor = model.bags(features(1)).values() * scale
            return value

        scale = torch.ones(1, requires_grad=True)
        rows = model.bags(features()).values() + checkpoint(second, scale, use_reentrant=reentrant)
        model.top(rows).sum().backward()
        assert model.bags.step_counts() == {"bags.t": updates * (dist.get_rank() == 0)}  # which has the table

    ranks(2, run)
