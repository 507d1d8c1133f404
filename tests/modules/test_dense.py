"""Gradients of the dense part are means over the ranks, whatever takes part in the loss of each."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError, InputError, PeerError
from shardrec.modules import shard
from tests.collective_counts import CountCollectives
from tests.models import apply_optimizer_in_backward
from tests.modules.parts import (
    DIM,
    EVERYTHING,
    PARTS,
    Parts,
    assert_gradients_equal,
    dense_of,
    features_of,
    made,
    plan_of,
    reference_loss,
    train_beside,
    used_of,
    whole,
)
from tests.ranks import RankErrors, raises_on_all, ranks


def differing(transport: str, dense: Any, fused: bool) -> list[dict[str, int]]:
    model, reference = made(fused, dense=dense, transport=transport)
    counts = train_beside(model, reference, model)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, counts)
    assert all(one == every[0] for one in every)
    return counts


@pytest.mark.some(2)
@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_use_other_parts(world_size: int, fused: bool, transport: str) -> None:
    """Fused or not, replicated tables stay alike; unused parameters have no gradient, as in the unsharded model."""
    for counts in ranks(world_size, differing, transport, "ddp", fused):
        assert {one["all_reduce"] for one in counts} == {1}


def test_each_gradient_in_an_all_reduce_of_its_own() -> None:
    for counts in ranks(2, differing, "auto", {"bucket_cap_mb": 1e-6, "broadcast_buffers": False}, False):
        assert {one["all_reduce"] for one in counts} == {3 + 2 * 4}


def fsdp_differing() -> list[dict[str, int]]:
    class Dense(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.EmbeddingBag(9, DIM, mode="sum")  # FSDP2 takes no sparse gradient

    torch.manual_seed(0)
    reference, model = Dense(), shard(Dense(), plan_of(dist.get_world_size()), dense={"use_orig_params": True})
    assert isinstance(model.bottom.weight, DTensor)
    return train_beside(model, reference, model)


def test_fsdp_with_ranks_that_use_other_parts() -> None:
    for counts in ranks(2, fsdp_differing):
        assert {(one["all_reduce"], one["reduce_scatter"]) for one in counts} == {(1, 1)}


def one_rank(fused: bool) -> None:
    """Of two replicated tables of rows one is out of the loss."""
    model, reference = made(fused)
    train_beside(model, reference, model)


@pytest.mark.parametrize("fused", [False, True])
def test_one_rank_likewise(fused: bool) -> None:
    ranks(1, one_rank, fused)


def accumulated(dense: Any) -> None:
    """Gradients made in no_sync, whole or in part, and those of two backwards, are averaged with the new ones."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, reference = made(dense=dense)
    if dense == "fsdp":
        model.words.sparse = reference.words.sparse = False  # type: ignore[union-attr,assignment]
    features = [[features_of(step, other) for other in range(world_size)] for step in range(4)]
    with model.no_sync(), CountCollectives() as counts:
        model(features[1][rank], frozenset(PARTS[:3])).backward()
    assert counts["all_reduce"] == counts["reduce_scatter"] == 0
    assert model.bottom.weight.grad is None
    used = [frozenset({"left"}), frozenset({"left", "words"}) - ({"words"} if dense == "fsdp" else set())]
    model(features[2][rank], used[rank % 2]).backward()
    total = sum(reference(one, frozenset(PARTS[:3])) for one in features[1])
    total = total + sum(reference(one, used[other % 2]) for other, one in enumerate(features[2]))
    (total / world_size).backward()
    assert_gradients_equal(model, reference, "after no_sync")
    model(features[3][rank], used[(rank + 1) % 2]).backward()
    total = sum(reference(one, used[(other + 1) % 2]) for other, one in enumerate(features[3]))
    (total / world_size).backward()
    assert_gradients_equal(model, reference, "after a second backward")


@pytest.mark.parametrize("dense", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_accumulated_gradients(dense: str) -> None:
    ranks(2, accumulated, dense)


def decided_at_forward() -> None:
    model, _ = made()
    features = features_of(0, dist.get_rank())
    with model.no_sync():
        loss = model(features, EVERYTHING)
    with CountCollectives() as counts:
        loss.backward()
    assert counts == {"all_to_all": 1}
    loss = model(features, EVERYTHING)
    with CountCollectives() as counts, model.no_sync():
        loss.backward()
    assert counts["all_reduce"] == 1


def test_the_forward_decides_about_no_sync() -> None:
    ranks(2, decided_at_forward)


def frozen_and_trained() -> None:
    model, reference = made()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        for one in (model, reference):
            # Frozen from step 1 on, trained again from step 3 on; and the other way round.
            one.bottom.requires_grad_(step not in (1, 2))  # type: ignore[union-attr]
            one.words.requires_grad_(step not in (2, 3))  # type: ignore[union-attr]
            one.zero_grad()
        model(features_of(step, rank), EVERYTHING).backward()
        losses = [reference(features_of(step, other), EVERYTHING) for other in range(world_size)]
        torch.stack(losses).mean().backward()
        assert_gradients_equal(model, reference, f"step {step}")


def frozen_before() -> None:
    """Frozen when the model is sharded, trained later."""
    frozen, reference = Parts(), Parts()
    frozen.bottom.requires_grad_(False)
    model, rank = shard(frozen, plan_of(2)), dist.get_rank()
    assert not model.bottom.weight.requires_grad
    model(features_of(0, rank), EVERYTHING).backward()
    assert model.bottom.weight.grad is None
    model.zero_grad()
    model.bottom.requires_grad_(True)
    model(features_of(1, rank), EVERYTHING).backward()
    torch.stack([reference(features_of(1, other), EVERYTHING) for other in range(2)]).mean().backward()
    assert_gradients_equal(model, reference, "trained")


@pytest.mark.parametrize("case", [frozen_and_trained, frozen_before])
def test_parameters_that_are_frozen_and_trained(case: Any) -> None:
    ranks(2, case)


def replaced(how: str, fused: bool) -> None:
    model, reference = made(fused, dense="fsdp" if how == "fsdp" else "ddp")
    train_beside(model, reference, model, steps=1)
    if how == "layer":
        for one in (model.module, reference):
            torch.manual_seed(1)
            one.bottom, one.words = nn.Linear(DIM, DIM), nn.EmbeddingBag(9, DIM, mode="sum", sparse=True)
    else:
        given = model if how == "fsdp" else reference
        tables = ("bags", "rows")
        state = {key: value if key.startswith(tables) else value.clone() for key, value in given.state_dict().items()}
        model.load_state_dict(state, assign=True)
    train_beside(model, reference, model, steps=3)


@pytest.mark.some(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["assign", "layer", "fsdp"])
def test_parameters_that_were_replaced_are_averaged(how: str, fused: bool) -> None:
    ranks(2, replaced, how, fused)


def train_tables(fused: bool) -> None:
    """The user averages the gradients of the dense part; copies of replicated tables are shardrec's."""
    model, reference = made(fused, dense="none")
    optimizers = [torch.optim.SGD(dense_of(one).values(), lr=0.1) for one in (model, reference)]
    for step in range(3):
        model(features_of(step, dist.get_rank()), used_of(step, dist.get_rank())).backward()
        reference_loss(reference, step).backward()
        for name, parameter in dense_of(model).items():
            if not name.startswith(("bags", "rows")) and parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else whole(parameter.grad) / 2
                dist.all_reduce(gradient)
                parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, one), other in zip(dense_of(model).items(), dense_of(reference).values(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), msg=f"step {step}: {name}")


@pytest.mark.parametrize("fused", [False, True])
def test_copies_of_tables_stay_alike_where_the_dense_part_is_the_user_s(fused: bool) -> None:
    ranks(2, train_tables, fused)


def parts_of(model: int, rank: int) -> frozenset[str]:
    return frozenset({"left", "right"} if (model + rank) % 2 else {"copied"})


def train_two_models(transport: str, options: Any) -> None:
    """Both in one loss; ranks use other parts of each, so that gradients are complete in another order."""
    rank, both = dist.get_rank(), [made(True, transport=transport, **options) for _ in range(2)]
    for step in range(4):
        order = both if step % 2 else both[::-1]
        losses = [model(features_of(step, rank), parts_of(number, rank)) for number, (model, _) in enumerate(order)]
        (losses[0] + 3 * losses[1]).backward()
        for number, (model, reference) in enumerate(order):
            where = f"step {step}, model {number}"
            model.fused_optimizer.step()
            of_ranks = [reference(features_of(step, other), parts_of(number, other)) for other in range(2)]
            ((1, 3)[number] * torch.stack(of_ranks).mean()).backward()
            assert_gradients_equal(model, reference, where)
            ((shard_, rows),) = model.module.bags.embedding_bags["cut"].locals.items()
            expected = reference.bags.embedding_bags["cut"].weight[shard_.row_start : shard_.row_end]
            torch.testing.assert_close(rows, expected, msg=where)
            model.zero_grad()
            reference.zero_grad()


SMALL_BUCKETS = {"bucket_cap_mb": 1e-6}


@pytest.mark.some(2)
@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize(
    "options", [{"dense": SMALL_BUCKETS}, {"dense": SMALL_BUCKETS, "update": "step"}, {"dense": "fsdp"}]
)
def test_two_models_in_one_backward(options: Any, transport: str) -> None:
    ranks(2, train_two_models, transport, options)


def raise_beside_a_dropped_model() -> tuple[Tensor, Tensor]:
    rank, order = dist.get_rank(), list[str]()
    other = shard(Parts(), plan_of(2))
    if rank:
        del other  # which rank 0's collector has yet to find
        gc.collect()
    model = shard(Parts(), plan_of(2), dense={"bucket_cap_mb": 1e-6})
    for name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))

    def step() -> Tensor:
        model.zero_grad()
        model(features_of(0, rank), EVERYTHING).backward()
        assert model.module.left.weight.grad is not None
        return model.module.left.weight.grad.clone()

    expected = step()

    def stop(_: Tensor) -> None:
        raise RuntimeError("out of memory")

    with model.module.get_parameter(order[-1]).register_hook(stop), pytest.raises(RuntimeError, match="out of memory"):
        step()
    return expected, step()


def test_a_backward_that_raises_beside_a_model_that_one_rank_has_dropped() -> None:
    for expected, gradient in ranks(2, raise_beside_a_dropped_model):
        assert torch.equal(gradient, expected)


class Normed(Parts):
    """Has buffers, which each forward broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, features: KeyedJaggedTensor, used: frozenset[str]) -> Tensor:
        self.norm(torch.arange(2.0 * DIM).view(2, DIM) * (1 + dist.get_rank()))
        return super().forward(features, used)


def disagree(how: str, fresh: bool, cls: type[Parts]) -> None:
    model, rank = shard(cls(), plan_of(2)), dist.get_rank()
    if not fresh:
        model(features_of(0, rank), EVERYTHING - {"words"}).backward()
    if how == "frozen":
        model.left.requires_grad_(rank == 0)
    if how == "replaced" and rank:
        model.module.left = nn.Linear(DIM, 2)  # type: ignore[assignment]
    accumulating = model.no_sync() if how == "no_sync" and rank else nullcontext()
    with torch.set_grad_enabled(how != "grad mode" or rank == 0), accumulating:
        model(features_of(1, rank), EVERYTHING)


@pytest.mark.some(4)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("cls", [Parts, Normed])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("grad mode", "rank 1: .*gradients off"),
        ("no_sync", "rank 1: .*gradients on in no_sync"),
        ("frozen", r"rank 1: .*, \d+ dense parameters trained"),
        ("replaced", r"rank 1: .*, \d+ dense parameters trained"),
    ],
)
def test_ranks_that_disagree_raise(how: str, words: str, cls: type[Parts], fresh: bool) -> None:
    """Also where buffers are broadcast, and after a backward."""
    raises_on_all(2, InputError, words, disagree, how, fresh, cls, timeout=60.0)


def skip_backward(skips: int, turns: int) -> None:
    """From its second step on, one rank's loss reaches no output of the model."""
    model, rank = shard(Parts(), plan_of(dist.get_world_size())), dist.get_rank()
    for step in range(3):
        losses = [model(features_of(turns * step + turn, rank), EVERYTHING).sum() for turn in range(turns)]
        alone = nn.Parameter(torch.ones(())) * 2
        for loss in losses:
            (alone if rank == skips and step else loss).backward(retain_graph=True)


@pytest.mark.some(1)
@pytest.mark.parametrize(("world_size", "skips", "turns"), [(2, 1, 1), (2, 0, 2), (3, 2, 1)])
def test_a_loss_without_the_model_is_named_in_the_next_forward(world_size: int, skips: int, turns: int) -> None:
    words = f"because rank {skips} has begun its next forward without the backward"
    with pytest.raises(RankErrors) as caught:
        ranks(world_size, skip_backward, skips, turns, timeout=60.0)
    assert len(caught.value.errors) == world_size
    for error in caught.value.errors.values():
        assert isinstance(error, PeerError) and words in str(error)


def buffers(broadcast: bool) -> None:
    model, rank = shard(Normed(), plan_of(2), dense={"broadcast_buffers": broadcast}), dist.get_rank()
    with CountCollectives() as counts:
        for step in range(2):
            model(features_of(step, rank), EVERYTHING).backward()
    assert counts["broadcast"] > 0 if broadcast else counts["broadcast"] == 0
    with torch.no_grad():
        model.eval()(features_of(2, rank), EVERYTHING)
    mean = model.norm.running_mean.clone()
    dist.broadcast(mean, 0)
    assert torch.equal(mean, model.norm.running_mean) == (broadcast or not rank)


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_those_of_rank_0(broadcast: bool) -> None:
    ranks(2, buffers, broadcast)


def steps_in_backward(late: bool) -> None:
    """The dense part's optimizers in backward step with the averaged gradient."""
    models = [Parts(), Parts()]
    for one in models:
        without = ("words", "bottom.", "left.") if late else ("words",)
        parameters = [p for name, p in one.named_parameters() if not name.startswith(without)]
        apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
    model, reference = shard(models[0], plan_of(2)), models[1]
    for step in range(3):
        loss = model(features_of(step, dist.get_rank()), EVERYTHING)
        if late and not step:  # after the model was sharded, and between a forward and its backward
            for layer in (model.bottom, model.left, reference.bottom, reference.left):
                apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
        loss.backward()
        torch.stack([reference(features_of(step, rank), EVERYTHING) for rank in range(2)]).mean().backward()
        assert model.bottom.weight.grad is None
        for (name, one), other in zip(dense_of(model).items(), dense_of(reference).values(), strict=True):
            torch.testing.assert_close(one, other, msg=f"step {step}: {name}")


@pytest.mark.parametrize("late", [False, True])
def test_optimizers_in_backward_of_the_dense_part(late: bool) -> None:
    ranks(2, steps_in_backward, late)


def in_backward_under_fsdp() -> None:
    words = r"apply_optimizer_in_backward has given optimizers to left.weight, left.bias, which dense='fsdp' shards"
    model = Parts()
    apply_optimizer_in_backward(torch.optim.SGD, model.left.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=words):
        shard(model, plan_of(2), dense="fsdp")
    sharded = shard(Parts(), plan_of(2), dense="fsdp")
    apply_optimizer_in_backward(torch.optim.SGD, sharded.left.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=words):
        sharded(features_of(0, dist.get_rank()), EVERYTHING)


def test_optimizers_in_backward_under_fsdp_are_refused() -> None:
    """Which would silently leave the layers as they are."""
    ranks(2, in_backward_under_fsdp)


class Recomputed(Parts):
    """Computes a layer again in backward, in a backward of its own, which it shares with the rest."""

    def forward(self, features: KeyedJaggedTensor, used: frozenset[str]) -> Tensor:
        hidden = self.bottom(torch.linspace(0, 1, DIM))
        hidden = checkpoint(self.bottom, hidden, use_reentrant=True)
        return super().forward(features, used) + hidden.square().sum()


def recomputed() -> None:
    model, reference = shard(Recomputed(), plan_of(2)), Recomputed()
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        model(features_of(step, dist.get_rank()), EVERYTHING).backward()
        torch.stack([reference(features_of(step, rank), EVERYTHING) for rank in range(2)]).mean().backward()
        assert_gradients_equal(model, reference, f"step {step}")


def test_a_backward_inside_a_backward() -> None:
    ranks(2, recomputed)


def without_accumulating() -> None:
    model, _ = made()
    features = features_of(0, dist.get_rank())
    with CountCollectives() as counts:
        torch.autograd.grad(model(features, EVERYTHING), [model.bottom.weight])
        loss = model(features, EVERYTHING)
        loss.backward(inputs=[model.left.weight])
    assert counts["all_reduce"] == 1, "of the backward"
    assert model.bottom.weight.grad is None and model.left.weight.grad is not None


def test_a_gradient_that_is_not_accumulated_is_the_rank_s_own() -> None:
    ranks(2, without_accumulating)


def frozen_tables(learns: str) -> int:
    model = Parts()
    model.bags.requires_grad_(learns == "cut")
    model.rows.requires_grad_(False)
    sharded = shard(model, plan_of(2))
    with CountCollectives() as counts:
        sharded(features_of(0, dist.get_rank()), EVERYTHING).backward()
    assert sharded.bottom.weight.grad is not None
    return counts["all_to_all"]


def test_frozen_tables_ask_for_no_gradients() -> None:
    assert ranks(2, frozen_tables, "none") == [2, 2]
    assert ranks(2, frozen_tables, "cut") == [3, 3]


@pytest.mark.parametrize(
    ("dense", "words"),
    [
        ({"find_unused_parameters": True}, "'find_unused_parameters', but takes 'bucket_cap_mb', .* need no option"),
        ({"bucket_mb": 3}, "'bucket_mb', but takes 'bucket_cap_mb', .*'use_orig_params': leave it out"),
        ({"use_orig_params": False}, "use_orig_params of dense is False, but FSDP2 has no flat .*Give True"),
        ({"use_orig_params": True, "bucket_cap_mb": 3}, "'use_orig_params', of FSDP, beside 'bucket_cap_mb'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb of dense is 0. Give a number of MiB above 0"),
        ("both", "dense is 'both'. Give one of 'ddp', 'fsdp', 'none', or a dict of options"),
    ],
)
def test_options_that_cannot_be(dense: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shard(Parts(), plan_of(1), dense=dense)
