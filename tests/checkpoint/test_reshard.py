"""`model.reshard`: what it moves is, to the last bit, what a save and a load under the new plan give."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.warmup import WarmupOptimizer, WarmupStage

from shardrec import Checkpoints, Publisher, Replicas, annotate_for_dynamo, script, shard
from shardrec.checkpoint import remote_reads as messages_module
from shardrec.checkpoint.remote_reads import Messages
from shardrec.errors import CheckpointError, ConfigError, PeerError, PlanError
from shardrec.exchange import agree
from shardrec.layout import Shard, ShardingPlan, TableLayout, Topology, cuts
from shardrec.pipeline import TrainPipeline
from shardrec.serve import Follower, quantize
from tests.checkpoint.memory import peak
from tests.checkpoint.reshards import (
    DIM,
    Case,
    Model,
    Table,
    batch_of,
    cases,
    check,
    contents,
    differences,
    make,
    plan_of,
    train,
)
from tests.cuda_ranks import DEVICES, WORLDS, cuda_ranks
from tests.ranks import RankDied, ranks
from tests.serve.published import assert_same, held


def equal_to_a_load(case: Case) -> None:
    topology = case.plans[0].topology
    with tempfile.TemporaryDirectory() as folder:
        for faults in ranks(topology.world_size, check, case, Path(folder), hosts=topology.hosts):
            assert not faults, "\n".join(faults[:5])


@given(cases(changes=1))
@settings(max_examples=4)
def test_any_plans(case: Case) -> None:
    equal_to_a_load(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(cases(changes=2))
@settings(max_examples=250)
def test_many_plans(case: Case) -> None:
    equal_to_a_load(case)


TABLES = {
    "a": Table(rows=40, cuts=("table_wise", "row_wise")),
    "b": Table(rows=24, optimizer="none", cuts=("row_wise", "column_wise")),
    "c": Table(rows=32, optimizer="rowwise_adagrad", cuts=("column_wise", "table_wise")),
    "d": Table(collection="sequences", rows=16, cuts=("row_wise", "table_wise")),
}


def case_of(tables: Mapping[str, Table] = TABLES, ranks: int = 2, **options: Any) -> Case:
    topology = Topology(ranks_per_host=ranks)
    count = len(next(iter(tables.values())).cuts)
    return Case(
        tables=tables, plans=[plan_of(tables, number, Random(5), topology) for number in range(count)], **options
    )


CUDA_TABLES = TABLES | {
    "e": Table(rows=20, optimizer="adam", cuts=("data_parallel", "row_wise")),
    "f": Table(rows=20, optimizer="adam", data_type=DataType.FP16, cuts=("row_wise", "table_wise")),
    "g": Table(collection="sequences", rows=40, dynamic=True, cuts=("table_wise", "row_wise")),
}


def equal_to_a_load_on_cuda(case: Case, folder: Path) -> None:
    faults = check(case, folder)
    assert not faults, "\n".join(faults[:5])


@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("at_step", [False, True])
def test_on_cuda(at_step: bool, world_size: int, tmp_path: Path) -> None:
    case = case_of(CUDA_TABLES, world_size, device="cuda", at_step=at_step)
    cuda_ranks(world_size, equal_to_a_load_on_cuda, replace(case, plans=[*case.plans, case.plans[0]]), tmp_path)


def on_rank(name: str, rows: int, rank: int) -> TableLayout:
    return cuts.table_wise(f"bags.{name}", rows, DIM, rank=rank)


def test_two_shards_of_a_table_on_a_rank() -> None:
    """Whose ordinary optimizer has two counts of the same steps."""
    halves = cuts.row_wise("bags.a", 8, DIM, ranks=[0, 0], boundaries=[0, 4, 8])
    plans = [
        ShardingPlan(topology=Topology(ranks_per_host=1), tables=(layout,)) for layout in (halves, on_rank("a", 8, 0))
    ]
    equal_to_a_load(Case(tables={"a": Table(rows=8, optimizer="none")}, plans=[*plans, plans[0]]))


def test_column_stripes_that_are_cut_at_other_rows() -> None:
    """Of a state kept per row each stripe has a copy, and no copy is made of the blocks of another."""
    places = [(0, 1, 0, 4), (1, 2, 0, 4), (0, 2, 4, DIM)]
    shards = tuple(
        Shard(table="bags.a", row_start=top, row_end=bottom, col_start=left, col_end=right, rank=0)
        for top, bottom, left, right in places
    )
    mixed = TableLayout(name="bags.a", num_embeddings=2, embedding_dim=DIM, shards=shards, cut="mixed")
    plans = [
        ShardingPlan(topology=Topology(ranks_per_host=2), tables=(layout,)) for layout in (mixed, on_rank("a", 2, 0))
    ]
    equal_to_a_load(Case(tables={"a": Table(rows=2, optimizer="rowwise_adagrad")}, plans=[*plans, plans[0]]))


def test_what_stays_is_neither_moved_nor_copied() -> None:
    """Table a goes from rank 0 to rank 1; b, of another optimizer, stays, and c on rank 2 sees nothing of it."""
    tables = {"a": Table(rows=1000), "b": Table(rows=200, optimizer="sgd"), "c": Table(rows=100)}
    old, new = (
        ShardingPlan(
            topology=Topology(ranks_per_host=3),
            tables=(on_rank("a", 1000, place), on_rank("b", 200, 0), on_rank("c", 100, 2)),
        )
        for place in (0, 1)
    )
    case = Case(tables=tables, plans=[old, new])

    def rank_main() -> tuple[int, list[bool], int]:
        model, optimizer = make(case, old)
        train(case, model, optimizer, range(1))
        before = dict(model.named_parameters())
        addresses = {name: one.data_ptr() for name, one in before.items()}
        received = model.reshard(new)
        kept = {name: one for name, one in model.named_parameters() if name in before and one is before[name]}
        assert all(one.data_ptr() == addresses[name] for name, one in kept.items())
        return (
            received,
            [f"bags.embedding_bags.{name}.weight" in kept for name in "abc"],
            before[A].numel() if A in before else -1,
        )

    A = "bags.embedding_bags.a.weight"
    weights_and_states = 2 * 4 * sum(change.moved_numel for change in old.diff(new))
    assert weights_and_states == 1000 * DIM * 8
    # On rank 0, what held table a is let go.
    assert ranks(3, rank_main) == [
        (0, [False, True, False], 0),
        (weights_and_states, [False, False, False], -1),
        (0, [False, False, True], -1),
    ]


def test_errors_leave_the_old_plan_on_all_ranks() -> None:
    """And training goes on as if nothing had been tried; after all of them the plan changes."""
    case = case_of(at_step=True)
    old, new = case.plans

    def rank_main() -> list[str]:
        rank = dist.get_rank()
        model, optimizer = make(case, old)
        other, others_optimizer = make(case, old)
        for pair in ((model, optimizer), (other, others_optimizer)):
            train(case, *pair, range(2))
        messages = []

        def refused(error: type[Exception], plan: ShardingPlan, *args: Any) -> None:
            before = contents(model, optimizer)
            with pytest.raises(error) as raised:
                model.reshard(plan, *args)
            assert model.plan == old and not differences(contents(model, optimizer), before)
            messages.append(str(raised.value).partition("\n")[0])

        refused(PlanError, old if rank else new, optimizer)
        refused(PlanError, replace(new, tables=new.tables[:-1]), optimizer)
        refused(PlanError, ShardingPlan(topology=Topology(ranks_per_host=1)), optimizer)
        refused(ConfigError, new)
        refused(ConfigError, new, *([optimizer] if rank else []))
        pending = model.bags(batch_of(case, 90))
        refused(ConfigError, new, optimizer)
        pending.wait()
        model(batch_of(case, 91)).sum().backward()
        refused(ConfigError, new, optimizer)
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            for method in ("_write", "_values"):  # before and while it answers the others
                if rank:
                    patch.setattr(Messages, method, failing)
                refused(CheckpointError, new, optimizer)
                patch.undo()
        losses = [train(case, *pair, range(2, 4)) for pair in ((model, optimizer), (other, others_optimizer))]
        assert losses[0] == losses[1]
        assert not differences(contents(model, optimizer), contents(other, others_optimizer))
        model.reshard(new, optimizer)
        train(case, model, optimizer, range(1))
        return messages

    def failing(self: Messages, work: Sequence[Any], *args: Any) -> None:
        if work:
            raise MemoryError("no memory left")

    for texts in ranks(2, rank_main):
        expected = (
            "the plan of rank(s) 1 differs from rank 0's",
            "the plan has no table 'sequences.d'",
            "the plan is for 1 ranks and the model is on 2",
            "call model.reshard(plan, optimizer) with it",
            "was not given the optimizer on ranks [0], and was on the others",
            "the values of 1 lookups were not used yet",
            "Call model.fused_optimizer.step() before reshard",
            *["rank 1: MemoryError: no memory left"] * 2,
        )
        assert all(part in text for part, text in zip(expected, texts, strict=True)), texts


@pytest.mark.some(2)
@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize(
    ("where", "moment"),
    [("all_gather", 1), ("all_gather", 2), ("all_gather", 3), ("all_gather", 5), ("_exchange", 0), ("_exchange", 2)],
)
def test_a_rank_that_dies_in_the_middle(where: str, moment: int, transport: str) -> None:
    """Before one of its agreements, or of the exchanges of rows; the others keep the old plan, with its values."""
    case = case_of(ranks=3, transport=transport)
    old, new = case.plans

    def rank_main() -> str:
        model, optimizer = make(case, old)
        train(case, model, optimizer, range(2))
        before, count = contents(model, optimizer), iter(range(100))
        owner: Any = agree if where == "all_gather" else Messages
        method = getattr(owner, where)

        def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
            if next(count) == moment:
                os._exit(3)
            return method(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages_module, "_ROUND_BYTES", 512)
            if dist.get_rank() == 1:
                patch.setattr(owner, where, dying)
            with pytest.raises(PeerError) as raised:
                model.reshard(new, optimizer)
        assert raised.value.ranks == (1,)
        assert model.plan == old and not differences(contents(model, optimizer), before)
        return raised.value.waited_for

    results = ranks(3, rank_main, expect_death={1}, timeout=90.0)
    assert isinstance(results.pop(1), RankDied)
    assert all("reshard" in result for result in results), results


def test_a_backward_of_before_is_refused() -> None:
    case = case_of({name: TABLES[name] for name in "ad"})

    def rank_main() -> None:
        model, _ = make(case, case.plans[0])
        output = model(batch_of(case, 0))
        model.reshard(case.plans[1])
        with pytest.raises(ConfigError, match="belongs to a forward before"):
            output.sum().backward()
        model(batch_of(case, 0)).sum().backward()

    ranks(2, rank_main)


@pytest.mark.parametrize(
    "ways",
    [("eager", "script"), pytest.param(("boundary", "traced"), marks=pytest.mark.slow)],
    ids=["plain", "compiled"],
)
def test_programs_and_pipelines_go_on(ways: tuple[str, ...]) -> None:
    """Beside an eager model, whose plan changes after the same step."""
    tables = {name: replace(TABLES[name], cuts=(*TABLES[name].cuts, "row_wise")) for name in "acd"}
    case = case_of(tables)

    def losses_of(how: str) -> list[float]:
        model, optimizer = make(case, case.plans[0])
        batches = [batch_of(case, seed) for seed in range(8)]
        forward: Any = model
        if how == "script":
            forward = script(model)
        elif how != "eager":
            annotate_for_dynamo(model, mode=how)  # type: ignore[arg-type]
            forward = torch.compile(model, backend="eager")
        losses = []
        steps: Iterator[Any] = TrainPipeline(model, optimizer, batches, loss_fn=lambda _, batch: forward(batch).sum())
        if how != "eager":
            steps = plain(forward, optimizer, batches)
        for number, loss in enumerate(steps):
            losses.append(loss.item())
            if number in (2, 4):
                model.reshard(case.plans[number // 2])
        return losses

    def plain(forward: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> Iterator[Tensor]:
        for batch in batches:
            optimizer.zero_grad()
            loss = forward(batch).sum()
            loss.backward()
            optimizer.step()
            yield loss

    def rank_main() -> None:
        model, optimizer = make(case, case.plans[0])
        expected = []
        for number in range(8):
            expected += [loss.item() for loss in train(case, model, optimizer, [number])]
            if number in (2, 4):
                model.reshard(case.plans[number // 2])
        for how in ways:
            # TorchScript's fuser rounds the head's layers in another way.
            assert losses_of(how) == (pytest.approx(expected, rel=1e-5) if how == "script" else expected), how

    ranks(2, rank_main)


def test_a_table_without_room_is_warned_about_once() -> None:
    """Whose ids do not fit the rows of their new blocks, each time that these change."""
    layouts = [
        cuts.row_wise("bags.a", 24, DIM, ranks=[0] * blocks, boundaries=[*range(0, 24, 24 // blocks), 24])
        for blocks in (1, 4, 2, 3)
    ]
    plans = [ShardingPlan(topology=Topology(ranks_per_host=1), tables=(layout,)) for layout in layouts]
    case = Case(tables={"a": Table(rows=24, dynamic=True)}, plans=plans)
    model, optimizer = make(case, plans[0])
    warned = []
    for number, plan in enumerate(plans[1:]):
        train(case, model, optimizer, range(10 * number, 10 * number + 10))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.reshard(plan)
        warned.append(sum("lack room for" in str(one.message) for one in caught))
    assert warned[0] > 0 and warned[1:] == [0, 0]
    assert model.tables_without_room == {"bags.a"}


def test_a_program_with_other_replicas_says_so() -> None:
    case = case_of({"a": Table(rows=9, cuts=("data_parallel", "row_wise"))})

    def rank_main() -> None:
        model, optimizer = make(case, case.plans[0])
        program = script(model)
        program(batch_of(case, 0)).sum().backward()
        optimizer.step()
        model.reshard(case.plans[1])
        with pytest.raises(RuntimeError, match="script or compile the model again"):
            program(batch_of(case, 0))
        script(model)(batch_of(case, 0)).sum().backward()

    ranks(2, rank_main)


def test_what_reads_the_model_reads_the_new_plan(tmp_path: Path) -> None:
    """Schedules, state_dicts, incremental checkpoints, and a publisher's followers."""
    case = case_of({name: TABLES[name] for name in "acd"})
    old, new = case.plans

    def rank_main() -> Any:
        model, optimizer = make(case, old)
        checkpoints = Checkpoints(tmp_path / "checkpoints", incremental=3)
        publisher = Publisher(model, tmp_path / "published", weights="int8")
        schedule = torch.optim.lr_scheduler.ExponentialLR(model.fused_optimizer, 0.5)
        for step in range(5):
            train(case, model, optimizer, range(step, step + 1))
            model.fused_optimizer.step()
            schedule.step()
            checkpoints.save(step, model, optimizer)
            publisher.publish()
            if step in (1, 2):
                model.reshard(case.plans[step % 2])
        assert {each for each in model.fused_optimizer.params.values() if each.numel()} <= {*model.parameters()}
        other, others_optimizer = make(case, new)
        checkpoints.load_last(other, others_optimizer)
        model.reshard(new)
        assert not differences(contents(model, optimizer), contents(other, others_optimizer))
        assert model.fused_optimizer.param_groups[0]["lr"] == other.fused_optimizer.param_groups[0]["lr"]
        other.load_state_dict(model.state_dict())
        return held(quantize(model, "int8"), model)

    of_ranks = ranks(2, rank_main)
    served = quantize(make(case, new.on_one_rank())[0], "int8")
    follower = Follower(served, served.formats, tmp_path / "published", interval=1.0)
    follower.poll()
    assert_same(served, of_ranks)


def test_what_callers_have_set_goes_on() -> None:
    """A warm-up, tables that were frozen later, the refusal of a scaler; and reshard in inference mode."""
    replicated = Table(rows=10, optimizer="none", cuts=("data_parallel", "data_parallel"))
    tables = {name: TABLES[name] for name in "abc"}
    tables |= {"q": replace(replicated, cuts=("data_parallel", "row_wise")), "k": replicated}
    case = case_of(tables)

    def rank_main() -> None:
        model, optimizer = make(case, case.plans[0])
        warm_up = WarmupOptimizer(model.fused_optimizer, [WarmupStage(max_iters=9)], lr=0.1)
        combined = CombinedOptimizer([("tables", warm_up)])
        train(case, model, optimizer, range(2))
        combined.step()
        for name in "qk":
            model.bags.embedding_bags[name].requires_grad_(False)
        with torch.inference_mode():
            model.reshard(case.plans[1], optimizer)
        paths = [name for name, one in model.named_parameters() if not one.requires_grad]
        assert sorted(path.split(".")[2] for path in paths) == ["k", "q"]
        train(case, model, optimizer, range(2))
        combined.step()
        (bags,) = model.sharded_collections
        stand_ins = sum(not bags.tables()[name].locals for name in bags.fused_optimizers())
        assert len({*combined.params.values()} - {*model.parameters()}) == 1 + stand_ins, "the warm-up's own"
        combined.state_dict()
        of_b = torch.optim.SGD(model.bags.embedding_bags["b"].parameters())
        scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined,unused-ignore]
        scaler.scale(model(batch_of(case, 0)).sum()).backward()
        with pytest.raises(ConfigError, match="GradScaler"):
            scaler.step(of_b)

    ranks(2, rank_main)


def test_models_and_programs_without_another_plan() -> None:
    case = case_of({"a": Table(cuts=("data_parallel", "table_wise"))}, ranks=1)
    old, new = case.plans
    model, _ = make(case, old)
    replicas = shard(Model(case.tables, 0), old, replicas=Replicas(1))
    for refused in (replicas, quantize(model)):
        with pytest.raises(ConfigError, match="Save a checkpoint, shard the model again, and load it"):
            refused.reshard(new)
    program = script(model.eval())
    with pytest.raises(ConfigError, match="script the model again after it"):
        model.reshard(new)
    del program
    assert model.reshard(new) == model.reshard(new) == 0 and model.plan == new


@pytest.mark.slow
def test_memory_stays_within_the_new_shards_and_64_mib() -> None:
    """Two ranks exchange tables of 96 MiB, of two lookup groups; of the resident memory, as Linux counts it."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of the resident memory cannot be reset here")
    rows = 3 * 2**19
    tables = {"a": Table(rows=rows, optimizer="sgd"), "b": Table(rows=rows, optimizer="rowwise_adagrad")}
    plans = [
        ShardingPlan(
            topology=Topology(ranks_per_host=2), tables=(on_rank("a", rows, rank), on_rank("b", rows, 1 - rank))
        )
        for rank in range(2)
    ]

    def grown(case: Case) -> tuple[int, int]:
        model, optimizer = make(case, case.plans[0])
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        received = model.reshard(case.plans[1], optimizer)
        return peak() - before, received

    shard_bytes = rows * DIM * 4
    for grown_bytes, received in ranks(2, grown, Case(tables=tables, plans=plans)):
        assert received >= shard_bytes
        assert shard_bytes // 2 < grown_bytes < shard_bytes + rows * 4 + 64 * 2**20
