"""``update="step"``: accumulation, clipping, gradient scaling and skipped steps, beside the unsharded model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel
from shardrec.modules.clipping import clip_by_norm
from shardrec.pipeline import TrainPipeline
from tests.executors import TRAINING, executed
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

ROWS, DIM, TABLES = 20, 8, 4
LOCAL = 3
"""Samples of a rank in a micro-batch."""

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{number}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{number}"]
                )
                for number in range(TABLES)
            ]
        )
        self.top = nn.Linear(TABLES * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.top(self.tables(features).values())
        return logits


def sharded(unsharded: nn.Module, optimizer: str, *, replicates: bool = True, **options: Any) -> ShardedModel:
    """A copy of the model, sharded by each of four cuts; or by three that leave no table to the dense part."""
    model = copy.deepcopy(unsharded)
    if optimizer != "none":
        cls, settings = OPTIMIZERS[optimizer]
        apply_optimizer_in_backward(cls, model.tables.parameters(), dict(settings))  # type: ignore[union-attr]
    world = dist.get_world_size() if dist.is_initialized() else 1
    everyone = range(world)
    layouts = (
        cuts.row_wise("tables.t0", ROWS, DIM, ranks=everyone),
        cuts.table_wise("tables.t1", ROWS, DIM, rank=world - 1),
        cuts.column_wise("tables.t2", ROWS, DIM, ranks=everyone),
        cuts.data_parallel("tables.t3", ROWS, DIM) if replicates else cuts.table_wise("tables.t3", ROWS, DIM, rank=0),
    )
    plan = ShardingPlan(topology=Topology(ranks_per_host=world), tables=layouts)
    return shardrec.shard(model, plan, **{"update": "step", **options})


def ids(generator: torch.Generator, world: int) -> Tensor:
    """(TABLES, samples of all ranks, 2) ids, few enough that rows repeat."""
    return torch.randint(ROWS, (TABLES, world * LOCAL, 2), generator=generator)


def batch(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        [f"f{number}" for number in range(TABLES)],
        ids.reshape(-1),
        torch.full((ids[..., 0].numel(),), 2, dtype=torch.int32),
    )


def mine(ids: Tensor) -> KeyedJaggedTensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return batch(ids[:, rank * LOCAL : (rank + 1) * LOCAL])


def reference_optimizers(model: Model, optimizer: str) -> list[torch.optim.Optimizer]:
    dense = [torch.optim.SGD(model.top.parameters(), lr=0.1)]
    if optimizer == "none":
        return [*dense, torch.optim.SGD(model.tables.parameters(), lr=0.3)]
    cls, settings = OPTIMIZERS[optimizer]
    return [*dense, cls(model.tables.parameters(), **settings)]


def optimizers_of(model: ShardedModel, optimizer: str) -> list[torch.optim.Optimizer]:
    if optimizer == "none":
        tables = [one for name, one in model.named_parameters() if "tables" in name]
        return [torch.optim.SGD(model.top.parameters(), lr=0.1), torch.optim.SGD(tables, lr=0.3)]
    return [torch.optim.SGD(model.dense_parameters(), lr=0.1), model.fused_optimizer]


def furthest(model: ShardedModel, reference: nn.Module) -> float:
    """The largest difference of this rank's weights and the unsharded model's."""
    most = 0.0
    held = model.state_dict()
    for name, whole in reference.state_dict().items():
        value = held[name]
        if not hasattr(value, "local_shards"):
            most = max(most, float((value - whole).abs().max()))
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            part = whole[row : row + rows, column : column + columns]
            most = max(most, float((shard.tensor - part).abs().max()) if part.numel() else 0.0)
    return most


def train_clipped(optimizer: str, norm_type: float) -> list[float]:
    world = dist.get_world_size()
    reference = Model()
    model = sharded(reference, optimizer)
    ours, theirs = optimizers_of(model, optimizer), reference_optimizers(reference, optimizer)
    generator = torch.Generator().manual_seed(1)
    differences = []
    for _ in range(4):
        for _ in range(2):
            micro = ids(generator, world)
            (model(mine(micro)) ** 2).mean().backward()
            (reference(batch(micro)) ** 2).mean().backward()
        parts = clip_by_norm(model, 1e9, norm_type)[1]  # which scales nothing
        named = [(name.startswith("tables."), one.grad) for name, one in reference.named_parameters()]
        for part, of_tables in zip(parts, (False, True), strict=True):
            gradients = [gradient for is_table, gradient in named if is_table == of_tables and gradient is not None]
            differences.append(abs(float(part / torch.nn.utils.get_total_norm(gradients, norm_type)) - 1))
        norm = shardrec.clip_grad_norm_(model, 0.02, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.02, norm_type)
        differences.append(abs(float(norm / expected) - 1))
        for one in (*ours, *theirs):
            one.step()
            one.zero_grad()
        assert furthest(model, reference) < 1e-6
    return differences


@pytest.mark.some(4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "none"])
def test_clipped_steps_are_the_unsharded_model_s(optimizer: str, norm_type: float) -> None:
    for differences in ranks(2, train_clipped, optimizer, norm_type):
        assert max(differences) < 1e-6


def norms_under_fsdp() -> list[float]:
    reference = Model()
    model = sharded(reference, "adagrad", dense="fsdp")
    micro = ids(torch.Generator().manual_seed(4), dist.get_world_size())
    (model(mine(micro)) ** 2).mean().backward()
    (reference(batch(micro)) ** 2).mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.02)
    first = shardrec.clip_grad_norm_(model, 0.02)
    return [float(first / expected), float(shardrec.clip_grad_norm_(model, 1.0) / 0.02)]


def test_parts_of_parameters_under_fsdp_are_clipped() -> None:
    for ratios in ranks(2, norms_under_fsdp):
        assert ratios == pytest.approx([1.0, 1.0], rel=1e-4)


def clip_values(optimizer: str) -> float:
    reference = Model()
    model = sharded(reference, optimizer)
    ours, theirs = optimizers_of(model, optimizer), reference_optimizers(reference, optimizer)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for _ in range(2):
            micro = ids(generator, dist.get_world_size())
            (model(mine(micro)) ** 2).mean().backward()
            (reference(batch(micro)) ** 2).mean().backward()
        shardrec.clip_grad_value_(model, 1e-3)
        torch.nn.utils.clip_grad_value_(reference.parameters(), 1e-3)
        for one in (*ours, *theirs):
            one.step()
            one.zero_grad()
    return furthest(model, reference)


def test_values_are_clamped_once_they_are_added_up() -> None:
    assert max(ranks(2, clip_values, "sgd")) < 1e-6


def scale_with_planted_infinities(optimizer: str, culprit: int) -> tuple[list[float], float]:
    """50 steps under a GradScaler; in some, one rank's loss has an infinite gradient in one table."""
    rank, world = dist.get_rank(), dist.get_world_size()
    reference = Model()
    model = sharded(reference, optimizer)
    ours, theirs = optimizers_of(model, optimizer), reference_optimizers(reference, optimizer)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5) for _ in range(2)]
    generator = torch.Generator().manual_seed(3)
    scales = []
    for step in range(50):
        micro = ids(generator, world)
        planted = step in (0, 7, 8, 30)

        def infinite(pooled: Tensor, planted: bool = planted) -> Tensor:
            # A gradient of the first table alone; the dense part sees none of it.
            return pooled[:1, :DIM].sum() * torch.tensor(torch.inf) if planted else pooled.new_zeros(())

        pooled = model.tables(mine(micro)).values()
        loss = (model.top(pooled) ** 2).mean()
        if rank == culprit:
            loss = loss + infinite(pooled)
        scalers[0].scale(loss).backward()
        whole = reference.tables(batch(micro)).values()
        loss = (reference.top(whole) ** 2).mean() + infinite(whole[culprit * LOCAL :])
        scalers[1].scale(loss).backward()
        for scaler, chosen in zip(scalers, (ours, theirs), strict=True):
            if step % 2:
                scaler.unscale_(chosen[1])
            for one in chosen:
                scaler.step(one)
            scaler.update()
            for one in chosen:
                one.zero_grad()
        scales.append(scalers[0].get_scale())
        assert scales[-1] == scalers[1].get_scale(), f"step {step}"
    return scales, furthest(model, reference)


@pytest.mark.some(1)
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_grad_scaler_skips_the_unsharded_model_s_steps_on_every_rank(optimizer: str, culprit: int) -> None:
    results = ranks(2, scale_with_planted_infinities, optimizer, culprit)
    assert results[0][0] == results[1][0]
    assert max(difference for _, difference in results) < 1e-5


def test_clipping_is_refused_where_tables_are_updated_in_backward() -> None:
    model = sharded(Model(), "sgd", update="backward")
    model(mine(ids(torch.Generator(), 1))).sum().backward()
    for clip in (shardrec.clip_grad_norm_, shardrec.clip_grad_value_):
        with pytest.raises(ConfigError, match="update='step'"):
            clip(model, 1.0)
        with pytest.raises(ConfigError, match="takes the result of shardrec"):
            clip(Model(), 1.0)


def test_a_norm_that_is_not_finite_scales_nothing_if_that_is_an_error() -> None:
    model = sharded(Model(), "sgd")
    (model(mine(ids(torch.Generator(), 1))).sum() * torch.inf).backward()
    before = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        shardrec.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    for one, gradient in zip(model.parameters(), before, strict=True):
        assert (one.grad is None) == (gradient is None)
        if one.grad is not None and gradient is not None:
            assert torch.allclose(one.grad, gradient, equal_nan=True)
    assert not torch.isfinite(shardrec.clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize("norm_type", [0, -2.0, -torch.inf, "-inf", torch.nan])
def test_norms_without_a_meaning_for_rows_are_refused(norm_type: Any) -> None:
    model = sharded(Model(), "sgd")
    with pytest.raises(ConfigError, match=r"norm_type of shardrec\.clip_grad_norm_ is .*: give a number above 0"):
        shardrec.clip_grad_norm_(model, 1.0, norm_type)


def test_a_norm_of_nan_makes_all_gradients_nan_as_torchs_function_does() -> None:
    model = sharded(Model(), "sgd")
    model(mine(ids(torch.Generator(), 1))).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients[0].fill_(torch.nan)
    shardrec.clip_grad_norm_(model, 1.0)
    assert all(gradient.isnan().all() for gradient in gradients)


def test_the_norm_of_no_gradients_is_zero_and_of_tables_alone_theirs() -> None:
    model = sharded(Model(), "sgd")
    assert float(shardrec.clip_grad_norm_(model, 1.0)) == 0.0
    model.tables(mine(ids(torch.Generator(), 1))).values()[:1, :DIM].sum().backward()
    assert float(shardrec.clip_grad_norm_(model, 1.0)) > 0.0


@pytest.mark.parametrize("drop", ["optimizer", "model"])
def test_gradients_that_are_dropped_are_not_applied(drop: str) -> None:
    model = sharded(Model(), "adagrad")
    before = copy.deepcopy(model.state_dict())
    model(mine(ids(torch.Generator(), 1))).sum().backward()
    (model.fused_optimizer if drop == "optimizer" else model).zero_grad()
    model.fused_optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_step_without_a_backward_or_after_a_step_does_nothing() -> None:
    model = sharded(Model(), "adagrad")
    model.fused_optimizer.step()
    model(mine(ids(torch.Generator(), 1))).sum().backward()
    model.fused_optimizer.step()
    before = copy.deepcopy(model.state_dict())
    model.fused_optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_values_written_between_backward_and_step_are_what_the_step_changes() -> None:
    reference = Model()
    model = sharded(reference, "sgd")
    theirs = reference_optimizers(reference, "sgd")
    micro = ids(torch.Generator(), 1)
    model(mine(micro)).sum().backward()
    reference(batch(micro)).sum().backward()
    with torch.no_grad():
        for one in (*model.parameters(), *reference.parameters()):
            one.fill_(0.25)
    for one in (*optimizers_of(model, "sgd"), *theirs):
        one.step()
    assert furthest(model, reference) < 1e-5


def test_two_losses_of_one_forward_are_added_up() -> None:
    reference = Model()
    model = sharded(reference, "sgd")
    theirs = reference_optimizers(reference, "sgd")
    micro = ids(torch.Generator(), 1)
    for logits in (model(mine(micro)), reference(batch(micro))):
        logits.sum().backward(retain_graph=True)
        (logits**2).sum().backward()
    for one in (*optimizers_of(model, "sgd"), *theirs):
        one.step()
    assert furthest(model, reference) < 1e-5


def test_a_second_backward_over_a_retained_graph_counts_twice() -> None:
    reference = Model()
    model = sharded(reference, "rowwise_adagrad", replicates=False)
    micro = ids(torch.Generator(), 1)
    ours, theirs = optimizers_of(model, "rowwise_adagrad"), reference_optimizers(reference, "rowwise_adagrad")
    for loss in ((model(mine(micro)) ** 2).mean(), (reference(batch(micro)) ** 2).mean()):
        loss.backward(retain_graph=True)
        loss.backward()
    for one in (*ours, *theirs):
        one.step()
    assert furthest(model, reference) < 1e-6


def clip_replicas() -> str:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
    replicated = shardrec.shard(model, replicas=shardrec.Replicas(2), update="step")
    with pytest.raises(ConfigError, match="Shard it without replicas"):
        shardrec.clip_grad_norm_(replicated, 1.0)
    return "refused"


def test_clipping_is_refused_with_replicas() -> None:
    assert ranks(2, clip_replicas) == ["refused"] * 2


def test_the_learning_rate_is_that_of_the_step() -> None:
    reference = Model()
    model = sharded(reference, "sgd")
    ours, theirs = optimizers_of(model, "sgd"), reference_optimizers(reference, "sgd")
    micro = ids(torch.Generator(), 1)
    model(mine(micro)).sum().backward()
    reference(batch(micro)).sum().backward()
    for one in (*ours, *theirs):
        for group in one.param_groups:
            group["lr"] *= 0.25
        one.step()
    assert furthest(model, reference) < 1e-6


def test_a_closure_has_gradients() -> None:
    reference = Model()
    model = sharded(reference, "sgd")
    theirs = reference_optimizers(reference, "sgd")
    micro = ids(torch.Generator(), 1)

    def closure() -> float:
        loss = (model(mine(micro)) ** 2).mean()
        loss.backward()
        return float(loss.detach())

    (reference(batch(micro)) ** 2).mean().backward()
    assert model.fused_optimizer.step(closure) is not None
    torch.optim.SGD(model.dense_parameters(), lr=0.1).step()
    for one in theirs:
        one.step()
    assert furthest(model, reference) < 1e-6


def test_a_model_whose_tables_nobody_steps_says_so_once() -> None:
    model = sharded(Model(), "sgd")
    model(mine(ids(torch.Generator(), 1))).sum().backward()
    with pytest.warns(UserWarning, match=r"fused_optimizer\.step"):
        model(mine(ids(torch.Generator(), 1))).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(mine(ids(torch.Generator(), 1)))


@pytest.mark.parametrize("update", ["later", None])
def test_another_time_of_update_is_refused(update: Any) -> None:
    with pytest.raises(ConfigError, match="'backward', 'step'"):
        sharded(Model(), "sgd", update=update)


def train_pipelined(depth: int, batches: int) -> float:
    world = dist.get_world_size()
    reference = Model()
    model = sharded(reference, "adagrad")
    generator = torch.Generator().manual_seed(4)
    micros = [ids(generator, world) for _ in range(batches)]
    pipeline = TrainPipeline(
        model,
        optimizers_of(model, "adagrad"),
        [mine(micro) for micro in micros],
        loss_fn=lambda model, features: (model(features) ** 2).mean(),
        depth=depth,
        accumulate=3,
    )
    assert len(list(pipeline)) == batches
    theirs = reference_optimizers(reference, "adagrad")
    for start in range(0, batches, 3):
        for micro in micros[start : start + 3]:
            ((reference(batch(micro)) ** 2).mean() / 3).backward()
        for one in theirs:
            one.step()
            one.zero_grad()
    return furthest(model, reference)


@pytest.mark.some(2)
@pytest.mark.parametrize("batches", [6, 7])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_pipeline_accumulates(depth: int, batches: int) -> None:
    """Also where the batches end before an update is due: it is made with those that there are."""
    assert max(ranks(2, train_pipelined, depth, batches)) < 1e-6


def train_clipped_pipeline() -> float:
    reference = Model()
    model = sharded(reference, "adagrad")
    micros = [ids(torch.Generator().manual_seed(6), dist.get_world_size()) for _ in range(3)]
    pipeline = TrainPipeline(
        model,
        optimizers_of(model, "adagrad"),
        [mine(micro) for micro in micros],
        loss_fn=lambda model, features: (model(features) ** 2).mean(),
        clip_norm=0.01,
    )
    list(pipeline)
    theirs = reference_optimizers(reference, "adagrad")
    for micro in micros:
        (reference(batch(micro)) ** 2).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        for one in theirs:
            one.step()
            one.zero_grad()
    assert pipeline.grad_norms is not None
    assert float(pipeline.grad_norms.norm()) == pytest.approx(float(norm), rel=1e-5)
    return furthest(model, reference)


def test_a_pipeline_clips() -> None:
    assert max(ranks(2, train_clipped_pipeline)) < 1e-6


def test_a_gradient_that_is_nan_names_its_table_and_is_not_applied() -> None:
    model = sharded(Model(), "sgd")
    before = copy.deepcopy(model.state_dict())
    with shardrec.detect_anomaly(model):
        with pytest.raises(shardrec.AnomalyError, match=r"tables\.t0"):
            (model(mine(ids(torch.Generator(), 1))).sum() * torch.nan).backward()
        model.zero_grad()
        model.fused_optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_pipeline_does_not_accumulate_what_backward_applies() -> None:
    model = sharded(Model(), "sgd", update="backward")
    with pytest.raises(ConfigError, match="update='step'"):
        TrainPipeline(model, model.fused_optimizer, [], accumulate=2)
    with pytest.raises(ConfigError, match="1 or more"):
        TrainPipeline(model, model.fused_optimizer, [], accumulate=0)


def train_by(executor: str, update: str, replicates: bool) -> float:
    world = dist.get_world_size()
    reference = Model()
    model = sharded(reference, "adagrad", update=update, replicates=replicates)
    program = executed(model, executor)
    ours, theirs = optimizers_of(model, "adagrad"), reference_optimizers(reference, "adagrad")
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        for _ in range(2 if update == "step" else 1):
            micro = ids(generator, world)
            (program(mine(micro)) ** 2).mean().backward()
            (reference(batch(micro)) ** 2).mean().backward()
        for one in (*ours, *theirs):
            one.step()
            one.zero_grad()
    return furthest(model, reference)


@pytest.mark.some(4)
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("replicates", [True, False])
@pytest.mark.parametrize("executor", TRAINING)
def test_every_executor_makes_the_unsharded_model_s_steps(executor: str, replicates: bool, update: str) -> None:
    """Also where no dense gradient comes after those of the rows, which an operator's own backward sends."""
    assert max(ranks(2, train_by, executor, update, replicates)) < 1e-6
