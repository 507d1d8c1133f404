"""Gradients of the dense part are means over the ranks, whatever takes part in the loss of each."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError, InputError, PeerError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from tests.collective_counts import CountCollectives
from tests.executors import executed
from tests.models import apply_optimizer_in_backward
from tests.ranks import RankErrors, raises_on_all, ranks

ROWS = {"cut": 13, "copied": 7, "row": 11, "other": 5}
DIM = 4
PARTS = ("copied", "row", "other", "bottom", "left", "right", "words")


class Parts(nn.Module):
    """A sum of parts, of which each call names those that take part; the cut table always does.

    ``unused`` never does. ``words`` has a sparse gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = {"embedding_dim": DIM}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=ROWS[name], feature_names=[name], **config)
                for name in ("cut", "copied")
            ]
        )
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, num_embeddings=ROWS[name], feature_names=[name], **config)
                for name in ("row", "other")
            ]
        )
        self.bottom, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.left, self.right = nn.Linear(DIM, 1), nn.Linear(DIM, 1)
        self.words = nn.EmbeddingBag(9, DIM, mode="sum", sparse=True)

    def forward(self, features: KeyedJaggedTensor, used: frozenset[str]) -> Tensor:
        pooled, rows = self.bags(features), self.rows(features)
        x = pooled["cut"].sum(dim=0)
        if "bottom" in used:
            x = x + self.bottom(torch.linspace(-1, 1, DIM))
        parts = [x.square().sum()]
        parts += [getattr(self, name)(x).square().sum() for name in ("left", "right") if name in used]
        parts += [rows[name].values().square().sum() for name in ("row", "other") if name in used]
        if "copied" in used:
            parts.append(pooled["copied"].square().sum())
        if "words" in used:
            parts.append(self.words(features["row"].values()[None] % 9).square().sum())
        return torch.stack(parts).sum()


def features_of(step: int, rank: int) -> KeyedJaggedTensor:
    rng = Random(100 * step + rank)
    return KeyedJaggedTensor(
        keys=list(ROWS),
        values=torch.tensor([rng.randrange(rows) for rows in ROWS.values() for _ in range(2)]),
        lengths=torch.ones(2 * len(ROWS), dtype=torch.int32),
    )


def used_of(step: int, rank: int) -> frozenset[str]:
    rng = Random(100 * step + 10 * rank)
    # In step 2 no rank uses any; in step 3 one rank only.
    if step == 2 or (step == 3 and rank):
        return frozenset()
    return frozenset(name for name in PARTS if rng.random() < 0.5)


def plan_of(world_size: int) -> ShardingPlan:
    return ShardingPlan(
        topology=Topology(ranks_per_host=world_size),
        tables=(
            cuts.row_wise("bags.cut", ROWS["cut"], DIM, ranks=range(world_size)),
            cuts.data_parallel("bags.copied", ROWS["copied"], DIM),
            cuts.data_parallel("rows.row", ROWS["row"], DIM),
            cuts.data_parallel("rows.other", ROWS["other"], DIM),
        ),
    )


def made(fused: bool = False, **options: Any) -> tuple[ShardedModel, Parts]:
    """A sharded model and the unsharded one."""
    both = []
    for _ in range(2):
        model = Parts()
        tables = [*model.bags.parameters(), *model.rows.parameters()] if fused else []
        apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.1})
        both.append(model)
    return shard(both[0], plan_of(dist.get_world_size()), **options), both[1]


def dense_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if ".cut." not in name}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.to_dense() if tensor.is_sparse else tensor


def assert_gradients_equal(model: ShardedModel, reference: Parts, where: str) -> None:
    expected = dense_of(reference)
    for name, parameter in dense_of(model).items():
        other = expected[name].grad
        assert (parameter.grad is None) == (other is None), f"{where}: {name} {parameter.grad} {other}"
        if parameter.grad is not None and other is not None:
            torch.testing.assert_close(
                whole(parameter.grad), whole(other), msg=lambda text, n=name: f"{where}: {n}: {text}"
            )


def reference_loss(reference: Parts, step: int) -> Tensor:
    world_size = dist.get_world_size()
    losses = [reference(features_of(step, rank), used_of(step, rank)) for rank in range(world_size)]
    return torch.stack(losses).mean()


def train_beside(model: ShardedModel, reference: Parts, run: Any, *, steps: int = 6) -> list[dict[str, int]]:
    """Adam with weight decay, which moves what has a gradient of zero. Gives the collectives of each backward."""
    rank = dist.get_rank()
    optimizers: list[torch.optim.Optimizer] = []
    for one in (model, reference):
        others = [p for name, p in dense_of(one).items() if "words" not in name]
        optimizers.append(torch.optim.AdamW(others, lr=0.05, weight_decay=0.1))
        optimizers.append(torch.optim.SGD(one.words.parameters(), lr=0.1))  # type: ignore[union-attr]
    counts = []
    for step in range(steps):
        loss = run(features_of(step, rank), used_of(step, rank))
        with CountCollectives() as counted:
            loss.backward()
        counts.append(dict(counted))
        reference_loss(reference, step).backward()
        assert_gradients_equal(model, reference, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, one), other in zip(dense_of(model).items(), dense_of(reference).values(), strict=True):
            torch.testing.assert_close(whole(one.detach()), other.detach(), msg=f"step {step}: {name}")
    return counts


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


EVERYTHING = frozenset(PARTS)


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


class Scorer(nn.Module):
    """Its loss uses ``right`` for negative scales only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=ROWS[n], embedding_dim=DIM, feature_names=[n])
            for n in ("cut", "copied")
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": 0.1})
        self.left, self.right = nn.Linear(2 * DIM, 1), nn.Linear(2 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor, scale: float) -> Tensor:
        pooled = self.bags(features).values()
        if scale < 0:
            return self.right(pooled).square().sum()
        return self.left(pooled).square().sum() * scale


def other_executors(executor: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plan = plan_of(world_size)
    plan = ShardingPlan(topology=plan.topology, tables=plan.tables[:2])
    model, reference = shard(Scorer(), plan), Scorer()
    run: Any = model
    if executor == "live":
        run = shardrec.script(model)
    elif executor != "eager":
        torch._dynamo.reset()
        shardrec.annotate_for_dynamo(model, mode=executor)
        run = torch.compile(model, backend="aot_eager", dynamic=True)
    optimizers = [
        torch.optim.AdamW([*one.left.parameters(), *one.right.parameters()], lr=0.1) for one in (model, reference)
    ]
    for step, scales in enumerate([(1.0, -1.0), (2.0, 1.0), (-1.0, 1.0)]):
        run(features_of(step, rank), scales[rank % 2]).backward()
        losses = [reference(features_of(step, other), scales[other % 2]) for other in range(world_size)]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, one), other in zip(dense_of(model).items(), dense_of(reference).values(), strict=True):
            torch.testing.assert_close(one, other, msg=f"step {step}: {name}")


@pytest.mark.some(1)
@pytest.mark.parametrize("executor", ["eager", "live", pytest.param("boundary", marks=pytest.mark.slow), "traced"])
def test_no_executor_needs_a_wrapper(executor: str) -> None:
    ranks(2, other_executors, executor, timeout=120)


class EmbeddingsAlone(nn.Module):
    """Its loss uses ``top`` if it is told to, and else the table, which is cut, alone."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = EmbeddingBagConfig(name="cut", num_embeddings=ROWS["cut"], embedding_dim=DIM, feature_names=["cut"])
        self.bags = EmbeddingBagCollection(tables=[table])
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters() if fused else [], {"lr": 0.1})
        self.top = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor, uses_top: bool) -> Tensor:
        pooled = self.bags(features).values()
        if uses_top:
            return self.top(pooled).square().sum()
        return pooled.square().sum()


def embeddings_alone(executor: str, fused: bool) -> list[int]:
    rank = dist.get_rank()
    plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=plan_of(2).tables[:1])
    model, reference = shard(EmbeddingsAlone(fused), plan), EmbeddingsAlone(fused)
    run, counts = executed(model, executor), []
    for step, uses in enumerate([(True, False), (False, False), (False, True), (True, True)]):
        with CountCollectives() as counted:
            run(features_of(step, rank), uses[rank]).backward()
        counts.append(counted["all_reduce"])
        losses = [reference(features_of(step, other), uses[other]) for other in range(2)]
        torch.stack(losses).mean().backward()
        for name in ("weight", "bias"):
            gradient, expected = getattr(model.top, name).grad, getattr(reference.top, name).grad
            assert (gradient is None) == (expected is None), f"step {step}: {name}"
            if expected is not None:
                torch.testing.assert_close(gradient, expected, msg=f"step {step}: {name}")
        model.zero_grad()
        reference.zero_grad()
    if not fused and executor == "eager":
        loss = run(features_of(0, rank), False)
        with CountCollectives() as counted:
            torch.autograd.grad(loss, [*model.bags.parameters()])  # type: ignore[union-attr]
        assert counted["all_reduce"] == 0, "nothing is accumulated"
    return counts


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("executor", ["eager", "live script", "traced"])
def test_a_loss_of_embeddings_alone_on_one_rank(executor: str, fused: bool) -> None:
    counts = ranks(2, embeddings_alone, executor, fused)
    assert counts == [[1, 1, 1, 1]] * 2


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
